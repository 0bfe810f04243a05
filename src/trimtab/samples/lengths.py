"""Files of ready-made lengths, which say themselves how many tiles, patches or tokens each sample has."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trimtab.address import Address
from trimtab.errors import ImageError, SampleError, shorten
from trimtab.limited import MEMORY_BYTES, ChildEndedError, at, limited_child
from trimtab.models.images.asked import AskedImages
from trimtab.models.images.rules import rule_in_sample
from trimtab.samples.formats import open_parquet, unreadable
from trimtab.samples.problems import BadSample, Format, refuse_bad
from trimtab.samples.records import GROUPED, detect_format, layout_of, read_records
from trimtab.samples.shapes import has_shape
from trimtab.samples.sources import find_sources, source_labels
from trimtab.samples.table import (
    COLUMNS,
    PART_COLUMNS,
    Part,
    is_saved_table,
    join_parts,
    load_table,
    numbers_of,
    part_bytes,
    part_from,
    repeat_samples,
)
from trimtab.specs import ImageCounts, ImageRule, IntArray, SampleTable

TOKEN_KEYS = ("token_num", "num_tokens", "length")
TILE_KEY, FLAG_KEY, SIZES_KEY = "vit_num", "image_flags", "image_wh"
CountImage = Callable[[int, int, int], ImageCounts]  # images of the sample, width, height

_KEYS = (*TOKEN_KEYS, TILE_KEY, FLAG_KEY, SIZES_KEY, "source", "id")
_MAX_NUMBER = 2**40  # squares of real lengths stay far inside 64 bits
_NO_SOURCE = "no source"  # of rows without one, where others have one
_BYTES_A_BYTE = 200  # of memory for one of a compressed column: it becomes a list of Python's numbers
_COLUMNS_CPU_S = 600  # hundreds of millions of rows
_PEEK_BYTES = 1 << 16  # the first record of a file of lengths is far shorter

_Columns = Mapping[str, Sequence[Any]]
"""By key what each row has, None where it has nothing; keys that no row has may be left out."""


def holds_lengths(path: Path) -> bool:
    """Return whether the file gives token counts and no conversations, judged by its schema or first record."""
    if is_saved_table(path):
        return True
    kind = detect_format(path)
    if kind == "tar":
        return False
    if kind in GROUPED:
        return _gives_lengths(layout_of(path, kind)[0])
    with path.open("rb") as file:
        head = (
            file.read(_PEEK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip().removeprefix(b"[" if kind == "json" else b"")
        )
    try:
        first, _ = json.JSONDecoder().raw_decode(head.decode("utf-8", "replace").lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and _gives_lengths(first)


def _gives_lengths(names: Collection[str]) -> bool:
    return any(key in names for key in TOKEN_KEYS) and not has_shape(names)


def read_length_parts(files: Sequence[Path], image_rule: ImageRule | None) -> list[Part]:
    """Return the files of lengths; a rule that asks another program is asked about all their images at once."""
    if isinstance(image_rule, AskedImages):
        image_rule.prepare(sizes_in([read_length_part(file, SizesAlone()) for file in files]))
    return [read_length_part(file, image_rule) for file in files]


def read_length_part(path: Path, image_rule: ImageRule | None) -> Part:
    """Return one file of lengths, bad rows aside; columns are read in a limited child."""
    if is_saved_table(path):
        return saved_part(load_table(path))
    kind = detect_format(path)
    if kind == "tar":
        raise SampleError(f"{path} is a tar shard, which holds samples and no lengths: size it with trimtab size")
    if kind not in GROUPED:
        return _read_part(path, kind, image_rule)
    memory_bytes = max(MEMORY_BYTES, _BYTES_A_BYTE * path.stat().st_size)
    with limited_child(network=isinstance(path, Address), memory_bytes=memory_bytes) as child:
        try:
            return part_from(child.ask(f"{__name__}:length_part", path, kind, image_rule))
        except ChildEndedError as error:
            raise unreadable(path, kind, error) from None


def length_part(path: Path, kind: Format, image_rule: ImageRule | None) -> bytes:
    """The answer to `read_length_part`."""
    at("the columns", cpu_s=_COLUMNS_CPU_S)
    return part_bytes(_read_part(path, kind, image_rule))


def _read_part(path: Path, kind: Format, image_rule: ImageRule | None) -> Part:
    count_image = None if image_rule is None else image_counter(image_rule)
    bad: list[BadSample] = []
    if kind == "parquet":
        columns = _parquet_columns(path)
        num_rows = len(next(iter(columns.values())))
        return _make_part(path, columns, range(1, num_rows + 1), bad, count_image)
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    for record in read_records(path, more_columns=_KEYS):
        if record.problem is not None:
            bad.append(BadSample.of(path, record.line, None, record.problem.kind, str(record.problem)))
        elif isinstance(record.value, dict):
            rows.append(record.value)
            lines.append(record.line)
        elif not record.blank:
            reason = f"the record is a {type(record.value).__name__}: it must be a JSON object"
            bad.append(BadSample.of(path, record.line, None, "type", reason))
    named = {key: [row.get(key) for row in rows] for key in _KEYS}
    return _make_part(path, named, lines, bad, count_image)


def saved_part(table: SampleTable) -> Part:
    """Return a table sized before, to be joined with others."""
    second = np.zeros(len(table), np.int64) if table.second_tokens is None else table.second_tokens
    return Part(
        numbers=np.stack([*(getattr(table, name) for name in COLUMNS), second], axis=1),
        image_patches=table.image_patches,
        lines=np.arange(1, len(table) + 1) if table.line is None else table.line,
        file_index=table.file_index,
        num_files=table.num_files,
        ids=table.ids,
        source=table.source,
        source_names=table.source_names,
        patch_unit=table.patch_unit,
        tokens_exact=table.tokens_exact,
    )


def _parquet_columns(path: Path) -> _Columns:
    import pyarrow

    file = open_parquet(path)
    try:
        table = file.read(columns=[name for name in file.schema_arrow.names if name in _KEYS])
        table.validate(full=True)
    except (OSError, ValueError, SystemError, pyarrow.ArrowException) as error:
        raise unreadable(path, "Parquet", error) from None
    if not any(key in table.column_names for key in TOKEN_KEYS):
        raise SampleError(f"{path} has no column of lengths: give one of {', '.join(TOKEN_KEYS)}")
    columns: dict[str, Sequence[Any]] = {}
    for name in table.column_names:
        column = table.column(name)
        has_holes = column.null_count and pyarrow.types.is_primitive(column.type)  # NaN in NumPy
        is_nested = pyarrow.types.is_nested(column.type)
        columns[name] = column.to_pylist() if has_holes or is_nested else column.to_numpy().tolist()  # ten times faster
    return columns


def _make_part(
    path: Path, columns: _Columns, lines: Sequence[int], bad: list[BadSample], count_image: CountImage | None
) -> Part:
    """Return rows as numbers; those that cannot be are put to `bad`."""
    columns = {key: values for key, values in columns.items() if any(x is not None for x in values)}
    reasons, counts = _find_problems(columns, len(lines), count_image)
    if reasons:
        ids = columns.get("id", [None] * len(lines))
        bad += [BadSample.of(path, lines[row], _id(ids[row]), "type", reason) for row, reason in reasons.items()]
        good = [row for row in range(len(lines)) if row not in reasons]
        columns = {key: [values[row] for row in good] for key, values in columns.items()}
        lines, counts = [lines[row] for row in good], counts and [counts[row] for row in good]
    numbers = np.zeros((len(lines), len(PART_COLUMNS)), np.int64)
    for key in columns.keys() & set(TOKEN_KEYS):  # some rows spell it one way, some another
        numbers[:, 2] += _numbers(columns[key])
    unit: Literal["patches", "tiles"] | None = None
    if TILE_KEY in columns:
        unit = "tiles"
        tiles = _numbers(columns[TILE_KEY])
        flags = columns.get(FLAG_KEY, tiles)
        numbers[:, 0] = np.array([t if x is None else x for x, t in zip(flags, tiles, strict=True)], np.int64) > 0
        numbers[:, 1] = numbers[:, 3] = numbers[:, 4] = tiles
    elif counts is not None:
        unit = "patches"
        for row, images in enumerate(counts):
            numbers[row] = numbers_of(images, numbers[row, 2])
    codes: dict[str, int] = {}
    names = (name if isinstance(name, str) else _NO_SOURCE for name in columns.get("source", ()))
    source = np.array([codes.setdefault(name, len(codes)) for name in names], np.int32)
    is_named = bool(codes.keys() - {_NO_SOURCE})
    ids = tuple(map(_id, columns.get("id", ())))
    return Part(
        numbers=numbers,
        image_patches=None if unit != "patches" else np.array([c.patches for x in counts or () for c in x], np.int64),
        lines=np.asarray(lines, np.int64),
        ids=ids if any(name is not None for name in ids) else None,
        bad=tuple(sorted(bad, key=lambda sample: sample.line or 0)),
        source=source if is_named else None,
        source_names=tuple(codes) if is_named else (),
        patch_unit=unit,
    )


def _numbers(values: Sequence[int | None]) -> IntArray:
    return np.array([0 if x is None else x for x in values] if None in values else values, np.int64)


def _find_problems(
    columns: _Columns, num_rows: int, count_image: CountImage | None
) -> tuple[dict[int, str], list[list[ImageCounts]] | None]:
    """Find what is wrong with rows, by row; and counts of every row's images, where some have sizes."""
    reasons: dict[int, str] = {}
    # 1. exactly one spelling of the tokens
    num_given = np.zeros(num_rows, np.int64)
    for key in columns.keys() & set(TOKEN_KEYS):
        num_given += np.fromiter((x is not None for x in columns[key]), np.bool_, num_rows)
    for row in np.flatnonzero(num_given != 1).tolist():
        reasons[row] = f"the record has {num_given[row]} of token_num, num_tokens and length: give exactly one"
    # 2. whole numbers within bounds; a column at once first, at the speed of C
    for key, low in (*((key, 1) for key in TOKEN_KEYS), (TILE_KEY, 0), (FLAG_KEY, 0)):
        values = columns.get(key, ())
        if set(map(type, values)) == {int} and low <= min(values) and max(values) <= _MAX_NUMBER:
            continue
        for row, value in enumerate(values):
            if value is not None and (type(value) is not int or not low <= value <= _MAX_NUMBER):
                wrong = f"'{key}' is {shorten(repr(value), 40)}: it must be a whole number of at least {low}"
                reasons.setdefault(row, wrong)
    # 3. images, in one unit
    if SIZES_KEY not in columns:
        return reasons, None
    tiles = columns.get(TILE_KEY, [None] * num_rows)
    counts: list[list[ImageCounts]] = [[] for _ in range(num_rows)]
    for row, sizes in enumerate(columns[SIZES_KEY]):
        if sizes is None or row in reasons:
            continue
        if tiles[row] is not None:
            reasons[row] = "the record has both 'vit_num' and 'image_wh': keep one of them"
            continue
        try:
            counts[row] = _count_images(sizes, count_image)
        except (ImageError, SampleError) as error:
            reasons[row] = str(error)
    return reasons, counts if any(columns[SIZES_KEY]) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesAlone:
    """Stands for a rule that has yet to be asked: an image's `patches` are its width and height."""

    name: str = "sizes"

    def count(self, width: int, height: int) -> ImageCounts:
        packed = width << _SIDE_BITS | height
        return ImageCounts(patches=packed, tokens=0, tiles=1, patches_sq=0, patches_windowed=0)


