"""What only a whole file tells of its samples: ids that come again, and how often they are in an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab.samples.problems import BadKind, BadSample
from trimtab.samples.table import Part


def leave_out_long(file: Path, part: Part, max_tokens: int | None) -> Part:
    """The part without samples of more than `max_tokens`, which are bad."""
    if max_tokens is None:
        return part
    advice = f"more than max_tokens {max_tokens}: shorten the sample or raise the limit"
    over = np.flatnonzero(part.numbers[:, 2] > max_tokens).tolist()
    return _leave_out(file, part, {row: f"{part.numbers[row, 2]} tokens, {advice}" for row in over}, "length")


def leave_out_repeated(file: Path, parts: Sequence[Part], unique_ids: bool) -> list[Part]:
    """Leave out, or number, samples whose id an earlier sample of the file has."""
    first: dict[str, int] = {}
    result = []
    for part in parts:
        if part.ids is None:
            result.append(part)
            continue
        ids, again = list(part.ids), dict[int, str]()
        for row, name in enumerate(part.ids):
            if name is None:
                continue
            line = int(part.lines[row])
            if name not in first:
                first[name] = line
            elif unique_ids:
                again[row] = f"line {first[name]} has this id too: make ids unique, or let unique_ids=False number them"
            else:
                numbered = _numbered(name, first)
                ids[row], first[numbered] = numbered, line
        result.append(_leave_out(file, replace(part, ids=tuple(ids)), again, "id"))
    return result


def _numbered(name: str, taken: dict[str, int]) -> str:
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


def _leave_out(file: Path, part: Part, reasons: dict[int, str], kind: BadKind) -> Part:
    if not reasons:
        return part
    keep = np.ones(len(part.lines), np.bool_)
    keep[list(reasons)] = False
    bad = [
        BadSample.of(file, int(part.lines[row]), part.ids[row] if part.ids else None, kind, reason)
        for row, reason in reasons.items()
    ]
    bad = sorted((*part.bad, *bad), key=lambda sample: sample.line or 0)
    return replace(_kept(part, keep), bad=tuple(bad))


def _kept(part: Part, keep: npt.NDArray[np.bool_]) -> Part:
    """The part without the samples that are not kept; its bad ones as they are."""
    return replace(
        part,
        numbers=part.numbers[keep],
        image_patches=None if part.image_patches is None else part.image_patches[np.repeat(keep, part.numbers[:, 0])],
        lines=part.lines[keep],
        ids=tuple(name for name, kept in zip(part.ids, keep.tolist(), strict=True) if kept) if part.ids else None,
        source=part.source[keep] if part.source is not None else None,
    )


def repeat_samples(parts: Sequence[Part], repeat: float) -> list[Part]:
    """The parts of a file as often as its samples are in an epoch: a whole number of times, or only its beginning.

    Below 1 the samples of the first int(n x repeat) of n lines stay. A sample's id counts its repeats: a, a#2, a#3.
    """
    if repeat < 1:
        ends = [int(part.lines.max(initial=0)) for part in parts]
        ends += [bad.line or 0 for part in parts for bad in part.bad]
        num_lines = max(sum(part.num_lines for part in parts), max(ends, default=0))
        return [_begin(part, int(num_lines * repeat)) for part in parts]
    again = [_renamed(part, number) for number in range(2, int(repeat) + 1) for part in parts]
    return [*parts, *again]


def _begin(part: Part, last_line: int) -> Part:
    kept = _kept(part, part.lines <= last_line)
    return replace(kept, bad=tuple(bad for bad in part.bad if (bad.line or 0) <= last_line))


def _renamed(part: Part, number: int) -> Part:
    ids = None if part.ids is None else tuple(name and f"{name}#{number}" for name in part.ids)
    return replace(part, ids=ids, bad=())
