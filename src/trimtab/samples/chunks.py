"""Parts of data files that one worker reads, the records in them, and the records of files that come in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimtab.samples.problems import BadRecordError, shorten
from trimtab.typed_json import parse_json

MAX_VALUES = 5_000_000  # of one record: Python takes some 70 bytes for each
Format = Literal["jsonl", "json", "parquet", "arrow", "lance", "tar"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One parsed record, or what is wrong with it."""

    line: int  # from 1, within the chunk where Chunk.first_line is None
    value: object = None
    key: str | None = None  # of a tar sample
    images: tuple[bytes, ...] | None = None  # members of a tar sample
    problem: BadRecordError | None = None
    blank: bool = False  # a line that holds no record, told because it counts as a line


TOO_DEEP = "nested too deeply"
"""Stands for a row of a JSON list that no process can hand to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Records of a chunk that ended a process which read them."""

    records: Mapping[int, str] = field(default_factory=dict)  # by line: why
    ends_at: int | None = None  # the line that cannot be read at all, nor those behind it
    one_by_one: bool = False  # one text ended it, so each is encoded by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """A file whose records lie in groups that can be read apart: row groups, record batches, fragments, a shard."""

    names: Sequence[str]  # of its columns
    counts: Sequence[int]  # records of each group
    records: Callable[[range, Sequence[str]], Iterator[Any]]  # of these groups, with these columns
    open_group: Callable[[int], Callable[[int], Any]]  # a group -> its records by number, from 0, all columns


def parse_record(data: bytes) -> object:
    """A JSON value; `BadRecordError` for anything that is not strict JSON in UTF-8."""
    if len(data) > MAX_VALUES and sum(map(data.count, (b"[", b"{", b","))) > MAX_VALUES:
        raise BadRecordError("json", f"it holds more than {MAX_VALUES:,} values: name files instead")
    try:
        return parse_json(data)
    except ValueError as error:
        raise BadRecordError("json", f"not JSON: {shorten(str(error), 120)}; fix or drop the line") from None
