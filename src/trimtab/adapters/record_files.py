"""The records of a data set found again: which bytes of which file are row i of a sample table.

JSON Lines are read in place. A JSON list or a Parquet file is first written out as JSON Lines, into a file that goes
when the work is done; a list is held in memory for that, as in sizing. Else memory is the names and positions of the
samples, and no record is held.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trimtab.errors import SampleError
from trimtab.samples.problems import BadRecordError, shorten
from trimtab.samples.record_lines import Lines, line_starts, places_of, refuse_other_files
from trimtab.samples.records import detect_format, list_chunks, open_parquet, read_chunk, read_json_list
from trimtab.samples.rows import record_id
from trimtab.specs import IntArray, SampleTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Where the record of each row of a sample table is: file `file[i]` of the list, its record `record[i]`.

    `record` counts a file's records from 0, blank lines aside; `line` counts lines from 0, blank ones too, and is equal
    to `record` where records have no lines.
    """

    file: IntArray
    record: IntArray
    line: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """The record of each row of a sample table, as JSON."""

    _file: IntArray
    _start: IntArray  # byte at which the record's line begins
    _lines: tuple[Lines | None, ...]  # None: no record in the file

    def read(self, row: int) -> bytes:
        """The record as JSON on one line, without the line's end."""
        lines = self._lines[int(self._file[row])]
        assert lines is not None, "the row's file is empty"
        return lines.read(int(self._start[row]))


@dataclass(slots=True)
class _Scan:
    """What one file holds, an entry per record that could be in a table."""

    own: list[str | None] = field(default_factory=list)  # the record's own id
    line: array[int] = field(default_factory=lambda: array("q"))  # from 0
    record: array[int] = field(default_factory=lambda: array("q"))
    num_broken: int = 0  # records that cannot be in a table


def find_records(files: Sequence[Path], samples: SampleTable) -> Places:
    """Where the samples' records are in the files they were sized from, of any format that can be sized.

    Rows are found by file and line, and their ids compared. Exact or refused: raises `SampleError` where a record is
    missing or has another id than the sample.
    """
    scans = [_scan_file(path) for path in files]
    chosen = _match(files, scans, samples)
    return Places(
        file=_file_of(scans)[chosen], record=_column(scans, "record")[chosen], line=_column(scans, "line")[chosen]
    )


@contextmanager
def open_records(files: Sequence[Path], samples: SampleTable, *, folder: Path) -> Iterator[Records]:
    """The samples' records as JSON; found and refused as by `find_records`. `folder` takes the passing JSON Lines."""
    with ExitStack() as stack:
        scans, starts, opened = list[_Scan](), list[IntArray](), list[Lines | None]()
        for number, path in enumerate(files):
            kind, source = detect_format(path), path
            if kind == "tar":
                raise SampleError(
                    f"{path} is a tar shard, whose images lie beside the record and go into no JSON: export npy, or "
                    "pack while reading with the Energon adapter"
                )
            if kind != "jsonl":
                source = folder / f".records-{number}.{secrets.token_hex(8)}.tmp.jsonl"
                folder.mkdir(parents=True, exist_ok=True)
                stack.callback(source.unlink, missing_ok=True)
                with source.open("wb") as spill:
                    _spill(path, kind, spill)
            scans.append(_scan_file(source))
            starts.append(line_starts(source)[np.array(scans[-1].line, np.int64)])
            opened.append(None if source.stat().st_size == 0 else stack.enter_context(closing(Lines(source))))
        chosen = _match(files, scans, samples)
        yield Records(_file=_file_of(scans)[chosen], _start=np.concatenate(starts)[chosen], _lines=tuple(opened))


def _file_of(scans: Sequence[_Scan]) -> IntArray:
    return np.repeat(np.arange(len(scans)), [len(scan.own) for scan in scans])


def _column(scans: Sequence[_Scan], name: str) -> IntArray:
    return np.concatenate([np.array(getattr(scan, name), np.int64) for scan in scans])


