"""One window of `balanced`: deal samples to packs, improve pairs of packs round by round, send back what does not fit.

Symbols as in `pair`: D columns, the last of them the cost; P packs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from trimtab.balance.pair import MAX_FREE, Goal, Packs, Scratch, share_pairs
from trimtab.balance.rng import UIntArray, below, next_u64, shuffle
from trimtab.compiled import compiled, inlined, inner
from trimtab.specs import FloatArray, IntArray

NUM_BUCKETS = 4096
ALL_AGAIN = 8  # every eighth round packs that nothing could improve are tried again
REPAIR_TRIES = 24  # partners of a pack above its limit, each time it is looked at
REPAIR_PASSES = 6
SHAKEN_PAIRS = 4  # pairs with room that are shaken for each pack that stays above a limit
SHAKE_FREE = 8
STUCK = 0.1  # polishing ends once fewer than this share of the packs that stick out get better


class Effort(NamedTuple):
    """How long a window is improved; see docs/packing.md for what each buys."""

    num_rounds: int
    num_coarse_rounds: int  # rounds that leave out pairs twice as far apart as later ones
    alike: float  # relative difference below which two packs count as alike
    patience: int  # failures in a row after which a pack rests
    max_free: int  # samples of a pair that may change side at once
    num_polished: int  # rounds in which the packs that stick out most meet random others
    tail: float  # share of the packs that each of them takes
    polish_free: int  # as max_free, in these rounds


@inner
def _sort_by_buckets(key: FloatArray, chosen: IntArray, n: int, out: IntArray, start: IntArray) -> None:
    """The first n of `chosen` in about ascending order of key (exact between buckets), in linear time."""
    smallest, largest = key[chosen[0]], key[chosen[0]]
    for i in range(n):
        smallest = min(smallest, key[chosen[i]])
        largest = max(largest, key[chosen[i]])
    if largest - smallest <= 1e-12 * max(abs(largest), abs(smallest)):
        for i in range(n):
            out[i] = chosen[i]
        return
    scale = (NUM_BUCKETS - 1e-6) / (largest - smallest)
    for k in range(NUM_BUCKETS + 1):
        start[k] = 0
    for i in range(n):
        start[np.int64((key[chosen[i]] - smallest) * scale) + 1] += 1
    for k in range(NUM_BUCKETS):
        start[k + 1] += start[k]
    for i in range(n):
        bucket = np.int64((key[chosen[i]] - smallest) * scale)
        out[start[bucket]] = chosen[i]
        start[bucket] += 1


@compiled
def deal(sizes: FloatArray, fill: FloatArray, packs: Packs) -> None:
    """Largest sample first (about), each to the emptiest pack (about), by the fullest of its columns.

    `fill` turns a column into a share of a pack. Packs wait in buckets of equal fullness, in each the one that has
    waited longest first, so samples of size zero spread too. No pack gets emptier: the emptiest bucket only moves up.
    """
    n, D = sizes.shape
    P = len(packs.head)
    # 1. samples by their fullest column
    key = np.zeros(n)
    for i in range(n):
        for d in range(D):
            key[i] = max(key[i], sizes[i, d] * fill[d])
    everyone, order = np.empty(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        everyone[i] = i
    start = np.empty(NUM_BUCKETS + 1, np.int64)
    _sort_by_buckets(key, everyone, n, order, start)
    # 2. all packs in the first bucket, which is a queue
    first, last = np.full(NUM_BUCKETS, -1, np.int64), np.full(NUM_BUCKETS, -1, np.int64)
    behind = np.empty(P, np.int64)
    for p in range(P):
        behind[p] = p + 1 if p + 1 < P else -1
    first[0], last[0] = 0, P - 1
    emptiest = 0
    # 3. each sample to the first pack of the emptiest bucket
    for position in range(n - 1, -1, -1):
        i = order[position]
        while first[emptiest] < 0:
            emptiest += 1
        p = first[emptiest]
        first[emptiest] = behind[p]
        packs.after[i] = packs.head[p]
        packs.head[p] = i
        packs.num_held[p] += 1
        full = 0.0
        for d in range(D):
            packs.sums[p, d] += sizes[i, d]
            full = max(full, packs.sums[p, d] * fill[d])
        bucket = min(NUM_BUCKETS - 1, np.int64(full * (NUM_BUCKETS - 2)))
        behind[p] = -1
        if first[bucket] < 0:
            first[bucket] = p
        else:
            behind[last[bucket]] = p
        last[bucket] = p


@inlined
def improve(
    sizes: FloatArray,
    packs: Packs,
    goal: Goal,
    effort: Effort,
    num_rounds: int,
    num_coarse_rounds: int,
    state: UIntArray,
    scratch: Scratch,
) -> None:
    """Rounds of pairwise sharing: sort the packs along one direction, pair the extremes, share each pair again.

    The direction is each column in turn, then a random mix of them. What two packs differ by is halved or better by
    every success, so extremes meet in the middle; those that are alike, or that failed `patience` times, are skipped.
    """
    P, D = packs.sums.shape
    direction = np.zeros(D)
    key = np.empty(P)
    chosen = np.empty(P, np.int64)
    order = np.empty(P, np.int64)
    start = np.empty(NUM_BUCKETS + 1, np.int64)
    failures = np.zeros(P, np.int64)
    for r in range(num_rounds):
        # 1. the packs that do not rest
        n = np.int64(0)
        for p in range(P):
            if failures[p] < effort.patience or r % ALL_AGAIN == ALL_AGAIN - 1:
                chosen[n] = p
                n += 1
        if n < 2:
            continue
        # 2. in order along the direction
        turn = (r + 1) % (D + 1)
        for d in range(D):
            share = 1.0 if turn == d else 0.0
            if turn == D:
                share = np.float64(next_u64(state) >> np.uint64(11)) / 2.0**52 - 1.0
            direction[d] = share / goal[d].mean
        for i in range(n):
            p = chosen[i]
            key[p] = 0.0
            for d in range(D):
                key[p] += direction[d] * packs.sums[p, d]
        _sort_by_buckets(key, chosen, n, order, start)
        # 3. the extremes, as long as they differ
        least = 2.0 * effort.alike if r < num_coarse_rounds else effort.alike
        num_pairs = np.int64(0)
        for i in range(n // 2):
            a, b = order[i], order[n - 1 - i]
            if key[b] - key[a] < least:
                break
            scratch.pairs[i, 0], scratch.pairs[i, 1] = a, b
            num_pairs += 1
        share_pairs(sizes, packs, num_pairs, goal, 1.0, effort.max_free, state, scratch)
        for i in range(num_pairs):
            a, b = scratch.pairs[i, 0], scratch.pairs[i, 1]
            failures[a] = 0 if scratch.better[i] else failures[a] + 1
            failures[b] = 0 if scratch.better[i] else failures[b] + 1


@inlined
def polish(sizes: FloatArray, packs: Packs, goal: Goal, effort: Effort, state: UIntArray, scratch: Scratch) -> None:
    """Share the packs that stick out most with random others, looking at more ways than `improve` does.

    Rows wait for their largest pack, so the tail decides. Extremes of one direction often cannot help each other (both
    are full of the same column); most packs are near the mean and can take a little each.
    """
    P, D = packs.sums.shape
    score = np.empty(P)
    everyone = np.empty(P, np.int64)
    for p in range(P):
        everyone[p] = p
    order = np.empty(P, np.int64)
    start = np.empty(NUM_BUCKETS + 1, np.int64)
    num_worst = min(P - 1, np.int64(math.ceil(effort.tail * P)))
    for _ in range(effort.num_polished):
        for p in range(P):
            score[p] = 0.0
            for d in range(D):
                above = packs.sums[p, d] - goal[d].mean
                score[p] += goal[d].weight * above**2 + goal[d].slope * max(0.0, above)
            score[p] = math.sqrt(score[p])
        _sort_by_buckets(score, everyone, P, order, start)
        for i in range(num_worst):
            scratch.pairs[i, 0], scratch.pairs[i, 1] = order[P - 1 - i], below(state, P)
        num_better = share_pairs(sizes, packs, num_worst, goal, 1.0, effort.polish_free, state, scratch)
        if num_better < STUCK * num_worst:
            break


@inner
def _overflows(sums: FloatArray, goal: Goal, p: int) -> bool:
    for d in range(len(goal)):  # noqa: SIM110  (any() would make a generator in compiled code)
        if sums[p, d] > goal[d].limit:
            return True
    return False


@inner
def _partner(sums: FloatArray, goal: Goal, p: int, first: int) -> int:
    """The first pack from `first` on with which all of pack p would fit two packs; p itself if there is none."""
    P, D = sums.shape
    q = first
    for _ in range(P):
        room = q != p
        for d in range(D):
            if sums[p, d] + sums[q, d] > 2.0 * goal[d].limit:
                room = False
        if room:
            return q
        q = q + 1 if q + 1 < P else 0
    return p


@inlined
def repair(sizes: FloatArray, packs: Packs, goal: Goal, state: UIntArray, scratch: Scratch) -> None:
    """Share each pack above a limit, exactly, with packs that leave room for both.

    Where that fails, *shake* and try again: the pack and some pairs that have room are shared under the opposite
    weights, which gathers scattered room in one pack and mixes large samples with small ones.
    """
    P = packs.sums.shape[0]
    pairs = scratch.pairs
    above = np.empty(P, np.int64)
    for attempt in range(REPAIR_PASSES):
        # 1. packs above a limit with others that have room, until none is or tries are used up
        num_above = np.int64(0)
        for p in range(P):
            if _overflows(packs.sums, goal, p):
                above[num_above] = p
                num_above += 1
        for _ in range(REPAIR_TRIES):
            num_pairs, num_left = np.int64(0), np.int64(0)
            for i in range(num_above):
                p = above[i]
                if _overflows(packs.sums, goal, p):
                    above[num_left] = p
                    num_left += 1
                    q = _partner(packs.sums, goal, p, below(state, P))
                    if q != p:
                        pairs[num_pairs, 0], pairs[num_pairs, 1] = p, q
                        num_pairs += 1
            num_above = num_left
            if num_pairs == 0:
                break
            share_pairs(sizes, packs, num_pairs, goal, 1.0, np.int64(MAX_FREE), state, scratch)
        if num_above == 0 or attempt + 1 == REPAIR_PASSES:
            break
        # 2. shake those that stay above it, and others
        num_pairs = np.int64(0)
        for i in range(min(num_above, P // (SHAKEN_PAIRS + 1))):
            p = above[i]
            pairs[num_pairs, 0], pairs[num_pairs, 1] = p, below(state, P)
            num_pairs += 1
            for _ in range(SHAKEN_PAIRS):
                a = _partner(packs.sums, goal, p, below(state, P))
                b = _partner(packs.sums, goal, p, below(state, P))
                if a != p and b != p:
                    pairs[num_pairs, 0], pairs[num_pairs, 1] = a, b
                    num_pairs += 1
        share_pairs(sizes, packs, num_pairs, goal, -1.0, np.int64(SHAKE_FREE), state, scratch)


@compiled
def arrange(
    sizes: FloatArray, packs: Packs, goal: Goal, last_goal: Goal, effort: Effort, state: UIntArray, scratch: Scratch
) -> None:
    """Share the samples of a window's packs again until they are alike and, where that can be, within the limits."""
    num_rounds, num_coarse_rounds = effort.num_rounds, effort.num_coarse_rounds
    for attempt in range(2):
        if attempt == 1:
            repair(sizes, packs, goal, state, scratch)
            num_rounds, num_coarse_rounds = max(1, num_rounds // 4), 0  # enough after a repair has moved a few packs
        improve(sizes, packs, goal, effort, num_rounds, num_coarse_rounds, state, scratch)
    polish(sizes, packs, last_goal, effort, state, scratch)


@compiled
def evict(sizes: FloatArray, packs: Packs, goal: Goal, age: IntArray, evicted: IntArray) -> int:
    """Take samples out of packs above a limit until none is; their number, and they in `evicted`.

    From each such pack goes the youngest sample, of equal age the one that leaves the least above the limits, then the
    smallest; each is put into the fullest pack that still has room, if one has.
    """
    P, D = packs.sums.shape
    num_evicted = 0
    for p in range(P):
        while _overflows(packs.sums, goal, p):
            best, best_before, best_age, best_key = np.int64(-1), np.int64(-1), np.int64(0), 0.0
            before = np.int64(-1)
            item = packs.head[p]
            while item >= 0:
                excess, size = 0.0, 0.0
                for d in range(D):
                    if goal[d].limit < np.inf:
                        excess += max(0.0, packs.sums[p, d] - sizes[item, d] - goal[d].limit) / goal[d].limit
                        size += sizes[item, d] / goal[d].limit
                key = 1e3 * excess + size
                if best < 0 or age[item] < best_age or (age[item] == best_age and key < best_key):
                    best, best_before, best_age, best_key = item, before, age[item], key
                before = item
                item = packs.after[item]
            _unlink(sizes, packs, np.int64(p), best, best_before)
            evicted[num_evicted] = best
            num_evicted += 1
    kept = 0
    for e in range(num_evicted):
        item = evicted[e]
        target, target_fill = -1, -1.0
        for p in range(P):
            fits, fill = True, 0.0
            for d in range(D):
                total = packs.sums[p, d] + sizes[item, d]
                if total > goal[d].limit:
                    fits = False
                if goal[d].limit < np.inf:
                    fill += total / goal[d].limit
            if fits and fill > target_fill:
                target, target_fill = p, fill
        if target >= 0:
            packs.after[item] = packs.head[target]
            packs.head[target] = item
            packs.num_held[target] += 1
            for d in range(D):
                packs.sums[target, d] += sizes[item, d]
        else:
            evicted[kept] = item
            kept += 1
    return kept


@inner
def _unlink(sizes: FloatArray, packs: Packs, p: int, item: int, before: int) -> None:
    if before < 0:
        packs.head[p] = packs.after[item]
    else:
        packs.after[before] = packs.after[item]
    packs.after[item] = -1
    packs.num_held[p] -= 1
    for d in range(sizes.shape[1]):
        packs.sums[p, d] -= sizes[item, d]


@compiled
def unload(packs: Packs, state: UIntArray) -> tuple[IntArray, IntArray]:
    """Samples pack by pack in random order of the packs, and the number in each; packs without samples are left out."""
    P = len(packs.head)
    order = np.empty(P, np.int64)
    num_members = 0
    for p in range(P):
        order[p] = p
        num_members += packs.num_held[p]
    shuffle(order, state)
    members = np.empty(num_members, np.int64)
    counts = np.empty(P, np.int64)
    at, num_packs = 0, 0
    for p in order:
        if packs.num_held[p] == 0:
            continue
        item = packs.head[p]
        while item >= 0:
            members[at] = item
            at += 1
            item = packs.after[item]
        counts[num_packs] = packs.num_held[p]
        num_packs += 1
    return members, counts[:num_packs]


@compiled
def copy_packs(members: IntArray, offsets: IntArray, sequence: IntArray) -> IntArray:
    """Members pack by pack, the packs in another order."""
    out = np.empty_like(members)
    position = 0
    for p in sequence:
        for i in range(offsets[p], offsets[p + 1]):
            out[position] = members[i]
            position += 1
    return out
