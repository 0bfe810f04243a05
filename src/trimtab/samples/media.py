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
import struct
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import unquote, unquote_to_bytes

import numpy as np
import numpy.typing as npt

from trimtab.address import Address, Allowed, fetch, refuse_address
from trimtab.errors import ConfigError, ImageError, SampleError, shorten
from trimtab.options import Exif
from trimtab.samples.problems import BadRecordError, outside_media, unreadable_media
from trimtab.samples.rows import Video
from trimtab.specs import Clip

# -- sizes of images by their headers ----------------------------------------------------------------------------------

# Pillow opens a 1.4-megapixel PNG in 14 us and a JPEG in 24 us, of the 220 us that a sample takes to size; a WebP takes
# it 2,800 us, because it reads and prepares the whole file (bench/sizing.py): hence own code for that one.


MAX_PIXELS = 178_956_970
"""Pillow raises `DecompressionBombError` above this: twice its `Image.MAX_IMAGE_PIXELS` (Pillow 13, Image.py)."""

_ORIENTATION = 0x0112  # tag of EXIF
_SWAPPING = frozenset((5, 6, 7, 8))  # EXIF orientations that exchange width and height
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF", "PPM", "ICO")  # known by a magic number
_WHOLE_FORMATS = ("GIF", "BMP")  # decoded where their end is unusual: only that finds a file that is cut
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")  # brands of ISO/IEC 23008-12
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_STARTS = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "GIF": b"GIF8", "BMP": b"BM"}
_FIRST_BYTES, _MOST_FIRST_BYTES = 1 << 13, 1 << 16  # of a header; thumbnails stand in that of a JPEG
_TAIL_BYTES = 4096  # where the end is looked for first: phones append films and depths to a JPEG
_TURNING = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")  # what may hold a PNG's orientation
_MOST_READS = 100_000  # of one header: a bound on time, not met by real files
_TAKE_AGAIN = "fetch or export the file again"


