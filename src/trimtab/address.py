"""The border: which places a file from outside may name; and addresses that fsspec opens, as paths.

What the user types is opened, addresses such as s3://bucket/a.jsonl too. What data, lists of data sets and plans name
goes through `place_inside`: a file below a folder that the user named, and no address, unless the user allows it. What
records and requests name is fetched by `fetch`, with limits.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PosixPath
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import unquote, urlsplit

from trimtab.errors import SampleError, shorten
from trimtab.files import blake2b

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_WEB = ("http://", "https://")
_STORES = re.compile(
    r"(https?|s3a?|gs|gcs|hf|az|abfss?|adl|oci|oss|r2|(web)?hdfs|sftp|ssh|ftps?|memory):/+", re.IGNORECASE
)
"""Schemes that a file may name: others, such as local:// and zip://, lead to files of this machine."""
MOST_FETCHED_BYTES, FETCH_S = 256 << 20, 60.0  # of one image or video
_BUFFER_BYTES = 1 << 16  # small: fsspec keeps blocks as well
_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "ETag", "etag", "created")
"""What drivers call the time, or another mark, of a file's last change."""


def place_of(name: Path | str) -> Path:
    """Return a local path, or an `Address` where `name` begins with a scheme; file:// is a local path.

    >>> place_of("data/a.jsonl").name, str(place_of("s3://bucket/a.jsonl")), str(place_of("file:///data/a.jsonl"))
    ('a.jsonl', 's3://bucket/a.jsonl', '/data/a.jsonl')
    """
    text = str(name)
    scheme = _SCHEME.match(text)
    if "\0" in text:
        raise SampleError(f"{text[:60]!r} holds a null character, which no file's name has: name a file")
    if isinstance(name, Address):
        return name
    if scheme is None:
        return Path(text)
    if "://" not in text and Path(text).exists():  # a folder that is called s3:
        return Path(text)
    if scheme[1].lower() == "file":
        return Path("/" + unquote(text[scheme.end() :]).removeprefix("localhost/"))
    return Address(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What the user allows files from outside to name, beyond what lies below the folders that the user named."""

    outside: bool = False
    remote: bool = False


def place_inside(text: str, folders: Sequence[Path], said_by: str, allowed: Allowed) -> Path:
    """The place that `said_by`, a file from outside, calls `text`: below one of the folders, links followed.

    A relative name is looked for in the working folder, then in the folders; where it is nowhere it is one of the first
    folder. `SampleError` where the place lies outside, or is an address, and the user has not allowed it.
    """
    place = place_of(text)
    if isinstance(place, Address):
        if not any(is_below(place, folder) for folder in folders):
            refuse_address(text, said_by, allowed)
        return place
    places = [place] if place.is_absolute() else [place, *(folder / text for folder in folders)]
    inside = [one for one in places if allowed.outside or any(is_below(one, folder) for folder in folders)]
    if not inside:
        raise SampleError(
            f"{said_by} names {shorten(text)}, outside {', '.join(map(str, folders))}: name a folder above it "
            "(--media-root), or --allow-outside for a file you trust"
        )
    return next((one for one in inside if one.exists()), folders[0] / text)


def refuse_address(text: str, said_by: str, allowed: Allowed) -> None:
    """Raise `SampleError` where a file from outside must not name this address."""
    if not allowed.remote:
        raise SampleError(f"{said_by} names {shorten(text)}: give that address yourself, or --allow-remote")
    if not _STORES.match(text):
        raise SampleError(f"{said_by} names {shorten(text)}, no store on the network: give that address yourself")


def is_below(place: Path, folder: Path) -> bool:
    """Return whether a place ends in a folder, links followed."""
    if isinstance(place, Address) or isinstance(folder, Address):
        if not (isinstance(place, Address) and isinstance(folder, Address)):
            return False
        lies, root = (posixpath.normpath(unquote(str(x)).replace("://", "/", 1)) for x in (place, folder))
        return lies == root or lies.startswith(f"{root}/")
    return Path(os.path.realpath(place)).is_relative_to(os.path.realpath(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressStat:
    """What `Path.stat` tells of an address."""

    st_size: int
    st_mtime_ns: int  # changes when the file does; no time, where the driver tells none


class Address(PosixPath):
    """A file or folder that fsspec reads: scheme://place.

    It is made only of its text, so `name`, `suffix`, `parent` and `/` are those of a path. A scheme whose driver is
    not installed is a `SampleError`, and so is what a driver raises, but for `FileNotFoundError`.
    """

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":")
        return f"{scheme}://{rest.removeprefix('/')}"

    @property
    def suffix(self) -> str:
        """Return the suffix of the last name, without a query."""
        return Path(self.name.partition("?")[0]).suffix

    def open(self, mode: str = "rb", *_: Any, block_bytes: int | None = None, **__: Any) -> Any:
        """The file, seekable, fetched in blocks: fsspec's own files lack half of what a file does, such as a limit of
        `readline`.
        """
        with self._driver() as (driver, path):
            file = driver.open(path, mode, block_size=block_bytes)
        return io.BufferedReader(_Remote(file, self), _BUFFER_BYTES) if mode == "rb" else file

    def stat(self, **_: Any) -> AddressStat:  # type: ignore[override]
        with self._driver() as (driver, path):
            info = driver.info(path)
        if info.get("size") is None:
            raise SampleError(
                f"{shorten(str(self))} does not tell its size, and files are read in parts: download it and name that"
            )
        changed = next((info[key] for key in _CHANGED if info.get(key)), "")
        return AddressStat(st_size=int(info["size"]), st_mtime_ns=int(blake2b(str(changed).encode()), 16))

    def exists(self, **_: Any) -> bool:
        with self._driver() as (driver, path):
            return bool(driver.exists(path))

    def is_file(self, **_: Any) -> bool:
        with self._driver() as (driver, path):
            return bool(driver.isfile(path))

    def is_dir(self, **_: Any) -> bool:
        with self._driver() as (driver, path):
            return bool(driver.isdir(path))

    def iterdir(self) -> Iterator[Address]:  # type: ignore[override]
        with self._driver() as (driver, path):
            names = driver.ls(path, detail=False)
        return iter([self / Path(name.rstrip("/")).name for name in names])

    def resolve(self, strict: bool = False) -> Address:  # noqa: ARG002
        return self

    def read_bytes(self) -> bytes:
        with self._driver() as (driver, path):
            return bytes(driver.cat_file(path))

    def write_bytes(self, data: Any) -> int:
        """The whole file at once: stores show a new object when it is complete."""
        with self._driver() as (driver, path):
            driver.makedirs(driver._parent(path), exist_ok=True)
            driver.pipe_file(path, bytes(data))
        return len(data)

    @contextmanager
    def _driver(self) -> Iterator[tuple[Any, str]]:
        """Yield fsspec's file system and the path in it."""
        name = shorten(str(self), 200)
        try:
            import fsspec
        except ModuleNotFoundError:
            raise SampleError(f"fsspec, which reads {name}, is not installed: pip install 'trimtab[remote]'") from None
        if "::" in str(self):  # fsspec's chains open a second place, a local file among them
            raise SampleError(f"{name} names two places: name one")
        try:
            driver, path = fsspec.core.url_to_fs(str(self))
        except (ImportError, ValueError) as error:  # "Install s3fs to access S3"; "Protocol not known: xyz"
            raise SampleError(f"no driver of fsspec for {name} ({' '.join(str(error).split())}): install it") from None
        try:
            yield driver, path
        except SampleError:
            raise
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from None
        except Exception as error:
            raise _unread(self, error) from None


def _unread(address: Address | str, error: Exception) -> SampleError:
    """Make one error of what drivers raise: their client libraries have nothing in common."""
    said = shorten(f"{type(error).__name__}: {' '.join(str(error).split())}", 220)
    return SampleError(f"{shorten(str(address), 200)} cannot be read ({said}): check the address and your access to it")


class _Remote(io.RawIOBase):
    """A file of fsspec as Python's buffers take it."""

    def __init__(self, file: Any, address: Address) -> None:
        self._file, self._address = file, address

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._raised():
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, origin: int = os.SEEK_SET, /) -> int:
        with self._raised():
            return int(self._file.seek(offset, origin))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    @contextmanager
    def _raised(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise _unread(self._address, error) from None


# -- what records and requests name ------------------------------------------------------------------------------------


def fetch(
    address: str, *, most_bytes: int = MOST_FETCHED_BYTES, seconds: float = FETCH_S, elsewhere: bool = True
) -> bytes:
    """Return the whole content of an address; `SampleError` where it takes more bytes or seconds than allowed.

    `elsewhere`: a server of HTTP may lead on to another one.
    A thread reads it, because a driver may wait for a name or a connection longer than any limit of its own.
    """
    found: SimpleQueue[bytes | Exception] = SimpleQueue()
    end = time.monotonic() + seconds

    def read() -> None:
        try:
            with _opened(address, seconds, elsewhere=elsewhere) as file:
                found.put(_read_within(file, address, most_bytes, end))
        except Exception as error:  # handed to the thread that waits
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            found.put(error)

    threading.Thread(target=read, daemon=True).start()
    try:
        content = found.get(timeout=seconds)
    except Empty:
        content = TimeoutError()
    if isinstance(content, TimeoutError):
        raise SampleError(f"{shorten(address)} took more than {seconds:g} s: download it and name the file")
    if isinstance(content, SampleError):
        raise content
    if isinstance(content, Exception):
        raise _unread(address, content) from None
    return content


def _opened(address: str, seconds: float, *, elsewhere: bool) -> Any:
    if address.lower().startswith(_WEB):
        return _http(elsewhere=elsewhere).open(address, timeout=seconds)
    return Address(address).open()


class _Staying(urllib.request.HTTPRedirectHandler):
    """Follows a server to other places of its own."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            raise SampleError(f"{shorten(req.full_url)} leads on to {shorten(newurl)}: --allow-remote follows it")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@cache
def _http(*, elsewhere: bool) -> urllib.request.OpenerDirector:
    """Return what follows addresses of HTTP to others of HTTP, and none to files or FTP."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler if elsewhere else _Staying,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _read_within(file: Any, address: str, most_bytes: int, end: float) -> bytes:
    """Return what an open file holds; `SampleError` past a limit, which a slow stream passes as well."""
    parts: list[bytes] = []
    num_bytes = 0
    while part := file.read1(_BUFFER_BYTES):
        num_bytes += len(part)
        if num_bytes > most_bytes:
            raise SampleError(f"{shorten(address)} holds more than {most_bytes:,} bytes: download it and name the file")
        if time.monotonic() > end:
            raise TimeoutError
        parts.append(part)
    return b"".join(parts)
