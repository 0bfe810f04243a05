"""Checked reading of a configuration: every problem of one config.json is noted, and all are reported together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.errors import ConfigError, join_problems
from trimtab.models.quote import quote

MAX_SIZE = 2**31 - 1  # no width, count or vocabulary of a real model comes near
MAX_LAYERS = 4096
MAX_LIST = 4096

_ABSENT = object()


@dataclass(slots=True)
class Problems:
    """What is wrong with one configuration, in the order it was read."""

    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)  # parts of a kind that no family describes, by `model_type`

    def messages(self) -> list[str]:
        found = []
        if self.missing:
            names = ", ".join(dict.fromkeys(self.missing))
            found.append(
                f"the configuration lacks {names}: class defaults are never assumed, only Transformers fills them in "
                "for its own models (pip install 'trimtab[torch]'); or save it in full with "
                "json.dump(AutoConfig.from_pretrained(MODEL).to_dict(), file) and describe that file"
            )
        # a contradiction between fields that could not be read is noise
        return found + ([*self.foreign, *self.wrong] or ([] if found else self.contradictions))


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

    def section(self, *names: str) -> Fields:
        """A subsection; when it is missing only that is reported, not each of its fields."""
        name, value = self._find(names)
        if isinstance(value, Mapping):
            return Fields(value, self.name(name), self.problems)
        if value is _ABSENT or value is None:
            self.problems.missing.append(self.name(name))
        else:
            self._reject(name, value, "a JSON object is needed")
        return Fields({}, self.name(name), Problems())

    def size(self, *names: str, maximum: int = MAX_SIZE, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        name, value = self._find(names)
        if value is _ABSENT or value is None:
            self.problems.missing.append(self.name(name))
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self._reject(name, value, f"a whole number from {minimum} to {maximum} is needed")
            return 1
        return value

    def layers(self, *names: str) -> int:
        return self.size(*names, maximum=MAX_LAYERS)

    def optional_size(self, *names: str, minimum: int = 1) -> int | None:
        """A size, or None where the field is absent or null."""
        return self.size(*names, minimum=minimum) if self.given(*names) else None

    def number(self, *names: str) -> float:
        """A finite number above 0."""
        name, value = self._find(names)
        if value is _ABSENT or value is None:
            self.problems.missing.append(self.name(name))
            return 1.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SIZE:
            self._reject(name, value, "a finite number above 0 is needed")
            return 1.0
        return float(value)

    def flag(self, *names: str, absent: bool | None = None) -> bool:
        """true or false; `absent` is the one documented meaning of a missing switch, where it has one."""
        name, value = self._find(names)
        if value is _ABSENT or value is None:
            if absent is None:
                self.problems.missing.append(self.name(name))
            return bool(absent)
        if not isinstance(value, bool):
            self._reject(name, value, "true or false is needed")
            return False
        return value

    def text(self, *names: str, absent: str) -> str:
        """A name of any kind; `absent` is the one documented meaning of silence."""
        name, value = self._find(names)
        if value is _ABSENT or value is None:
            return absent
        if not isinstance(value, str):
            self._reject(name, value, "a text is needed")
            return absent
        return value

    def word(self, *names: str, choices: Sequence[str]) -> str:
        name, value = self._find(names)
        if value is _ABSENT or value is None:
            self.problems.missing.append(self.name(name))
            return choices[0]
        if value not in choices or not isinstance(value, str):
            known = f"{self.name(name)} is {quote(value)}: {_one_of(choices)} is described"
            is_kind = isinstance(value, str) and name.rpartition(".")[2] == "model_type"
            (self.problems.foreign if is_kind else self.problems.wrong).append(known)
            return choices[0]
        return value

    def words(self, *names: str, choices: Sequence[str]) -> tuple[str, ...]:
        name, value = self._find(names)
        if value is _ABSENT or value is None:
            self.problems.missing.append(self.name(name))
            return ()
        if not isinstance(value, (list, tuple)) or len(value) > MAX_LIST:
            self._reject(name, value, "a list is needed")
            return ()
        for entry in value:
            if not isinstance(entry, str) or entry not in choices:
                self._reject(name, entry, f"each entry must be {_one_of(choices)}")
                return ()
        return tuple(value)

    def indices(self, *names: str) -> tuple[int, ...]:
        """A list of different whole numbers of at least 0."""
        name, value = self._find(names)
        if value is _ABSENT or value is None:
            self.problems.missing.append(self.name(name))
            return ()
        well_formed = (
            isinstance(value, (list, tuple))
            and len(value) <= MAX_LIST
            and all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < MAX_LAYERS for x in value)
        )
        if not well_formed or not isinstance(value, (list, tuple)) or len(set(value)) != len(value):
            self._reject(name, value, "a list of different whole numbers from 0 is needed")
            return ()
        return tuple(value)

    def pair(self, *names: str) -> tuple[int, int]:
        """(height, width), written as one number or two."""
        name, value = self._find(names)
        if isinstance(value, (list, tuple)):
            whole = all(isinstance(x, int) and not isinstance(x, bool) and 0 < x <= MAX_SIZE for x in value)
            if whole and len(value) == 2:
                return value[0], value[1]
            self._reject(name, value, "a size or a list of two sizes is needed")
            return 1, 1
        side = self.size(*names)
        return side, side

    # -- judging -----------------------------------------------------------------------------------------------------

    def _reject(self, name: str, value: object, needed: str) -> None:
        self.problems.wrong.append(f"{self.name(name)} is {quote(value)}: {needed}")

    def check(self, agrees: bool, contradiction: str) -> None:
        """Notes two fields that cannot both be true; `contradiction` names both and says what to do."""
        if not agrees:
            self.problems.contradictions.append(contradiction)

    def raise_problems(self) -> None:
        messages = self.problems.messages()
        if messages:
            raise ConfigError(join_problems(messages))


def _one_of(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"


def is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number
