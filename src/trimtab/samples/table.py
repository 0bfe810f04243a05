"""Sample tables: joined from parts, saved as .npz without pickle, loaded again; and finished chunks of a pass."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from trimtab.address import Address, place_of
from trimtab.errors import SampleError, refuse_type, shorten
from trimtab.files import blake2b, write_atomically
from trimtab.samples.problems import BadKind, BadSample, Chunk
from trimtab.specs import ImageCounts, IntArray, SampleTable

# -- named arrays and strings as the bytes of an .npz: equal input to equal bytes --------------------------------------


Arrays = dict[str, npt.NDArray[Any]]


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any]) -> bytes:
    """Return an .npz with its metadata as JSON; equal input gives equal bytes."""
    assert not any(array.dtype.hasobject for array in arrays.values()), "it would be pickled"
    buffer = io.BytesIO()
    text = json.dumps(meta, sort_keys=True).encode()
    # without `allow_pickle`, which NumPy before 2.2 writes as an array of that name
    np.savez(buffer, meta=np.frombuffer(text, np.uint8), **arrays)  # type: ignore[arg-type]  # its types know 2.2
    return buffer.getvalue()


def unpack_arrays(content: bytes) -> tuple[Arrays, dict[str, Any]]:
    """Return what `pack_arrays` wrote; raises ValueError, KeyError or BadZipFile on anything else."""
    _refuse_inflated(content)
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    meta = json.loads(arrays.pop("meta").tobytes())
    if not isinstance(meta, dict):
        raise ValueError("its metadata is no object")
    return arrays, meta


def _refuse_inflated(content: bytes) -> None:
    """Raise `ValueError` for arrays that would take more memory than the file has bytes; before they take any.

    We compress nothing, so both words on an array's size, the archive's and the array's own, are below the file's size.
    """
    advice = "and a table is not compressed"
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        packed = [entry.file_size for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"its {len(content)} bytes hold compressed arrays of {sum(packed)}, {advice}")
        for entry in archive.infolist():
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
            declared = math.prod(shape) * dtype.itemsize
            if declared > len(content):
                raise ValueError(f"its {len(content)} bytes declare an array of {declared}, {advice}")


def pack_strings(name: str, strings: Sequence[str]) -> Arrays:
    """Return strings as one block of UTF-8 and their ends: no pickle, no padding to the longest."""
    encoded = [text.encode() for text in strings]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return {f"{name}_utf8": np.frombuffer(b"".join(encoded), np.uint8), f"{name}_ends": ends}


def unpack_strings(name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> list[str]:
    block, ends = arrays[f"{name}_utf8"].tobytes(), arrays[f"{name}_ends"].tolist()
    return [block[start:end].decode() for start, end in zip([0, *ends[:-1]], ends, strict=bool(ends))]


COLUMNS = ("num_images", "num_patches", "num_tokens", "patches_sq", "patches_windowed")
PART_COLUMNS = (*COLUMNS, "second_tokens")
TABLE_VERSION = "1"
# columns that may be absent
_OPTIONAL: dict[str, type[np.signedinteger[Any]]] = {
    "file_index": np.int32,
    "line": np.int64,
    "second_tokens": np.int64,
}
_IMAGES = "image_patches"

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError, zipfile.BadZipFile)
"""What reading a damaged or foreign file of ours may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedFile:
    """A file that was sized."""

    path: str
    blake2b: str  # `fingerprint_file`
    media_root: str | None = None  # that was stated for it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizingResult:
    """Sizes of a data set, what was left out of it, and what the sizes assume.

    Use its `table` to plan or to pack; `save_sizing` keeps all of it.
    """

    table: SampleTable
    bad: tuple[BadSample, ...] = ()
    assumptions: tuple[str, ...] = ()
    image_rule: str | None = None  # `write_rule` of the rule that counted the images; None: ready-made lengths
    files: tuple[SizedFile, ...] = ()  # in order

    def __repr__(self) -> str:
        return f"SizingResult, {len(self.bad)} samples left out, of a {self.table!r}"

    @property
    def num_read(self) -> int:
        """Count the samples in the files."""
        return len(self.table) + len(self.bad)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Sized samples of one stretch of one file."""

    numbers: IntArray  # (num_samples, len(PART_COLUMNS))
    lines: IntArray  # (num_samples,) line or record number of each, from 1
    ids: tuple[str | None, ...] | None  # None: no record has one
    image_patches: IntArray | None = None  # of every image, sample after sample; None: not known
    bad: tuple[BadSample, ...] = ()
    num_lines: int = 0  # lines of the stretch, blank ones included
    source: npt.NDArray[np.int32] | None = None  # index into source_names; None: the file is the source
    source_names: tuple[str, ...] = ()
    file_index: npt.NDArray[np.int32] | None = None  # of a table sized before: its own column; None: this file
    num_files: int = 1
    patch_unit: Literal["patches", "tiles"] | None = None  # None: holds no patches
    tokens_exact: bool = True
    unused: tuple[str, ...] = ()  # fields of records that no sample is made of
    num_pairs: int = 0  # samples that are two sequences, with a chosen and a rejected answer
    media: tuple[str, ...] = ()  # images and videos in files, each with its size and time

    @property
    def num_read(self) -> int:
        """Count the samples in the stretch."""
        return len(self.lines) + len(self.bad)


def numbers_of(images: Sequence[ImageCounts], num_tokens: int, second_tokens: int = 0) -> tuple[int, ...]:
    """Return a sample's row of `PART_COLUMNS`."""
    sums = (sum(c.patches for c in images), sum(c.patches_sq for c in images), sum(c.patches_windowed for c in images))
    return len(images), sums[0], num_tokens, sums[1], sums[2], second_tokens


