"""Packs that are alike, put into one step: a k-d tree over the packs whose leaves are steps."""

from __future__ import annotations

import numpy as np

from trimtab.specs import FloatArray, IntArray


def group_alike(columns: FloatArray, packs: IntArray, group: int, emphasis: float = 1.0) -> None:
    """Reorder `packs` in place so that each `group` in a row are alike in all columns; heuristic, no bound.

    Halves the packs (at a multiple of `group`) along the column in which they spread most, relative to its mean, and
    each half again. The spread of the last column, the cost, counts `emphasis` times. O(n log^2 n).

    Example: tokens [9, 1, 8, 2] in groups of 2 spread over 8; sorted and cut in the middle: [1, 2] and [8, 9].
    """
    values = columns[packs]
    n, D = values.shape
    mean = np.cumsum(values / n, axis=0)[-1] if n else np.zeros(D)  # added in order: the same bits everywhere
    starts, ends = np.array([0]), np.array([n])  # of the runs that are still to be cut, all of one level of the tree
    while True:
        large = ends - starts > group
        starts, ends = starts[large], ends[large]
        if len(starts) == 0:
            return
        # 1. the column in which each run spreads most
        lengths = ends - starts
        first = np.cumsum(lengths) - lengths
        rows = np.repeat(starts - first, lengths) + np.arange(lengths.sum())
        spread = np.maximum.reduceat(values[rows], first) - np.minimum.reduceat(values[rows], first)
        relative = np.divide(spread, mean, out=np.zeros_like(spread), where=mean > 0)
        relative[:, -1] *= emphasis
        widest = np.argmax(relative, axis=1)
        # 2. each run in the order of that column
        run = np.repeat(np.arange(len(starts)), lengths)
        order = rows[np.lexsort((values[rows, widest[run]], run))]
        values[rows], packs[rows] = values[order], packs[order]
        # 3. halves of whole groups
        middle = starts + group * (-(-lengths // group) // 2)
        starts, ends = np.stack([starts, middle], axis=1).reshape(-1), np.stack([middle, ends], axis=1).reshape(-1)
