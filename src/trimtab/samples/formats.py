"""Readers of formats: Parquet, Arrow's two IPC forms; WebDataset's shards; JSON lists.

Every batch of columns is validated in full before a value of it is read: offsets and lengths in a file are a stranger's
numbers, and pyarrow follows them anywhere in memory.
"""

import codecs
import contextlib
import csv
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trimtab.address import Address
from trimtab.errors import SampleError, shorten
from trimtab.samples.problems import MAX_VALUES, BadRecordError, Record, RecordGroups, parse_record
from trimtab.samples.shapes import CONVERSATION_KEYS, has_shape
from trimtab.typed_json import STRICT, parse_json, refuse_surrogates

_BATCH_ROWS = 512  # made into records at once
_BATCH_BYTES = 32 << 20  # of rows that are larger
_ARROW_FILE = b"ARROW1"


def open_parquet(path: Path) -> Any:
    """Open it as pyarrow's ParquetFile."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path.open("rb") if isinstance(path, Address) else path)
        _ = file.schema_arrow.names  # not every one is text
    except (OSError, ValueError, SystemError, pyarrow.ArrowException) as error:
        raise unreadable(path, "Parquet", error) from None
    return file


def parquet_groups(path: Path) -> RecordGroups:
    """Return row groups."""
    import pyarrow

    file = open_parquet(path)

    def records(groups: range, columns: Sequence[str]) -> Iterator[Any]:
        sizes = [file.metadata.row_group(group) for group in groups]
        rows, num_bytes = sum(x.num_rows for x in sizes), sum(x.total_byte_size for x in sizes)
        batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(1, num_bytes)))
        how = {"row_groups": groups, "columns": columns, "batch_size": batch_rows, "use_threads": False}
        yield from _records_of(file.iter_batches(**how))

    def open_group(group: int) -> Callable[[int], Any]:
        try:
            return _rows_of(file.read_row_group(group, use_threads=False))
        except (OSError, ValueError, SystemError, pyarrow.ArrowException) as error:
            raise unreadable(path, "Parquet", error) from None

    return RecordGroups(
        names=file.schema_arrow.names,
        counts=[file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)],
        records=records,
        open_group=open_group,
    )


def arrow_groups(path: Path) -> RecordGroups:
    """Record batches of an IPC stream (as `datasets` saves them) or an IPC file; a local file is mapped."""
    import pyarrow

    try:
        source = path.open("rb") if isinstance(path, Address) else pyarrow.memory_map(str(path))
        is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)] if is_file else list(reader)
        names = reader.schema.names
    except (OSError, ValueError, SystemError, pyarrow.ArrowException) as error:
        raise unreadable(path, "an Arrow stream or file", error) from None

    def records(groups: range, columns: Sequence[str]) -> Iterator[Any]:
        for group in groups:
            batch = batches[group].select(columns)
            yield from _records_of(batch.slice(at, _BATCH_ROWS) for at in range(0, batch.num_rows, _BATCH_ROWS))

    def open_group(group: int) -> Callable[[int], Any]:
        try:
            return _rows_of(batches[group])
        except (ValueError, SystemError, pyarrow.ArrowException) as error:
            raise unreadable(path, "an Arrow stream or file", error) from None

    return RecordGroups(
        names=names,
        counts=[batch.num_rows for batch in batches],
        records=records,
        open_group=open_group,
    )


def _records_of(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield rows as dicts; what pyarrow raises is a `ValueError` or an `OSError`."""
    import pyarrow

    try:
        for batch in batches:
            batch.validate(full=True)
            yield from batch.to_pylist()
    except (SystemError, pyarrow.ArrowException) as error:
        raise ValueError(str(error)) from None


def _rows_of(table: Any) -> Callable[[int], Any]:
    table.validate(full=True)
    return lambda row: table.slice(row, 1).to_pylist()[0]


def unreadable(path: Path, what: str, error: Exception) -> SampleError:
    return SampleError(f"{path} is not readable as {what}: {shorten(str(error), 200)}; write it again")


# -- WebDataset: members of a tar that share a key are one sample ------------------------------------------------------


_IMAGE_SUFFIXES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "ppm"))


def read_tar(path: Path) -> Iterator[Record]:
    """Read members in sequence; those with one key (name up to the first dot of its last part) are one sample.

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
        if isinstance(value, dict) and (has_shape(value) or "txt" not in members):
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
    reason = "the sample has neither a .json member, which holds an object, nor a .txt member: add one"
    return Record(line=line, key=key, problem=BadRecordError("type", reason))


def _is_image(suffix: str) -> bool:
    return suffix.rpartition(".")[2] in _IMAGE_SUFFIXES


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that puts 10.jpg after 2.jpg: every second piece is a number."""
    pieces = re.split(r"([0-9]{1,18})", text)
    return [(int(piece), "") if i % 2 else (-1, piece) for i, piece in enumerate(pieces)]