def source_names_of(files: Sequence[Path]) -> list[str]:
    """Return one name a file, the shortest kind that tells the files apart: stem, name, name with folders before it."""
    deepest = max(len(file.parts) for file in files)
    # a folder may be called llava-1.5
    kinds = [[file.name if file.suffix[1:2].isdigit() else file.stem for file in files]]
    kinds += [["/".join(file.parts[-depth:]) for file in files] for depth in range(1, 1 + deepest)]
    named = next((names for names in kinds if len(set(names)) == len(names)), None)
    return named or [f"{file.stem}#{number}" for number, file in enumerate(files, 1)]


def join_parts(
    files: Sequence[Path], parts: Sequence[Sequence[Part]], sources: Sequence[str] | None = None
) -> SampleTable:
    """Return one table of the parts of each file, in order.

    Sources are `sources` (None: the files), or what a part's own source column says. Ids: None where no record has one
    and none was left out; else a record without an id is called file:line, and with several files every id starts with
    the file's name.
    """
    labels = source_names_of(files)
    flat = [part for file_parts in parts for part in file_parts]
    units = sorted({part.patch_unit for part in flat if part.patch_unit is not None})
    if len(units) > 1:
        raise SampleError("tiles (vit_num) and patches cannot be added: size each kind by itself")
    names: dict[str, int] = {}
    codes: list[npt.NDArray[np.int32]] = []
    for label, file_parts in zip(sources or labels, parts, strict=True):
        for part in file_parts:
            own = part.source_names if part.source is not None else (label,)
            lookup = np.array([names.setdefault(name, len(names)) for name in own], np.int32)
            local = part.source if part.source is not None else np.zeros(len(part.lines), np.int32)
            codes.append(lookup[local])
    numbers = np.concatenate([part.numbers for part in flat]) if flat else np.empty((0, len(PART_COLUMNS)), np.int64)
    ids: tuple[str, ...] | None = None
    if any(part.ids is not None or part.bad for part in flat):
        ids = tuple(
            name
            for label, file_parts in zip(labels, parts, strict=True)
            for part in file_parts
            for name in _ids(part, label, prefix=len(files) > 1)
        )
    columns: dict[str, Any] = {name: np.ascontiguousarray(numbers[:, i]) for i, name in enumerate(COLUMNS)}
    return SampleTable(
        **columns,
        image_patches=_image_patches(flat),
        second_tokens=np.ascontiguousarray(numbers[:, -1]) if numbers[:, -1].any() else None,
        **_places(parts),
        ids=ids,
        source=np.concatenate(codes) if codes else np.empty(0, np.int32),
        source_names=tuple(names) or tuple(sources or labels),
        patch_unit=units[0] if units else "patches",
        tokens_exact=all(part.tokens_exact for part in flat),
    )


