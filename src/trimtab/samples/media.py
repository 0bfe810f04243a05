"""Images and videos of records: from their names to their sizes and bytes, without leaving the media folder."""

from __future__ import annotations

import base64
import binascii
import errno
import io
import os
import posixpath
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import unquote, unquote_to_bytes

import numpy as np
import numpy.typing as npt

from trimtab.address import Address
from trimtab.errors import ImageError, SampleError
from trimtab.options import Exif
from trimtab.samples.headers import image_size, read_clip, read_frames
from trimtab.samples.problems import BadRecordError, shorten
from trimtab.samples.rows import Video
from trimtab.specs import Clip

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW: int | None = getattr(os, "O_NOFOLLOW", None)


class MediaFolder:
    """Reads sizes of the images below one folder.

    Symlinks, `..` and absolute paths are followed and judged by where they end; what ends outside is refused unless
    `allow_outside`. It remembers where folders lead, because resolving a path costs more than reading a header.
    """

    def __init__(self, root: Path, *, allow_outside: bool, exif: Exif) -> None:
        self._root = os.path.realpath(root)
        self._allow_outside = allow_outside
        self._exif: Exif = exif
        self._real_folders: dict[str, str] = {}

    def image_size(self, image: str | bytes) -> tuple[int, int]:
        """(width, height) of a path below the folder, a data: or file: URL, or bytes; else `BadRecordError`."""
        try:
            content = _carried(image)
            if content is not None:
                return image_size(content, exif=self._exif)
            fd = self._descriptor(image)
            try:
                return image_size(fd, exif=self._exif)
            finally:
                os.close(fd)
        except ImageError as error:
            raise _bad_image(image, error) from None

    def clip(self, video: Video) -> Clip:
        """What decides how a video is sampled: of its record or its header; of frames, the size that all have."""
        if not isinstance(video.source, tuple):
            if video.clip is None:
                with self._video(video.source) as file:
                    return read_clip(file, _named(video.source))
            self._video(video.source).close()  # it is there
            return video.clip
        sizes = {self.image_size(frame) for frame in video.source}
        if len(sizes) > 1:
            shown = " and ".join(f"{width} x {height}" for width, height in sorted(sizes)[:2])
            raise BadRecordError("video", f"its frames are {shown} pixels: give frames of one size")
        ((width, height),) = sizes
        return Clip(width=width, height=height, num_frames=len(video.source), fps=video.fps, listed=True)

    def frames(self, video: str | bytes, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Frames of a video file as (frames, height, width, 3)."""
        with self._video(video) as file:
            return read_frames(file, _named(video), indices)

    def _video(self, video: str | bytes) -> BinaryIO:
        if isinstance(video, bytes):
            return io.BytesIO(video)
        if not video.startswith("data:"):
            fd = self._descriptor(video, "video")
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise BadRecordError("video", f"{_named(video)} is a folder or a device: name a regular file")
            return os.fdopen(fd, "rb")
        try:
            return io.BytesIO(_data_url_bytes(video))
        except ImageError as error:
            raise BadRecordError("video", str(error)) from None

    def read(self, image: str | bytes) -> bytes:
        """The encoded image, once its header is known to be one of a size that trainers open."""
        try:
            content = _carried(image)
            if content is None:
                with os.fdopen(self._descriptor(image), "rb") as file:
                    content = file.read()
            image_size(content, exif=self._exif)
        except ImageError as error:
            raise _bad_image(image, error) from None
        return content

    def _descriptor(self, image: str | bytes, kind: Literal["image", "video"] = "image") -> int:
        """An open file of a path below the folder or a file: URL."""
        assert isinstance(image, str), "bytes are carried"
        scheme = _SCHEME.match(image)
        if scheme is not None and scheme[1].lower() != "file":
            raise BadRecordError(
                "path",
                f"{kind} {shorten(image)} is on the network, and nothing is fetched: download it and name the file",
            )
        name = image if scheme is None else unquote(image[7:].removeprefix("localhost"))
        try:
            return self._open(name)
        except (OSError, ValueError) as error:
            raise unreadable_media(f"{kind} {shorten(name)}", "opened", self._root, error) from None

    def _open(self, name: str) -> int:
        path = os.path.join(self._root, name)  # noqa: PTH118 (Path costs three times the header)
        if self._allow_outside:
            return os.open(path, _FLAGS)
        if _NOFOLLOW is not None:
            folder, leaf = os.path.split(path)
            if leaf not in ("", ".", ".."):
                try:
                    return os.open(self._inside(self._real_folder(folder), name) + os.sep + leaf, _FLAGS | _NOFOLLOW)
                except OSError as error:
                    if error.errno != errno.ELOOP:  # the file itself is a symlink
                        raise
        return os.open(self._inside(os.path.realpath(path, strict=True), name), _FLAGS | (_NOFOLLOW or 0))

    def _real_folder(self, folder: str) -> str:
        real = self._real_folders.get(folder)
        if real is None:
            real = self._real_folders[folder] = os.path.realpath(folder)
        return real

    def _inside(self, real: str, name: str) -> str:
        if real != self._root and not real.startswith(self._root.rstrip(os.sep) + os.sep):
            raise outside_media(shorten(name), self._root)
        return real


def unreadable_media(what: str, done: str, root: str, error: Exception) -> BadRecordError:
    """A file of a media folder that cannot be "opened" or "read"."""
    cause = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return BadRecordError("path", f"{what} cannot be {done} below {root}: {cause}; check media_root")


def outside_media(what: str, root: str) -> BadRecordError:
    """A name that leads out of its media folder."""
    return BadRecordError(
        "path",
        f"{what} lies outside the media folder {root}: set media_root to a folder above it, or allow_outside "
        "(--allow-outside) if you trust the data set",
    )


def _carried(image: str | bytes) -> bytes | None:
    """The bytes that a record itself carries; None for the name of a file."""
    if isinstance(image, bytes):
        return image
    return _data_url_bytes(image) if image.startswith("data:") else None


def _named(video: str | bytes) -> str:
    return "the video" if isinstance(video, bytes) or video.startswith("data:") else f"video {shorten(video)}"


def _bad_image(image: str | bytes, error: ImageError) -> BadRecordError:
    where = "" if isinstance(image, bytes) or image.startswith("data:") else f"image {shorten(image)}: "
    return BadRecordError("image", where + str(error))


def _data_url_bytes(url: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma:
        raise ImageError("a data: URL without a comma holds no image; write data:image/png;base64,...")
    if not header.endswith(";base64"):
        return unquote_to_bytes(payload)
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"a data: URL is not base64: {error}; encode the image again") from None


# -- the folder of each data file --------------------------------------------------------------------------------------


class AddressFolder(MediaFolder):
    """A media folder behind an address; a name that leads out of it is refused unless `allow_outside`."""

    def __init__(self, root: Address, *, allow_outside: bool, exif: Exif) -> None:
        super().__init__(root, allow_outside=allow_outside, exif=exif)
        self._root = str(root)

    def _descriptor(self, image: str | bytes, kind: Literal["image", "video"] = "image") -> int:
        """An open file with the content, which goes when it is closed."""
        assert isinstance(image, str), "bytes are carried"
        address = self._address(image, kind)
        try:
            content = address.read_bytes()
        except (OSError, SampleError) as error:
            raise unreadable_media(f"{kind} {shorten(image)}", "read", self._root, error) from None
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            return os.dup(file.fileno())

    def _address(self, name: str, kind: str) -> Address:
        """Root and name as one address, `..` resolved, quoted ones too."""
        scheme, _, root = self._root.partition("://")
        own, mark, inner = name.partition("://")
        path = f"/{inner}" if mark else posixpath.join(f"/{root}", name)
        spellings = (path, unquote(path))
        below = f"/{root.rstrip('/')}/".replace("//", "/")
        lies_in = all(f"{posixpath.normpath(spelling)}/".startswith(below) for spelling in spellings)
        if (mark and own != scheme) or not (lies_in or self._allow_outside):
            raise outside_media(f"{kind} {shorten(name)}", self._root)
        return Address(f"{scheme}:/{posixpath.normpath(path)}")


class MediaFolders:
    """The media folder of each data file: the one stated for it, or else `root`, or else the file's own folder."""

    def __init__(self, root: Path | None, *, allow_outside: bool, exif: Exif) -> None:
        self._root = root
        self._made: dict[Path, MediaFolder] = {}
        self._how: dict[str, Any] = {"allow_outside": allow_outside, "exif": exif}

    def of(self, file: Path, stated: Path | None = None) -> MediaFolder:
        root = stated or self._root or file.parent
        if root not in self._made:
            if isinstance(root, Address):
                self._made[root] = AddressFolder(root, **self._how)
            else:
                self._made[root] = MediaFolder(root, **self._how)
        return self._made[root]