# -- reading ----------------------------------------------------------------------------------------------------------


def _scan_file(path: Path) -> _Scan:
    scan, offset, number = _Scan(), 0, 0
    for chunk in list_chunks(path):
        last = 0
        for record in read_chunk(chunk):
            last = record.line
            if record.blank:
                continue
            try:
                if record.problem is not None:
                    raise record.problem
                if not isinstance(record.value, dict):
                    raise BadRecordError("type", "the record is no object")
                scan.own.append(record_id(record.value) or record.key)
                scan.line.append(offset + record.line - 1)
                scan.record.append(number)
            except BadRecordError:
                scan.num_broken += 1
            number += 1
        if chunk.first_line is None:  # its lines are numbered within the chunk
            offset += last
    return scan


def _spill(path: Path, kind: str, spill: BinaryIO) -> None:
    """Every record of the file as one line."""
    for number, value in enumerate(read_json_list(path) if kind == "json" else _parquet_rows(path)):
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError):
            name = _odd_field(value)
            raise SampleError(
                f"field {name!r} of record {number + 1} of {path} was to be written as JSON, which has no such value: "
                "keep images as files and name their paths, or export npy and read the records in your own loader"
            ) from None
        spill.write(text + b"\n")


def _parquet_rows(path: Path) -> Iterator[object]:
    import pyarrow

    try:
        for batch in open_parquet(path).iter_batches(batch_size=512, use_threads=False):
            yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise SampleError(f"{path} is not readable as Parquet: {shorten(str(error), 200)}; write it again") from None


def _odd_field(record: object) -> str:
    for name, value in record.items() if isinstance(record, Mapping) else ():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return str(name)
    return ""


# -- matching ---------------------------------------------------------------------------------------------------------


def _match(files: Sequence[Path], scans: Sequence[_Scan], samples: SampleTable) -> IntArray:
    """Of every row of the table its place among the records of all files: by file and line, checked by id."""
    named = ", ".join(map(str, files))
    num_broken = sum(scan.num_broken for scan in scans)
    total = sum(len(scan.own) for scan in scans)
    refuse_other_files(samples, files)
    places = places_of(samples)
    if samples.ids is None and (total != len(samples) or num_broken):
        raise SampleError(
            f"the plan holds {len(samples)} samples without ids, hence all of its data, and {named} "
            f"{'hold' if len(files) > 1 else 'holds'} {total + num_broken} records"
            f"{f', {num_broken} of them broken' if num_broken else ''}: name the files that were planned, in order"
        )
    n, line = len(samples), places.line - 1
    rows = np.full(n, -1, np.int64)
    first = 0
    for number, scan in enumerate(scans):
        here = np.flatnonzero(places.file == number)
        known = np.array(scan.line, np.int64)
        at = np.searchsorted(known, line[here])
        found = at < len(known)
        found[found] = known[at[found]] == line[here][found]
        rows[here[found]] = first + at[found]
        first += len(known)
    wrong = rows < 0
    if samples.ids is not None:
        own = [name for scan in scans for name in scan.own]
        wrong |= np.array(
            [r < 0 or not _is_name(name, own[r]) for r, name in zip(rows.tolist(), samples.ids, strict=True)], bool
        )
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise SampleError(
            f"{int(wrong.sum())} of the plan's {n} samples, such as {shorten(samples.sample_id(row))}, are not on the "
            f"lines of {named} where they were sized (line {int(line[row]) + 1}): name the files that were planned, in "
            "their order, or plan again"
        )
    return rows


def _is_name(name: str, own: str | None) -> bool:
    """Whether sizing may have called a record of this id so: perhaps behind its file's name, perhaps numbered."""
    if own is None:
        return name.rpartition(":")[2].isdigit()
    stem, mark, number = name.rpartition("#")
    names = [name, stem] if mark and number.isdigit() else [name]
    return any(x == own or x.endswith("/" + own) for x in names)