def _image_patches(parts: Sequence[Part]) -> IntArray | None:
    """Join the images' patches; None where a part lacks them, or where each sample has one image of its size."""
    if all((part.numbers[:, 0] <= 1).all() for part in parts):
        return None
    found = [part.numbers[:, 1][part.numbers[:, 0] > 0] if _is_single(part) else part.image_patches for part in parts]
    known = [images for images in found if images is not None]
    return np.concatenate(known) if len(known) == len(found) else None


def _is_single(part: Part) -> bool:
    return part.image_patches is None and bool((part.numbers[:, 0] <= 1).all())


def _places(parts: Sequence[Sequence[Part]]) -> dict[str, Any]:
    """Return where the samples' records are, as `SampleTable` has it; None where its default says it."""
    files, lines, num_files = [np.empty(0, np.int32)], [np.empty(0, np.int64)], 0
    for file_parts in parts:
        for part in file_parts:
            own = np.zeros(len(part.lines), np.int32) if part.file_index is None else part.file_index
            files.append(own + np.int32(num_files))
            lines.append(part.lines)
        num_files += max((part.num_files for part in file_parts), default=1)
    file, line = np.concatenate(files), np.concatenate(lines)
    return {
        "file_index": file if file.any() else None,
        "line": None if np.array_equal(line, np.arange(1, len(line) + 1)) else line,
        "num_files": max(1, num_files),
    }


def _ids(part: Part, label: str, *, prefix: bool) -> list[str]:
    lines = part.lines.tolist()
    own = part.ids if part.ids is not None else (None,) * len(lines)
    start = f"{label}/" if prefix else ""
    return [f"{label}:{line}" if name is None else start + name for name, line in zip(own, lines, strict=True)]


# -- files ------------------------------------------------------------------------------------------------------------


def load_table(path: Path) -> SampleTable:
    """Read a table that `save_sizing` wrote."""
    return load_sizing(path).table


def table_bytes(table: SampleTable) -> bytes:
    """Return a table as the content of an .npz file; equal tables give equal bytes."""
    return _sizing_bytes(SizingResult(table=table))


def table_from_bytes(content: bytes, *, origin: str) -> SampleTable:
    """Return what `table_bytes` made; `origin` names it in errors."""
    return _parse_sizing(lambda: content, origin).table


def save_sizing(result: SizingResult, path: Path | str) -> None:
    """Write table, bad samples and assumptions as .npz; the file is complete, or is not there.

    Use it to size once and plan often: `load_sizing`, `trimtab plan` and `trimtab pack` read the file.
    The same result gives the same bytes with the same version of numpy.
    """
    refuse_type("path", path, Path | str, "the path of a file.npz")
    path = Path(path)
    if path.suffix != ".npz":
        raise SampleError(f"a table cannot be saved as {path.name}: end the name in .npz")
    write_atomically(path, _sizing_bytes(result))


