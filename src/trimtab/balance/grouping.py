"""Packs that are alike, put into one step: a k-d tree over the packs whose leaves are steps."""

from __future__ import annotations

import numpy as np
from numba import njit

from trimtab.specs import FloatArray, IntArray


@njit(cache=True, nogil=True)
def group_alike(columns: FloatArray, packs: IntArray, group: int, emphasis: float = 1.0) -> None:
    """Reorder `packs` in place so that each `group` in a row are alike in all columns; heuristic, no bound.

    Halves the packs (at a multiple of `group`) along the column in which they spread most, relative to its mean, and
    each half again. The spread of the last column, the cost, counts `emphasis` times. O(n log^2 n).
    """
    n, D = len(packs), columns.shape[1]
    mean = np.zeros(D)
    for i in range(n):
        for d in range(D):
            mean[d] += columns[packs[i], d] / n
    stack = np.empty((128, 2), np.int64)
    stack[0, 0], stack[0, 1] = 0, n
    depth = 1
    while depth > 0:
        depth -= 1
        low, high = stack[depth, 0], stack[depth, 1]
        if high - low <= group:
            continue
        widest, spread = 0, -1.0
        for d in range(D):
            smallest, largest = np.inf, -np.inf
            for i in range(low, high):
                smallest = min(smallest, columns[packs[i], d])
                largest = max(largest, columns[packs[i], d])
            relative = (largest - smallest) / mean[d] if mean[d] > 0 else 0.0
            if d == D - 1:
                relative *= emphasis
            if relative > spread:
                widest, spread = d, relative
        key = np.empty(high - low)
        for i in range(low, high):
            key[i - low] = columns[packs[i], widest]
        order = np.argsort(key, kind="mergesort")
        packs[low:high] = packs[low:high][order]
        num_groups = (high - low + group - 1) // group
        middle = low + group * (num_groups // 2)
        stack[depth, 0], stack[depth, 1] = low, middle
        stack[depth + 1, 0], stack[depth + 1, 1] = middle, high
        depth += 2