def image_size(image: bytes | int, *, exif: Exif = "ignore", max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return (width, height) of an image's bytes, or of an open file by its descriptor, which stays open.

    The size is the one Pillow's `Image.open` reports; `exif="apply"` gives it after `ImageOps.exif_transpose`, of a PNG
    as far as its orientation stands before the pixels. Checked as well: nothing is missing at the end (a PNG and a JPEG
    hold their end mark, a WebP its declared length, a BMP its rows; a GIF that does not end with its trailer, and a BMP
    that lacks rows, are decoded). Damage inside the pixels is not looked for. Raises only `ImageError`, whatever the
    bytes hold.

    >>> import io
    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (640, 480)).save(file, "PNG")
    >>> image_size(file.getvalue())
    (640, 480)
    """
    if isinstance(image, bytes):
        return _size(io.BytesIO(image), len(image), exif, max_pixels)
    try:
        status = os.fstat(image)
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("the image's path names a folder or a device: name a regular file")
        quick = _by_first_bytes(image, status.st_size) if exif == "ignore" else None
        if quick is not None and 0 < quick[0] * quick[1] <= max_pixels:
            return quick
        with os.fdopen(os.dup(image), "rb") as file:
            file.seek(0)
            return _size(file, status.st_size, exif, max_pixels)
    except OSError as error:
        raise ImageError(f"cannot read the image: {error.strerror or error}; check the disk it lies on") from None


def _by_first_bytes(fd: int, num_bytes: int, num_first: int = _FIRST_BYTES) -> tuple[int, int] | None:
    """Return the size of a whole PNG, JPEG, GIF or BMP whose header and end are usual; None of any other.

    In half the time, and of a GIF or BMP in a hundredth: what does not end as these do is decoded.
    """
    head = os.pread(fd, num_first, 0)
    kind = next((kind for kind, start in _STARTS.items() if head.startswith(start)), None)
    if kind is None:
        return None
    file = io.BytesIO(head)
    try:
        from PIL import Image

        Image.preinit()
        image = Image.OPEN[kind][0](file, "")  # `Image.open` without its warnings of size, which the caller looks at
        size, same_kind, start = image.size, image.format == kind, file.tell()
    except Exception:  # whoever looks at all of it says what is wrong
        is_cut = kind == "JPEG" and num_first < min(num_bytes, _MOST_FIRST_BYTES)
        return _by_first_bytes(fd, num_bytes, _MOST_FIRST_BYTES) if is_cut else None
    if kind == "BMP":
        return size if same_kind and _holds_rows(head, num_bytes) else None
    if kind == "GIF":  # the last block of pixels is empty, and the trailer follows
        return size if same_kind and os.pread(fd, 2, num_bytes - 2) == b"\0;" else None
    first = max(start, num_bytes - _TAIL_BYTES)
    return size if same_kind and _ENDS[kind] in os.pread(fd, num_bytes - first, first) else None


def _holds_rows(head: bytes, num_bytes: int) -> bool:
    """Return whether a BMP without compression is as long as its rows, each a multiple of four bytes."""
    if len(head) < 34:  # the shorter header of OS/2
        return False
    offset, header_bytes, width, height, _, bits, compression = struct.unpack_from("<IIiiHHI", head, 10)
    rows_bytes = (width * bits + 31) // 32 * 4 * abs(height)
    return header_bytes >= 40 and compression in (0, 3) and offset + rows_bytes <= num_bytes


def _size(file: BinaryIO, num_bytes: int, exif: Exif, max_pixels: int) -> tuple[int, int]:
    head = file.read(256)
    if not head:
        raise ImageError(f"the image file is empty; {_TAKE_AGAIN}")
    if head[4:8] == b"ftyp":
        _refuse_heic(head)
    is_webp = head.startswith(b"RIFF") and head[8:12] == b"WEBP"
    if is_webp:
        width, height = _webp(head, num_bytes)
    if not is_webp or exif == "apply":
        file.seek(0)
        width, height = _pillow(file, num_bytes, exif, max_pixels)
    if width <= 0 or height <= 0:
        raise ImageError(f"the header says {width} x {height} pixels, which holds no pixel; {_TAKE_AGAIN}")
    if width * height > max_pixels:
        raise ImageError(f"the header says {width} x {height} pixels{_too_many(max_pixels)}")
    return width, height


def _too_many(most: int) -> str:
    return f", more than {most}, where Pillow and trainers refuse an image: shrink it"


def _refuse_heic(head: bytes) -> None:
    brands = head[8 : max(12, min(int.from_bytes(head[:4], "big"), 256))]
    if b"avif" not in brands and b"avis" not in brands:
        kind = "HEIC" if any(brand in brands for brand in _HEIC) else "a video or another file"
        raise ImageError(f"{kind} of brand {brands[:4]!r}, which Pillow does not open: convert it to JPEG or PNG")


def _webp(first: bytes, num_bytes: int) -> tuple[int, int]:
    """Read the first chunk: VP8 (RFC 6386, 9.1), VP8L or VP8X (WebP container specification)."""
    kind = first[12:16]
    if len(first) < 30 or int.from_bytes(first[4:8], "little") + 8 > num_bytes:
        raise ImageError(f"truncated: a WebP of {num_bytes} bytes says that it has more; {_TAKE_AGAIN}")
    if kind == b"VP8X":
        return 1 + int.from_bytes(first[24:27], "little"), 1 + int.from_bytes(first[27:30], "little")
    if kind == b"VP8L" and first[20] == 0x2F:
        bits = int.from_bytes(first[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and not first[20] & 1 and first[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", first[26:30])
        return width & 0x3FFF, height & 0x3FFF
    raise ImageError(f"a WebP whose first chunk {kind!r} is no start of a VP8, VP8L or VP8X image; {_TAKE_AGAIN}")


def _pillow(file: BinaryIO, num_bytes: int, exif: Exif, max_pixels: int) -> tuple[int, int]:
    """Make an `ImageError` of whatever Pillow raises: its readers raise whatever struct, zlib or indexing raises."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise ImageError("Pillow, which reads images, is not installed: pip install 'trimtab[data]'") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(cast("BinaryIO", _Bounded(file)), formats=_FORMATS) as image:
                kind, size, start = str(image.format), image.size, file.tell()
                if kind in _WHOLE_FORMATS and size[0] * size[1] <= max_pixels:
                    image.load()
                    size = image.size
                # Pillow's TIFF size is the one after its orientation; a PNG's pixels would be decoded to look for one
                may_turn = kind != "TIFF" and (kind != "PNG" or any(name in image.info for name in _TURNING))
                turned = exif == "apply" and may_turn and image.getexif().get(_ORIENTATION) in _SWAPPING
            if kind in _ENDS and not _holds(file, _ENDS[kind], start if kind == "JPEG" else 0, num_bytes):
                raise ImageError(f"truncated: a {kind} of {num_bytes} bytes without its end mark; {_TAKE_AGAIN}")
    except ImageError:
        raise
    except Image.DecompressionBombError:  # before its size is known to us
        raise ImageError(f"the header says many pixels{_too_many(MAX_PIXELS)}") from None
    except UnidentifiedImageError:  # whose own words are an address
        file.seek(0)
        raise ImageError(f"not an image, or truncated: it starts with {file.read(8)!r}; name an image file") from None
    except Exception as error:
        raise ImageError(f"not a readable image ({type(error).__name__}: {error}); name an image file") from None
    return (size[1], size[0]) if turned else size