# -- tables as text ----------------------------------------------------------------------------------------------------


_STRUCTURED = (*CONVERSATION_KEYS, "conversation", "images", "videos", "tools", "history", "chosen", "rejected")


def read_csv(path: Path) -> Iterator[tuple[object, int]]:
    """Yield rows by the names of the first one, each with the characters read so far; empty fields are left out.

    Fields that hold lists, such as messages and images, may be JSON.
    """
    delimiter = "\t" if path.name.lower().endswith(".tsv") else ","
    read = 0

    def lines(file: Iterable[str]) -> Iterator[str]:
        nonlocal read
        for line in file:
            read += len(line)
            yield line

    limit = csv.field_size_limit(MAX_ELEMENT)
    try:
        with path.open("rb") as binary:
            text = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
            for row in csv.DictReader(lines(text), delimiter=delimiter, restkey="", strict=True):
                if "" in row:
                    raise ValueError(f"a row has more fields than the {len(row) - 1} of the first line")
                yield {name: _field(name, value) for name, value in row.items() if value}, read
    except (csv.Error, ValueError) as error:
        raise SampleError(
            f"{path} is no {'TSV' if delimiter != ',' else 'CSV'} with names in its first line: "
            f"{shorten(str(error), 160)}, after character {read}; write it again"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _field(name: str, value: str) -> object:
    if name in _STRUCTURED and value[0] in "[{":
        with contextlib.suppress(ValueError):
            return parse_json(value.encode("utf-8", "surrogatepass"))
    return value


# -- JSON lists, element by element: in linear time, and in the memory of the largest element --------------------------


_BLOCK_BYTES = 1 << 22
MAX_ELEMENT = 256 << 20  # characters
_SPACE = re.compile(r"[ \t\n\r]*")
_CUT = 16  # characters: an error so near the end of what was read may be the cut of a longer element


def read_json_list(path: Path) -> Iterator[tuple[object, int]]:
    """The elements of the list, each with the number of characters read so far.

    `SampleError` where the file stops being one JSON list: what follows cannot be read.
    """
    # a file of one block at once, in a fifth of the seconds; where something is wrong, the walk below says where
    with path.open("rb") as file:
        head, values = file.read(_BLOCK_BYTES + 1), None
        with contextlib.suppress(ValueError, RecursionError):
            values = parse_json(head) if len(head) <= _BLOCK_BYTES else None
        if isinstance(values, list):
            yield from ((value, len(head) * done // len(values)) for done, value in enumerate(values, start=1))
            return
        file.seek(0)
        text = _Text(file)
        try:
            yield from _elements(text)
        except json.JSONDecodeError as error:
            raise _broken(path, f"{error.msg} at character {text.before + error.pos}") from None
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise _broken(path, f"{reason}, after character {text.before + text.at}") from None


def _broken(path: Path, reason: str) -> SampleError:
    return SampleError(f"{path} is not JSON: {shorten(reason, 160)}: correct it, or write JSON Lines")


class _Text:
    """The part of a file that is being parsed: `text[at:]` is what comes next."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decoder = file, codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.before, self.ended = "", 0, 0, False

    def more(self) -> None:
        """Read half as much again after the rest, so that an element of any length is tried few times."""
        rest = self.text[self.at :]
        if len(rest) > MAX_ELEMENT:
            raise ValueError(f"an element is longer than {MAX_ELEMENT >> 20} Mi characters")
        if len(rest) > MAX_VALUES and sum(map(rest.count, "[{,")) > MAX_VALUES:
            raise ValueError(f"an element holds more than {MAX_VALUES:,} values")
        block = self._file.read(max(_BLOCK_BYTES, len(rest)))
        self.ended = not block
        self.before += self.at
        self.text, self.at = rest + self._decoder.decode(block, final=self.ended), 0

    def mark(self) -> str:
        """The next character that is no white space; "" at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.more()

    def element(self) -> object:
        """Return one value, from here on."""
        while True:
            try:
                value, end = STRICT.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - _CUT
                if self.ended or not is_cut:
                    raise
            else:
                if end < len(self.text) or self.ended:  # else a number may go on
                    break
            self.more()
        start, self.at = self.at, end
        return refuse_surrogates(value, self.text, start, end)


def _elements(text: _Text) -> Iterator[tuple[object, int]]:
    mark = text.mark()
    assert mark == "[", "detect_format saw it"
    text.at += 1
    if text.mark() == "]":
        text.at += 1
    else:
        while mark != "]":
            text.mark()
            value = text.element()
            yield value, text.before + text.at
            mark = text.mark()
            if mark not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' delimiter", text.text, text.at)
            text.at += 1
    if text.mark():
        raise json.JSONDecodeError("Extra data", text.text, text.at)