def _sizing_bytes(result: SizingResult) -> bytes:
    table = result.table
    meta = {
        "version": TABLE_VERSION,
        "patch_unit": table.patch_unit,
        "tokens_exact": table.tokens_exact,
        "source_names": list(table.source_names),
        "has_ids": table.ids is not None,
        **({"num_files": table.num_files} if table.num_files != 1 else {}),
        "num_read": result.num_read,
        "image_rule": result.image_rule,
        "assumptions": list(result.assumptions),
        "bad": [asdict(sample) for sample in result.bad],
        **({"files": list(map(_file_row, result.files))} if result.files else {}),
    }
    arrays: Arrays = {name: getattr(table, name) for name in COLUMNS} | {"source": table.source}
    arrays |= {name: column for name in _OPTIONAL if (column := getattr(table, name)) is not None}
    if table.image_patches is not None:
        arrays[_IMAGES] = table.image_patches
    return pack_arrays(arrays | pack_strings("id", table.ids or ()), meta)


def load_sizing(path: Path | str) -> SizingResult:
    """Return what `save_sizing` wrote; a file that is damaged or of another kind is a `SampleError`.

    Use it for a table that was sized before, also by `trimtab size --out`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "sizes.npz"
    >>> save_sizing(SizingResult(table=SampleTable.of([1024, 64], [300, 20])), path)
    >>> load_sizing(path).table.num_tokens.tolist()
    [300, 20]
    """
    refuse_type("path", path, Path | str, "the path of a file that save_sizing wrote")
    return _parse_sizing(place_of(path).read_bytes, str(path))


def _parse_sizing(read: Callable[[], bytes], origin: str) -> SizingResult:
    try:
        arrays, meta = unpack_arrays(read())
        names = unpack_strings("id", arrays)
        if meta.get("version") != TABLE_VERSION:
            raise ValueError(f"table version {meta.get('version')!r} is not {TABLE_VERSION!r}")
        columns = {name: _integers(arrays[name], np.int64) for name in COLUMNS}
        source = _integers(arrays["source"], np.int32)
        places = {name: _integers(arrays[name], kind) for name, kind in _OPTIONAL.items() if name in arrays}
        num_rows, num_sources, num_files = len(source), len(meta["source_names"]), meta.get("num_files", 1)
        if any(len(column) != num_rows for column in (*columns.values(), *places.values())) or (
            meta["has_ids"] and len(names) != num_rows
        ):
            raise ValueError("its columns differ in length")
        if num_rows and (source.max() >= num_sources or min(c.min() for c in (*columns.values(), source)) < 0):
            raise ValueError("a number lies outside its range")
        file, line = places.get("file_index"), places.get("line")
        outside = file is not None and num_rows and (file.min() < 0 or file.max() >= num_files)
        if outside or not isinstance(num_files, int) or (line is not None and num_rows and line.min() < 1):
            raise ValueError("a record's place lies outside the files")
        second = places.get("second_tokens")
        if second is not None and ((second < 0) | (second > columns["num_tokens"])).any():
            raise ValueError("a second sequence lies outside its sample")
        if meta["patch_unit"] not in ("patches", "tiles"):
            raise ValueError(f"patch unit {meta['patch_unit']!r} is unknown")
        images = _integers(arrays[_IMAGES], np.int64) if _IMAGES in arrays else None
        if images is not None and not _add_up(images, columns["num_images"], columns["num_patches"]):
            raise ValueError("the patches of its images are not those of its samples")
        table = SampleTable(
            **columns,
            image_patches=images,
            ids=tuple(names) if meta["has_ids"] else None,
            source=source,
            source_names=tuple(map(str, meta["source_names"])),
            patch_unit=meta["patch_unit"],
            tokens_exact=bool(meta["tokens_exact"]),
            file_index=file,
            line=line,
            second_tokens=second,
            num_files=num_files,
        )
        return SizingResult(
            table=table,
            bad=tuple(bad_from_dict(sample) for sample in meta["bad"]),
            assumptions=tuple(map(str, meta["assumptions"])),
            image_rule=None if meta.get("image_rule") is None else str(meta["image_rule"]),
            files=_sized_files(meta),
        )
    except UNREADABLE as error:
        raise _unreadable(origin, error) from None


