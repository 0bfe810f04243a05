"""Writing files that are complete or not there, and telling whether a file is still the same."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_MIB = 2**20


@contextmanager
def open_atomically(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` at the end of the block, or never: a reader never sees half of it.

    That holds when the process dies; with `sync` also when the machine does, at the cost of waiting for the disk. Of
    writers of one path, on whatever machines, the last one wins.
    """
    refuse_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # not tempfile's: the file keeps the permissions that the user's umask gives
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb", buffering=_MIB) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_folder(path: Path) -> None:
    """Raises `IsADirectoryError` where a file is to be written and `path` names a folder."""
    if not path.name or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def write_atomically(path: Path, content: bytes | str, *, sync: bool = True) -> None:
    """`open_atomically` for content that is there as a whole."""
    with open_atomically(path, sync=sync) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


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
