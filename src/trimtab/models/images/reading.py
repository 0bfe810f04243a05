"""Checked reading of what image rules need: every problem is noted, and all are reported together.

A rule's setting stands in preprocessor_config.json (`preprocessor_config.NAME`) or in config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

from trimtab.errors import ConfigError, join_problems, quote

MAX_SIZE = 2**30  # no width, count or vocabulary of a real model comes near; sums of squared patches fit 63 bits
MAX_LIST = 4096
OF_IMAGES = "preprocessor_config"
"""The section that holds the content of preprocessor_config.json, which is a file of its own."""

MAX_PATCH = 4096  # pixels a side of a patch
MAX_MERGE = 64  # patches a side that become one token
MAX_GRID = 4096  # patches a side of a tile
MAX_PINPOINTS = 1024

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

    def messages(self) -> list[str]:
        own = [x for x in self.missing if not x.startswith(f"{OF_IMAGES}.")]
        of_images = [x.removeprefix(f"{OF_IMAGES}.") for x in self.missing if x not in own]
        found = []
        if own:
            found.append(
                f"the configuration lacks {', '.join(dict.fromkeys(own))}: no default is assumed, save it in full with "
                "json.dump(AutoConfig.from_pretrained(MODEL).to_dict(), file) and describe that file"
            )
        # a contradiction between fields that could not be read is noise
        found += self.wrong or ([] if found else self.contradictions)
        if of_images:
            cure = "pass --set preprocessor=preprocessor_config.json, or put it beside config.json"
            found.append(
                f"preprocessor_config.json lacks {', '.join(dict.fromkeys(of_images))}, and no default is assumed: "
                + ("add it to that file" if self.has_file else cure)
            )
        return list(dict.fromkeys(found))


class Fields:
    """A configuration, with the settings of its image processor in the section `OF_IMAGES`.

    A reading method takes the names that a field goes by, the usual one first; the first that is present is read, and
    a dotted name reads a field of a subsection. What cannot be read is noted and a harmless stand-in (1, False, ())
    returned, so that a family reads all its fields before `raise_problems` ends the attempt; what was computed from
    stand-ins is never seen by anyone.
    """

    def __init__(self, values: Mapping[str, object], problems: Problems) -> None:
        self.values = values
        self.problems = problems

    @staticmethod
    def of_model(config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> Fields:
        """Of a config.json, with the settings of its image processor in the section `OF_IMAGES`."""
        settings = preprocessor or {}
        nested = settings.get("image_processor")  # Transformers 5 may nest it in processor_config.json
        settings = {**settings, **nested} if isinstance(nested, Mapping) else settings
        return Fields({**config, OF_IMAGES: settings}, Problems(has_file=preprocessor is not None))

    # -- finding -----------------------------------------------------------------------------------------------------

    def given(self, *names: str) -> bool:
        """Return whether the field is present and not null."""
        return self._find(names)[1] not in (_ABSENT, None)

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
                self.problems.missing.append(name)
                return stand_in
            return absent
        parsed = parse(value)
        if parsed is None:
            self.problems.wrong.append(f"{name} is {quote(value)}: {needed} is needed")
            return stand_in
        return parsed

    def size(self, *names: str, maximum: int = MAX_SIZE) -> int:
        """Return a whole number of at least 1."""
        needed = f"a whole number from 1 to {maximum}"
        return self._read(names, lambda x: x if _is_whole(x, 1, maximum) else None, needed, 1)

    def side(self, *names: str, maximum: int = MAX_SIZE) -> int:
        """A size that may stand for both sides: [448, 448], {"height": 448, "width": 448}, {"shortest_edge": 448}."""
        needed = f"a whole number from 1 to {maximum}, or two equal ones,"
        return self._read(names, lambda x: _one_side(x, maximum), needed, 1)

    def agreed(self, *names: str, maximum: int = MAX_SIZE) -> int:
        """The `side` that all names which are given agree on."""
        value = self.side(*names, maximum=maximum)
        given = [name for name in names if self.given(name)]
        self.expect(value, given[0] if given else "", *given[1:])
        return value

    def expect(self, expected: int, whence: str, *names: str) -> None:
        """Every name that is given must hold this number, which `whence` makes."""
        for name in names:
            value = self.raw(name)
            self.check(
                value is None or _one_side(value, MAX_SIZE) == expected,
                f"{name} is {quote(value)}, but {whence} makes it {expected}: take config.json and "
                "preprocessor_config.json of one checkpoint, or correct one of the two",
            )

    def number(self, *names: str) -> float:
        """Return a finite number above 0."""
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

    def text(self, *names: str) -> str:
        """Return a name of any kind."""
        return self._read(names, lambda x: x if isinstance(x, str) and x else None, "a text", "")

    def word(self, *names: str, choices: Sequence[str]) -> str:
        """Return one of `choices`."""
        return self._read(
            names, lambda x: x if isinstance(x, str) and x in choices else None, _one_of(choices), choices[0]
        )

    def pairs(self, *names: str, maximum: int) -> tuple[tuple[int, int], ...]:
        """Return a list of up to `maximum` [height, width]."""

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
        is_put_off = of_file and not (p.has_file or p.wrong or p.contradictions)
        raise (LackingFileError if is_put_off else ConfigError)(join_problems(messages))


# -- settings of several families -----------------------------------------------------------------------------------


def require_resize(s: Fields) -> None:
    s.check(
        s.raw("preprocessor_config.do_resize") is not False,
        "preprocessor_config.do_resize is false: images would reach the tower in sizes that no rule describes: set it "
        "to true",
    )


def patch_and_merge(s: Fields) -> tuple[int, int]:
    patch = s.agreed("vision_config.patch_size", "preprocessor_config.patch_size", maximum=MAX_PATCH)
    merge = s.agreed("vision_config.spatial_merge_size", "preprocessor_config.merge_size", maximum=MAX_MERGE)
    return patch, merge


def pixel_limits(s: Fields) -> tuple[int, int]:
    """min_pixels and max_pixels; at the file's top level they override `size`, as in the processor."""
    name = "preprocessor_config"
    low = s.size(f"{name}.min_pixels", f"{name}.size.shortest_edge")
    high = s.size(f"{name}.max_pixels", f"{name}.size.longest_edge")
    return low, high


def read_tile(s: Fields, *sides: str) -> tuple[int, int]:
    """Side of a square tile in pixels, on which all of `sides` agree, and in patches."""
    tile, patch = s.agreed(*sides), s.side("vision_config.patch_size", maximum=MAX_PATCH)
    s.check(
        1 <= tile // patch <= MAX_GRID,
        f"vision_config.patch_size {patch} cuts a tile of {tile} pixels into {tile // patch} patches a side, and 1 to "
        f"{MAX_GRID} can be counted: correct image_size or patch_size",
    )
    return tile, max(tile // patch, 1)


def read_pinpoints(s: Fields) -> tuple[tuple[int, int], ...]:
    """image_grid_pinpoints as (height, width), equal wherever they are given."""
    names = [f"{prefix}image_grid_pinpoints" for prefix in ("preprocessor_config.", "")]
    given = [name for name in names if s.given(name)] or names[1:]
    found = [s.pairs(name, maximum=MAX_PINPOINTS) for name in given]
    s.check(
        len(set(found)) == 1,
        f"{' and '.join(given)} differ: take both files of one checkpoint: image features and placeholders would not "
        "match",
    )
    return found[0]


# -- kinds of values -------------------------------------------------------------------------------------------------


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
