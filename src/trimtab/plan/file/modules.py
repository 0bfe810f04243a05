"""Module paths in short form: "model.visual.blocks[0..23]" for blocks.0 to blocks.23, both ends included."""

from __future__ import annotations

import re
from collections.abc import Iterable

from trimtab.errors import PlanError

_NUMBERED = re.compile(r"^(?P<stem>.+)\.(?P<number>\d+)$")
_RANGE = re.compile(r"^(?P<stem>.+)\[(?P<first>\d+)\.\.(?P<last>\d+)\]$")
_MAX_RANGE = 100_000  # a plan from outside must not make us build a list of a billion names


def fold_modules(names: Iterable[str]) -> tuple[str, ...]:
    """The names with runs of consecutive numbers written as one range; order is kept.

    >>> fold_modules(["visual.blocks.0", "visual.blocks.1", "visual.blocks.2", "lm_head"])
    ('visual.blocks[0..2]', 'lm_head')
    """
    runs: list[tuple[str, int, int]] = []  # stem, first, last number; of a name without one the name, -2, -2
    for name in names:
        match = _NUMBERED.match(name)
        stem, number = (match["stem"], int(match["number"])) if match else (name, -2)
        if match and runs and runs[-1][0] == stem and runs[-1][2] + 1 == number:
            runs[-1] = (stem, runs[-1][1], number)
        else:
            runs.append((stem, number, number))
    return tuple(
        stem if last < 0 else f"{stem}.{first}" if first == last else f"{stem}[{first}..{last}]"
        for stem, first, last in runs
    )


def unfold_modules(folded: Iterable[str]) -> tuple[str, ...]:
    """The inverse of `fold_modules`."""
    names: list[str] = []
    for entry in folded:
        match = _RANGE.match(entry)
        if match is None:
            names.append(entry)
            continue
        first, last = int(match["first"]), int(match["last"])
        if not first <= last <= first + _MAX_RANGE:
            raise PlanError(f"the plan names modules {entry!r}, which is no range: write first..last, both included")
        names.extend(f"{match['stem']}.{i}" for i in range(first, last + 1))
    return tuple(names)
