"""The records that a plan was made from: their files, and of each row of the plan its line or row in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.address import Address, Allowed, place_inside, place_of
from trimtab.errors import PlanError, SampleError
from trimtab.files import blake2b, fingerprint_file, is_there, write_atomically
from trimtab.plan.file.reload import read_samples
from trimtab.plan.file.yaml import array_bytes, load_plan
from trimtab.plan.plan import DataFile, Plan
from trimtab.samples.lengths import holds_lengths
from trimtab.samples.problems import parse_record
from trimtab.samples.records import Lines, detect_format, open_rows, refuse_other_files, row_starts
from trimtab.samples.sources import SourceFile, find_sources
from trimtab.samples.table import SizedFile, is_saved_table, sized_files
from trimtab.specs import IntArray, SampleTable

# -- the files: those that the plan was made from, or those behind its saved sizes -------------------------------------


def find_data_files(
    plan: Plan,
    folder: Path,
    given: Sequence[Path] | None = None,
    media_root: Path | str | None = None,
    *,
    allowed: Allowed | None = None,
) -> list[SourceFile]:
    """Return the files that were sized, in their order: `given`, or those that the plan in `folder` leads to.

    Each says which media folder a list of data sets, or the plan, states for it. A plan made from tables that `trimtab
    size` saved leads through them to the files that were sized. An address that the plan names is opened only if that
    is `allowed`. Raises `SampleError` where a file is missing or holds no records, and `PlanError` where it is not the
    one that was sized.
    """
    allowed = allowed or Allowed()
    # 1. path and fingerprint of every file that was sized; unknown behind a table that is gone or does not say it
    sized: list[SizedFile] | None = []
    for file in plan.inputs.data.files:
        found = _behind(file, folder, allowed) if is_saved_table(place_of(file.path)) else [_sized(file)]
        sized = None if found is None or sized is None else [*sized, *found]
    # 2. where they are
    if given is None:
        known = sized if sized is not None else list(map(_sized, plan.inputs.data.files))
        sources = [_source(file, folder, allowed) for file in known]
    else:
        sources = find_sources(given, media_root, allowed)
    files = [source.file for source in sources]
    (refuse_absent if given is None else refuse_no_records)(files)
    # 3. whether they are what was sized
    for place, expected in zip(files, sized or (), strict=False):
        if fingerprint_file(place) != expected.blake2b:
            raise PlanError(f"{place} is not {expected.path} as it was sized: name that file (--data), or plan again")
    if sized is not None and len(sized) != len(files):
        named = ", ".join(file.path for file in sized)
        raise PlanError(f"{len(files)} files for a plan of {len(sized)}: name {named}, in order (--data)")
    refuse_no_records(files)  # only now: what a plan leads to is not parsed before it is known to be what was sized
    return sources


def refuse_absent(files: Sequence[Path]) -> None:
    """Raise `SampleError` where a file is missing."""
    gone = [str(file) for file in files if not is_there(file)]
    if gone or not files:
        raise SampleError(f"no data at {', '.join(gone) or 'any place'}: name the files that were sized (--data)")


def refuse_no_records(files: Sequence[Path]) -> None:
    """Raise `SampleError` where a file is missing, or holds sizes and no records."""
    refuse_absent(files)
    if bare := [str(file) for file in files if holds_lengths(file)]:
        raise SampleError(f"{', '.join(bare)} holds sizes, not records: name the files that were sized (--data)")


def _place(path: str, folder: Path, allowed: Allowed) -> Path:
    """Return a file as the plan names it: from the working folder, or the plan's; or an address, if allowed."""
    place = place_of(path)
    if isinstance(place, Address) and not allowed.remote:
        raise SampleError(f"the plan in {folder} names the address {path}: name the data (--data), or --allow-remote")
    return place if isinstance(place, Address) or is_there(place) else folder / path


def _source(file: SizedFile, folder: Path, allowed: Allowed) -> SourceFile:
    place = _place(file.path, folder, allowed)
    root = None if file.media_root is None else place_of(file.media_root)
    if isinstance(root, Address):
        _place(str(root), folder, allowed)
    return SourceFile(file=place, named=place, media_root=root)


def refuse_roots(sources: Sequence[SourceFile], given: Path | None, folder: Path, allowed: Allowed | None) -> None:
    """Raise `SampleError` where the plan in `folder` names a media folder far from its file, unless that is `allowed`.

    It lies below the folder above the file's own, or below `given`.
    """
    for source in sources:
        if source.media_root is not None:
            file = source.file if isinstance(source.file, Address) else source.file.absolute()
            folders = [file.parent.parent, *([] if given is None else [given])]
            place_inside(str(source.media_root), folders, f"the plan in {folder}", allowed or Allowed())


def _sized(file: DataFile) -> SizedFile:
    return SizedFile(path=file.path, blake2b=file.blake2b, media_root=file.media_root)


def _behind(file: DataFile, folder: Path, allowed: Allowed) -> list[SizedFile] | None:
    """Return the files behind a saved table of the plan; None where the table is gone or names none."""
    place = _place(file.path, folder, allowed)
    return (list(sized_files(place)) or None) if place.is_file() else None


# -- the records of rows ----------------------------------------------------------------------------------------------


def refuse_tars(files: Sequence[Path]) -> None:
    """Raise `SampleError` for shards: their records are read one after the other only."""
    refused = [str(file) for file in files if detect_format(file) == "tar"]
    if refused:
        raise SampleError(f"{', '.join(refused)}: tar shards have no records by row; read them in your own data set")


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
    media_root: Path | str | None = None,
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
    root = None if media_root is None else place_of(media_root)
    if files is None:
        refuse_roots(sources, root, folder, allowed)
    return PlannedRecords(
        read_samples(made, folder),
        [source.file for source in sources],
        index_dir=folder,
        media_roots=[source.media_root or root for source in sources],
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
        """Take `files` that were sized, in the same order; their line starts are found once, and with `index_dir`
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
        """Return the file and line of a row; `IndexError` past the last."""
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
    """Return a record by its number in the file; of JSON Lines by the byte at which it begins."""
    if kind != "jsonl":
        return open_rows(path)
    lines = Lines(path)
    return lambda start: parse_record(lines.read(start))


def _line_starts(records: PlannedRecords, samples: SampleTable, index_dir: Path | None) -> IntArray:
    """Find (num_rows,) byte offset of each row's line, 0 in other formats; found once, then mapped from `index_dir`."""
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
