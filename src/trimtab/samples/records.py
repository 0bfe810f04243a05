"""Data set files as records, in chunks that do not depend on how many workers read them.

`FORMATS` is the one list of formats of files, and of how each is recognised; folders and lists of files, and what they
lead to, are in `sources.py`.
"""

import json
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from trimtab.address import Address
from trimtab.errors import SampleError, shorten
from trimtab.files import refuse_special
from trimtab.limited import ChildEndedError, at, is_limited, limited_child
from trimtab.samples.formats import arrow_groups, parquet_groups, read_csv, read_json_list, read_tar, unreadable
from trimtab.samples.problems import BadRecordError, Chunk, Format, Record, RecordGroups, parse_record
from trimtab.samples.rows import KNOWN_KEYS
from trimtab.specs import IntArray, SampleTable

CHUNK_BYTES = 1 << 20  # of a JSONL file: about 0.3 s of work, and what a kill can lose per worker
CHUNK_RECORDS = 2000  # of a JSON list; of groups at least as many
MAX_CHUNKS = 4096  # of one JSONL file; a larger file gets larger chunks
LIST_CHUNK_CHARACTERS = 32 << 20  # of a JSON list of large records
MAX_LINE_BYTES = 256 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """How files of one format are recognised: by the end of their name, or else by their first bytes."""

    name: Format
    endings: tuple[str, ...]
    begins: tuple[bytes, ...] = ()
    begins_at: int = 0


FORMATS = (
    FileFormat(name="parquet", endings=(".parquet",), begins=(b"PAR1",)),
    FileFormat(name="arrow", endings=(".arrow", ".feather", ".ipc"), begins=(b"ARROW1", b"\xff\xff\xff\xff")),
    FileFormat(name="tar", endings=(".tar",), begins=(b"ustar",), begins_at=257),
    FileFormat(name="jsonl", endings=(".jsonl", ".ndjson")),
    FileFormat(name="csv", endings=(".csv", ".tsv")),
    FileFormat(name="json", endings=(".json",)),  # a list if its first character is [, else one object a line
)
LISTS: Mapping[Format, Callable[[Path], Iterator[tuple[object, int]]]] = MappingProxyType(
    {"json": read_json_list, "csv": read_csv}
)
"""Formats that are parsed from the beginning, as records with the number of characters read so far."""
GROUPED: Mapping[Format, Callable[[Path], RecordGroups]] = MappingProxyType(
    {"parquet": parquet_groups, "arrow": arrow_groups}
)


def format_of_name(path: Path) -> Format | None:
    """The format that the end of a file's name tells; None: none."""
    name = path.name.partition("?")[0].lower() if isinstance(path, Address) else path.name.lower()
    return next((known.name for known in FORMATS if name.endswith(known.endings)), None)


