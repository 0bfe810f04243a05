"""Records as they are read, a chunk at a time, and samples that cannot be planned: which, where, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trimtab.errors import SampleError, join_problems, shorten
from trimtab.typed_json import parse_json

BadKind = Literal[
    "json",  # the line or record is not JSON
    "type",  # a field is missing or has another type than the format gives it
    "id",  # two members of a shard have one name
    "path",  # an image reference leads out of the media folder, to the network, or nowhere
    "image",  # the image file is not one, is truncated, has no or too many pixels
    "video",  # the video file is not one, is damaged, has no frames, or its processor refuses it
    "placeholder",  # as many placeholders as images and videos are needed
    "template",  # the chat template or the tokenizer refuses the conversation
    "length",  # more tokens than the limit
    "reader",  # reading it takes too much time or memory, or ends the process that does
]


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


def unreadable_media(what: str, done: str, root: str, error: Exception) -> BadRecordError:
    """Return a file of a media folder that cannot be "opened" or "read"."""
    cause = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return BadRecordError("path", f"{what} cannot be {done} below {root}: {cause}; check media_root")


def outside_media(what: str, root: str) -> BadRecordError:
    """Return a name that leads out of its media folder."""
    return BadRecordError(
        "path",
        f"{what} lies outside the media folder {root}: set media_root above it, or --allow-outside for data you trust",
    )


def wrong(what: str, value: object, wanted: str) -> BadRecordError:
    """Return a field of a record that is not of the kind it must be."""
    shown = shorten(repr(value), 40) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return BadRecordError("type", f"{what} is {shown}: it must be {wanted}")


def refuse_bad(bad: Sequence[BadSample], num_read: int, *, can_skip: bool = True, of: str = "") -> None:
    """Raise one `SampleError` that names the bad samples, if there are any; `of`: which samples were read."""
    if not bad:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(sample.kind for sample in bad).items()))
    can_skip = can_skip and len(bad) < num_read  # without all of them nothing is left
    alike: dict[tuple[str, str], list[BadSample]] = {}  # one line for what is wrong with many
    for sample in bad:
        alike.setdefault((sample.file, sample.reason), []).append(sample)
    lines = [f"{b[0]}" + (f" (and {len(b) - 1:,} more like it)" if len(b) > 1 else "") for b in alike.values()]
    cure = "fix them, or leave them out with on_bad='skip' (--on-bad skip)" if can_skip else "fix them"
    raise SampleError(
        f"{len(bad)} of {of}{num_read} samples cannot be planned ({kinds}): {cure}\n" + join_problems(lines)
    )


# -- records and chunks ------------------------------------------------------------------------------------------------


MAX_VALUES = 5_000_000  # of one record: Python takes some 70 bytes for each
Format = Literal["jsonl", "json", "csv", "parquet", "arrow", "tar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of one file that one worker reads: bytes, records or groups of rows `start <= i < stop`."""

    file: Path
    format: Format
    start: int
    stop: int
    first_line: int | None  # number of its first record, from 1; None: known once the chunks before it are read
    num_bytes: int  # share of the file, for progress
    rows: tuple[object, ...] = ()  # of a JSON list, which is parsed once and handed out
    media_root: Path | None = None  # that image paths start from; None: the file's folder
    columns: tuple[tuple[str, str], ...] = ()  # of its records, as a list of data sets has them


class Record(NamedTuple):
    """One parsed record, or what is wrong with it."""

    line: int  # from 1, within the chunk where Chunk.first_line is None
    value: object = None
    key: str | None = None  # of a tar sample
    images: tuple[bytes, ...] | None = None  # members of a tar sample
    problem: BadRecordError | None = None
    blank: bool = False  # a line that holds no record: it counts as a line


TOO_DEEP = "nested too deeply"
"""Stands for a row of a JSON list that no process can hand to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Records of a chunk that ended a process which read them."""

    records: Mapping[int, str] = field(default_factory=dict)  # by line: why
    ends_at: int | None = None  # the line that cannot be read at all, nor those behind it
    one_by_one: bool = False  # one text ended it, so each is encoded by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordGroups:
    """A file whose records lie in groups that can be read apart: row groups, record batches, fragments, a shard."""

    names: Sequence[str]  # of its columns
    counts: Sequence[int]  # records of each group
    records: Callable[[range, Sequence[str]], Iterator[Any]]  # of these groups, with these columns
    open_group: Callable[[int], Callable[[int], Any]]  # a group -> its records by number, from 0, all columns


def parse_record(data: bytes) -> object:
    """Return a JSON value; `BadRecordError` for anything that is not strict JSON in UTF-8."""
    if len(data) > MAX_VALUES and sum(map(data.count, (b"[", b"{", b","))) > MAX_VALUES:
        raise BadRecordError("json", f"it holds more than {MAX_VALUES:,} values: name files instead")
    try:
        return parse_json(data)
    except ValueError as error:
        raise BadRecordError("json", f"not JSON: {shorten(str(error), 120)}; fix or drop the line") from None
