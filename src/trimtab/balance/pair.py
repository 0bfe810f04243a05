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
from trimtab.compiled import inlined
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
    both: FloatArray  # (D,) sums of the two packs


def make_packs(num_packs: int, num_samples: int, num_columns: int) -> Packs:
    """Empty packs for samples 0 .. num_samples - 1."""
    return Packs(
        np.full(num_packs, -1, np.int64),
        np.full(num_samples, -1, np.int64),
        np.zeros(num_packs, np.int64),
        np.zeros((num_packs, num_columns)),
    )


def make_scratch(num_samples: int, num_columns: int) -> Scratch:
    num_rows = 1 << (MAX_FREE - LOW_BITS)
    return Scratch(
        np.empty(num_samples, np.int64),
        np.empty(num_rows, np.float32),
        np.empty(WIDTH, np.float32),
        np.empty((num_rows, WIDTH), np.float32),
        np.empty(WIDTH, np.float32),
        np.empty(num_columns),
    )


@inlined
def _list_members(packs: Packs, a: int, b: int, members: IntArray) -> None:
    """The samples of pack a, then those of pack b."""
    k = 0
    for pack in (a, b):
        item = packs.head[pack]
        while item >= 0:
            members[k] = item
            k += 1
            item = packs.after[item]


@inlined
def _choose_free(members: IntArray, num_a: int, n: int, max_free: int, state: UIntArray) -> int:
    """Moves `max_free` random members, about as many of each pack, to where the two packs meet; the first of them."""
    free_a = min(num_a, max(max_free - (n - num_a), max_free // 2))
    for k in range(free_a):
        p = num_a - 1 - k
        q = below(state, p + 1)
        members[p], members[q] = members[q], members[p]
    for k in range(max_free - free_a):
        p = num_a + k
        q = p + below(state, n - p)
        members[p], members[q] = members[q], members[p]
    return num_a - free_a


@inlined
def _sum_ways(
    sizes: FloatArray, d: int, members: IntArray, first: int, free: int, base: float, scratch: Scratch
) -> None:
    """Sums of column d for all ways, as high[way >> LOW_BITS] + low[way & (WIDTH - 1)]; `base`: of what stays in a."""
    high, low = scratch.high, scratch.low
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


@inlined
def _score_ways(
    sizes: FloatArray, sums_of_both: FloatArray, members: IntArray, first: int, free: int, goal: Goal, scratch: Scratch
) -> None:
    """The score of every way in float32, row by row: the compiler makes vector code of it."""
    high, low, score = scratch.high, scratch.low, scratch.score
    num_rows = 1 << max(0, free - LOW_BITS)
    width = len(low)  # not a constant: the compiler would unroll the loops below instead of making vectors of them
    for h in range(num_rows):
        for k in range(width):
            score[h, k] = np.float32(0.0)
    for d in range(sizes.shape[1]):
        half = 0.5 * sums_of_both[d]
        base = -half
        for k in range(first):
            base += sizes[members[k], d]
        _sum_ways(sizes, d, members, first, free, base, scratch)  # of pack a, less half of both: e
        w, penalty, room = np.float32(goal.weights[d]), np.float32(goal.penalties[d]), np.float32(goal.limits[d] - half)
        for h in range(num_rows):
            for k in range(width):
                e = abs(high[h] + low[k])
                score[h, k] += w * e * e + penalty * max(np.float32(0.0), e - room)
        if goal.slopes[d] > 0.0:
            slope, room = np.float32(goal.slopes[d]), np.float32(goal.means[d] - half)
            for h in range(num_rows):
                for k in range(width):
                    score[h, k] += slope * max(np.float32(0.0), abs(high[h] + low[k]) - room)


@inlined
def _best_way(free: int, current: int, scratch: Scratch) -> int:
    """The way of least score; `current` if none is better by more than float32 can tell."""
    score, lanes = scratch.score, scratch.lanes
    num_rows, width = 1 << max(0, free - LOW_BITS), len(lanes)
    for k in range(width):
        lanes[k] = score[0, k]
    for h in range(1, num_rows):  # lane by lane: a running minimum would wait for itself
        for k in range(width):
            lanes[k] = min(lanes[k], score[h, k])
    lane = 0
    for k in range(1, width):
        if lanes[k] < lanes[lane]:
            lane = k
    old = score[current >> LOW_BITS, current & (WIDTH - 1)]
    if not lanes[lane] < old - np.float32(1e-5) * abs(old):
        return current
    row = 0
    while score[row, lane] != lanes[lane]:
        row += 1
    return (row << LOW_BITS) + lane


@inlined
def _is_better(
    sizes: FloatArray,
    sums: FloatArray,
    a: int,
    b: int,
    members: IntArray,
    first: int,
    free: int,
    way: int,
    goal: Goal,
) -> bool:
    """Whether the way scores less than the packs as they are, in float64."""
    old_score, new_score = 0.0, 0.0
    for d in range(sizes.shape[1]):
        half = 0.5 * (sums[a, d] + sums[b, d])
        new_a = 0.0
        for k in range(first):
            new_a += sizes[members[k], d]
        for k in range(free):
            if (way >> k) & 1:
                new_a += sizes[members[first + k], d]
        old_e, new_e = abs(sums[a, d] - half), abs(new_a - half)
        room = goal.limits[d] - half
        old_score += goal.weights[d] * old_e * old_e + goal.penalties[d] * max(0.0, old_e - room)
        new_score += goal.weights[d] * new_e * new_e + goal.penalties[d] * max(0.0, new_e - room)
        room = goal.means[d] - half
        old_score += goal.slopes[d] * max(0.0, old_e - room)
        new_score += goal.slopes[d] * max(0.0, new_e - room)
    return new_score < old_score - 1e-9 * abs(old_score)


@inlined
def _move(sizes: FloatArray, packs: Packs, a: int, b: int, members: IntArray, first: int, free: int, way: int) -> None:
    """The members before `first`, and those free ones whose bit is set, into pack a; the others into b."""
    head, after, count, sums = packs.head, packs.after, packs.num_held, packs.sums
    n = count[a] + count[b]
    head[a], head[b], count[a] = -1, -1, 0
    for d in range(sizes.shape[1]):
        sums[b, d] += sums[a, d]
        sums[a, d] = 0.0
    for k in range(n):
        item = members[k]
        pack = a if k < first or (k < first + free and (way >> (k - first)) & 1) else b
        after[item] = head[pack]
        head[pack] = item
        if pack == a:
            count[a] += 1
            for d in range(sizes.shape[1]):
                sums[a, d] += sizes[item, d]
    count[b] = n - count[a]
    for d in range(sizes.shape[1]):
        sums[b, d] -= sums[a, d]


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"nnan", "ninf", "nsz"})
def split_pair(
    sizes: FloatArray, packs: Packs, a: int, b: int, goal: Goal, max_free: int, state: UIntArray, scratch: Scratch
) -> bool:
    """Share the samples of packs a and b again if that is better; True if it was.

    Minimises, with e the half difference of the two packs' sums, sum_d weights[d] e_d^2 + penalties[d] overflow_d +
    slopes[d] above_d: what the larger of the two has above its limit, and above the mean. Of n <= max_free + 1 samples
    all ways are looked at: one sample stays, as swapping the packs changes nothing. Of more, max_free random ones may
    change side.

    Example: a holds [7, 2], b holds [3, 3]; half of both is 7.5, e is 1.5. The 7 stays in a, the other three are free:
    8 ways, numbered by the bits of those that are in a. Way 001, [7, 2], is the one there is. Way 000, [7], has e 0.5
    and no other less: the packs become [7] and [2, 3, 3].

    All ways are scored in float32: the best is exact but for ties within 1e-5. It is accepted only if it is better in
    float64, where sums of integers below 2^53 are exact. No fused multiply-add and no reordered sums: every machine
    takes the same decisions.
    """
    members = scratch.members
    if packs.num_held[a] == 0:
        a, b = b, a
    num_a = packs.num_held[a]
    n = num_a + packs.num_held[b]
    if n < 2:
        return False
    # 1. members[first : first + free] may change side; those before stay in a, those behind stay in b
    _list_members(packs, a, b, members)
    first, free = np.int64(1), n - 1
    if free > max_free:
        free = max_free
        first = _choose_free(members, num_a, n, max_free, state)
    # 2. the best way, in float32
    for d in range(sizes.shape[1]):
        scratch.both[d] = packs.sums[a, d] + packs.sums[b, d]
    _score_ways(sizes, scratch.both, members, first, free, goal, scratch)
    current = (1 << (num_a - first)) - 1
    way = _best_way(free, current, scratch)
    # 3. is it one, in float64?
    if way == current or not _is_better(sizes, packs.sums, a, b, members, first, free, way, goal):
        return False
    _move(sizes, packs, a, b, members, first, free, way)
    return True