_SIDE_BITS = 28  # of an image of `MAX_PIXELS`; a sample of a hundred such images still fits 63 bits


def sizes_in(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return distinct (width, height) of all images, sized by `SizesAlone`."""
    columns = [part.image_patches for part in parts if part.image_patches is not None and len(part.image_patches)]
    distinct = np.unique(np.concatenate(columns)).tolist() if columns else []
    return [(packed >> _SIDE_BITS, packed & (1 << _SIDE_BITS) - 1) for packed in distinct]


def image_counter(rule: ImageRule) -> CountImage:
    """Counts of an image among `num_images` of its sample, remembered by size."""

    @lru_cache(maxsize=1 << 16)
    def count(num_images: int, width: int, height: int) -> ImageCounts:
        return rule_in_sample(rule, num_images).count(width, height)

    return count


def _count_images(images: object, count_image: CountImage | None) -> list[ImageCounts]:
    """Counts of the images of [[width, height], ...] (one bare pair is one image)."""
    if count_image is None:
        raise SampleError("'image_wh' needs a model's image rule to count patches: name the model (--model)")
    pairs = [images] if _is_pair(images) else images
    if not isinstance(pairs, (list, tuple)) or not all(map(_is_pair, pairs)):
        raise SampleError("'image_wh' must be a list of [width, height] pairs of whole numbers above 0")
    return [count_image(len(pairs), width, height) for width, height in pairs]


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(side, int) and not isinstance(side, bool) and 0 < side <= 2**31 for side in value)
    )


def _id(value: object) -> str | None:
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None


# -- several files as one table: what `trimtab pack` reads -------------------------------------------------------------


def read_lengths(paths: Path | Sequence[Path], *, image_rule: ImageRule | None = None) -> SampleTable:
    """Return one table of files that give token counts themselves: `token_num`, `num_tokens` or `length`.

    With `vit_num` the table counts tiles (`patch_unit="tiles"`, `patches_sq` = tiles; `num_images` is 1 where a sample
    has real tiles, because the file does not tell images apart; a text-only sample keeps the dummy tile it is given).
    With `image_wh` ([[width, height], ...]) patches come from `image_rule`. A `source` column names data sets; else
    each file is one. Tables of `save_sizing` are read as they are. Raises one `SampleError` that lists every bad row.
    """
    sources = find_sources(paths)
    files = [source.file for source in sources]
    if len(files) == 1 and is_saved_table(files[0]):
        return load_table(files[0])
    parts = read_length_parts(files, image_rule)
    refuse_bad([bad for part in parts for bad in part.bad], sum(part.num_read for part in parts), can_skip=False)
    if not any(len(part.lines) for part in parts):
        raise SampleError(f"no sample in {', '.join(map(str, files))}: name files that hold some")
    repeated = [repeat_samples([part], source.repeat) for source, part in zip(sources, parts, strict=True)]
    return join_parts([source.file for source in sources], repeated, source_labels(sources))
