"""Finished chunks of a sizing pass on disk, so that a killed pass goes on where it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from trimtab.files import blake2b, write_atomically
from trimtab.samples.records import Chunk
from trimtab.samples.table import (
    COLUMNS,
    UNREADABLE,
    Part,
    bad_from_dict,
    pack_arrays,
    pack_strings,
    unpack_arrays,
    unpack_strings,
)


def chunk_path(folder: Path, chunk: Chunk, settings_key: str) -> Path:
    """Where the chunk's result lies; the name changes with the file's size or time, the chunk, and the settings."""
    status = chunk.file.stat()
    identity = (str(chunk.file.resolve()), status.st_size, status.st_mtime_ns, chunk.format, chunk.start, chunk.stop)
    return folder / f"chunk-{blake2b(repr((identity, settings_key)).encode())}.npz"


def save_part(path: Path, part: Part) -> None:
    """Write one finished chunk, whole or not at all."""
    names = [name for name in part.ids or () if name is not None]
    has_id = np.array([name is not None for name in part.ids or ()], np.bool_)
    meta: dict[str, object] = {
        "num_lines": part.num_lines,
        "has_ids": part.ids is not None,
        "tokens_exact": part.tokens_exact,
        "source_names": None if part.source is None else list(part.source_names),
        "bad": [dataclasses.asdict(sample) for sample in part.bad],
    }
    source = np.empty(0, np.int32) if part.source is None else part.source
    assert part.image_patches is not None, "a sizing pass counts every image"
    numbers = {"numbers": part.numbers, "image_patches": part.image_patches, "lines": part.lines}
    others = {"has_id": has_id, "source": source, **pack_strings("id", names)}
    write_atomically(path, pack_arrays({**numbers, **others}, meta))


def load_part(path: Path) -> Part | None:
    """The chunk saved there; None where there is none or it cannot be trusted, and it is sized again."""
    try:
        arrays, meta = unpack_arrays(path.read_bytes())
        numbers, lines, has_id = arrays["numbers"], arrays["lines"], arrays["has_id"]
        if numbers.dtype != np.int64 or numbers.shape != (len(lines), len(COLUMNS)) or lines.dtype != np.int64:
            return None
        images = arrays["image_patches"]
        if images.dtype != np.int64 or images.shape != (numbers[:, 0].sum(),):
            return None
        names = iter(unpack_strings("id", arrays))
        ids = tuple(next(names) if own else None for own in has_id.tolist()) if meta["has_ids"] else None
        if ids is not None and len(ids) != len(lines):
            return None
        source, source_names = arrays["source"], meta["source_names"]
        if source_names is not None and (source.dtype != np.int32 or source.shape != lines.shape):
            return None
        return Part(
            numbers=numbers,
            image_patches=images,
            lines=lines,
            ids=ids,
            bad=tuple(bad_from_dict(sample) for sample in meta["bad"]),
            num_lines=meta["num_lines"],
            source=None if source_names is None else source,
            source_names=tuple(map(str, source_names or ())),
            patch_unit="patches",
            tokens_exact=meta["tokens_exact"],
        )
    except UNREADABLE:
        return None
