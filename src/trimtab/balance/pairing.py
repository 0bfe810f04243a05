"""The most pairs of samples that fit two limits: exact, where a pack holds two samples at most.

Symbols: n samples with columns a and b under the limits A and B; i and j fit where a_i + a_j <= A and b_i + b_j <= B.
"""

from __future__ import annotations

import numpy as np

from trimtab.compiled import compiled, inner
from trimtab.specs import FloatArray, IntArray

NO_THREE_FIT = (2 / 3) * (1 + 1e-9)
"""No three samples fit one pack whose shares of the two limits add up to more than this each: they fill above two."""


@compiled
def match_pairs(sizes: FloatArray, limits: FloatArray) -> IntArray:
    """Partner of each sample (n, 2), or -1: as many pairs as any choice makes. O(n log n).

    Each sample chooses one that fits it, itself included, and each is chosen once at most; as many as possible choose
    (`_choose`). Choices form chains and circles, which become pairs. Only a circle of odd length leaves one out; it
    holds a sample that fits itself, and any two of these fit each other. So half of the choices become pairs,
    rounded down, and no pairing has more: each of its pairs is two choices.

    Example: sizes 6, 5, 4, 3 of one column under 9 choose 3, 4, 5 and 6: the pairs 6 + 3 and 5 + 4.
    """
    n = len(sizes)
    chosen, chooser = _choose(sizes, limits)
    partner, seen = np.full(n, -1, np.int64), np.zeros(n, np.bool_)
    # 1. chains, from their first sample on
    for i in range(n):
        if chooser[i] < 0:
            j = np.int64(i)
            while j >= 0:
                seen[j] = True
                k = chosen[j]
                if k < 0:
                    break
                seen[k] = True
                partner[j], partner[k] = k, j
                j = chosen[k]
    # 2. circles; those of odd length leave out a sample that fits itself
    left = np.int64(-1)
    for i in range(n):
        if seen[i]:
            continue
        length, start, j = 0, np.int64(i), np.int64(i)
        while not seen[j]:
            seen[j] = True
            length += 1
            if 2 * sizes[j, 0] <= limits[0] and 2 * sizes[j, 1] <= limits[1]:
                start = j
            j = chosen[j]
        j = start
        if length % 2 == 1:
            if left >= 0:
                partner[start], partner[left] = left, start
            left = start if left < 0 else np.int64(-1)
            j = chosen[start]
        for _pair in range(length // 2):
            k = chosen[j]
            partner[j], partner[k] = k, j
            j = chosen[k]
    return partner


@inner
def _choose(sizes: FloatArray, limits: FloatArray) -> tuple[IntArray, IntArray]:
    """What each sample chooses, or -1, and who chooses it: as many choices as can be.

    The largest of column a choose first. What fits them there fits all later ones too, so the best choice is what
    fills most of column b: it is found in a binary tree over the samples by b, whose nodes know what is still free.
    """
    n = len(sizes)
    by_a, by_b = np.argsort(sizes[:, 0], kind="mergesort"), np.argsort(sizes[:, 1], kind="mergesort")
    place, ascending = np.empty(n, np.int64), np.empty(n)
    for r in range(n):
        place[by_b[r]], ascending[r] = r, sizes[by_b[r], 1]
    width = 1
    while width < n:
        width *= 2
    is_free = np.zeros(2 * width, np.bool_)  # node p has the children 2 p and 2 p + 1; leaves begin at `width`
    chosen, chooser = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    num_open = 0
    for r in range(n - 1, -1, -1):
        i = by_a[r]
        # 1. samples that fit i in column a are free from now on
        while num_open < n and sizes[by_a[num_open], 0] + sizes[i, 0] <= limits[0]:
            p = place[by_a[num_open]] + width
            while p > 0 and not is_free[p]:
                is_free[p] = True
                p //= 2
            num_open += 1
        # 2. the last free leaf that fits in column b: up to a free left neighbour, and down again
        p = np.searchsorted(ascending, limits[1] - sizes[i, 1], side="right") - 1 + width
        if p < width:
            continue
        while p > 0 and not is_free[p]:
            while p > 0 and p % 2 == 0:
                p //= 2
            p -= np.int64(p > 0)
        if p == 0:
            continue
        while p < width:
            p = 2 * p + np.int64(is_free[2 * p + 1])
        # 3. it is taken
        j = by_b[p - width]
        chosen[i], chooser[j] = j, i
        is_free[p] = False
        while p > 1 and not (is_free[p] or is_free[p ^ 1]):
            p //= 2
            is_free[p] = False
    return chosen, chooser
