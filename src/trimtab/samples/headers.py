"""Width and height of an image from its header alone: PNG, JPEG, WebP, GIF and BMP; Pillow reads the others."""

from __future__ import annotations

import io
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from trimtab.errors import ImageError
from trimtab.options import Exif

MAX_PIXELS = 178_956_970
"""Pillow raises `DecompressionBombError` above this: twice its `Image.MAX_IMAGE_PIXELS` (Pillow 13, Image.py)."""

_HEAD_BYTES = 4096
_MAX_SEARCH_BYTES = 16 << 20  # of JPEG segments before the frame header; profiles and thumbnails stay far below
_MAX_STEPS = 100_000  # chunks, segments or blocks walked in one file: a bound on time, not met by real files

_SWAPPING = frozenset((5, 6, 7, 8))  # EXIF orientations that exchange width and height
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_OTHER_MAGIC = (
    *(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),  # TIFF and BigTIFF
    *(b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n"),  # JPEG 2000, bare and in its container
    *(b"P%d" % kind for kind in range(1, 8)),  # PPM and its kin
    b"\0\0\1\0",  # ICO
)
_PILLOW_FORMATS = ("TIFF", "JPEG2000", "AVIF", "PPM", "ICO")  # by magic number; formats without one accept any bytes
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by colour type
_BMP_HEADERS = (12, 16, 40, 52, 56, 64, 108, 124)
_TAKE_AGAIN = "fetch or export the file again"


def image_size(
    image: str | os.PathLike[str] | bytes | memoryview, *, exif: Exif = "ignore", max_pixels: int = MAX_PIXELS
) -> tuple[int, int]:
    """(width, height) of an image file or of its bytes, without decoding a pixel.

    The size is the one Pillow's `Image.open` reports; `exif="apply"` gives it after `ImageOps.exif_transpose`.
    Checked as well, as far as the container tells: nothing is missing at the end (PNG up to IEND, JPEG an end-of-image
    marker behind the frame header, WebP and BMP their declared length, GIF the whole first frame). Damage inside the
    compressed data is not looked for. Raises `ImageError` and nothing else, whatever the bytes hold.
    """
    if isinstance(image, (bytes, memoryview)):
        data = bytes(image)
        return _size(_Source(data, len(data), None), exif, max_pixels)
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer
        fd = os.open(image, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        raise ImageError(f"cannot open the image: {_cause(error)}; check its path") from None
    try:
        return image_size_of_descriptor(fd, exif=exif, max_pixels=max_pixels)
    finally:
        os.close(fd)


def image_size_of_descriptor(fd: int, *, exif: Exif = "ignore", max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """`image_size` of an open file descriptor, which stays open."""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("the image's path names a folder or a device: name a regular file")
        return _size(_Source(os.read(fd, _HEAD_BYTES), status.st_size, fd), exif, max_pixels)
    except OSError as error:
        raise ImageError(f"cannot read the image: {_cause(error)}; check the disk it lies on") from None


class _Header(NamedTuple):
    width: int
    height: int
    orientation: int | None = None  # EXIF, where it was asked for


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


def _cause(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _size(source: _Source, exif: Exif, max_pixels: int) -> tuple[int, int]:
    head = source.head
    if not head:
        raise ImageError(f"the image file is empty; {_TAKE_AGAIN}")
    if head.startswith(b"\xff\xd8"):
        header = _jpeg(source, exif == "apply")
    elif head.startswith(b"\x89PNG\r\n\x1a\n"):
        header = _png(source, exif == "apply")
    elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        header = _webp(source, exif == "apply")
    elif head.startswith((b"GIF87a", b"GIF89a")):
        header = _gif(source)
    elif head.startswith(b"BM"):
        header = _bmp(source)
    else:
        header = _pillow(source, exif == "apply")
    width, height, orientation = header
    if width <= 0 or height <= 0:
        raise ImageError(f"the header says {width} x {height} pixels, which holds no pixel; {_TAKE_AGAIN}")
    if width * height > max_pixels:
        raise ImageError(
            f"the header says {width} x {height} pixels, more than max_pixels {max_pixels}: "
            "shrink the image, or raise the limit if the trainer raises Pillow's too"
        )
    return (height, width) if orientation in _SWAPPING else (width, height)


# -- JPEG: segments up to the frame header (ITU-T T.81, annex B) ------------------------------------------------------


def _jpeg(source: _Source, apply_exif: bool) -> _Header:
    size: tuple[int, int] | None = None
    frame_end = 0
    exif, xmp = b"", b""
    for marker, offset, length in _jpeg_segments(source):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # DHT, JPG and DAC are no frame headers
            if length < 8:
                raise ImageError(f"a JPEG frame header of {length} bytes is too short; {_TAKE_AGAIN}")
            _, height, width, _ = struct.unpack(">BHHB", source.need(offset, 6, "the JPEG frame header"))
            size, frame_end = (width, height), offset + length - 2
            if not apply_exif:
                break
        elif marker == 0xDA:
            break
        elif marker == 0xE1 and apply_exif:
            segment = source.need(offset, length - 2, "a JPEG APP1 segment")
            if segment.startswith(b"Exif\0\0"):
                exif += segment[6:]
            elif segment.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
                xmp = segment
    if size is None:
        raise ImageError(f"a JPEG without a frame header before its first scan; {_TAKE_AGAIN}")
    if source.at(source.size - 2, 2) != b"\xff\xd9" and not _holds(source, b"\xff\xd9", frame_end):
        raise ImageError(
            f"truncated: a JPEG of {source.size} bytes without an end-of-image marker behind its frame header; "
            f"{_TAKE_AGAIN}"
        )
    return _Header(*size, _orientation(exif, xmp) if apply_exif else None)


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
        elif lead[1] == 0xD9:
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


def _png(source: _Source, apply_exif: bool) -> _Header:
    header = source.need(8, 25, "the PNG header")
    if header[:8] != b"\0\0\0\rIHDR":
        raise ImageError(f"a PNG whose first chunk is not IHDR; {_TAKE_AGAIN}")
    if struct.pack(">I", zlib.crc32(header[4:21])) != header[21:]:
        raise ImageError(f"the PNG header fails its checksum; {_TAKE_AGAIN}")
    width, height, depth, colour = struct.unpack(">IIBB", header[8:18])
    if depth not in _PNG_DEPTHS.get(colour, ()):
        raise ImageError(f"a PNG with {depth} bits of colour type {colour}, which PNG does not know; {_TAKE_AGAIN}")
    if not apply_exif and source.at(source.size - 12, 12) == b"\0\0\0\0IEND\xaeB`\x82":
        return _Header(width, height)
    exif, xmp = b"", b""
    for name, offset, length in _png_chunks(source):
        if not apply_exif or length > _MAX_SEARCH_BYTES:
            continue
        if name == b"eXIf":
            exif = source.need(offset, length, "a PNG eXIf chunk")
        elif name in (b"tEXt", b"zTXt", b"iTXt"):
            text = source.need(offset, length, "a PNG text chunk")
            if text.startswith(b"Raw profile type exif\0"):
                exif = exif or _raw_profile(text[22:], compressed=name == b"zTXt")
            elif text.startswith(b"XML:com.adobe.xmp\0"):
                xmp = text
    return _Header(width, height, _orientation(exif, xmp) if apply_exif else None)


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


def _raw_profile(text: bytes, *, compressed: bool) -> bytes:
    """EXIF as ImageMagick stores it: three lines, then hexadecimal."""
    try:
        if compressed:
            text = zlib.decompressobj().decompress(text[1:], _MAX_SEARCH_BYTES)
        return bytes.fromhex(b"".join(text.split(b"\n")[3:]).decode("ascii"))
    except (ValueError, zlib.error):
        return b""


# -- WebP, GIF, BMP ---------------------------------------------------------------------------------------------------


def _webp(source: _Source, apply_exif: bool) -> _Header:
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
    if not apply_exif or kind != b"VP8X":
        return _Header(width, height)
    exif, xmp, position = b"", b"", 12
    for _ in range(_MAX_STEPS):
        if position + 8 > declared + 8:
            break
        name, length = struct.unpack("<4sI", source.need(position, 8, "a WebP chunk"))
        if name in (b"EXIF", b"XMP ") and length <= _MAX_SEARCH_BYTES:
            payload = source.need(position + 8, length, "WebP metadata")
            exif, xmp = (payload, xmp) if name == b"EXIF" else (exif, payload)
        position += 8 + length + (length & 1)
    return _Header(width, height, _orientation(exif, xmp))


def _gif(source: _Source) -> _Header:
    """The screen, widened where the first frame exceeds it, as Pillow does (GIF89a specification)."""
    screen = source.need(6, 7, "the GIF header")
    width, height, packed = struct.unpack("<HHB", screen[:5])
    position = 13 + (3 << (packed & 7) + 1 if packed & 0x80 else 0)
    for _ in range(_MAX_STEPS):
        introducer = source.need(position, 1, "the GIF blocks before the first frame")
        if introducer == b"!":
            position = _gif_skip_blocks(source, position + 2)
        elif introducer == b",":
            left, top, w, h, packed = struct.unpack("<HHHHB", source.need(position + 1, 9, "the first GIF frame"))
            position += 10 + (3 << (packed & 7) + 1 if packed & 0x80 else 0)
            _gif_skip_blocks(source, position + 1)  # one byte of code size; also proves the frame is whole
            return _Header(max(width, left + w), max(height, top + h))
        elif introducer == b";":
            break
        else:
            position += 1
    raise ImageError(f"a GIF without a frame; {_TAKE_AGAIN}")


def _gif_skip_blocks(source: _Source, position: int) -> int:
    data, start = source.at(position, 1 << 16), position
    for _ in range(50 * _MAX_STEPS):  # 1.2 GB of 255-byte blocks
        if position - start >= len(data):
            data, start = source.at(position, 1 << 16), position
            if not data:
                raise ImageError(f"truncated: a GIF of {source.size} bytes ends inside a block; {_TAKE_AGAIN}")
        length = data[position - start]
        position += 1 + length
        if length == 0:
            return position
    raise ImageError(f"a GIF frame of too many blocks; {_TAKE_AGAIN}")


def _bmp(source: _Source) -> _Header:
    """OS/2 core header (12 bytes, 16-bit sides) or Windows headers; a negative height stores rows top down."""
    pixels, header = struct.unpack("<II", source.need(10, 8, "the BMP header"))
    if header not in _BMP_HEADERS:
        raise ImageError(f"a BMP with a header of {header} bytes, which no version has; {_TAKE_AGAIN}")
    if header == 12:
        width, height, _, bits = struct.unpack("<HHHH", source.need(18, 8, "the BMP header"))
        compression = 0
    else:
        fields = source.need(18, header - 4, "the BMP header")
        width, height, _, bits = struct.unpack("<iiHH", fields[:12])
        compression = int.from_bytes(fields[12:16], "little")
        height = abs(height)
    packed_rows = compression not in (0, 3, 6)  # raw and bit fields have a known length, run lengths have not
    needed = pixels + (1 if packed_rows else (width * bits + 31) // 32 * 4 * height)
    if width > 0 and needed > source.size:
        raise ImageError(f"truncated: {source.size} of {needed} bytes of a BMP; {_TAKE_AGAIN}")
    return _Header(width, height)


# -- other formats, orientation ---------------------------------------------------------------------------------------


def _pillow(source: _Source, apply_exif: bool) -> _Header:
    """Header read by Pillow; no pixel is decoded, so its own limit on pixels is not needed here."""
    import warnings

    if not _other_magic(source.head):
        raise ImageError(f"not an image: it starts with {source.head[:8]!r}; name an image file")
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ImageError(
            "not a PNG, JPEG, WebP, GIF or BMP, and Pillow, which reads other formats, is not installed: "
            "pip install 'trimtab[data]'"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with source.stream() as stream, Image.open(stream, formats=_PILLOW_FORMATS) as image:
                width, height = image.size
                turned = image.format == "TIFF"  # Pillow's TIFF size is the one after its orientation, asked or not
                orientation = image.getexif().get(0x0112) if apply_exif and not turned else None
    except Exception as error:  # its format readers raise whatever struct, zlib or indexing raises
        raise ImageError(f"not a readable image ({type(error).__name__}): {error}; name an image file") from None
    return _Header(width, height, orientation if isinstance(orientation, int) else None)


def _other_magic(head: bytes) -> bool:
    return head.startswith(_OTHER_MAGIC) or head[4:8] == b"ftyp"  # AVIF is one of many kinds of ftyp


def _orientation(exif: bytes, xmp: bytes) -> int | None:
    """Tag 0x0112 of the first TIFF directory, else the one XMP names: the order Pillow's `getexif` looks in."""
    found = _tiff_orientation(exif.removeprefix(b"Exif\0\0"))
    if found is None and (match := _XMP_ORIENTATION.search(xmp)):
        return int(match[1])
    return found


def _tiff_orientation(tiff: bytes) -> int | None:
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return None
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (num_entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(num_entries):
            tag, kind, count = struct.unpack_from(order + "HHI", tiff, directory + 2 + 12 * entry)
            if tag == 0x0112 and count == 1 and kind in (1, 3, 4):
                code = {1: "B", 3: "H", 4: "I"}[kind]
                (value,) = struct.unpack_from(order + code, tiff, directory + 10 + 12 * entry)
                return int(value)
    except struct.error:
        return None
    return None
