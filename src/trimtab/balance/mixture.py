"""Data sets drawn together by weights: which rows of each, how often, as one table to pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.errors import PackingError, join_problems
from trimtab.specs import IntArray, SampleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPart:
    """One data set's share of a mixture."""

    weight: float  # of all weights, which add up to 1
    num_rows: int  # it has
    num_drawn: int
    fewest: int  # times a row is drawn in this epoch: fewest or fewest + 1
    num_left_out: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """Row i of `table` is row `row[i]` of data set `part[i]`."""

    table: SampleTable
    part: npt.NDArray[np.int32]
    row: IntArray
    parts: tuple[MixedPart, ...]


def mix_samples(
    tables: Sequence[SampleTable],
    weights: Sequence[float],
    *,
    num_samples: int | None = None,
    epochs: float = 1.0,
    seed: int = 0,
    epoch: int = 0,
) -> Mixture:
    """Samples of all tables in proportion to `weights`, of which data set i gets the share w_i / sum w.

    Use it to draw several data sets in proportion before you pack them.

    `num_samples` in all, or `epochs` times as many as the tables have together. Exact: counts differ from the shares by
    less than one sample (largest remainders), rows of one data set are drawn equally often or once more, and over
    epochs 0 .. e too: each epoch goes on in the data set's own shuffle where the last one stopped.

    >>> import numpy as np
    >>> from trimtab import SampleTable
    >>> tiles = np.array([1, 5, 3, 0, 2, 5, 1, 4])
    >>> samples = SampleTable.of(tiles, 256 * tiles + 90, patch_unit="tiles")
    >>> mixture = mix_samples([samples, samples], weights=[3.0, 1.0], num_samples=16)
    >>> np.bincount(mixture.part).tolist()
    [12, 4]
    """
    _check(tables, weights, num_samples, epochs)
    total = sum(len(table) for table in tables)
    wanted = num_samples if num_samples is not None else max(1, round(epochs * total))
    shares = np.array(weights, np.float64) / float(np.sum(weights))
    counts = share_exactly(wanted, shares)
    rows = [
        _draw(len(table), int(count), seed, epoch, i)
        for i, (table, count) in enumerate(zip(tables, counts, strict=True))
    ]
    part = np.repeat(np.arange(len(tables), dtype=np.int32), counts)
    return Mixture(
        table=_join(tables, rows),
        part=part,
        row=np.concatenate(rows),
        parts=tuple(
            MixedPart(
                weight=float(share),
                num_rows=len(table),
                num_drawn=int(count),
                fewest=int(count) // len(table) if len(table) else 0,
                num_left_out=max(0, len(table) - int(count)),
            )
            for share, table, count in zip(shares, tables, counts, strict=True)
        ),
    )


def share_exactly(total: int, shares: npt.NDArray[np.float64]) -> IntArray:
    """Whole numbers that add up to `total`, each within one of its share (largest remainders, first of equals)."""
    exact = total * shares
    counts = np.floor(exact).astype(np.int64)
    order = np.lexsort((np.arange(len(shares)), counts - exact))
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def _draw(num_rows: int, count: int, seed: int, epoch: int, part: int) -> IntArray:
    """`count` rows, ascending: places epoch * count and on of the data set's shuffle, which repeats for ever."""
    if count == 0:
        return np.empty(0, np.int64)
    from trimtab.balance.rng import permutation

    whole, rest = divmod(count, num_rows)
    first = epoch * count % num_rows
    extra = permutation(num_rows, seed, part, 0x6D6978)[(first + np.arange(rest)) % num_rows]
    times = np.full(num_rows, whole, np.int64)
    times[extra] += 1
    return np.repeat(np.arange(num_rows, dtype=np.int64), times)


def _join(tables: Sequence[SampleTable], rows: Sequence[IntArray]) -> SampleTable:
    def column(name: str) -> IntArray:
        joined: IntArray = np.concatenate([getattr(t, name)[r] for t, r in zip(tables, rows, strict=True)])
        return joined

    starts = np.cumsum([0, *(len(table.source_names) for table in tables)])[:-1]
    source = [t.source[r] + int(s) for t, r, s in zip(tables, rows, starts, strict=True)]
    ids = None
    if any(table.ids is not None for table in tables):
        ids = tuple(t.sample_id(row) for t, r in zip(tables, rows, strict=True) for row in r.tolist())
    return SampleTable(
        num_images=column("num_images"),
        num_patches=column("num_patches"),
        num_tokens=column("num_tokens"),
        patches_sq=column("patches_sq"),
        patches_windowed=column("patches_windowed"),
        image_patches=_join_images(tables, rows),
        ids=ids,
        source=np.concatenate(source).astype(np.int32),
        source_names=tuple(name for table in tables for name in table.source_names),
        patch_unit=tables[0].patch_unit,
        tokens_exact=all(table.tokens_exact for table in tables),
    )


def _join_images(tables: Sequence[SampleTable], rows: Sequence[IntArray]) -> IntArray | None:
    """None where a table does not know them."""
    found = [t.images_of(r) for t, r in zip(tables, rows, strict=True)]
    known = [images for images in found if images is not None]
    return np.concatenate(known) if len(known) == len(found) else None


def _check(tables: Sequence[SampleTable], weights: Sequence[float], num_samples: int | None, epochs: float) -> None:
    problems = []
    if not tables or len(tables) != len(weights):
        problems.append(f"{len(weights)} weights for {len(tables)} data sets: give one each, and at least one data set")
    elif not all(np.isfinite(w) and w >= 0 for w in weights) or not sum(weights) > 0:
        problems.append(f"weights {tuple(weights)} are no proportions: give numbers from 0, one of them above it")
    else:
        for i, (table, weight) in enumerate(zip(tables, weights, strict=True)):
            if weight > 0 and len(table) == 0:
                problems.append(f"data set {i} has weight {weight} and no samples: give it samples, or weight 0")
    if len({table.patch_unit for table in tables}) > 1:
        problems.append("some data sets count patches and others tiles: size them with one image rule")
    if num_samples is not None and num_samples < 1:
        problems.append(f"num_samples {num_samples} draws nothing: give 1 or more")
    if not (np.isfinite(epochs) and epochs > 0):
        problems.append(f"epochs {epochs} is not an amount of data: give a number above 0")
    if problems:
        raise PackingError(join_problems(problems))
