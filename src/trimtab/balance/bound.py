"""Packs that any packing needs: by the room that samples fill, and by those of which no two fit one pack.

Symbols: k limited columns, Q the limit of one.
"""

from __future__ import annotations

import numpy as np

from trimtab.specs import FloatArray, IntArray

MOST_COUNTED = 1 << 22  # largest size up to which counting beats sorting


def rounded_sizes(sizes: IntArray, limit: int) -> FloatArray | None:
    """Sizes (n,) rounded so that they still bound packs from below, and by more packs; None where none do.

    For a threshold x of at most Q / 2, what is above Q - x counts as Q, what is below x as nothing: no pack's sum of
    these is above Q, since beside a sample above Q - x there is room only for samples below x (a dual feasible
    function; Martello and Toth 1990, bound L2). The threshold that gives most packs is found by trying all.

    Example: of sizes [5, 5, 5, 3, 1] under Q = 9 there are 19, which fill 2.1 packs; with x = 4.5 the fives count as 9
    and the others as nothing: 3 packs. O(n log n).
    """
    values, counts = _histogram(sizes)
    sums = np.concatenate([[0.0], np.cumsum(values * counts, dtype=np.float64)])
    numbers = np.concatenate([[0], np.cumsum(counts)])
    thresholds = np.append(values[values <= 0.5 * limit], 0.5 * limit)
    first = np.searchsorted(values, thresholds, side="left")  # below: nothing
    last = np.searchsorted(values, limit - thresholds, side="right")  # from here on: whole packs
    packs = (numbers[-1] - numbers[last]) + (sums[last] - sums[first]) / limit
    best = int(np.argmax(packs))
    if packs[best] <= sums[-1] / limit * (1 + 1e-9):
        return None
    rounded = np.where(sizes > limit - thresholds[best], limit, sizes).astype(np.float64)
    rounded[sizes < thresholds[best]] = 0.0
    return rounded


def _histogram(sizes: IntArray) -> tuple[IntArray, IntArray]:
    """The sizes that occur, ascending, and how often."""
    if len(sizes) and sizes.max() <= MOST_COUNTED:
        counts = np.bincount(sizes)
        values = np.flatnonzero(counts)
        return values, counts[values]
    values, counts = np.unique(sizes, return_counts=True)
    return values, counts


def counted_columns(sizes: IntArray, limits: tuple[int, ...], rounded_fill: float = 1.0) -> FloatArray:
    """Columns (n, k or more) in units of a pack: the sum of each is a number of packs that the samples need at least.

    Rounded sizes times `rounded_fill`: packs can hold a large sample each, all of them, but not be full of small ones.
    """
    columns = []
    for d, limit in enumerate(limits):
        columns.append(sizes[:, d] / limit)
        rounded = rounded_sizes(sizes[:, d], limit)
        if rounded is not None:
            columns.append(rounded * (rounded_fill / limit))
    return np.stack(columns, axis=1)


def sum_columns(sizes: FloatArray) -> FloatArray:
    """Sums of (n, D) columns, each added as NumPy adds: the same bits on every machine."""
    return np.array([column.sum() for column in sizes.T])


def lower_bound_packs(sizes: IntArray, limits: tuple[int, ...]) -> int:
    """Packs that samples (n, k) need under `limits`, whatever the packing: no method makes fewer.

    >>> lower_bound_packs(np.array([[5, 10], [5, 10], [5, 10], [3, 10], [1, 10]]), (9, 100))
    3
    """
    if len(sizes) == 0:
        return 0
    return int(np.ceil(counted_columns(sizes, limits).sum(axis=0).max() - 1e-9))