def detect_format(path: Path) -> Format:
    """The format of a file by `FORMATS`; `SampleError` for one of no known format, or that cannot be read."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise SampleError(f"cannot read {path}: {error.strerror}; name data files, or folders of them") from None
    found = format_of_name(path) or next(
        (known.name for known in FORMATS if known.begins and head[known.begins_at :].startswith(known.begins)), None
    )
    if found is None:
        endings = ", ".join(ending for known in FORMATS for ending in known.endings[:1])
        raise SampleError(f"{path} is of no known format: name files that end in one of {endings}")
    if found == "json":
        return "json" if head.removeprefix(_BOM).lstrip().startswith(b"[") else "jsonl"
    return found


def layout_of(path: Path, kind: Format) -> tuple[list[str], list[int]]:
    """Return the columns of a file of columns, and how many records each group holds, as a limited child reads them."""
    if is_limited():
        groups = GROUPED[kind](path)
        return list(groups.names), list(groups.counts)
    with limited_child(network=isinstance(path, Address)) as child:
        try:
            names, counts = json.loads(child.ask(f"{__name__}:layout", path, kind))
        except ChildEndedError as error:
            raise unreadable(path, kind, error) from None
    return names, counts


def layout(path: Path, kind: Format) -> bytes:
    """The answer to `layout_of`."""
    at("the file's layout")
    return json.dumps(layout_of(path, kind)).encode()


def list_chunks(path: Path) -> Iterator[Chunk]:
    """The file in chunks, in order; the same for any number of workers. A list is parsed here, as it is asked."""
    kind = detect_format(path)
    size = path.stat().st_size
    if kind == "jsonl":
        step = max(CHUNK_BYTES, -(-size // MAX_CHUNKS))
        for at in range(0, size, step):
            yield _chunk(path, kind, at, min(at + step, size), None, min(step, size - at))
        return
    if kind == "tar":
        yield _chunk(path, kind, 0, 1, 1, size)
        return
    if kind in LISTS:
        yield from _list_chunks(path, kind)
        return
    _, counts = layout_of(path, kind)
    firsts = [0, *accumulate(counts)]
    start = 0
    for stop in range(1, len(counts) + 1):
        rows_in = firsts[stop] - firsts[start]
        if rows_in >= CHUNK_RECORDS or stop == len(counts):
            share = size * rows_in // max(1, firsts[-1])
            yield _chunk(path, kind, start, stop, firsts[start] + 1, share)
            start = stop


def _list_chunks(path: Path, kind: Format) -> Iterator[Chunk]:
    rows: list[object] = []
    first = start = end = 0
    for value, end in LISTS[kind](path):
        rows.append(value)
        if len(rows) == CHUNK_RECORDS or end - start > LIST_CHUNK_CHARACTERS:
            chunk = _chunk(path, kind, first, first + len(rows), first + 1, end - start)
            yield replace(chunk, rows=tuple(rows))
            first, start, rows = first + len(rows), end, []
    if rows:
        yield replace(_chunk(path, kind, first, first + len(rows), first + 1, end - start), rows=tuple(rows))


def _chunk(path: Path, kind: Format, start: int, stop: int, first_line: int | None, num_bytes: int) -> Chunk:
    return Chunk(file=path, format=kind, start=start, stop=stop, first_line=first_line, num_bytes=num_bytes)


def read_records(path: Path, *, more_columns: tuple[str, ...] = ()) -> Iterator[Record]:
    """The records of a whole file in order, lines numbered within the file; columns as `read_chunk` has them."""
    num_lines = 0
    for chunk in list_chunks(path):
        last = 0
        for record in read_chunk(chunk, more_columns=more_columns):
            last = record.line
            yield record._replace(line=num_lines + last) if num_lines else record
        if chunk.first_line is None:  # its lines are numbered within the chunk
            num_lines += last


def names_of(chunk: Chunk) -> tuple[str, ...]:
    """The columns of a chunk's file; none of a file without columns."""
    return tuple(layout_of(chunk.file, chunk.format)[0]) if chunk.format in GROUPED else ()


def read_chunk(chunk: Chunk, *, more_columns: tuple[str, ...] = ()) -> Iterator[Record]:
    """The chunk's records in order; broken ones carry their problem.

    Of columns only those that records are made of are read, and `more_columns`.
    """
    if chunk.format == "jsonl":
        with chunk.file.open("rb") as file:
            yield from _read_lines(file, chunk.start, chunk.stop)
    elif chunk.format in LISTS:
        for offset, value in enumerate(chunk.rows):
            yield Record(line=chunk.start + 1 + offset, value=value)
    elif chunk.format == "tar":
        yield from read_tar(chunk.file)
    else:
        yield from _read_groups(chunk, more_columns)


# -- JSON -------------------------------------------------------------------------------------------------------------


def _read_lines(file: BinaryIO, start: int, stop: int) -> Iterator[Record]:
    """Yield lines that begin in [start, stop), numbered from 1 within the chunk."""
    position = start
    if start:
        file.seek(start - 1)
        position = _skip_line(file, start - 1, stop)
    number = 0
    while position < stop:
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        number += 1
        position += len(line)
        if len(line) > MAX_LINE_BYTES:
            position = _skip_line(file, position, stop)
            yield Record(line=number, problem=BadRecordError("json", _TOO_LONG))
            continue
        if position == len(line) and start == 0:
            line = line.removeprefix(_BOM)
        line = line.strip()
        if line:
            yield _parse_line(line, number)
        else:
            yield Record(line=number, blank=True)


_TOO_LONG = f"the line is longer than {MAX_LINE_BYTES >> 20} MiB: name image files instead of carrying their bytes"


def _parse_line(line: bytes, number: int) -> Record:
    try:
        return Record(line=number, value=parse_record(line))
    except BadRecordError as error:
        return Record(line=number, problem=error)


def _skip_line(file: BinaryIO, position: int, stop: int) -> int:
    """Read on behind the next line end, or to `stop`: who skips a long line in every chunk reads it once in all."""
    while position < stop and (part := file.readline(min(1 << 20, stop - position))):
        position += len(part)
        if part.endswith(b"\n"):
            break
    return position