def sized_files(path: Path) -> tuple[SizedFile, ...]:
    """Return `SizingResult.files` of a saved table, whose columns are not read; none where it does not say them."""
    try:
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            return _sized_files(json.loads(file["meta"].tobytes()))
    except UNREADABLE as error:
        raise _unreadable(str(path), error) from None


def _unreadable(origin: str, error: Exception) -> SampleError:
    if isinstance(error, FileNotFoundError):
        return SampleError(f"there is no sample table at {origin}: give one that `trimtab size --out` wrote")
    return SampleError(f"{origin} is no sample table ({shorten(str(error), 120)}): write it with trimtab size")


def _file_row(file: SizedFile) -> list[str]:
    return [file.path, file.blake2b, *([] if file.media_root is None else [file.media_root])]


def _sized_files(meta: Mapping[str, Any]) -> tuple[SizedFile, ...]:
    rows = [[str(text) for text in row] for row in meta.get("files", ())]
    return tuple(
        SizedFile(path=path, blake2b=digest, media_root=root[0] if root else None) for path, digest, *root in rows
    )


def bad_from_dict(fields: Mapping[str, Any]) -> BadSample:
    if fields["kind"] not in get_args(BadKind):
        raise ValueError(f"kind {fields['kind']!r} is unknown")
    return BadSample(**fields)


def is_saved_table(path: Path) -> bool:
    """Return whether the file was written by `save_sizing`."""
    return path.suffix == ".npz"


def _add_up(images: IntArray, num_images: IntArray, num_patches: IntArray) -> bool:
    """Return whether every sample has as many images as it should, of as many patches together."""
    if len(images) != num_images.sum() or (len(images) and images.min() < 0):
        return False
    ends = np.concatenate([[0], np.cumsum(images)])[np.cumsum(num_images)]
    return np.array_equal(np.diff(ends, prepend=0), num_patches)


def _integers(array: npt.NDArray[Any], dtype: type[np.signedinteger[Any]]) -> npt.NDArray[Any]:
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(f"a column of {array.dtype} is no column of whole numbers")
    return array.astype(dtype, copy=False)


# -- finished chunks, so that a killed pass goes on where it was -------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFile:
    """Where a chunk's result lies, and what it says that it is the result of."""

    path: Path
    of: str

    @staticmethod
    def of_chunk(folder: Path, chunk: Chunk, settings_key: str) -> ChunkFile:
        """The name changes with the file's size or time, the chunk, and the settings."""
        status = chunk.file.stat()
        identity: tuple[object, ...] = (str(chunk.file.resolve()), status.st_size, status.st_mtime_ns)
        identity += (chunk.format, chunk.start, chunk.stop, chunk.media_root and str(chunk.media_root), chunk.columns)
        of = repr((identity, blake2b(settings_key.encode())))
        return ChunkFile(path=folder / f"chunk-{blake2b(of.encode())}.npz", of=of)


def save_part(file: ChunkFile, part: Part) -> None:
    """Write one finished chunk; the file is complete, or is not there."""
    content = part_bytes(part, of=file.of)
    if isinstance(file.path, Address):
        file.path.write_bytes(content)
    else:
        write_atomically(file.path, content)


def load_part(file: ChunkFile) -> Part | None:
    """The chunk saved there; None where there is none, or it is damaged (every array has a checksum) or another's."""
    try:
        return part_from(file.path.read_bytes(), of=file.of)
    except UNREADABLE:
        return None


def part_bytes(part: Part, of: str = "") -> bytes:
    """The part as plain data; `of` says of what."""
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in values.items() if name not in arrays}
    return pack_arrays(arrays, plain | {"bad": [asdict(sample) for sample in part.bad], "of": of})


