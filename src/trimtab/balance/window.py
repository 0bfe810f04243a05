"""One window of `balanced`: deal samples to packs, improve pairs of packs round by round, send back what does not fit.

What goes through samples or pairs one by one is compiled; rounds are NumPy's. Symbols as in `pair`: D columns, the last
of them the cost; P packs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.balance.bound import above_limits
from trimtab.balance.pair import MAX_FREE, Goal, Packs, Scratch, share_pairs
from trimtab.balance.rng import UIntArray, draw, draw_below, permute
from trimtab.compiled import compiled, inner
from trimtab.specs import FloatArray, IntArray

NUM_BUCKETS = 4096
ALL_AGAIN = 8  # every eighth round packs that nothing could improve are tried again
REPAIR_PASSES = 4
REPAIR_PARTNERS = 8  # of each pack above its limit, in each pass
MOST_REPAIRED = 0.125  # share of the packs that a pass looks at; where more are above a limit, samples are carried on
SHAKEN_PAIRS = 4  # pairs with room that are shaken for each pack that stays above a limit
SHAKE_FREE = 8


class Pull(NamedTuple):
    """What two packs' differences count, relative to the mean pack: weights of squares, and slopes above the mean.

    A square pulls packs together from both sides. A slope counts only what is above the mean: rows wait for their
    largest pack, and a pack that is small in one column, as one long sample makes it, holds up nobody.
    """

    weights: FloatArray  # (D,)
    slopes: FloatArray  # (D,); 0: this column's limit counts instead


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
    stuck: float  # they end once fewer than this share of the packs that stick out get better


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
        # never below: a negative size would leave a pack where nobody looks for it
        bucket = np.int64(max(emptiest, min(NUM_BUCKETS - 1.0, full * (NUM_BUCKETS - 2))))
        behind[p] = -1
        if first[bucket] < 0:
            first[bucket] = p
        else:
            behind[last[bucket]] = p
        last[bucket] = p


@compiled
def pair_extremes(
    sums: FloatArray, direction: FloatArray, failures: IntArray, patience: int, least: float, pairs: IntArray
) -> int:
    """Packs that failed less than `patience` times, sorted along a direction: the first with the last, and so on.

    As many `pairs` as differ by `least`; their number. Example: along tokens packs of [9, 4, 6, 5], least 2, give
    (4, 9), and leave out (5, 6).
    """
    P, D = sums.shape
    key = np.empty(P)
    chosen, order = np.empty(P, np.int64), np.empty(P, np.int64)
    n = np.int64(0)
    for p in range(P):
        if failures[p] < patience:
            key[p] = 0.0
            for d in range(D):
                key[p] += direction[d] * sums[p, d]
            chosen[n] = p
            n += 1
    if n < 2:
        return 0
    _sort_by_buckets(key, chosen, n, order, np.empty(NUM_BUCKETS + 1, np.int64))
    for i in range(n // 2):
        a, b = order[i], order[n - 1 - i]
        if key[b] - key[a] < least:
            return i
        pairs[i, 0], pairs[i, 1] = a, b
    return n // 2


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

    The direction is each column in turn, then a random mix of all. The fullest column, which its limit holds, has no
    turn of its own. What two packs differ by is halved or better by
    every success, so extremes meet in the middle; those that are alike, or that failed `patience` times, are skipped.
    """
    D = len(goal)
    fullest = int(np.argmax(goal["mean"] / goal["limit"]))
    turns = [d for d in range(D - 1, -1, -1) if d != fullest] + [D]
    scratch.failures[:] = 0
    for r in range(num_rounds):
        turn = turns[r % len(turns)]
        shares = [draw(state) / 2.0**63 - 1.0 for _ in range(D)] if turn == D else np.arange(D) == turn
        patience = effort.patience if r % ALL_AGAIN != ALL_AGAIN - 1 else r + 1
        least = 2.0 * effort.alike if r < num_coarse_rounds else effort.alike
        num_pairs = pair_extremes(packs.sums, shares / goal["mean"], scratch.failures, patience, least, scratch.pairs)
        share_pairs(sizes, packs, num_pairs, goal, 1.0, effort.max_free, state, scratch)


def polish(sizes: FloatArray, packs: Packs, goal: Goal, effort: Effort, state: UIntArray, scratch: Scratch) -> None:
    """Share the packs that stick out most with random others, looking at more ways than `improve` does.

    Rows wait for their largest pack, so the tail decides. Extremes of one direction often cannot help each other (both
    are full of the same column); most packs are near the mean and can take a little each.
    """
    P = len(packs.sums)
    num_worst = min(P - 1, int(np.ceil(effort.tail * P)))
    if num_worst < 1:
        return
    for _ in range(effort.num_polished):
        score = np.zeros(P)
        for d, column in enumerate(goal):
            above = packs.sums[:, d] - column["mean"]
            score += column["weight"] * above * above + column["slope"] * np.maximum(0.0, above)
        least = np.partition(score, P - num_worst)[P - num_worst]
        worst = np.flatnonzero(score >= least)
        scratch.pairs[: len(worst), 0], scratch.pairs[: len(worst), 1] = worst, draw_below(state, P, len(worst))
        num_better = share_pairs(sizes, packs, len(worst), goal, 1.0, effort.polish_free, state, scratch)
        if num_better < effort.stuck * len(worst):
            break


