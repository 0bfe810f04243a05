"""One file of ready-made lengths, which says itself how many tiles, patches or tokens each sample has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from trimtab.errors import ImageError, SampleError
from trimtab.samples.problems import BadSample, shorten
from trimtab.samples.records import detect_format, open_parquet, read_json_list, read_records
from trimtab.samples.rows import CONVERSATION_KEYS
from trimtab.samples.table import COLUMNS, Part, is_saved_table, load_table
from trimtab.specs import ImageCounts, ImageRule, ImageRuleBySample, IntArray, SampleTable

TOKEN_KEYS = ("token_num", "num_tokens", "length")
TILE_KEY, FLAG_KEY, SIZES_KEY = "vit_num", "image_flags", "image_wh"
CountImage = Callable[[int, int, int], ImageCounts]  # images of the sample, width, height

_MAX_NUMBER = 2**40  # squares of real lengths stay far inside 64 bits
_NO_SOURCE = "no source"  # of rows without one, where others have one
_PEEK_BYTES = 1 << 16  # the first record of a file of lengths is far shorter

_Source = tuple["npt.NDArray[np.int32]", "tuple[str, ...]"]


def holds_lengths(path: Path) -> bool:
    """Whether the file gives token counts and no conversations, judged by its schema or first record."""
    if is_saved_table(path):
        return True
    kind = detect_format(path)
    if kind == "tar":
        return False
    if kind == "parquet":
        return _gives_lengths(open_parquet(path).schema_arrow.names)
    with path.open("rb") as file:
        head = (
            file.read(_PEEK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip().removeprefix(b"[" if kind == "json" else b"")
        )
    try:
        first, _ = json.JSONDecoder().raw_decode(head.decode("utf-8", "replace").lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and _gives_lengths(first)


def _gives_lengths(names: Sequence[str] | Mapping[str, object]) -> bool:
    return any(key in names for key in TOKEN_KEYS) and not any(key in names for key in CONVERSATION_KEYS)


def read_length_part(path: Path, *, count_image: CountImage | None) -> Part:
    """One file of lengths, bad rows aside."""
    if is_saved_table(path):
        return saved_part(load_table(path))
    kind = detect_format(path)
    if kind == "parquet":
        return _parquet_part(path, count_image)
    if kind == "json":
        rows = read_json_list(path)
        return _rows_part(path, rows, range(1, len(rows) + 1), [], count_image)
    if kind == "tar":
        raise SampleError(f"{path} is a tar shard, which holds samples and no lengths: size it with trimtab size")
    values, lines, bad = [], [], []
    for record in read_records(path):
        if record.problem is not None:
            bad.append(BadSample.of(path, record.line, None, record.problem.kind, str(record.problem)))
        elif not record.blank:
            values.append(record.value)
            lines.append(record.line)
    return _rows_part(path, values, lines, bad, count_image)


def saved_part(table: SampleTable) -> Part:
    """A table sized before, to be joined with others."""
    return Part(
        numbers=np.stack([getattr(table, name) for name in COLUMNS], axis=1),
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


# -- JSON rows --------------------------------------------------------------------------------------------------------


def _rows_part(
    path: Path, rows: list[object], lines: Sequence[int], bad: list[BadSample], count_image: CountImage | None
) -> Part:
    """Columns of a list of objects; checked all at once, and one by one only to name the bad ones."""
    good, good_lines = rows, np.asarray(lines, np.int64)
    fast = set(map(type, rows)) <= {dict}
    columns = {key: [cast("dict[str, object]", row).get(key) for row in rows] for key in _ROW_KEYS} if fast else {}
    if not fast or any(_column_problem(columns, len(rows))):
        keep = []
        for i, row in enumerate(rows):
            reason = _row_problem(row, count_image)
            if reason is None:
                keep.append(i)
            else:
                bad.append(BadSample.of(path, int(good_lines[i]), _id(row), "type", reason))
        good, good_lines = [rows[i] for i in keep], good_lines[keep]
        columns = {key: [cast("dict[str, object]", row).get(key) for row in good] for key in _ROW_KEYS}
    present = [key for key in TOKEN_KEYS if any(v is not None for v in columns[key])]
    if len(present) == 1:
        tokens = np.array(columns[present[0]], np.int64)
    else:  # some rows spell it one way, some another
        spellings = zip(*(columns[key] for key in TOKEN_KEYS), strict=True)
        tokens = np.array([next(v for v in row if v is not None) for row in spellings], np.int64)
    tiles = [v if v is not None else 0 for v in columns[TILE_KEY]]
    flags = [t if f is None else f for f, t in zip(columns[FLAG_KEY], tiles, strict=True)]
    sizes = columns[SIZES_KEY] if any(columns[SIZES_KEY]) else None
    ids = tuple(_id(row) for row in good)
    named = None
    if any(isinstance(name, str) for name in columns["source"]):
        named = [name if isinstance(name, str) else _NO_SOURCE for name in columns["source"]]
    return _part(
        tokens=tokens,
        tiles=np.array(tiles, np.int64) if any(v is not None for v in columns[TILE_KEY]) else None,
        flags=np.array(flags, np.int64),
        sizes=cast("list[Any] | None", sizes),
        count_image=count_image,
        lines=good_lines,
        ids=ids if any(name is not None for name in ids) else None,
        bad=bad,
        source=_codes(named) if named is not None else None,
    )


_ROW_KEYS = (*TOKEN_KEYS, TILE_KEY, FLAG_KEY, SIZES_KEY, "source")


def _column_problem(columns: Mapping[str, list[object]], num_rows: int) -> Iterator[bool]:
    """Whether some row of a column is not what it must be; reads columns at the speed of C."""
    present = [key for key in TOKEN_KEYS if any(value is not None for value in columns[key])]
    yield len(present) != 1
    for key in (*present, TILE_KEY, FLAG_KEY):
        values = columns[key]
        kinds = set(map(type, values))
        if kinds == {type(None)} and key not in present:
            continue
        yield kinds != {int}
        low, high = min(cast("list[int]", values)), max(cast("list[int]", values))
        yield low < (1 if key in TOKEN_KEYS else 0) or high > _MAX_NUMBER
    yield num_rows > 0 and any(value is not None for value in columns[SIZES_KEY])  # nested: looked at row by row


def _row_problem(row: object, count_image: CountImage | None) -> str | None:
    if not isinstance(row, dict):
        return f"the record is a {type(row).__name__}: it must be a JSON object"
    present = [key for key in TOKEN_KEYS if row.get(key) is not None]
    if len(present) != 1:
        return f"the record has {len(present)} of token_num, num_tokens and length: give exactly one"
    for key, low in ((present[0], 1), (TILE_KEY, 0), (FLAG_KEY, 0)):
        value = row.get(key)
        if value is None and key != present[0]:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MAX_NUMBER:
            return f"'{key}' is {shorten(repr(value), 40)}: it must be a whole number of at least {low}"
    if row.get(SIZES_KEY) is None:
        return None
    if row.get(TILE_KEY) is not None:
        return "the record has both 'vit_num' and 'image_wh': keep one of them"
    try:
        _count_images(row[SIZES_KEY], count_image)
    except (ImageError, SampleError) as error:
        return str(error)
    return None


# -- Parquet ----------------------------------------------------------------------------------------------------------


def _parquet_part(path: Path, count_image: CountImage | None) -> Part:
    import pyarrow
    import pyarrow.compute
    import pyarrow.parquet

    file = open_parquet(path)
    names = [name for name in file.schema_arrow.names if name in (*_ROW_KEYS, "id")]
    try:
        table = file.read(columns=names)
    except (OSError, pyarrow.ArrowException) as error:
        raise SampleError(f"{path} is not readable as Parquet: {shorten(str(error), 200)}; write it again") from None
    token_names = [name for name in names if name in TOKEN_KEYS]
    if len(token_names) != 1:
        raise SampleError(f"{path} has the columns {token_names or names}: give exactly one of {', '.join(TOKEN_KEYS)}")
    numbers: dict[str, IntArray] = {}
    is_plain = SIZES_KEY not in names and table.num_rows > 0
    for name in (token_names[0], TILE_KEY, FLAG_KEY) if is_plain else ():
        if name not in names:
            continue
        column = table.column(name)
        if not pyarrow.types.is_integer(column.type):
            raise SampleError(f"column '{name}' of {path} is {column.type}: write it as whole numbers")
        values = pyarrow.compute.fill_null(column.cast(pyarrow.int64(), safe=False), -1).to_numpy()
        is_plain &= (1 if name in TOKEN_KEYS else 0) <= values.min() and values.max() <= _MAX_NUMBER
        numbers[name] = values
    if not is_plain:  # images, or bad rows to be named: row by row
        rows = table.to_pylist()
        return _rows_part(path, rows, range(1, len(rows) + 1), [], count_image)
    source = None
    if "source" in names:
        encoded = table.column("source").cast(pyarrow.string()).combine_chunks().dictionary_encode()
        source_names = encoded.dictionary.to_pylist()
        codes = pyarrow.compute.fill_null(encoded.indices, len(source_names)).to_numpy().astype(np.int32)
        source = (codes, (*source_names, *([_NO_SOURCE] if encoded.null_count else [])))
    tiles = numbers.get(TILE_KEY)
    return _part(
        tokens=numbers[token_names[0]],
        tiles=tiles,
        flags=numbers.get(FLAG_KEY, np.zeros(table.num_rows, np.int64) if tiles is None else tiles),
        sizes=None,
        count_image=count_image,
        lines=np.arange(1, table.num_rows + 1),
        ids=tuple(map(str, table.column("id").to_pylist())) if "id" in names else None,
        bad=[],
        source=source,
    )


# -- both -------------------------------------------------------------------------------------------------------------


def _part(
    *,
    tokens: IntArray,
    tiles: IntArray | None,
    flags: IntArray,
    sizes: list[Any] | None,
    count_image: CountImage | None,
    lines: IntArray,
    ids: tuple[str | None, ...] | None,
    bad: list[BadSample],
    source: _Source | None,
) -> Part:
    numbers = np.zeros((len(tokens), len(COLUMNS)), np.int64)
    numbers[:, 2] = tokens
    image_patches: list[int] = []
    unit: Literal["patches", "tiles"] | None = None
    if tiles is not None:
        unit = "tiles"
        numbers[:, 0] = flags > 0
        numbers[:, 1] = numbers[:, 3] = numbers[:, 4] = tiles
    elif sizes is not None:
        unit = "patches"
        for row, images in enumerate(sizes):
            counts = _count_images(images, count_image)
            numbers[row, [0, 1, 3, 4]] = (
                len(counts),
                sum(c.patches for c in counts),
                sum(c.patches_sq for c in counts),
                sum(c.patches_windowed for c in counts),
            )
            image_patches += [c.patches for c in counts]
    order = sorted(bad, key=lambda sample: sample.line or 0)
    return Part(
        numbers=numbers,
        image_patches=None if sizes is None else np.array(image_patches, np.int64),
        lines=lines,
        ids=ids,
        bad=tuple(order),
        source=source[0] if source is not None else None,
        source_names=source[1] if source is not None else (),
        patch_unit=unit,
    )


def image_counter(rule: ImageRule) -> CountImage:
    """Counts of an image among `num_images` of its sample, remembered by size."""

    @lru_cache(maxsize=1 << 16)
    def count(num_images: int, width: int, height: int) -> ImageCounts:
        own = rule.in_sample(num_images) if isinstance(rule, ImageRuleBySample) else rule
        return own.count(width, height)

    return count


def _count_images(images: object, count_image: CountImage | None) -> list[ImageCounts]:
    """Counts of the images of [[width, height], ...] (one bare pair is one image)."""
    if images is None:
        return []
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


def _codes(names: list[str]) -> _Source:
    seen: dict[str, int] = {}
    return np.array([seen.setdefault(name, len(seen)) for name in names], np.int32), tuple(seen)


def _id(row: object) -> str | None:
    value = row.get("id") if isinstance(row, dict) else None
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
