"""Best way to share the samples of two packs between them: the move all of `balanced` is made of.

Symbols: D columns per sample, the limited ones first and the cost last (its limit is infinite); a pack's *sums* are
its samples' columns added up. Packs are linked lists (`head`, `after`, -1 ends), so no pack has a largest count.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from trimtab.balance.rng import UIntArray, below
from trimtab.specs import FloatArray, IntArray

MAX_FREE = 12
"""Samples of two packs that may change side at once, at most: 2**12 ways are looked at."""

LOW_BITS = 5
WIDTH = 1 << LOW_BITS  # ways a row: four AVX registers of float32


class Packs(NamedTuple):
    """Packs while they are being made (a NamedTuple: what numba can take apart)."""

    head: IntArray  # (P,) first sample of each pack
    after: IntArray  # (n,) next sample of the same pack
    num_held: IntArray  # (P,) samples in each pack
    sums: FloatArray  # (P, D)


class Goal(NamedTuple):
    """What makes one sharing of samples better than another."""

    limits: FloatArray  # (D,)
    weights: FloatArray  # (D,) of squared half differences
    penalties: FloatArray  # (D,) of each unit above a limit; 0 where there is none
    means: FloatArray  # (D,)
    slopes: FloatArray  # (D,) of each unit above the mean; 0: only limits count


class Scratch(NamedTuple):
    """Working memory of `split_pair`, made once."""

    members: IntArray  # as long as two packs can be
    high: npt.NDArray[np.float32]
    low: npt.NDArray[np.float32]
    score: npt.NDArray[np.float32]
    lanes: npt.NDArray[np.float32]


def make_packs(num_packs: int, num_samples: int, num_columns: int) -> Packs:
    """Empty packs for samples 0 .. num_samples - 1."""
    return Packs(
        np.full(num_packs, -1, np.int64),
        np.full(num_samples, -1, np.int64),
        np.zeros(num_packs, np.int64),
        np.zeros((num_packs, num_columns)),
    )


def make_scratch(num_samples: int) -> Scratch:
    num_rows = 1 << (MAX_FREE - LOW_BITS)
    return Scratch(
        np.empty(num_samples, np.int64),
        np.empty(num_rows, np.float32),
        np.empty(WIDTH, np.float32),
        np.empty((num_rows, WIDTH), np.float32),
        np.empty(WIDTH, np.float32),
    )


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"nnan", "ninf", "nsz"})
def split_pair(
    sizes: FloatArray, packs: Packs, a: int, b: int, goal: Goal, max_free: int, state: UIntArray, scratch: Scratch
) -> bool:
    """Share the samples of packs a and b anew if that is better; True if it was.

    Minimises, with e the half difference of the two packs' sums, sum_d weights[d] e_d^2 + penalties[d] overflow_d +
    slopes[d] above_d: what the larger of the two has above its limit, and above the mean. Of n <= max_free + 1 samples
    all ways are looked at: one sample stays, as swapping the packs changes nothing. Of more, max_free random ones may
    change side.

    All ways are scored in float32, row by row, which the compiler turns into vector code: the best is exact but for
    ties within 1e-5. It is accepted only if it is better in float64, where sums of integers below 2^53 are exact. No
    fused multiply-add and no reordered sums: every machine takes the same decisions.
    """
    head, after, count, sums = packs.head, packs.after, packs.num_held, packs.sums
    limits, weights, penalties = goal.limits, goal.weights, goal.penalties
    means, slopes = goal.means, goal.slopes
    members, high, low, score, lanes = scratch.members, scratch.high, scratch.low, scratch.score, scratch.lanes
    D = sizes.shape[1]
    if count[a] == 0:
        a, b = b, a
    num_a = count[a]
    n = num_a + count[b]
    if n < 2:
        return False
    k = 0
    item = head[a]
    while item >= 0:
        members[k] = item
        k += 1
        item = after[item]
    item = head[b]
    while item >= 0:
        members[k] = item
        k += 1
        item = after[item]

    # members[first : first + free] may change side; those before stay in a, those behind stay in b
    first, free = 1, n - 1
    if free > max_free:
        free = max_free
        free_a = min(num_a, max(max_free - (n - num_a), max_free // 2))
        for k in range(free_a):
            p = num_a - 1 - k
            q = below(state, p + 1)
            members[p], members[q] = members[q], members[p]
        for k in range(max_free - free_a):
            p = num_a + k
            q = p + below(state, n - p)
            members[p], members[q] = members[q], members[p]
        first = num_a - free_a
    current = (1 << (num_a - first)) - 1

    num_rows = 1 << max(0, free - LOW_BITS)
    width = len(low)  # not a constant: the compiler would unroll the loops below instead of making vectors of them
    for d in range(D):
        half = 0.5 * (sums[a, d] + sums[b, d])
        base = -half
        for k in range(first):
            base += sizes[members[k], d]
        low[0] = np.float32(0.0)
        for j in range(LOW_BITS):  # fewer free samples: the rest are copies of the same ways
            x = np.float32(sizes[members[first + j], d]) if j < free else np.float32(0.0)
            for k in range(1 << j):
                low[(1 << j) + k] = low[k] + x
        high[0] = np.float32(base)
        for j in range(LOW_BITS, free):
            x = np.float32(sizes[members[first + j], d])
            for k in range(1 << (j - LOW_BITS)):
                high[(1 << (j - LOW_BITS)) + k] = high[k] + x
        w, penalty, room = np.float32(weights[d]), np.float32(penalties[d]), np.float32(limits[d] - half)
        if d == 0:
            for h in range(num_rows):
                for k in range(width):
                    score[h, k] = np.float32(0.0)
        for h in range(num_rows):
            for k in range(width):
                e = abs(high[h] + low[k])
                score[h, k] += w * e * e + penalty * max(np.float32(0.0), e - room)
        if slopes[d] > 0.0:
            slope, room = np.float32(slopes[d]), np.float32(means[d] - half)
            for h in range(num_rows):
                for k in range(width):
                    score[h, k] += slope * max(np.float32(0.0), abs(high[h] + low[k]) - room)

    old = score[current >> LOW_BITS, current & (WIDTH - 1)]
    best_score = old - np.float32(1e-5) * abs(old)
    best = current
    for k in range(width):
        lanes[k] = score[0, k]
    for h in range(1, num_rows):  # lane by lane: a running minimum would wait for itself
        for k in range(width):
            lanes[k] = min(lanes[k], score[h, k])
    lane = 0
    for k in range(1, width):
        if lanes[k] < lanes[lane]:
            lane = k
    if lanes[lane] < best_score:
        row = 0
        while score[row, lane] != lanes[lane]:
            row += 1
        best = (row << LOW_BITS) + lane
    if best == current:
        return False

    old_score, new_score = 0.0, 0.0
    for d in range(D):
        half = 0.5 * (sums[a, d] + sums[b, d])
        new_a = 0.0
        for k in range(first):
            new_a += sizes[members[k], d]
        for k in range(free):
            if (best >> k) & 1:
                new_a += sizes[members[first + k], d]
        old_e, new_e = abs(sums[a, d] - half), abs(new_a - half)
        room = limits[d] - half
        old_score += weights[d] * old_e * old_e + penalties[d] * max(0.0, old_e - room)
        new_score += weights[d] * new_e * new_e + penalties[d] * max(0.0, new_e - room)
        room = means[d] - half
        old_score += slopes[d] * max(0.0, old_e - room)
        new_score += slopes[d] * max(0.0, new_e - room)
    if not new_score < old_score - 1e-9 * abs(old_score):
        return False

    head[a], head[b], count[a] = -1, -1, 0
    for d in range(D):
        sums[b, d] += sums[a, d]
        sums[a, d] = 0.0
    for k in range(n):
        item = members[k]
        if k < first or (k < first + free and (best >> (k - first)) & 1):
            after[item] = head[a]
            head[a] = item
            count[a] += 1
            for d in range(D):
                sums[a, d] += sizes[item, d]
        else:
            after[item] = head[b]
            head[b] = item
    count[b] = n - count[a]
    for d in range(D):
        sums[b, d] -= sums[a, d]
    return True
