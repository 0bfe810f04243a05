"""Checked reading of a configuration: every problem of one config.json is noted, and all are reported together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

from trimtab.errors import ConfigError, join_problems, quote

MAX_SIZE = 2**30  # no width, count or vocabulary of a real model comes near; sums of squared patches fit 63 bits
MAX_LAYERS = 4096
MAX_LIST = 4096
OF_IMAGES = "preprocessor_config"
"""The section that holds the content of preprocessor_config.json, which is a file of its own."""

T = TypeVar("T")
_ABSENT = object()


class LackingFileError(ConfigError):
    """Nothing is wrong but that preprocessor_config.json was not given."""


@dataclass(slots=True, kw_only=True)
class Problems:
    """What is wrong with one configuration, in the order it was read."""

    has_file: bool = True  # preprocessor_config.json was given
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)  # parts of a kind that no family describes, by `model_type`

    def messages(self) -> list[str]:
        own = [x for x in self.missing if not x.startswith(f"{OF_IMAGES}.")]
        of_images = [x.removeprefix(f"{OF_IMAGES}.") for x in self.missing if x not in own]
        found = []
        if own:
            found.append(
                f"the configuration lacks {', '.join(dict.fromkeys(own))}: class defaults are never assumed, only "
                "Transformers fills them in for its own models (pip install 'trimtab[torch]'); or save it in full with "
                "json.dump(AutoConfig.from_pretrained(MODEL).to_dict(), file) and describe that file"
            )
        # a contradiction between fields that could not be read is noise
        found += [*self.foreign, *self.wrong] or ([] if found else self.contradictions)
        if of_images:
            cure = "pass --set preprocessor=preprocessor_config.json, or put it beside config.json"
            found.append(
                f"preprocessor_config.json lacks {', '.join(dict.fromkeys(of_images))}, and no default is assumed: "
                + ("add it to that file" if self.has_file else cure)
            )
        return list(dict.fromkeys(found))


class Fields:
    """One section of a configuration.

    A reading method takes the names that a field goes by, the usual one first; the first that is present is read, and
    a dotted name reads a field of a subsection. What cannot be read is noted and a harmless stand-in (1, False, ())
    returned, so that a family reads all its fields before `raise_problems` ends the attempt; what was computed from
    stand-ins is never seen by anyone.
    """

    def __init__(self, values: Mapping[str, object], path: str = "", problems: Problems | None = None) -> None:
        self.values = values
        self.path = path
        self.problems = Problems() if problems is None else problems

    @staticmethod
    def of_model(config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> Fields:
        """Of a config.json, with the settings of its image processor in the section `OF_IMAGES`."""
        settings = preprocessor or {}
        nested = settings.get("image_processor")  # Transformers 5 may nest it in processor_config.json
        settings = {**settings, **nested} if isinstance(nested, Mapping) else settings
        return Fields({**config, OF_IMAGES: settings}, problems=Problems(has_file=preprocessor is not None))

    # -- finding -----------------------------------------------------------------------------------------------------

    def name(self, key: str) -> str:
        """The field's name as messages spell it: "text_config.hidden_size"."""
        return f"{self.path}.{key}" if self.path else key

    def given(self, *names: str) -> bool:
        """Whether the field is present and not null."""
        return self._find(names)[1] not in (_ABSENT, None)

    def has_key(self, *names: str) -> bool:
        """Whether the field is present, null included."""
        return self._find(names)[1] is not _ABSENT

    def raw(self, *names: str) -> object:
        """The field as it stands, None where it is absent."""
        value = self._find(names)[1]
        return None if value is _ABSENT else value

    def _find(self, names: Sequence[str]) -> tuple[str, object]:
        null = None
        for name in names:
            value: object = self.values
            for part in name.split("."):
                value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
            if value is None:
                null = null or name
            elif value is not _ABSENT:
                return name, value
        return (names[0], _ABSENT) if null is None else (null, None)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read(
        self,
        names: Sequence[str],
        parse: Callable[[object], T | None],
        needed: str,
        stand_in: T,
        absent: T | None = None,
    ) -> T:
        """What `parse` makes of the field, None where that is not what is `needed`; `absent` is what silence means."""
        name, value = self._find(names)
        if value is _ABSENT or value is None:
            if absent is None:
                self.problems.missing.append(self.name(name))
                return stand_in
            return absent
        parsed = parse(value)
        if parsed is None:
            self.problems.wrong.append(f"{self.name(name)} is {quote(value)}: {needed} is needed")
            return stand_in
        return parsed

    def section(self, *names: str) -> Fields:
        """A subsection; when it is missing only that is reported, not each of its fields."""
        nothing: Mapping[str, object] = {}
        values = self._read(names, lambda x: x if isinstance(x, Mapping) else None, "a JSON object", nothing)
        name = self.name(self._find(names)[0])
        return Fields(values, name, self.problems if isinstance(self.raw(*names), Mapping) else Problems())

    def size(self, *names: str, maximum: int = MAX_SIZE) -> int:
        """A whole number of at least 1."""
        needed = f"a whole number from 1 to {maximum}"
        return self._read(names, lambda x: x if _is_whole(x, 1, maximum) else None, needed, 1)

    def layers(self, *names: str) -> int:
        return self.size(*names, maximum=MAX_LAYERS)

    def optional_size(self, *names: str) -> int | None:
        """A size, or None where the field is absent or null."""
        return self.size(*names) if self.given(*names) else None

    def side(self, *names: str, maximum: int = MAX_SIZE) -> int:
        """A size that may stand for both sides: [448, 448], {"height": 448, "width": 448}, {"shortest_edge": 448}."""
        needed = f"a whole number from 1 to {maximum}, or two equal ones,"
        return self._read(names, lambda x: _one_side(x, maximum), needed, 1)

    def agreed(self, *names: str, maximum: int = MAX_SIZE) -> int:
        """The `side` that all names which are given agree on."""
        value = self.side(*names, maximum=maximum)
        given = [name for name in names if self.given(name)]
        self.expect(value, self.name(given[0]) if given else "", *given[1:])
        return value

    def expect(self, expected: int, whence: str, *names: str) -> None:
        """Every name that is given must hold this number, which `whence` makes."""
        for name in names:
            value = self.raw(name)
            self.check(
                value is None or _one_side(value, MAX_SIZE) == expected,
                f"{self.name(name)} is {quote(value)}, but {whence} makes it {expected}: take config.json and "
                "preprocessor_config.json of one checkpoint, or correct one of the two",
            )

    def number(self, *names: str) -> float:
        """A finite number above 0."""
        return self._read(
            names,
            lambda x: (
                float(x) if type(x) in (int, float) and isinstance(x, (int, float)) and 0 < x <= MAX_SIZE else None
            ),
            f"a number above 0 and up to {MAX_SIZE}",
            1.0,
        )

    def flag(self, *names: str, absent: bool | None = None) -> bool:
        """true or false; `absent` is the one documented meaning of a missing switch, where it has one."""
        return self._read(names, lambda x: x if isinstance(x, bool) else None, "true or false", False, absent)

    def text(self, *names: str, absent: str | None = None) -> str:
        """A name of any kind; `absent` is the one documented meaning of silence, where it has one."""
        return self._read(names, lambda x: x if isinstance(x, str) and x else None, "a text", absent or "", absent)

    def word(self, *names: str, choices: Sequence[str]) -> str:
        """One of `choices`; a `model_type` of another kind is foreign, not wrong."""
        name, value = self._find(names)
        if name.rpartition(".")[2] == "model_type" and isinstance(value, str) and value not in choices:
            self.problems.foreign.append(f"{self.name(name)} is {quote(value)}: {_one_of(choices)} is described")
            return choices[0]
        return self._read(
            names, lambda x: x if isinstance(x, str) and x in choices else None, _one_of(choices), choices[0]
        )

    def indices(self, *names: str) -> tuple[int, ...]:
        """A list of different whole numbers of at least 0."""

        def parse(value: object) -> tuple[int, ...] | None:
            numbers = _all(value, lambda x: _is_whole(x, 0, MAX_LAYERS - 1))
            return numbers if numbers is None or len(set(numbers)) == len(numbers) else None

        return self._read(names, parse, "a list of different whole numbers from 0", ())

    def pair(self, *names: str) -> tuple[int, int]:
        """(height, width), written as one number or two."""

        def parse(value: object) -> tuple[int, int] | None:
            two = _all(
                value if isinstance(value, (list, tuple)) else [value, value], lambda x: _is_whole(x, 1, MAX_SIZE)
            )
            return (two[0], two[1]) if two is not None and len(two) == 2 else None

        return self._read(names, parse, f"a size from 1 to {MAX_SIZE}, or a list of two,", (1, 1))

    def pairs(self, *names: str, maximum: int) -> tuple[tuple[int, int], ...]:
        """A list of up to `maximum` [height, width]."""

        def parse(value: object) -> tuple[tuple[int, int], ...] | None:
            found = _all(value, lambda x: len(_all(x, lambda y: _is_whole(y, 1, MAX_SIZE)) or ()) == 2)
            return tuple((a, b) for a, b in found) if found and len(found) <= maximum else None

        return self._read(names, parse, f"a list of at most {maximum} [height, width] pairs of whole numbers", ())

    # -- judging -----------------------------------------------------------------------------------------------------

    def check(self, agrees: bool, contradiction: str) -> None:
        """Notes two fields that cannot both be true; `contradiction` names both and says what to do."""
        if not agrees:
            self.problems.contradictions.append(contradiction)

    def raise_problems(self) -> None:
        """One `ConfigError` with all that was noted; `LackingFileError` where only a file was not given."""
        p, messages = self.problems, self.problems.messages()
        if not messages:
            return
        of_file = all(x.startswith(f"{OF_IMAGES}.") for x in p.missing)
        is_put_off = of_file and not (p.has_file or p.wrong or p.foreign or p.contradictions)
        raise (LackingFileError if is_put_off else ConfigError)(join_problems(messages))


def _is_whole(value: object, minimum: int, maximum: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _one_side(value: object, maximum: int) -> int | None:
    if isinstance(value, Mapping):
        value = [value[key] for key in ("height", "width", "shortest_edge") if value.get(key) is not None]
    if isinstance(value, (list, tuple)) and value and all(side == value[0] for side in value):
        value = value[0]
    return value if _is_whole(value, 1, maximum) else None


def _all(value: object, fits: Callable[[Any], bool]) -> tuple[Any, ...] | None:
    """The list as a tuple, if it is one, not too long, and every entry fits."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_LIST or not all(fits(x) for x in value):
        return None
    return tuple(value)


def _one_of(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
