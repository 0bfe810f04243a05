"""Data set files as records, in chunks that do not depend on how many workers read them."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Literal

from trimtab.errors import SampleError
from trimtab.samples.problems import BadRecordError, shorten
from trimtab.samples.rows import CONVERSATION_KEYS, KNOWN_KEYS
from trimtab.typed_json import parse_json

Format = Literal["jsonl", "json", "parquet", "tar"]

CHUNK_BYTES = 1 << 20  # of a JSONL file: about 0.3 s of work, and what a kill can lose per worker
CHUNK_RECORDS = 2000  # of a JSON list; of Parquet row groups at least as many
MAX_CHUNKS = 4096  # of one JSONL file; a larger file gets larger chunks
MAX_LINE_BYTES = 256 << 20

_IMAGE_SUFFIXES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "ppm"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of one file that one worker reads: bytes, records or row groups `start <= i < stop`."""

    file: Path
    format: Format
    start: int
    stop: int
    first_line: int | None  # number of its first record, from 1; None: known once the chunks before it are read
    num_bytes: int  # share of the file, for progress
    rows: tuple[object, ...] = ()  # of a JSON list, which is parsed once and handed out


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One parsed record, or what is wrong with it."""

    line: int  # from 1, within the chunk where Chunk.first_line is None
    value: object = None
    key: str | None = None  # of a tar sample
    images: tuple[bytes, ...] | None = None  # members of a tar sample
    problem: BadRecordError | None = None
    blank: bool = False  # a line that holds no record, told because it counts as a line


def detect_format(path: Path) -> Format:
    """Format by suffix; a .json file is a list if its first character is [, else one object a line."""
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise SampleError(f"cannot read {path}: {error.strerror}; name data files, not folders") from None
    if suffix == ".parquet" or head.startswith(b"PAR1"):
        return "parquet"
    if suffix == ".tar" or head[257:262] == b"ustar":
        return "tar"
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix == ".json":
        return "json" if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[") else "jsonl"
    raise SampleError(f"{path} is of no known format: name .jsonl, .json, .parquet or .tar files")


def list_chunks(path: Path) -> list[Chunk]:
    """The file in chunks, in order; the same for any number of workers. A JSON list is parsed here."""
    kind = detect_format(path)
    size = path.stat().st_size
    if kind == "jsonl":
        step = max(CHUNK_BYTES, -(-size // MAX_CHUNKS))
        return [_chunk(path, kind, at, min(at + step, size), None, min(step, size - at)) for at in range(0, size, step)]
    if kind == "tar":
        return [_chunk(path, kind, 0, 1, 1, size)]
    if kind == "json":
        rows = read_json_list(path)
        step = CHUNK_RECORDS
        return [
            replace(
                _chunk(path, kind, at, stop := min(at + step, len(rows)), at + 1, size * (stop - at) // len(rows)),
                rows=tuple(rows[at:stop]),
            )
            for at in range(0, len(rows), step)
        ]
    metadata = open_parquet(path).metadata
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    firsts = [0, *accumulate(counts)]
    chunks, start = [], 0
    for stop in range(1, len(counts) + 1):
        rows_in = firsts[stop] - firsts[start]
        if rows_in >= CHUNK_RECORDS or stop == len(counts):
            share = size * rows_in // max(1, firsts[-1])
            chunks.append(_chunk(path, kind, start, stop, firsts[start] + 1, share))
            start = stop
    return chunks


def _chunk(path: Path, kind: Format, start: int, stop: int, first_line: int | None, num_bytes: int) -> Chunk:
    return Chunk(file=path, format=kind, start=start, stop=stop, first_line=first_line, num_bytes=num_bytes)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a whole file in order, lines numbered within the file."""
    num_lines = 0
    for chunk in list_chunks(path):
        last = 0
        for record in read_chunk(chunk):
            last = record.line
            yield replace(record, line=num_lines + last) if num_lines else record
        if chunk.first_line is None:  # its lines are numbered within the chunk
            num_lines += last


def read_chunk(chunk: Chunk, *, more_columns: tuple[str, ...] = ()) -> Iterator[Record]:
    """The chunk's records in order; broken ones carry their problem.

    Of a Parquet file only the columns that records are made of are read, and `more_columns`.
    """
    if chunk.format == "jsonl":
        with chunk.file.open("rb") as file:
            yield from _read_lines(file, chunk.start, chunk.stop)
    elif chunk.format == "json":
        for offset, value in enumerate(chunk.rows):
            yield Record(line=chunk.start + 1 + offset, value=value)
    elif chunk.format == "parquet":
        yield from _read_row_groups(chunk, more_columns)
    else:
        yield from _read_tar(chunk.file)


# -- JSON -------------------------------------------------------------------------------------------------------------


def parse_record(data: bytes) -> object:
    """A JSON value; `BadRecordError` for anything that is not strict JSON in UTF-8."""
    try:
        value = parse_json(data)
        if b"\\ud" in data or b"\\uD" in data:  # lone surrogates, which no tokenizer takes, do not encode
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise BadRecordError("json", f"not JSON: {shorten(str(error), 120)}; fix or drop the line") from None
    return value


def read_json_list(path: Path) -> list[object]:
    """A file that is one JSON list; `SampleError` if it is not, because then no record can be told from another."""
    try:
        rows = parse_record(path.read_bytes())
    except BadRecordError as error:
        raise SampleError(
            f"{path} is {error} (one JSON list is read whole: a JSON Lines file can skip lines)"
        ) from None
    assert isinstance(rows, list), "detect_format saw a ["
    return rows


def _read_lines(file: BinaryIO, start: int, stop: int) -> Iterator[Record]:
    """Lines that begin in [start, stop), numbered from 1 within the chunk."""
    position = start
    if start:
        file.seek(start - 1)
        position = _skip_line(file, start - 1)
    number = 0
    while position < stop:
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        number += 1
        position += len(line)
        if len(line) > MAX_LINE_BYTES:
            position = _skip_line(file, position)
            yield Record(line=number, problem=BadRecordError("json", _TOO_LONG))
            continue
        if position == len(line) and start == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.strip()
        if line:
            yield _parse_line(line, number)
        else:
            yield Record(line=number, blank=True)


_TOO_LONG = f"the line is longer than {MAX_LINE_BYTES >> 20} MiB: name image files instead of carrying their bytes"


def _parse_line(line: bytes, number: int) -> Record:
    try:
        return Record(line=number, value=parse_record(line))
    except BadRecordError as error:
        return Record(line=number, problem=error)


def _skip_line(file: BinaryIO, position: int) -> int:
    """Read on behind the next line end; lines of any length in little memory."""
    while part := file.readline(1 << 20):
        position += len(part)
        if part.endswith(b"\n"):
            break
    return position


# -- Parquet ----------------------------------------------------------------------------------------------------------


def open_parquet(path: Path) -> Any:
    """pyarrow's ParquetFile."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise SampleError(f"{path} is not readable as Parquet: {shorten(str(error), 200)}; write it again") from None


def _read_row_groups(chunk: Chunk, more_columns: tuple[str, ...]) -> Iterator[Record]:
    import pyarrow

    assert chunk.first_line is not None
    line = chunk.first_line
    file = open_parquet(chunk.file)
    columns = [name for name in file.schema_arrow.names if name in (*KNOWN_KEYS, *more_columns)]
    try:
        groups = range(chunk.start, chunk.stop)
        for batch in file.iter_batches(row_groups=groups, columns=columns, batch_size=512, use_threads=False):
            for value in batch.to_pylist():
                yield Record(line=line, value=value)
                line += 1
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = f"row groups {chunk.start} to {chunk.stop - 1} end here: {shorten(str(error), 120)}; write them again"
        yield Record(line=line, problem=BadRecordError("json", reason))


# -- WebDataset -------------------------------------------------------------------------------------------------------


def _read_tar(path: Path) -> Iterator[Record]:
    """Members with one key (name up to the first dot of its last part), in sequence, are one sample.

    `.json` holds the record, `.txt` a caption (user: the images, assistant: the caption), images are taken by number
    and name. A name that comes twice within one sample makes it a bad one. Nothing is written to disk.
    """
    line, key, members, twice = 0, None, dict[str, bytes](), list[str]()
    limit = path.stat().st_size
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                member_key = f"{folder}/{stem}" if folder else stem
                if member_key != key and members:
                    line += 1
                    yield _tar_record(line, key, members, twice)
                if member_key != key:
                    key, members, twice = member_key, {}, []
                if member.size > limit or member.issparse():
                    raise tarfile.ReadError(f"member {shorten(member.name)} claims {member.size} bytes")
                content = archive.extractfile(member)
                assert content is not None, "a regular member has content"
                if suffix.lower() in members:
                    twice.append(member.name)
                members[suffix.lower()] = content.read()
            # tarfile takes a cut or damaged header for the end; the end is a block of zeros
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("no end mark, so the shard is cut or damaged")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        problem = BadRecordError("json", f"the tar ends here: {shorten(str(error), 120)}; write the shard again")
        yield Record(line=line + 1, key=key, problem=problem)
        return
    if members:
        yield _tar_record(line + 1, key, members, twice)


def _tar_record(line: int, key: str | None, members: dict[str, bytes], twice: Sequence[str]) -> Record:
    if twice:
        names = ", ".join(shorten(name) for name in dict.fromkeys(twice))
        reason = f"the shard holds {names} more than once in a row, and a loader would keep one: give each its own name"
        return Record(line=line, key=key, problem=BadRecordError("id", reason))
    images = tuple(members[suffix] for suffix in sorted(filter(_is_image, members), key=_natural))
    value: object = None
    try:
        if "json" in members:
            value = parse_record(members["json"])
        if isinstance(value, dict) and any(value.get(name) for name in CONVERSATION_KEYS):
            return Record(line=line, key=key, value=value, images=images)
        if "txt" in members:
            text = members["txt"].decode("utf-8")
            marks: Sequence[object] = [{"type": "image"} for _ in images]
            turns = [{"role": "user", "content": marks}, {"role": "assistant", "content": text}]
            return Record(line=line, key=key, value={"messages": turns}, images=images)
    except BadRecordError as error:
        return Record(line=line, key=key, problem=error)
    except UnicodeDecodeError:
        return Record(
            line=line, key=key, problem=BadRecordError("type", "the .txt member is not UTF-8: encode it again")
        )
    reason = "the sample has neither a .json member with 'conversations' or 'messages' nor a .txt member: add one"
    return Record(line=line, key=key, problem=BadRecordError("type", reason))


def _is_image(suffix: str) -> bool:
    return suffix.rpartition(".")[2] in _IMAGE_SUFFIXES


def _natural(text: str) -> list[tuple[int, str]]:
    """A sort key that puts 10.jpg behind 2.jpg: every second piece is a number."""
    pieces = re.split(r"([0-9]{1,18})", text)
    return [(int(piece), "") if i % 2 else (-1, piece) for i, piece in enumerate(pieces)]