def repair(sizes: FloatArray, packs: Packs, goal: Goal, state: UIntArray, scratch: Scratch) -> None:
    """Share each pack above a limit, exactly, with packs that leave room for both.

    Where that fails, *shake* and try again: the pack and some pairs that have room are shared under the opposite
    weights, which gathers scattered room in one pack and mixes large samples with small ones.
    """
    P = len(packs.sums)
    limits = np.array(goal["limit"])
    for attempt in range(REPAIR_PASSES):
        above = np.flatnonzero(above_limits(packs.sums, goal["limit"]))[: max(1, int(MOST_REPAIRED * P))]
        if len(above) == 0:
            break
        by_column = np.ascontiguousarray(packs.sums.T)
        wanted = REPAIR_PARTNERS + 2 * SHAKEN_PAIRS + 1
        draws = draw_below(state, 1 << 31, len(above) * wanted).reshape(len(above), wanted)
        shared, shaken = [], []
        for p, draw_of in zip(above.tolist(), draws, strict=True):
            has_room = np.ones(P, np.bool_)
            for sums, limit in zip(by_column[:-1], limits, strict=False):
                has_room &= sums <= 2.0 * limit - sums[p]
            room = np.flatnonzero(has_room)
            others = room[(draw_of[1:] * len(room)) >> 31].tolist() if len(room) else []
            shared += [(p, q) for q in others[:REPAIR_PARTNERS]]
            shaken.append((p, int(draw_of[0] * P) >> 31))
            shaken += zip(others[REPAIR_PARTNERS::2], others[REPAIR_PARTNERS + 1 :: 2], strict=True)
        share_listed(shared, sizes, packs, goal, 1.0, MAX_FREE, state, scratch)
        if attempt + 1 < REPAIR_PASSES and above_limits(packs.sums, goal["limit"]).any():
            share_listed(shaken, sizes, packs, goal, -1.0, SHAKE_FREE, state, scratch)


def share_listed(
    pairs: list[tuple[int, int]],
    sizes: FloatArray,
    packs: Packs,
    goal: Goal,
    sign: float,
    max_free: int,
    state: UIntArray,
    scratch: Scratch,
) -> None:
    """`share_pairs` of any number of pairs."""
    for first in range(0, len(pairs), len(scratch.pairs)):
        part = pairs[first : first + len(scratch.pairs)]
        scratch.pairs[: len(part)] = part
        share_pairs(sizes, packs, len(part), goal, sign, max_free, state, scratch)


def arrange(
    sizes: FloatArray, packs: Packs, goal: Goal, last_goal: Goal, effort: Effort, state: UIntArray, scratch: Scratch
) -> None:
    """Share the samples of a window's packs again until they are alike and, where that can be, within the limits."""
    improve(sizes, packs, goal, effort, effort.num_rounds, effort.num_coarse_rounds, state, scratch)
    repair(sizes, packs, goal, state, scratch)
    improve(sizes, packs, goal, effort, max(1, effort.num_rounds // 4), 0, state, scratch)
    polish(sizes, packs, last_goal, effort, state, scratch)


def evict(sizes: FloatArray, packs: Packs, goal: Goal, age: IntArray) -> IntArray:
    """Take samples out of packs above a limit until none is; those that fit nowhere else.

    From each such pack goes the youngest sample, of equal age the one that leaves the least above the limits, then the
    smallest; each is put into the fullest pack that still has room, if one has.
    """
    limits = np.array(goal["limit"])
    evicted: list[int] = []
    # 1. out of each pack above a limit, until it is not
    for p in np.flatnonzero(above_limits(packs.sums, limits)).tolist():
        held = _samples_of(packs, p)
        while (packs.sums[p] > limits).any():
            excess = (np.maximum(0.0, packs.sums[p] - sizes[held] - limits) / limits).sum(axis=1)
            size = (sizes[held] / limits).sum(axis=1)
            item = held.pop(int(np.lexsort((1e3 * excess + size, age[held]))[0]))
            packs.sums[p] -= sizes[item]
            evicted.append(item)
        _hold(packs, p, held)
    # 2. into the fullest other that has room
    left = []
    for item in evicted:
        sums = packs.sums + sizes[item]
        fits = np.flatnonzero((sums <= limits).all(axis=1))
        if len(fits) == 0:
            left.append(item)
            continue
        p = int(fits[np.argmax((sums[fits] / limits).sum(axis=1))])
        packs.sums[p] += sizes[item]
        _hold(packs, p, [item, *_samples_of(packs, p)])
    return np.array(left, np.int64)


def _samples_of(packs: Packs, p: int) -> list[int]:
    held, item = [], int(packs.head[p])
    while item >= 0:
        held.append(item)
        item = int(packs.after[item])
    return held


def _hold(packs: Packs, p: int, held: list[int]) -> None:
    """Pack p of these samples; its sums are the caller's."""
    packs.head[p] = held[0] if held else -1
    packs.after[held] = [*held[1:], -1][: len(held)]
    packs.num_held[p] = len(held)


def unload(packs: Packs, state: UIntArray) -> tuple[IntArray, IntArray]:
    """Samples pack by pack in random order of the packs, and the number in each; packs without samples are left out."""
    order = permute(np.arange(len(packs.head)), state)
    order = order[packs.num_held[order] > 0]
    counts = packs.num_held[order]
    place = np.cumsum(counts) - counts
    members = np.empty(int(counts.sum()), np.int64)
    item = packs.head[order]
    while len(item):  # one sample of every pack that has one left
        members[place] = item
        item = packs.after[item]
        more = item >= 0
        item, place = item[more], place[more] + 1
    return members, counts
