"""Writing files whole or not at all, and telling whether a file is still the same."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_MIB = 2**20


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write under a temporary name beside `path` and rename it: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def blake2b(content: bytes) -> str:
    """16 hexadecimal digits: tells versions of a file apart, guards against accidents and not against forgery."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def fingerprint_file(path: Path) -> str:
    """`blake2b` of a file's size, first MiB and last MiB: cheap on data sets of any size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_MIB)
        file.seek(max(len(head), size - _MIB))
        tail = file.read(_MIB)
    return blake2b(str(size).encode() + b"\0" + head + tail)
