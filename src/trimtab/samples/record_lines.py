"""Where a table's records are: file and line of each row, and the bytes of a JSON Lines file's lines."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.address import Address
from trimtab.errors import SampleError
from trimtab.specs import IntArray, SampleTable

_SCAN_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 16  # fetched for one record behind an address
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPlaces:
    """Of each row of a table its file, from 0, and its line or record number in it, from 1."""

    file: IntArray
    line: IntArray


def refuse_other_files(samples: SampleTable, files: Sequence[Path]) -> None:
    """`SampleError` unless as many files are named as the table was sized from."""
    if len(files) != samples.num_files:
        named = ", ".join(map(str, files)) or "none"
        raise SampleError(
            f"the samples were sized from {samples.num_files} files, and {len(files)} were named ({named}): name the "
            "files that were sized, in the same order"
        )


def places_of(samples: SampleTable) -> RowPlaces:
    """The table's own word on where its records are."""
    n = len(samples)
    return RowPlaces(
        file=np.zeros(n, np.int64) if samples.file_index is None else samples.file_index.astype(np.int64),
        line=np.arange(1, n + 1) if samples.line is None else samples.line,
    )


def line_starts(file: Path) -> IntArray:
    """Byte offset of every line of a file, blank ones too; lines end at a line feed."""
    starts, position = [np.zeros(1, np.int64)], 0
    with file.open("rb") as stream:
        while block := stream.read(_SCAN_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + position + 1)
            position += len(block)
    joined = np.concatenate(starts)
    return joined[joined < position]


def row_starts(samples: SampleTable, files: Sequence[Path | None]) -> IntArray:
    """(num_rows,) byte offset at which each row's line begins; the files are JSON Lines, None stands for another."""
    starts, places = np.zeros(len(samples), np.int64), places_of(samples)
    for number, file in enumerate(files):
        rows = np.flatnonzero(places.file == number)
        if file is None or not len(rows):
            continue
        lines, of_file = places.line[rows], line_starts(file)
        if lines.max() > len(of_file):
            raise SampleError(
                f"{file} has {len(of_file)} lines, and a sample was sized from line {lines.max()}: "
                "give the files that were sized, in the same order"
            )
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
