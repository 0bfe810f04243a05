"""Rows of a plan to the records they were sized from: a file's line or row, wherever bad samples were left out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.address import Allowed
from trimtab.files import blake2b, fingerprint_file, write_atomically
from trimtab.plan.file.reload import find_data_files, read_samples
from trimtab.plan.file.yaml import array_bytes, load_plan
from trimtab.plan.layout import refuse_tars
from trimtab.samples.problems import parse_record
from trimtab.samples.records import Lines, detect_format, open_rows, refuse_other_files, row_starts
from trimtab.samples.sources import MediaRoot, whole_root
from trimtab.specs import IntArray, SampleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a sample's record is."""

    file: Path
    line: int  # of a JSON Lines file, blank lines counted; elsewhere the record's number; from 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def open_records(
    plan: Path | str,
    files: Sequence[Path] | None = None,
    media_root: MediaRoot = None,
    *,
    allowed: Allowed | None = None,
) -> PlannedRecords:
    """The records of a plan folder's samples; line starts are kept in the folder.

    Use it to read the records of a plan as they stand in your files; `open_conversations` makes a model's input of
    them. docs/training-loop.md has an example.

    `files` are the data files, where they are no longer where the plan names them. An address that the plan names is
    opened only if that is `allowed` (`Allowed(remote=True)`).
    """
    path = Path(plan)
    folder = path.parent if path.is_file() or path.name == "plan.yaml" else path
    made = load_plan(path if path.is_file() else folder)
    sources = find_data_files(made, folder, files, media_root, allowed=allowed)
    whole = whole_root(sources, media_root)
    return PlannedRecords(
        read_samples(made, folder),
        [source.file for source in sources],
        index_dir=folder,
        media_roots=[source.media_root or whole for source in sources],
    )


class PlannedRecords(Sequence[Any]):
    """Item i is the record that row i of the plan was sized from, as a dict.

    Of JSON Lines a line is read at its place in the file; of Parquet the row group that holds the row (the last one is
    kept); a JSON list is held in memory. Objects go to worker processes: each opens the files for itself.
    """

    def __init__(
        self,
        samples: SampleTable,
        files: Sequence[Path],
        *,
        index_dir: Path | None = None,
        media_roots: Sequence[Path | None] | None = None,
    ) -> None:
        """`files` are those that were sized, in the same order; their line starts are found once, and with `index_dir`
        kept there for later runs (8 bytes a sample). `media_roots` are the folders that image paths of each start from.
        """
        refuse_other_files(samples, files)
        self._media_roots = tuple(media_roots or [None] * len(files))
        self._files = tuple(files)
        self._formats = tuple(detect_format(file) for file in files)
        refuse_tars(files)
        self.samples = samples
        self._starts = _line_starts(self, samples, index_dir) if "jsonl" in self._formats else None
        self._open: dict[int, Callable[[int], object]] = {}
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self.samples)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def place(self, row: int) -> Place:
        """File and line of a row; `IndexError` past the last."""
        return Place(file=self._files[self._file_of(row)], line=self._line_of(row))

    def media_root(self, row: int) -> Path | None:
        """The folder that image paths of the row's file start from; None: the file's own."""
        return self._media_roots[self._file_of(row)]

    def __getitem__(self, row: Any) -> Any:
        number, line = self._file_of(row), self._line_of(row)
        if self._pid != os.getpid():  # a forked worker opens its own
            self._open, self._pid = {}, os.getpid()
        if number not in self._open:
            self._open[number] = _reader(self._files[number], self._formats[number])
        if self._starts is not None and self._formats[number] == "jsonl":
            line = int(self._starts[row])
        return self._open[number](line)

    def _file_of(self, row: int) -> int:
        if not 0 <= row < len(self.samples):
            raise IndexError(f"row {row} of a plan of {len(self.samples)} samples")
        return 0 if self.samples.file_index is None else int(self.samples.file_index[row])

    def _line_of(self, row: int) -> int:
        return row + 1 if self.samples.line is None else int(self.samples.line[row])


def _reader(path: Path, kind: str) -> Callable[[int], object]:
    """A record by its number in the file; of JSON Lines by the byte at which it begins."""
    if kind != "jsonl":
        return open_rows(path)
    lines = Lines(path)
    return lambda start: parse_record(lines.read(start))


def _line_starts(records: PlannedRecords, samples: SampleTable, index_dir: Path | None) -> IntArray:
    """(num_rows,) byte offset of each row's line, 0 in other formats; found once, then mapped from `index_dir`."""
    path = None
    if index_dir is not None:
        lines = b"" if samples.line is None else samples.line.tobytes()
        parts = b"" if samples.file_index is None else samples.file_index.tobytes()
        prints = "".join(fingerprint_file(file) for file in records._files).encode()
        key = blake2b(prints + lines + b"\0" + parts + str(len(samples)).encode())
        path = index_dir / f"line-starts-{key}.npy"
        if path.is_file():
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    lines_of = [f if kind == "jsonl" else None for f, kind in zip(records._files, records._formats, strict=True)]
    starts = row_starts(samples, lines_of)
    if path is not None:
        write_atomically(path, array_bytes(starts))
    return starts
