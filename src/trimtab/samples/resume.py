"""Finished chunks of a sizing pass on disk, so that a killed pass goes on where it was."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from trimtab.address import Address
from trimtab.files import blake2b, write_atomically
from trimtab.samples.arrays import pack_arrays, unpack_arrays
from trimtab.samples.chunks import Chunk
from trimtab.samples.table import UNREADABLE, Part, bad_from_dict


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFile:
    """Where a chunk's result lies, and what it says that it is the result of."""

    path: Path
    of: str

    @staticmethod
    def of_chunk(folder: Path, chunk: Chunk, settings_key: str) -> ChunkFile:
        """The name changes with the file's size or time, the chunk, and the settings."""
        status = chunk.file.stat()
        identity: tuple[object, ...] = (str(chunk.file.resolve()), status.st_size, status.st_mtime_ns)
        identity += (chunk.format, chunk.start, chunk.stop, chunk.media_root and str(chunk.media_root))
        of = repr((identity, blake2b(settings_key.encode())))
        return ChunkFile(path=folder / f"chunk-{blake2b(of.encode())}.npz", of=of)


def save_part(file: ChunkFile, part: Part) -> None:
    """Write one finished chunk; the file is complete, or is not there."""
    content = part_bytes(part, of=file.of)
    if isinstance(file.path, Address):
        file.path.write_bytes(content)
    else:
        write_atomically(file.path, content)


def load_part(file: ChunkFile) -> Part | None:
    """The chunk saved there; None where there is none, or it is damaged (every array has a checksum) or another's."""
    try:
        return part_from(file.path.read_bytes(), of=file.of)
    except UNREADABLE:
        return None


def part_bytes(part: Part, of: str = "") -> bytes:
    """The part as plain data; `of` says of what."""
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in values.items() if name not in arrays}
    return pack_arrays(arrays, plain | {"bad": [asdict(sample) for sample in part.bad], "of": of})


def part_from(content: bytes, of: str = "") -> Part:
    """What `part_bytes` wrote; raises one of `UNREADABLE` for anything else."""
    arrays, plain = unpack_arrays(content)
    if plain.pop("of") != of:
        raise ValueError("it is the part of another chunk")
    lists = {name: tuple(value) for name, value in plain.items() if isinstance(value, list)}
    return Part(**{**arrays, **plain, **lists, "bad": tuple(map(bad_from_dict, plain["bad"]))})
