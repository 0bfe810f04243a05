"""Packs that are alike, put into one step: a k-d tree over the packs whose leaves are steps."""

from __future__ import annotations

import numpy as np

from trimtab.specs import FloatArray, IntArray


def group_alike(
    columns: FloatArray, packs: IntArray, group: int, emphasis: float = 1.0, *, run: int | None = None
) -> None:
    """Reorder `packs` in place so that each `group` in a row are alike in all columns; heuristic, no bound.

    Halves the packs (at a multiple of `group`) along the column in which they spread most, relative to its mean, and
    each half again. The spread of the last column, the cost, counts `emphasis` times. O(n log^2 n). With `run` each
    `run` packs in a row are grouped for themselves, all of them in the same passes.

    Example: tokens [9, 1, 8, 2] in groups of 2 spread over 8; sorted and cut in the middle: [1, 2] and [8, 9].
    """
    values = columns[packs]
    n = len(values)
    length = max(run or n, 1)
    starts = np.arange(0, n, length)  # of the runs that are still to be cut, all of one level of the tree
    ends = np.minimum(starts + length, n)
    means, mean_of = _means(values, length), np.arange(len(starts))
    while True:
        large = ends - starts > group
        starts, ends, mean_of = starts[large], ends[large], mean_of[large]
        if len(starts) == 0:
            return
        # 1. the column in which each run spreads most
        lengths = ends - starts
        first = np.cumsum(lengths) - lengths
        rows = np.repeat(starts - first, lengths) + np.arange(lengths.sum())
        spread = np.maximum.reduceat(values[rows], first) - np.minimum.reduceat(values[rows], first)
        mean = means[mean_of]
        relative = np.divide(spread, mean, out=np.zeros_like(spread), where=mean > 0)
        relative[:, -1] *= emphasis
        widest = np.argmax(relative, axis=1)
        # 2. each run in the order of that column
        number = np.repeat(np.arange(len(starts)), lengths)
        order = rows[np.lexsort((values[rows, widest[number]], number))]
        values[rows], packs[rows] = values[order], packs[order]
        # 3. halves of whole groups
        middle = starts + group * (-(-lengths // group) // 2)
        starts, ends = np.stack([starts, middle], axis=1).reshape(-1), np.stack([middle, ends], axis=1).reshape(-1)
        mean_of = np.repeat(mean_of, 2)


def _means(values: FloatArray, length: int) -> FloatArray:
    """(runs, D) of each `length` rows, the last run maybe shorter; added in order: the same bits everywhere."""
    num_full = len(values) // length
    full, rest = np.split(values, [num_full * length])
    means = [np.cumsum(full.reshape(num_full, length, -1) / length, axis=1)[:, -1]] if num_full else []
    means += [np.cumsum(rest / len(rest), axis=0)[-1:]] if len(rest) else []
    return np.concatenate(means) if means else values