# -- groups ------------------------------------------------------------------------------------------------------------


def _read_groups(chunk: Chunk, more_columns: tuple[str, ...]) -> Iterator[Record]:
    assert chunk.first_line is not None
    line = chunk.first_line
    groups = GROUPED[chunk.format](chunk.file)
    columns = [name for name in groups.names if name in (*KNOWN_KEYS, *more_columns)]
    try:
        for value in groups.records(range(chunk.start, chunk.stop), columns):
            yield Record(line=line, value=value)
            line += 1
    except (OSError, ValueError, SystemError) as error:
        reason = f"row groups {chunk.start} to {chunk.stop - 1} end here: {shorten(str(error), 120)}; write them again"
        yield Record(line=line, problem=BadRecordError("json", reason))


# -- by number ---------------------------------------------------------------------------------------------------------


def open_rows(path: Path) -> Callable[[int], object]:
    """Open records by their number in the file, from 1: of a JSON list, or of groups, the last of which is kept."""
    kind = detect_format(path)
    if kind in LISTS:
        rows = [value for value, _ in LISTS[kind](path)]
        return lambda line: rows[line - 1]
    groups = GROUPED[kind](path)
    firsts = np.cumsum([0, *groups.counts])
    kept: dict[int, Callable[[int], object]] = {}

    def read(line: int) -> object:
        group = int(np.searchsorted(firsts, line - 1, side="right")) - 1
        if group not in kept:
            kept.clear()
            kept[group] = groups.open_group(group)
        return kept[group](line - 1 - int(firsts[group]))

    return read


def rows_of(path: Path) -> Iterator[object]:
    """Yield every record of a JSON list or of groups, all columns."""
    kind = detect_format(path)
    if kind in LISTS:
        yield from (value for value, _ in LISTS[kind](path))
        return
    groups = GROUPED[kind](path)
    try:
        yield from groups.records(range(len(groups.counts)), groups.names)
    except (OSError, ValueError) as error:
        raise unreadable(path, kind, error) from None


# -- by row: where a table's records are -------------------------------------------------------------------------------


_SCAN_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 16  # fetched for one record behind an address


def refuse_other_files(samples: SampleTable, files: Sequence[Path]) -> None:
    """Raise `SampleError` unless as many files are named as the table was sized from."""
    if len(files) != samples.num_files:
        named = ", ".join(map(str, files)) or "none"
        raise SampleError(f"{samples.num_files} files were sized, not {len(files)} ({named}): name the same in order")


def file_numbers(samples: SampleTable) -> IntArray:
    """Return the file of each row of a table, from 0."""
    return np.zeros(len(samples), np.int64) if samples.file_index is None else samples.file_index.astype(np.int64)


def line_starts(file: Path) -> IntArray:
    """Return the byte offset of every line of a file, blank ones too; lines end at a line feed."""
    starts, position = [np.zeros(1, np.int64)], 0
    with file.open("rb") as stream:
        while block := stream.read(_SCAN_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + position + 1)
            position += len(block)
    joined = np.concatenate(starts)
    return joined[joined < position]


def row_starts(samples: SampleTable, files: Sequence[Path | None]) -> IntArray:
    """Return (num_rows,) byte offset of each row's line; the files are JSON Lines, None stands for another."""
    starts, in_file = np.zeros(len(samples), np.int64), file_numbers(samples)
    line = np.arange(1, len(samples) + 1) if samples.line is None else samples.line
    for number, file in enumerate(files):
        rows = np.flatnonzero(in_file == number)
        if file is None or not len(rows):
            continue
        lines, of_file = line[rows], line_starts(file)
        if lines.max() > len(of_file):
            raise SampleError(f"{file} has {len(of_file)} lines, not {lines.max()}: name the files that were sized")
        starts[rows] = of_file[lines - 1]
    return starts


class Lines:
    """A JSON Lines file, mapped, or behind an address; read at the byte offsets of `line_starts`."""

    def __init__(self, path: Path) -> None:
        self._bytes: Any
        if isinstance(path, Address):
            self._bytes = path.open("rb", block_bytes=_BLOCK_BYTES)
            return
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, start: int) -> bytes:
        """The line that begins there, without white space around it and without a byte order mark."""
        self._bytes.seek(start)
        line: bytes = self._bytes.readline()
        return (line.removeprefix(_BOM) if start == 0 else line).strip()

    def close(self) -> None:
        self._bytes.close()
