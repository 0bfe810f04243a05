"""Samples that cannot be planned: which, where, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimtab.errors import SampleError, join_problems

BadKind = Literal[
    "json",  # the line or record is not JSON
    "type",  # a field is missing or has another type than the format gives it
    "id",  # an earlier sample of the same file has this id, or two members of a shard one name
    "path",  # an image reference leads out of the media folder, to the network, or nowhere
    "image",  # the image file is not one, is truncated, has no or too many pixels
    "video",  # the video file is not one, is damaged, has no frames, or its processor refuses it
    "placeholder",  # as many placeholders as images and videos are needed
    "template",  # the chat template or the tokenizer refuses the conversation
    "length",  # more tokens than the limit
    "reader",  # reading it takes too much time or memory, or ends the process that does
]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """One sample left out of a table."""

    file: str
    line: int | None  # of a JSONL file; elsewhere the record's number; both from 1; None: known to no line
    id: str | None
    kind: BadKind
    reason: str

    @staticmethod
    def of(file: Path, line: int, name: str | None, kind: BadKind, reason: str) -> BadSample:
        return BadSample(file=str(file), line=line, id=name, kind=kind, reason=reason)

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.reason}" if self.id is None else f"{place} (id {shorten(self.id)}): {self.reason}"


class BadRecordError(SampleError):
    """Raised while one record is read; the pass turns it into a `BadSample`."""

    def __init__(self, kind: BadKind, reason: str) -> None:
        super().__init__(reason)
        self.kind: BadKind = kind


def wrong(what: str, value: object, wanted: str) -> BadRecordError:
    """A field of a record that is not of the kind it must be."""
    shown = shorten(repr(value), 40) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return BadRecordError("type", f"{what} is {shown}: it must be {wanted}")


def shorten(text: str, limit: int = 80) -> str:
    """Text of a stranger's file, fit for one line of a terminal: no control characters, at most `limit` others."""
    text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 3] + "..."


def refuse_bad(bad: Sequence[BadSample], num_read: int, *, can_skip: bool = True, of: str = "") -> None:
    """Raise one `SampleError` that names the bad samples, if there are any; `of`: which samples were read."""
    if not bad:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(sample.kind for sample in bad).items()))
    can_skip = can_skip and len(bad) < num_read  # without all of them nothing is left
    cure = "fix them, or leave them out with on_bad='skip' (--on-bad skip)" if can_skip else "fix them"
    raise SampleError(
        f"{len(bad)} of {of}{num_read} samples cannot be planned ({kinds}): {cure}\n"
        + join_problems([str(b) for b in bad])
    )
