"""Module paths in short form: "model.visual.blocks[0..23]" for blocks.0 to blocks.23, both ends included."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from trimtab.errors import PlanError

_NUMBERED = re.compile(r"^(?P<stem>.+)\.(?P<number>\d+)$")
_RANGE = re.compile(r"^(?P<stem>.+)\[(?P<first>\d+)\.\.(?P<last>\d+)\]$")
_MAX_RANGE = 100_000  # a plan from outside must not make us build a list of a billion names


def fold_modules(names: Sequence[str]) -> tuple[str, ...]:
    """The names with runs of consecutive numbers written as one range; order is kept."""
    folded: list[str] = []
    run: tuple[str, int, int] | None = None  # stem, first, last

    def close() -> None:
        if run is not None:
            stem, first, last = run
            folded.append(f"{stem}.{first}" if first == last else f"{stem}[{first}..{last}]")

    for name in names:
        match = _NUMBERED.match(name)
        if match is None:
            close()
            run = None
            folded.append(name)
            continue
        stem, number = match["stem"], int(match["number"])
        if run is not None and run[0] == stem and run[2] + 1 == number:
            run = (stem, run[1], number)
        else:
            close()
            run = (stem, number, number)
    close()
    return tuple(folded)


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
