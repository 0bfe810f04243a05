"""Width and height of an image: of PNG, JPEG and WebP from the header alone; Pillow reads the others, and EXIF.

Pillow's `Image.open` takes 38 us for a PNG, 53 us for a JPEG and 125 us for a WebP, which it reads whole; the code here
takes 10 to 15 us, and a sample costs 220 us in sizing (bench/sizing.py): hence own code for these three.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from trimtab.errors import ImageError
from trimtab.options import Exif

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 178_956_970
"""Pillow raises `DecompressionBombError` above this: twice its `Image.MAX_IMAGE_PIXELS` (Pillow 13, Image.py)."""

_HEAD_BYTES = 4096
_MAX_SEARCH_BYTES = 16 << 20  # of JPEG segments before the frame header; profiles and thumbnails stay far below
_MAX_STEPS = 100_000  # chunks, segments or blocks walked in one file: a bound on time, not met by real files

_ORIENTATION = 0x0112  # tag of EXIF
_SWAPPING = frozenset((5, 6, 7, 8))  # EXIF orientations that exchange width and height
_OTHER_MAGIC = (
    *(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),  # TIFF and BigTIFF
    *(b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n"),  # JPEG 2000, bare and in its container
    *(b"P%d" % kind for kind in range(1, 8)),  # PPM and its kin
    *(b"GIF87a", b"GIF89a", b"BM", b"\0\0\1\0"),  # the last is ICO
)
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")  # brands of ISO/IEC 23008-12
_OWN_FORMATS = ("JPEG", "PNG", "WEBP")
_PILLOW_FORMATS = ("GIF", "BMP", "TIFF", "JPEG2000", "AVIF", "PPM", "ICO")  # known by a magic number
_WHOLE_FORMATS = ("GIF", "BMP")  # decoded once, because only that finds a file that is cut
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by colour type
_TAKE_AGAIN = "fetch or export the file again"


def image_size(image: bytes | int, *, exif: Exif = "ignore", max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) of an image's bytes, or of an open file by its descriptor, which stays open.

    The size is the one Pillow's `Image.open` reports; `exif="apply"` gives it after `ImageOps.exif_transpose`.
    Checked as well, as far as the container tells: nothing is missing at the end (PNG up to IEND, JPEG an end-of-image
    marker behind the frame header, WebP its declared length; the first frame of a GIF and a BMP are decoded). Damage
    inside the compressed data of others is not looked for. Raises `ImageError` alone, whatever the bytes hold.

    >>> import io
    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (640, 480)).save(file, "PNG")
    >>> image_size(file.getvalue())
    (640, 480)
    """
    if isinstance(image, bytes):
        return _size(_Source(image, len(image), None), exif, max_pixels)
    try:
        status = os.fstat(image)
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("the image's path names a folder or a device: name a regular file")
        return _size(_Source(os.read(image, _HEAD_BYTES), status.st_size, image), exif, max_pixels)
    except OSError as error:
        raise ImageError(f"cannot read the image: {error.strerror or error}; check the disk it lies on") from None