class _Bounded:
    """A file of which no more than `_MOST_READS` parts are read: Pillow steps over fill bytes one by one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, _MOST_READS

    def read(self, size: int = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ImageError(f"no end of the header in {_MOST_READS:,} parts; {_TAKE_AGAIN}")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _holds(file: BinaryIO, mark: bytes, start: int, num_bytes: int) -> bool:
    """Return whether `mark` stands behind `start`, where a thumbnail's own mark does not count."""
    for first in (max(start, num_bytes - _TAIL_BYTES), start):
        file.seek(first)
        if mark in file.read():
            return True
    return False


# -- videos: their header, and the frames that were sampled ------------------------------------------------------------


MAX_FRAME_PIXELS = 2**26
"""Twice those of 8K: a decoder holds several frames, and larger ones would take gigabytes before any is looked at."""

_DAMAGED = "replace or drop it"
_HEAD_BYTES = 400
_DEMUXERS = (  # first bytes, where they stand, FFmpeg's demuxer: none of these opens a second file or a connection
    *((kind, 4, "mov") for kind in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")),
    (b"\x1aE\xdf\xa3", 0, "matroska"),
    (b"AVI ", 8, "avi"),
    (b"OggS", 0, "ogg"),
    (b"FLV\x01", 0, "flv"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", 0, "asf"),
    (b"\x00\x00\x01\xba", 0, "mpeg"),
    (b"GIF8", 0, "gif"),
)
_TRANSPORT = "mpegts"  # a packet of 188 bytes begins with G


def read_clip(file: BinaryIO, name: str) -> Clip:
    """Return the size, frames and frames a second of the first video stream; nothing is decoded.

    As Transformers' reader by PyAV sees them: sides as coded (no rotation), the average rate. Where the header does not
    count the frames (WebM, MKV), the packets are. Raises `BadRecordError` of kind video.
    """
    with _opened(file, name) as (container, stream):
        num_frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        rate = stream.average_rate
        if not num_frames or not rate or not _has_sides(stream):
            found = f"{num_frames} frames of {stream.width} x {stream.height} at {rate or 0} a second"
            raise BadRecordError("video", f"{name} holds {found}: {_DAMAGED}")
        return Clip(width=stream.width, height=stream.height, num_frames=num_frames, fps=float(rate))


def read_frames(file: BinaryIO, name: str, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
    """The frames of these numbers (ascending, repeats kept) as (frames, height, width, 3); `BadRecordError` if not all.

    Decoded from the start up to the last one: no seeking, so that numbers are those of the header in any file.
    """
    wanted, found = set(indices), dict[int, npt.NDArray[np.uint8]]()
    with _opened(file, name) as (container, stream):
        if not _has_sides(stream):
            raise BadRecordError("video", f"{name} holds frames of {stream.width} x {stream.height}: {_DAMAGED}")
        stream.thread_type = "AUTO"
        sides = stream.height, stream.width
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                if (frame.height, frame.width) != sides:
                    damage = f"frame {number} of {frame.width} x {frame.height} pixels after a header of another size"
                    raise BadRecordError("video", f"{name} holds {damage}: {_DAMAGED}")
                found[number] = frame.to_ndarray(format="rgb24")
            if len(found) == len(wanted):
                break
    if len(found) < len(wanted):
        missing = min(wanted - found.keys())
        raise BadRecordError("video", f"{name} ends before frame {missing}, which its header counts: {_DAMAGED}")
    return np.stack([found[number] for number in indices])


def _has_sides(stream: Any) -> bool:
    pixels: int = stream.width * stream.height
    return 0 < pixels <= MAX_FRAME_PIXELS


@contextmanager
def _opened(file: BinaryIO, name: str) -> Iterator[tuple[Any, Any]]:
    try:
        import av
    except ModuleNotFoundError:
        raise ConfigError(
            "PyAV is not installed: pip install 'trimtab[video]', or give width, height, fps, num_frames"
        ) from None
    try:
        demuxer = _demuxer(file, name)
        with av.open(file, mode="r", format=demuxer, options={"protocol_whitelist": ""}, io_open=_refuse) as container:
            if not container.streams.video or container.streams.video[0].codec_context is None:
                raise BadRecordError("video", f"{name} holds no video stream that can be decoded: {_DAMAGED}")
            yield container, container.streams.video[0]
    except BadRecordError:
        raise
    except (av.FFmpegError, OSError, ValueError, MemoryError) as error:  # as FFmpeg's readers fail
        raise BadRecordError("video", f"{name} cannot be read as a video ({shorten(str(error))}): {_DAMAGED}") from None


def _demuxer(file: BinaryIO, name: str) -> str:
    """The demuxer that the first bytes ask for; FFmpeg, left to guess, takes playlists and session descriptions too."""
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    found = next((kind for mark, at, kind in _DEMUXERS if head[at : at + len(mark)] == mark), None)
    if found is None and all(head[at : at + 1] == b"G" for at in (0, 188, 376)):
        found = _TRANSPORT
    if found is None:
        raise BadRecordError("video", f"{name} begins with {head[:8]!r}, which is no video that PyAV opens: convert it")
    return found


def _refuse(url: str, *_: Any) -> Any:
    raise BadRecordError("video", f"it names another file, {shorten(url)}: {_DAMAGED}")


_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW: int | None = getattr(os, "O_NOFOLLOW", None)


class MediaFolder:
    """Reads sizes of the images below one folder.

    Symlinks, `..` and absolute paths are followed and judged by where they end; what ends outside is refused unless
    that is allowed, and so is an address. It remembers where folders lead, because resolving a path costs more than
    reading a header.
    """

    def __init__(self, root: Path, *, allowed: Allowed, exif: Exif) -> None:
        self._root = os.path.realpath(root)
        self._allowed = allowed
        self._exif: Exif = exif
        self._real_folder = cache(os.path.realpath)
        self._seen: dict[str, str] = {}

    def take_seen(self) -> tuple[str, ...]:
        """Return the files that were opened, or are missing, since the last call: "SIZE:TIME PATH" each."""
        seen, self._seen = self._seen, {}
        return tuple(f"{stamp} {path}" for path, stamp in seen.items())

    def image_size(self, image: str | bytes) -> tuple[int, int]:
        """Return (width, height) of a path below the folder, a data: or file: URL, or bytes; else `BadRecordError`."""
        try:
            content = _carried(image)
            if content is not None:
                return image_size(content, exif=self._exif)
            with os.fdopen(self._descriptor(image), "rb") as file:
                return image_size(file.fileno(), exif=self._exif)
        except ImageError as error:
            raise _bad_image(image, error) from None

    def clip(self, video: Video) -> Clip:
        """Read what decides how a video is sampled: its record or its header; for frames, the size that all have."""
        if not isinstance(video.source, tuple):
            with self._video(video.source) as file:  # it is there
                clip = video.clip or read_clip(file, _named(video.source))
            return replace(clip, own=video.own)
        sizes = {self.image_size(frame) for frame in video.source}
        if len(sizes) > 1:
            shown = " and ".join(f"{width} x {height}" for width, height in sorted(sizes)[:2])
            raise BadRecordError("video", f"its frames are {shown} pixels: give frames of one size")
        ((width, height),) = sizes
        return Clip(width=width, height=height, num_frames=len(video.source), fps=video.fps, listed=True)

    def frames(self, video: str | bytes, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the frames of a video file as (frames, height, width, 3)."""
        with self._video(video) as file:
            return read_frames(file, _named(video), indices)

    def _video(self, video: str | bytes) -> BinaryIO:
        try:
            content = _carried(video)
        except ImageError as error:
            raise BadRecordError("video", str(error)) from None
        return os.fdopen(self._descriptor(video, "video"), "rb") if content is None else io.BytesIO(content)

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
        """Return an open file of a path below the folder or a file: URL."""
        assert isinstance(image, str), "bytes are carried"
        scheme = _SCHEME.match(image)
        if scheme is not None and scheme[1].lower() != "file":
            return self._fetched(image, kind)
        name = image if scheme is None else unquote(image[7:].removeprefix("localhost"))
        path = os.path.join(self._root, name)  # noqa: PTH118 (Path costs three times the header)
        try:
            fd = self._open(path, name)
            found = os.fstat(fd)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                self._seen[path] = ""
            raise unreadable_media(f"{kind} {shorten(name)}", "opened", self._root, error) from None
        self._seen[path] = _stamp(found)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise BadRecordError(kind, f"{kind} {shorten(name)} is a folder or a device: name a regular file")
        return fd

    def _fetched(self, address: str, kind: str) -> int:
        """Return an open file with the content of an address, which goes when it is closed."""
        if not self._allowed.remote:
            where = shorten(address)
            raise BadRecordError("path", f"{kind} {where} is on the network: download it, or --allow-remote")
        try:
            refuse_address(address, f"its {kind}", self._allowed)
            return _held(fetch(address))
        except SampleError as error:
            raise BadRecordError("path", str(error)) from None

    def _open(self, path: str, name: str) -> int:
        if self._allowed.outside:
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

    def _inside(self, real: str, name: str) -> str:
        if real != self._root and not real.startswith(self._root.rstrip(os.sep) + os.sep):
            raise outside_media(shorten(name), self._root)
        return real


def has_changed(seen: str) -> bool:
    """Return whether a file of `MediaFolder.take_seen` has another size or time than then."""
    stamp, _, path = seen.partition(" ")
    try:
        return _stamp(os.stat(path)) != stamp  # noqa: PTH116
    except (OSError, ValueError):
        return bool(stamp)


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size}:{status.st_mtime_ns}"


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
    """A media folder behind an address; a name that leads out of it is refused unless that is allowed."""

    def __init__(self, root: Address, *, allowed: Allowed, exif: Exif) -> None:
        super().__init__(root, allowed=allowed, exif=exif)
        self._root = str(root)

    def _descriptor(self, image: str | bytes, kind: Literal["image", "video"] = "image") -> int:
        """Return an open file with the content, which goes when it is closed."""
        assert isinstance(image, str), "bytes are carried"
        address = self._address(image)
        if address is None:
            if _SCHEME.match(image) is not None and self._allowed.remote:
                return self._fetched(image, kind)
            raise outside_media(f"{kind} {shorten(image)}", self._root)
        try:
            return _held(fetch(str(address), elsewhere=self._allowed.remote))
        except SampleError as error:
            raise unreadable_media(f"{kind} {shorten(image)}", "read", self._root, error) from None

    def _address(self, name: str) -> Address | None:
        """Return root and name as one address, `..` resolved, quoted ones too; None where that leads outside."""
        scheme, _, root = self._root.partition("://")
        own, mark, inner = name.partition("://")
        path = f"/{inner}" if mark else posixpath.join(f"/{root}", name)
        spellings = (path, unquote(path))
        below = f"/{root.rstrip('/')}/".replace("//", "/")
        lies_in = all(f"{posixpath.normpath(spelling)}/".startswith(below) for spelling in spellings)
        if (mark and own != scheme) or not (lies_in or self._allowed.outside):
            return None
        return Address(f"{scheme}:/{posixpath.normpath(path)}")


def _held(content: bytes) -> int:
    """Return an open file of the content, which goes when it is closed."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        return os.dup(file.fileno())


class MediaFolders:
    """The media folder of each data file: the one stated for it, or else `root`, or else the file's own folder."""

    def __init__(self, root: Path | None, *, allowed: Allowed, exif: Exif) -> None:
        self._root = root
        self._made: dict[Path, MediaFolder] = {}
        self._how: dict[str, Any] = {"allowed": allowed, "exif": exif}

    def of(self, file: Path, stated: Path | None = None) -> MediaFolder:
        root = stated or self._root or file.parent
        if root not in self._made:
            if isinstance(root, Address):
                self._made[root] = AddressFolder(root, **self._how)
            else:
                self._made[root] = MediaFolder(root, **self._how)
        return self._made[root]
