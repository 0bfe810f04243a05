"""WebDataset shards: members of a tar that share a key are one sample."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from trimtab.samples.chunks import Record, parse_record
from trimtab.samples.problems import BadRecordError, shorten
from trimtab.samples.rows import CONVERSATION_KEYS

_IMAGE_SUFFIXES = frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "ppm"))


def read_tar(path: Path) -> Iterator[Record]:
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
    """A sort key that puts 10.jpg after 2.jpg: every second piece is a number."""
    pieces = re.split(r"([0-9]{1,18})", text)
    return [(int(piece), "") if i % 2 else (-1, piece) for i, piece in enumerate(pieces)]