class _Source:
    """Bytes by offset: of memory, or of a file whose first block is held."""

    __slots__ = ("_fd", "head", "size")

    def __init__(self, head: bytes, size: int, fd: int | None) -> None:
        self.head, self.size, self._fd = head, size, fd

    def at(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes; fewer at the end of the file."""
        if self._fd is None or offset + length <= len(self.head):
            return self.head[offset : offset + length]
        return os.pread(self._fd, length, offset)

    def need(self, offset: int, length: int, what: str) -> bytes:
        """Exactly `length` bytes, or the file is truncated."""
        data = self.at(offset, length)
        if len(data) < length:
            raise ImageError(f"truncated: the file ends at byte {self.size}, inside {what}; {_TAKE_AGAIN}")
        return data

    def stream(self) -> BinaryIO:
        """The same bytes as a file object, from the start."""
        if self._fd is None:
            return io.BytesIO(self.head)
        stream = os.fdopen(os.dup(self._fd), "rb")
        stream.seek(0)
        return stream


def _size(source: _Source, exif: Exif, max_pixels: int) -> tuple[int, int]:
    head = source.head
    if not head:
        raise ImageError(f"the image file is empty; {_TAKE_AGAIN}")
    orientation = None
    if head.startswith(b"\xff\xd8"):
        width, height = _jpeg(source)
        tagged = True
    elif head.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = _png(source)
        tagged = exif == "apply" and _may_be_turned(source)
    elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        width, height = _webp(source)
        tagged = True
    else:
        width, height = _pillow(source, max_pixels, exif)
        tagged = False
    if width <= 0 or height <= 0:
        raise ImageError(f"the header says {width} x {height} pixels, which holds no pixel; {_TAKE_AGAIN}")
    if width * height > max_pixels:
        raise ImageError(
            f"the header says {width} x {height} pixels, more than max_pixels {max_pixels}: "
            "shrink the image, or raise the limit if the trainer raises Pillow's too"
        )
    if exif == "apply" and tagged:
        with _opened(source, _OWN_FORMATS) as image:
            orientation = image.getexif().get(_ORIENTATION)
    return (height, width) if orientation in _SWAPPING else (width, height)


# -- JPEG: segments up to the frame header (ITU-T T.81, annex B) ------------------------------------------------------


def _jpeg(source: _Source) -> tuple[int, int]:
    # of the markers 0xC0 to 0xCF, DHT, JPG and DAC are no frame headers
    frames = (
        (offset, length)
        for marker, offset, length in _jpeg_segments(source)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)
    )
    offset, length = next(frames, (0, None))
    if length is None:
        raise ImageError(f"a JPEG without a frame header before its first scan; {_TAKE_AGAIN}")
    if length < 8:
        raise ImageError(f"a JPEG frame header of {length} bytes is too short; {_TAKE_AGAIN}")
    _, height, width, _ = struct.unpack(">BHHB", source.need(offset, 6, "the JPEG frame header"))
    if source.at(source.size - 2, 2) != b"\xff\xd9" and not _holds(source, b"\xff\xd9", offset + length - 2):
        raise ImageError(
            f"truncated: a JPEG of {source.size} bytes without an end-of-image marker behind its frame header; "
            f"{_TAKE_AGAIN}"
        )
    return width, height


def _jpeg_segments(source: _Source) -> Iterator[tuple[int, int, int]]:
    """(marker, offset of its payload, length with the two length bytes); fill bytes and junk are stepped over."""
    position = 2
    for _ in range(_MAX_STEPS):
        lead = source.need(position, 2, "the JPEG segments before the frame header")
        if position > _MAX_SEARCH_BYTES:
            break
        if lead[0] != 0xFF or lead[1] == 0xFF:
            block = source.at(position, _HEAD_BYTES)
            if lead[0] == 0xFF:
                position += max(1, len(block) - len(block.lstrip(b"\xff")) - 1)  # stand on the last fill byte
            else:
                junk = block.find(b"\xff")
                position += junk if junk >= 0 else len(block)
        elif lead[1] <= 0x01 or 0xD0 <= lead[1] <= 0xD8:  # markers that stand alone
            position += 2
        elif lead[1] in (0xD9, 0xDA):  # the end, the first scan
            return
        else:
            (length,) = struct.unpack(">H", source.need(position + 2, 2, "a JPEG segment"))
            if length < 2:
                raise ImageError(f"a JPEG segment at byte {position} claims {length} bytes; {_TAKE_AGAIN}")
            yield lead[1], position + 4, length
            position += 2 + length
    raise ImageError(f"no JPEG frame header in the first {position} bytes; {_TAKE_AGAIN}")


def _holds(source: _Source, needle: bytes, start: int) -> bool:
    """Whether `needle` stands at or behind `start`; the end of the file is looked at first."""
    step = 1 << 20
    tail = max(start, source.size - _HEAD_BYTES)
    if needle in source.at(tail, source.size - tail):
        return True
    return any(needle in source.at(at, step + len(needle)) for at in range(start, tail, step))


# -- PNG: IHDR, then chunks up to IEND (W3C PNG, third edition) -------------------------------------------------------


def _png(source: _Source) -> tuple[int, int]:
    header = source.need(8, 25, "the PNG header")
    if header[:8] != b"\0\0\0\rIHDR":
        raise ImageError(f"a PNG whose first chunk is not IHDR; {_TAKE_AGAIN}")
    if struct.pack(">I", zlib.crc32(header[4:21])) != header[21:]:
        raise ImageError(f"the PNG header fails its checksum; {_TAKE_AGAIN}")
    width, height, depth, colour = struct.unpack(">IIBB", header[8:18])
    if depth not in _PNG_DEPTHS.get(colour, ()):
        raise ImageError(f"a PNG with {depth} bits of colour type {colour}, which PNG does not know; {_TAKE_AGAIN}")
    if source.at(source.size - 12, 12) != b"\0\0\0\0IEND\xaeB`\x82":
        for _ in _png_chunks(source):
            pass
    return width, height


def _may_be_turned(source: _Source) -> bool:
    """Whether some chunk may hold EXIF: Pillow decodes a PNG before it says so, a thousand times as long."""
    for name, offset, length in _png_chunks(source):
        if name == b"eXIf":
            return True
        if name in (b"tEXt", b"zTXt", b"iTXt"):
            text = source.at(offset, min(length, 32))
            if text.startswith((b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")):
                return True
    return False


def _png_chunks(source: _Source) -> Iterator[tuple[bytes, int, int]]:
    position = 33
    for _ in range(_MAX_STEPS):
        length, name = struct.unpack(">I4s", source.need(position, 8, "the PNG data before IEND"))
        if name == b"IEND":
            source.need(position, 12, "the PNG data before IEND")
            return
        yield name, position + 8, length
        position += 12 + length
    raise ImageError(f"a PNG of more than {_MAX_STEPS} chunks; {_TAKE_AGAIN}")


# -- WebP -------------------------------------------------------------------------------------------------------------


def _webp(source: _Source) -> tuple[int, int]:
    """First chunk VP8 (RFC 6386, 9.1), VP8L or VP8X (WebP container specification)."""
    first = source.need(0, 30, "the WebP header")
    (declared,) = struct.unpack("<I", first[4:8])
    kind = first[12:16]
    if kind == b"VP8X":
        width = 1 + int.from_bytes(first[24:27], "little")
        height = 1 + int.from_bytes(first[27:30], "little")
    elif kind == b"VP8L":
        if first[20] != 0x2F:
            raise ImageError(f"a lossless WebP without its signature byte; {_TAKE_AGAIN}")
        bits = int.from_bytes(first[21:25], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        if first[20] & 1 or first[23:26] != b"\x9d\x01\x2a":
            raise ImageError(f"a lossy WebP that does not start with a key frame; {_TAKE_AGAIN}")
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", first[26:30]))
    else:
        raise ImageError(f"a WebP whose first chunk {kind!r} is none of VP8, VP8L, VP8X; {_TAKE_AGAIN}")
    if declared + 8 > source.size:
        raise ImageError(f"truncated: {source.size} of {declared + 8} bytes of a WebP; {_TAKE_AGAIN}")
    return width, height


# -- Pillow -----------------------------------------------------------------------------------------------------------


def _pillow(source: _Source, max_pixels: int, exif: Exif) -> tuple[int, int]:
    is_box = source.head[4:8] == b"ftyp"
    brands = source.head[8 : max(12, min(int.from_bytes(source.head[:4], "big"), 256))] if is_box else b""
    if is_box and b"avif" not in brands and b"avis" not in brands:
        kind = "HEIC" if any(brand in brands for brand in _HEIC) else "a video or another file"
        raise ImageError(
            f"{kind} of brand {brands[:4]!r}, which Pillow and most processors do not open: convert it to JPEG or PNG"
        )
    if not (is_box or source.head.startswith(_OTHER_MAGIC)):
        raise ImageError(f"not an image: it starts with {source.head[:8]!r}; name an image file")
    with _opened(source, _PILLOW_FORMATS) as image:
        width, height = image.size
        if image.format in _WHOLE_FORMATS and width * height <= max_pixels:
            image.load()
            width, height = image.size
        turned = image.format == "TIFF"  # Pillow's TIFF size is the one after its orientation, asked or not
        orientation = image.getexif().get(_ORIENTATION) if exif == "apply" and not turned else None
    return (height, width) if orientation in _SWAPPING else (width, height)


@contextmanager
def _opened(source: _Source, formats: Sequence[str]) -> Iterator[Image.Image]:
    """The image as Pillow opens it; whatever it raises inside is an `ImageError`."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise ImageError(
            "Pillow, which reads EXIF and formats other than PNG, JPEG and WebP, is not installed: "
            "pip install 'trimtab[data]'"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with source.stream() as stream, Image.open(stream, formats=formats) as image:
                yield image
    except Exception as error:  # its format readers raise whatever struct, zlib or indexing raises
        said = (
            "no header of its kind" if isinstance(error, UnidentifiedImageError) else str(error)
        )  # its own is an address
        raise ImageError(f"not a readable image ({type(error).__name__}): {said}; name an image file") from None