def part_from(content: bytes, of: str = "") -> Part:
    """Return what `part_bytes` wrote; raises one of `UNREADABLE` for anything else."""
    arrays, plain = unpack_arrays(content)
    if plain.pop("of") != of:
        raise ValueError("it is the part of another chunk")
    lists = {name: tuple(value) for name, value in plain.items() if isinstance(value, list)}
    return Part(**{**arrays, **plain, **lists, "bad": tuple(map(bad_from_dict, plain["bad"]))})


# -- whole files: ids that come again, and how often samples are in an epoch -------------------------------------------


def leave_out_long(file: Path, part: Part, max_tokens: int | None) -> Part:
    """The part without samples of more than `max_tokens`, which are bad."""
    if max_tokens is None:
        return part
    advice = f"more than max_tokens {max_tokens}: shorten the sample or raise the limit"
    over = np.flatnonzero(part.numbers[:, 2] > max_tokens).tolist()
    return _leave_out(file, part, {row: f"{part.numbers[row, 2]} tokens, {advice}" for row in over}, "length")


def number_repeated(parts: Sequence[Part]) -> list[Part]:
    """Number samples whose id an earlier one of the file has: a, a#2, a#3; names that another sample has are passed."""
    taken = {name for part in parts for name in part.ids or ()}
    seen, result = dict[str, int](), []
    for part in parts:
        ids = list(part.ids or ())
        for row, name in enumerate(ids):
            if name is None:
                continue
            number = seen.get(name, 0) + 1
            while number > 1 and f"{name}#{number}" in taken:
                number += 1
            seen[name] = number
            if number > 1:
                ids[row] = f"{name}#{number}"
                taken.add(ids[row])
        result.append(part if part.ids is None else replace(part, ids=tuple(ids)))
    return result


def _leave_out(file: Path, part: Part, reasons: dict[int, str], kind: BadKind) -> Part:
    if not reasons:
        return part
    keep = np.ones(len(part.lines), np.bool_)
    keep[list(reasons)] = False
    bad = [
        BadSample.of(file, int(part.lines[row]), part.ids[row] if part.ids else None, kind, reason)
        for row, reason in reasons.items()
    ]
    bad = sorted((*part.bad, *bad), key=lambda sample: sample.line or 0)
    return replace(_kept(part, keep), bad=tuple(bad))


def _kept(part: Part, keep: npt.NDArray[np.bool_]) -> Part:
    """The part without the samples that are not kept; its bad ones as they are."""
    return replace(
        part,
        numbers=part.numbers[keep],
        image_patches=None if part.image_patches is None else part.image_patches[np.repeat(keep, part.numbers[:, 0])],
        lines=part.lines[keep],
        ids=tuple(name for name, kept in zip(part.ids, keep.tolist(), strict=True) if kept) if part.ids else None,
        source=part.source[keep] if part.source is not None else None,
    )


def repeat_samples(parts: Sequence[Part], repeat: float) -> list[Part]:
    """The parts of a file as often as its samples are in an epoch: a whole number of times, or only its beginning.

    Below 1 the samples of the first int(n x repeat) of n lines stay. A sample's id counts its repeats: a, a#2, a#3.
    """
    if repeat < 1:
        ends = [int(part.lines.max(initial=0)) for part in parts]
        ends += [bad.line or 0 for part in parts for bad in part.bad]
        num_lines = max(sum(part.num_lines for part in parts), max(ends, default=0))
        return [_begin(part, int(num_lines * repeat)) for part in parts]
    again = [_renamed(part, number) for number in range(2, int(repeat) + 1) for part in parts]
    return [*parts, *again]


def _begin(part: Part, last_line: int) -> Part:
    kept = _kept(part, part.lines <= last_line)
    return replace(kept, bad=tuple(bad for bad in part.bad if (bad.line or 0) <= last_line))


def _renamed(part: Part, number: int) -> Part:
    ids = None if part.ids is None else tuple(name and f"{name}#{number}" for name in part.ids)
    return replace(part, ids=ids, bad=())
