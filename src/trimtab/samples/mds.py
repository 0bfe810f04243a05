"""Shards of Mosaic's MDS: little-endian, whole, and told by themselves.

A shard is: number of samples n; n + 1 offsets, all uint32; the columns as JSON; the samples. A sample is the sizes
(uint32) of its columns of no fixed size, then every column (mosaicml-streaming 0.13, base/format/mds/writer.py).
"""

from __future__ import annotations

import io
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.address import Address
from trimtab.errors import SampleError
from trimtab.files import refuse_special
from trimtab.samples.chunks import Groups, parse_record
from trimtab.samples.problems import BadRecordError, shorten
from trimtab.samples.rows import CONVERSATION_KEYS

CODECS = {".zstd": "zstd", ".gz": "gzip", ".bz2": "bz2", ".br": "brotli"}
"""Endings of compressed shards, and what pyarrow calls them."""
_MAX_BYTES = 2 << 30  # of a shard without its compression; MDSWriter makes them of 64 MiB
_JSON_TEXT = (*CONVERSATION_KEYS, "tools", "images")  # columns that people write as JSON into a column of text
_NUMBERS = ("int", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)))
_NUMBERS += ("float16", "float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    name: str
    encoding: str
    num_bytes: int | None  # None: told by each sample


def mds_groups(path: Path) -> Groups:
    """One group, the shard; numbers, text, JSON, images and lists of images are read, never a pickle."""
    content = _content(path)
    try:
        (count,) = struct.unpack_from("<I", content, 0)
        offsets = np.frombuffer(content, "<u4", count + 1, 4).astype(np.int64)
        config = parse_record(content[8 + 4 * count : int(offsets[0])])
        assert isinstance(config, dict)
        columns = [
            _Column(name=str(name), encoding=str(encoding), num_bytes=None if size is None else int(size))
            for name, encoding, size in zip(
                config["column_names"], config["column_encodings"], config["column_sizes"], strict=True
            )
        ]
        if (np.diff(offsets) < 0).any() or offsets[-1] > len(content):
            raise ValueError(f"its samples end at byte {offsets[-1]} of {len(content)}")
    except (AssertionError, BadRecordError, KeyError, TypeError, ValueError, struct.error) as error:
        raise SampleError(
            f"{path} is no whole MDS shard ({shorten(str(error) or 'its columns are no object', 120)}): write it again"
        ) from None
    pickled = [column.name for column in columns if column.encoding == "pkl"]
    if pickled:
        raise SampleError(
            f"{path}: column {pickled[0]!r} holds pickles (encoding pkl), which can run code when they are read: write "
            "it as json, str, jpeg or png"
        )

    def row(number: int, wanted: Sequence[str] | None = None) -> dict[str, Any]:
        return _decode(content[int(offsets[number]) : int(offsets[number + 1])], columns, wanted)

    def records(_groups: range, wanted: Sequence[str]) -> Iterator[Any]:
        for number in range(count):
            try:
                yield row(number, wanted)
            except BadRecordError as error:
                yield error
            except (ValueError, struct.error) as error:
                yield BadRecordError("type", f"a column cannot be read ({shorten(str(error), 120)}): write it again")

    return Groups(names=[c.name for c in columns], counts=[count], records=records, open_group=lambda _group: row)


def _content(path: Path) -> bytes | mmap.mmap:
    refuse_special(path)
    codec = CODECS.get(path.suffix)
    if codec is None and not isinstance(path, Address):
        with path.open("rb") as file:
            try:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise SampleError(f"{path} is empty: write the shard again") from None
    if codec is None:
        return path.read_bytes()
    import pyarrow

    try:
        with path.open("rb") as file, pyarrow.CompressedInputStream(pyarrow.PythonFile(file), codec) as stream:
            content = bytes(stream.read(_MAX_BYTES + 1))
    except (OSError, pyarrow.ArrowException) as error:
        raise SampleError(f"{path} is not whole ({shorten(str(error), 120)}): write the shard again") from None
    if len(content) > _MAX_BYTES:
        raise SampleError(f"{path} is a shard of over {_MAX_BYTES >> 30} GiB: write smaller ones (size_limit)")
    return content


def _decode(sample: bytes, columns: Sequence[_Column], wanted: Sequence[str] | None) -> dict[str, Any]:
    num_open = sum(column.num_bytes is None for column in columns)
    sizes = iter(np.frombuffer(sample, "<u4", num_open).tolist())
    record, at = dict[str, Any](), 4 * num_open
    for column in columns:
        num_bytes = next(sizes) if column.num_bytes is None else column.num_bytes
        if wanted is None or column.name in wanted:
            record[column.name] = _value(sample[at : at + num_bytes], column)
        at += num_bytes
    if at != len(sample):
        raise ValueError(f"a sample of {len(sample)} bytes has columns of {at}")
    return record


def _value(data: bytes, column: _Column) -> Any:
    """A column's value; None for arrays, which no conversation is made of."""
    encoding = column.encoding
    if encoding in ("str", "str_decimal"):
        text = data.decode("utf-8")
        return parse_record(data) if column.name in _JSON_TEXT and text.lstrip()[:1] in ("[", "{") else text
    if encoding == "json":
        return parse_record(data)
    if encoding in _NUMBERS:
        return np.frombuffer(data, "<i8" if encoding == "int" else encoding)[0].item()
    if encoding in ("str_int", "str_float"):
        return (int if encoding == "str_int" else float)(data.decode())
    if encoding.startswith("list["):  # four bytes that are kept for later
        return [_image(item, encoding[5:-1]) for item in _items(data[4:])]
    if encoding in ("jpeg_array", "jpegarray"):
        return list(_items(data))
    return _image(data, encoding)


def _items(data: bytes) -> Iterator[bytes]:
    """Number, sizes, items."""
    (count,) = struct.unpack_from("<I", data)
    sizes, at = np.frombuffer(data, "<u4", count, 4).tolist(), 4 + 4 * count
    for size in sizes:
        yield data[at : at + size]
        at += size


def _image(data: bytes, encoding: str) -> bytes | None:
    if encoding in ("bytes", "jpeg", "png"):
        return data
    if encoding != "pil":
        return None
    from PIL import Image  # width, height, length of the mode, mode, pixels

    width, height, length = struct.unpack_from("<III", data)
    picture = Image.frombytes(data[12 : 12 + length].decode(), (width, height), data[12 + length :])
    encoded = io.BytesIO()
    picture.save(encoded, "PNG", compress_level=0)
    return encoded.getvalue()
