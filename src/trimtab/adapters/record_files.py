"""The records of a data set found again: which bytes of which file are row i of a sample table.

JSON Lines are read in place. A JSON list or a Parquet file is first written out as JSON Lines, into a file that goes
when the work is done; a list is held in memory for that, as in sizing. Else memory is the names and positions of the
samples, and no record is held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trimtab.errors import SampleError
from trimtab.files import open_passing
from trimtab.samples.problems import BadRecordError, shorten
from trimtab.samples.record_lines import Lines, places_of, refuse_other_files, row_starts
from trimtab.samples.records import detect_format, read_records, rows_of
from trimtab.samples.rows import record_id
from trimtab.specs import IntArray, SampleTable


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


def find_records(files: Sequence[Path], samples: SampleTable) -> IntArray:
    """Of each row the number of its record in its file, from 0, blank lines aside; files of any format that is sized.

    Rows are found by file and line, and their ids compared. Exact or refused: raises `SampleError` where a record is
    missing or has another id than the sample.
    """
    refuse_other_files(samples, files)
    places, named = places_of(samples), ", ".join(map(str, files))
    numbers, num_read, num_broken = np.full(len(samples), -1, np.int64), 0, 0
    for index, path in enumerate(files):
        rows = np.flatnonzero(places.file == index)
        rows = rows[np.argsort(places.line[rows], kind="stable")]
        lines, at = places.line[rows].tolist(), 0
        for number, (line, own) in enumerate(_ids_in(path)):
            num_read += 1
            num_broken += own is None
            while at < len(lines) and lines[at] == line:  # one row, or as many as the record is repeated
                if own is not None and _is_sample(samples, int(rows[at]), own):
                    numbers[rows[at]] = number
                at += 1
    if samples.ids is None and (num_read != len(samples) or num_broken):
        raise SampleError(
            f"the plan holds {len(samples)} samples without ids, hence all of its data, and {named} "
            f"{'hold' if len(files) > 1 else 'holds'} {num_read} records"
            f"{f', {num_broken} of them broken' if num_broken else ''}: name the files that were planned, in order"
        )
    wrong = np.flatnonzero(numbers < 0)
    if len(wrong):
        raise SampleError(
            f"{len(wrong)} of the plan's {len(samples)} samples, such as {shorten(samples.sample_id(int(wrong[0])))}, "
            f"are not on the lines of {named} where they were sized (line {places.line[wrong[0]]}): name the files "
            "that were planned, in their order, or plan again"
        )
    return numbers


@contextmanager
def open_records(files: Sequence[Path], samples: SampleTable, *, folder: Path) -> Iterator[Records]:
    """The samples' records as JSON; found and refused as by `find_records`. `folder` takes the passing JSON Lines."""
    with ExitStack() as stack:
        sources: list[Path] = []
        for path in files:
            kind, source = detect_format(path), path
            if kind == "tar":
                raise SampleError(
                    f"{path} is a tar shard, whose images lie beside the record and go into no JSON: export npy, and "
                    "read the records in your own loader"
                )
            if kind != "jsonl":
                spill = stack.enter_context(open_passing(folder, ".jsonl"))
                _spill(path, spill)
                spill.flush()
                source = Path(spill.name)
            sources.append(source)
        find_records(sources, samples)
        opened = tuple(
            None if source.stat().st_size == 0 else stack.enter_context(closing(Lines(source))) for source in sources
        )
        yield Records(_file=places_of(samples).file, _start=row_starts(samples, sources), _lines=opened)


# -- reading ----------------------------------------------------------------------------------------------------------


def _ids_in(path: Path) -> Iterator[tuple[int, str | None]]:
    """Line and own id of every record, blank lines aside: "" without one, None for a record that no table can hold."""
    for record in read_records(path):
        if record.blank:
            continue
        try:
            usable = record.problem is None and isinstance(record.value, dict)
            own = record_id(record.value) or record.key or "" if usable else None
        except BadRecordError:
            own = None
        yield record.line, own


def _spill(path: Path, spill: BinaryIO) -> None:
    """Every record of the file as one line."""
    for number, value in enumerate(rows_of(path)):
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError):
            name = _odd_field(value)
            raise SampleError(
                f"field {name!r} of record {number + 1} of {path} was to be written as JSON, which has no such value: "
                "keep images as files and name their paths, or export npy and read the records in your own loader"
            ) from None
        spill.write(text + b"\n")


def _odd_field(record: object) -> str:
    for name, value in record.items() if isinstance(record, Mapping) else ():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return str(name)
    return ""


def _is_sample(samples: SampleTable, row: int, own: str) -> bool:
    """Whether sizing may have called a record of this id so: perhaps behind its file's name, perhaps numbered."""
    if samples.ids is None:
        return True
    name = samples.ids[row]
    if not own:
        return name.rpartition(":")[2].isdigit()
    stem, mark, number = name.rpartition("#")
    names = [name, stem] if mark and number.isdigit() else [name]
    return any(x == own or x.endswith("/" + own) for x in names)
