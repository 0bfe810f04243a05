"""Best way to share the samples of two packs between them: the move all of `balanced` is made of.

Symbols: D columns per sample, the limited ones first and the cost last (its limit is infinite); a pack's *sums* are
its samples' columns added up. Packs are linked lists (`head`, `after`, -1 ends), so no pack has a largest count.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trimtab.compiled import UIntArray, below, compiled, inlined, inner, relaxed
from trimtab.specs import FloatArray, IntArray

MAX_FREE = 12
"""Samples of two packs that may change side at once, at most: 2**12 ways are looked at."""

_U = np.uint64
LOW_BITS = 5  # fewer free samples are made up to this: 32 ways are four AVX registers of float32

COLUMN = np.dtype([
    ("limit", np.float64),
    ("weight", np.float64),  # of the squared half difference
    ("penalty", np.float64),  # of each unit above the limit; 0 where there is none
    ("mean", np.float64),
    ("slope", np.float64),  # of each unit above the mean; 0: only the limit counts
    ("both", np.float64),  # the rest is of the two packs at hand: their sum,
    ("fixed", np.float64),  # of what stays in pack a,
    ("of_a", np.float64),  # and of pack a if they are shared anew
])  # fmt: skip

Goal = npt.NDArray[np.void]
"""(D,) of `COLUMN`: what makes one sharing of samples better than another, and what is known of the pair at hand."""


class Packs(NamedTuple):
    """Packs while they are being made (a NamedTuple: what numba can take apart)."""

    head: IntArray  # (P,) first sample of each pack
    after: IntArray  # (n,) next sample of the same pack
    num_held: IntArray  # (P,) samples in each pack
    sums: FloatArray  # (P, D)


class Scratch(NamedTuple):
    """Working memory of `share_pairs`, made once."""

    pairs: IntArray  # (P, 2) packs to share
    failures: IntArray  # (P,) of each pack in a row
    members: IntArray  # as long as two packs can be
    held: FloatArray  # (D, the same) their columns
    sums: npt.NDArray[np.float32]  # of all ways: one column,
    score: npt.NDArray[np.float32]  # all columns,
    bits: npt.NDArray[np.int32]  # and the same memory as integers,
    ways: npt.NDArray[np.int32]  # 0, 1, 2, ...: a counter of 8 bytes would make integers of 8 bytes of all


def make_goal(
    limits: FloatArray, weights: FloatArray, penalties: FloatArray, means: FloatArray, slopes: FloatArray
) -> Goal:
    """Return what pairs are shared by; each argument is (D,)."""
    goal = np.zeros(len(limits), COLUMN)
    for name, values in zip(COLUMN.names or (), (limits, weights, penalties, means, slopes), strict=False):
        goal[name] = values
    return goal


def make_packs(num_packs: int, num_samples: int, num_columns: int) -> Packs:
    """Return empty packs for samples 0 .. num_samples - 1."""
    return Packs(
        np.full(num_packs, -1, np.int64),
        np.full(num_samples, -1, np.int64),
        np.zeros(num_packs, np.int64),
        np.zeros((num_packs, num_columns)),
    )


def make_scratch(num_packs: int, num_samples: int, num_columns: int) -> Scratch:
    score = np.empty(1 << MAX_FREE, np.float32)
    return Scratch(
        np.empty((num_packs, 2), np.int64),
        np.zeros(num_packs, np.int64),
        np.empty(num_samples, np.int64),
        np.empty((num_columns, num_samples + LOW_BITS)),
        np.empty_like(score),
        score,
        score.view(np.int32),
        np.arange(len(score), dtype=np.int32),
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
    for k in range(max_free):
        p = num_a - 1 - k if k < free_a else num_a + k - free_a
        q = below(state, p + 1) if k < free_a else p + below(state, n - p)
        members[p], members[q] = members[q], members[p]
    return num_a - free_a


@inlined
def _score_ways(goal: Goal, sign: float, first: int, free: int, scratch: Scratch) -> None:
    """The score of every way in float32, column by column: the compiler makes vector code of the loops over ways."""
    sums, score, held = scratch.sums, scratch.score, scratch.held
    bits = max(LOW_BITS, free)
    for way in range(1 << bits):
        score[way] = np.float32(0.0)
    for d in range(len(goal)):
        half = 0.5 * goal[d].both
        goal[d].fixed = 0.0
        for k in range(first):
            goal[d].fixed += held[d, k]
        for k in range(free, LOW_BITS):  # ways that differ in these are copies
            held[d, first + k] = 0.0
        # 1. sums[way], of pack a less half of both: way by way with one more sample
        sums[0] = np.float32(goal[d].fixed - half)
        known = _U(1)  # unsigned: numba then leaves out what negative indices need, and vector code comes of it
        for j in range(bits):
            x = np.float32(held[d, first + j])
            for way in range(known):
                sums[known + way] = sums[way] + x
            known += known
        # 2. what they score
        w, penalty = np.float32(sign * goal[d].weight), np.float32(goal[d].penalty)
        room = np.float32(goal[d].limit - half)
        for way in range(1 << bits):
            e = abs(sums[way])
            score[way] += w * e * e + penalty * max(np.float32(0.0), e - room)
        if goal[d].slope > 0.0:
            slope, room = np.float32(goal[d].slope), np.float32(goal[d].mean - half)
            for way in range(1 << bits):
                score[way] += slope * max(np.float32(0.0), abs(sums[way]) - room)


@inlined
def _best_way(free: int, current: int, scratch: Scratch) -> int:
    """The way of least score; `current` if none is better by more than the bits in which the ways are numbered.

    The lowest bits of a score are replaced by its number, so one minimum of integers finds both. Floats are ordered as
    their bits are, negative ones once these are turned round.
    """
    bits, ways = scratch.bits, scratch.ways
    num_ways = 1 << max(LOW_BITS, free)
    high, best = np.int32(-num_ways), np.int32(0x7FFFFFFF)
    for way in range(num_ways):
        x = bits[way]
        flip = np.int32(0x7FFFFFFF) if x < 0 else np.int32(0)
        key = np.int32((np.int32(x ^ flip) & high) | ways[way])
        if key < best:
            best = key
    x = bits[current]
    now = (x ^ ((x >> 31) & 0x7FFFFFFF)) & -num_ways
    return np.int64(best & (num_ways - 1)) if (best & -num_ways) < now else np.int64(current)


@inlined
def _is_better(
    sums: FloatArray, a: int, goal: Goal, sign: float, first: int, free: int, way: int, held: FloatArray
) -> bool:
    """Return whether the way scores less than the packs as they are, in float64."""
    old_score, new_score = 0.0, 0.0
    for d in range(len(goal)):
        half = 0.5 * goal[d].both
        of_a = goal[d].fixed
        for k in range(free):
            of_a += held[d, first + k] * np.float64((way >> k) & 1)
        goal[d].of_a = of_a
        old_e, new_e = abs(sums[a, d] - half), abs(of_a - half)
        room, above = goal[d].limit - half, goal[d].mean - half
        w, penalty, slope = sign * goal[d].weight, goal[d].penalty, goal[d].slope
        old_score += w * old_e * old_e + penalty * max(0.0, old_e - room) + slope * max(0.0, old_e - above)
        new_score += w * new_e * new_e + penalty * max(0.0, new_e - room) + slope * max(0.0, new_e - above)
    return new_score < old_score - 1e-9 * abs(old_score)


@inlined
def _move(packs: Packs, a: int, b: int, members: IntArray, n: int, first: int, free: int, way: int, goal: Goal) -> None:
    """The members before `first`, and those free ones whose bit is set, into pack a; the others into b."""
    head_a, head_b, num_a = np.int64(-1), np.int64(-1), np.int64(0)
    for k in range(n):
        item = members[k]
        in_a = k < first or (k < first + free and ((way >> (k - first)) & 1) == 1)
        packs.after[item] = head_a if in_a else head_b
        head_a = item if in_a else head_a
        head_b = head_b if in_a else item
        num_a += np.int64(in_a)
    packs.head[a], packs.head[b] = head_a, head_b
    packs.num_held[a], packs.num_held[b] = num_a, n - num_a
    for d in range(len(goal)):
        packs.sums[a, d] = goal[d].of_a
        packs.sums[b, d] = goal[d].both - goal[d].of_a


@relaxed
def share_pairs(
    sizes: FloatArray,
    packs: Packs,
    num_pairs: int,
    goal: Goal,
    sign: float,
    max_free: int,
    state: UIntArray,
    scratch: Scratch,
) -> int:
    """Share the samples of each of `scratch.pairs` again if that is better; how often it was.

    Minimises, with e the half difference of the two packs' sums, sum_d sign weight_d e_d^2 + penalty_d overflow_d +
    slope_d above_d: what the larger of the two has above its limit, and above the mean. Of n <= max_free + 1 samples
    all ways are looked at: one sample stays, as swapping the packs changes nothing. Of more, max_free random ones may
    change side.

    Example: a holds [7, 2], b holds [3, 3]; half of both is 7.5, e is 1.5. The 7 stays in a, the other three are free:
    8 ways, numbered by the bits of those that are in a. Way 001, [7, 2], is the one there is. Way 000, [7], has e 0.5
    and no other less: the packs become [7] and [2, 3, 3].

    All ways are scored in float32: the best is exact but for ties, which for 2^8 ways are 3e-5 apart. It is accepted
    only if it is better in float64, where sums of integers below 2^53 are exact. No fused multiply-add and no reordered
    sums: every machine takes the same decisions.
    """
    members, held = scratch.members, scratch.held
    num_better = np.int64(0)
    for i in range(num_pairs):
        a, b = scratch.pairs[i, 0], scratch.pairs[i, 1]
        if packs.num_held[a] == 0:
            a, b = b, a
        num_a = packs.num_held[a]
        n = num_a + packs.num_held[b]
        if n < 2 or a == b:
            continue
        # 1. members[first : first + free] may change side; those before stay in a, those after stay in b
        _list_members(packs, a, b, members)
        first, free = np.int64(1), n - 1
        if free > max_free:
            free = max_free
            first = _choose_free(members, num_a, n, max_free, state)
        for d in range(len(goal)):
            goal[d].both = packs.sums[a, d] + packs.sums[b, d]
            for k in range(first + free):
                held[d, k] = sizes[members[k], d]
        # 2. the best way, in float32
        _score_ways(goal, sign, first, free, scratch)
        current = (np.int64(1) << (num_a - first)) - 1
        way = _best_way(free, current, scratch)
        # 3. is it one, in float64?
        if way != current and _is_better(packs.sums, a, goal, sign, first, free, way, held):
            _move(packs, a, b, members, n, first, free, way, goal)
            scratch.failures[a], scratch.failures[b] = 0, 0
            num_better += 1
        else:
            scratch.failures[a] += 1
            scratch.failures[b] += 1
    return num_better


# -- the most pairs: exact, where a pack holds two samples at most ----------------------------------------------------

# n samples have columns a and b under the limits A and B; i and j fit where a_i + a_j <= A and b_i + b_j <= B.


NO_THREE_FIT = (2 / 3) * (1 + 1e-9)
"""No three samples fit one pack whose shares of the two limits add up to more than this each: they fill above two."""


@compiled
def match_pairs(sizes: FloatArray, limits: FloatArray) -> IntArray:
    """Return the partner of each sample (n, 2), or -1: as many pairs as any choice makes. O(n log n).

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
    """Return what each sample chooses, or -1, and who chooses it: as many choices as can be.

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
