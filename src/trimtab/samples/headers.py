"""Width and height of an image by Pillow, which reads only headers; of WebP by ourselves.

Pillow opens a 1.4-megapixel PNG in 14 us and a JPEG in 24 us, of the 220 us that a sample takes to size; a WebP takes
it 2,800 us, because it reads and prepares the whole file (bench/sizing.py): hence own code for that one.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import warnings
from typing import Any, BinaryIO, cast

from trimtab.errors import ImageError
from trimtab.options import Exif

MAX_PIXELS = 178_956_970
"""Pillow raises `DecompressionBombError` above this: twice its `Image.MAX_IMAGE_PIXELS` (Pillow 13, Image.py)."""

_ORIENTATION = 0x0112  # tag of EXIF
_SWAPPING = frozenset((5, 6, 7, 8))  # EXIF orientations that exchange width and height
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF", "PPM", "ICO")  # known by a magic number
_WHOLE_FORMATS = ("GIF", "BMP")  # decoded once, because only that finds a file that is cut
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")  # brands of ISO/IEC 23008-12
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_TAIL_BYTES = 4096  # where the end is looked for first: phones append films and depths to a JPEG
_TURNING = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")  # what may hold a PNG's orientation
_MOST_READS = 100_000  # of one header: a bound on time, not met by real files
_TAKE_AGAIN = "fetch or export the file again"


def image_size(image: bytes | int, *, exif: Exif = "ignore", max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) of an image's bytes, or of an open file by its descriptor, which stays open.

    The size is the one Pillow's `Image.open` reports; `exif="apply"` gives it after `ImageOps.exif_transpose`, of a PNG
    as far as its orientation stands before the pixels. Checked as well: nothing is missing at the end (a PNG and a JPEG
    hold their end mark, a WebP its declared length; the first frame of a GIF and a BMP are decoded). Damage inside the
    compressed data of others is not looked for. Raises only `ImageError`, whatever the bytes hold.

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
        with os.fdopen(os.dup(image), "rb") as file:
            file.seek(0)
            return _size(file, status.st_size, exif, max_pixels)
    except OSError as error:
        raise ImageError(f"cannot read the image: {error.strerror or error}; check the disk it lies on") from None


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
        raise ImageError(
            f"{kind} of brand {brands[:4]!r}, which Pillow and most processors do not open: convert it to JPEG or PNG"
        )


def _webp(first: bytes, num_bytes: int) -> tuple[int, int]:
    """First chunk VP8 (RFC 6386, 9.1), VP8L or VP8X (WebP container specification)."""
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
    """Whatever Pillow raises is an `ImageError`: its readers raise whatever struct, zlib or indexing raises."""
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
    """Whether `mark` stands behind `start`, where a thumbnail's own mark does not count."""
    for first in (max(start, num_bytes - _TAIL_BYTES), start):
        file.seek(first)
        if mark in file.read():
            return True
    return False
