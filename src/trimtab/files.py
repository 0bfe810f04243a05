"""Writing files that are complete or not there, and telling whether a file is still the same."""

import errno
import hashlib
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

from trimtab.errors import TrimtabError

_MIB = 2**20
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(?=/)")  # of an address; of two letters or more, for C:/ is a drive


@dataclass(frozen=True, slots=True)
class _Aside:
    """A file under another name until it is whole; locked while its writer lives."""

    file: BinaryIO
    temporary: Path
    path: Path

    def take_name(self) -> None:
        self.temporary.replace(self.path)

    def close(self) -> None:
        self.temporary.unlink(missing_ok=True)
        with suppress(OSError):  # what could not be written is known already
            self.file.close()


_waiting: ContextVar[list[_Aside] | None] = ContextVar("_waiting", default=None)  # inside `written_together`


@contextmanager
def open_atomically(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file that takes the name `path` at the end of the block, or never: a reader never sees half of it.

    That holds when the process dies; with `sync` also when the machine does, at the cost of waiting for the disk. Of
    writers of one path, on whatever machines, the last one wins. What a killed writer left in the folder is removed by
    the next one. A device or a pipe, as /dev/stdout, is written to as it is.
    """
    refuse_folder(path)
    made: list[Path] = []
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as device:
                yield device
            return
        path = Path(os.path.realpath(path)) if path.is_symlink() else path
        made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent.resolve())
        aside, waiting = _open_aside(path), _waiting.get()
        try:
            yield aside.file
            aside.file.flush()
            if sync:
                os.fsync(aside.file.fileno())
            if waiting is None:
                aside.take_name()
            else:
                waiting.append(aside)
        finally:
            if waiting is None or aside not in waiting:
                aside.close()
    except OSError as error:  # a full disk names no file, and a name aside tells nobody anything
        with suppress(OSError):  # until one that holds something
            for folder in made:
                folder.rmdir()
        if error.errno and (error.filename is None or str(error.filename).endswith(".tmp")):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


@contextmanager
def written_together() -> Iterator[None]:
    """Name the files written inside the block at its end: one result of several files, all of them or none.

    A kill at any moment leaves the old files, the new ones, or some of either kind, never of both. The file that is
    written last is the first old one to go and the last new one to come: a folder that has it is whole.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with written_together():
    ...     write_atomically(folder / "table.npy", b"123")
    ...     write_atomically(folder / "plan.yaml", "table: table.npy")
    ...     len([file for file in folder.iterdir() if not file.name.startswith(".")])
    0
    >>> sorted(file.name for file in folder.iterdir())
    ['plan.yaml', 'table.npy']
    """
    if _waiting.get() is not None:  # part of a larger result
        yield
        return
    waiting: list[_Aside] = []
    token = _waiting.set(waiting)
    try:
        yield
        for aside in reversed(waiting):
            aside.path.unlink(missing_ok=True)
        for aside in waiting:
            aside.take_name()
    finally:
        _waiting.reset(token)
        for aside in waiting:
            aside.close()


@contextmanager
def open_passing(folder: Path, suffix: str) -> Iterator[BinaryIO]:
    """Open a file to write and read that is gone at the end of the block; `suffix` ends its name."""
    _sweep(folder.resolve())
    folder.mkdir(parents=True, exist_ok=True)
    aside = _open_aside(folder / "passing", suffix)
    try:
        yield aside.file
    finally:
        aside.close()


def _open_aside(path: Path, suffix: str = "") -> _Aside:
    while True:
        # not tempfile's: the file keeps the permissions that the user's umask gives
        temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp{suffix}")
        file = temporary.open("xb", buffering=_MIB)
        lock(file)
        if os.fstat(file.fileno()).st_nlink:  # else swept between the two calls
            return _Aside(file, temporary, path)
        file.close()


@cache
def _sweep(folder: Path) -> None:
    """Remove what killed writers left, once a process: files aside that nobody holds a lock on."""
    for leftover in folder.glob(f".*.{'[0-9a-f]' * 16}.tmp*"):
        try:
            with leftover.open("rb") as file:
                if lock(file):
                    leftover.unlink(missing_ok=True)
        except OSError:  # another's, or gone
            continue


def lock(file: BinaryIO) -> bool:
    """Return whether the lock was free, on a system that has such locks; else leftovers of killed writers stay."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def refuse_folder(path: Path) -> None:
    """Raise `IsADirectoryError` where a file is to be written and `path` names a folder; refuse an address too."""
    scheme = _SCHEME.match(str(path))
    if scheme is not None and not Path(scheme[0]).exists():
        raise TrimtabError(f"{path} is an address, and results are written to files: name a file or folder here")
    if not path.name or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def write_atomically(path: Path, content: bytes | str, *, sync: bool = True) -> None:
    """Write whole content as `open_atomically` does."""
    with open_atomically(path, sync=sync) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def is_there(path: Path, *, or_folder: bool = False) -> bool:
    """Return whether there is such a file; no `OSError` for a name that is longer than any (Python's own raise)."""
    try:
        return path.is_file() or (or_folder and path.exists())
    except OSError:
        return False


def refuse_special(path: Path | str) -> None:
    """Raise `TrimtabError` for a device, pipe or socket that is to be read: it may never end, or never begin."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 (any text)
    except (OSError, ValueError):  # none of our files: whoever opens it says so
        return
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise TrimtabError(f"{path} is a device, a pipe or a socket: write its content into a file first")


def read_small(path: Path, *, most_bytes: int = 64 * _MIB) -> bytes:
    """Return a file that somebody wrote by hand or a program keeps settings in; `TrimtabError` for any other."""
    if "\0" in str(path):
        raise TrimtabError(f"{str(path)[:60]!r} holds a null character, which no file's name has: name a file")
    refuse_special(path)
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise TrimtabError(f"{path} has more than {most_bytes >> 20} MiB, and no such file is so large: name another")
    return content


def blake2b(content: bytes) -> str:
    """Return 16 hexadecimal digits that tell versions of a file apart; no guard against forgery."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def fingerprint_file(path: Path) -> str:
    """Return `blake2b` of a file's size, first MiB and last MiB: cheap on data sets of any size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_MIB)
        file.seek(max(len(head), size - _MIB))
        tail = file.read(_MIB)
    return blake2b(str(size).encode() + b"\0" + head + tail)
