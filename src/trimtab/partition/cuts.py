"""Compiled: can S stages cover the model within a time and a memory limit, how far do they reach, which cuts tie best.

K *segments* are runs of layers between two allowed cuts; a stage is an interval [a, b) of them, never empty, and costs
    time[b] - time[a] + extra(i, a, b)
where extra is the least recompute time (module `tiers`) for which
    state[b] - state[a] + in_flight[i] * saved + pending[i] * whole + transient <= cap[i],
`saved` by the chosen tiers and `whole` without recompute, `entry[a]` in both, `transient` the most that one layer's
backward needs beside: a layer that recomputes needs what it computes again as well (`TierTable.reach`), so that a stage
that recomputes nothing has more room, and a stage may do better with a weaker tier. Where a micro-batch is pending,
`whole` holds that already. Time and bytes rise when the interval grows: what it enters with is no more than what
earlier segments hold for it. Where also no later stage is more expensive than an earlier one for the same interval
(true of in-flight counts where backwards are whole), `furthest_ends` is exact; else it still never calls a feasible
limit infeasible.

Example: four layers of 3, 2, 2 and 3 ms, a cut allowed between any two, on S = 2 stages. Each layer keeps 3 GB of a
micro-batch, or 1 GB if it recomputes for 1 ms. Stage 0 has 2 micro-batches in flight, stage 1 has 1; the cap is 10 GB.
Limit 5 ms: two layers on stage 0 take 5 ms, but hold 12 GB; recomputing one of them holds 2 x (1 + 3) GB, and 2 GB more
while it is computed again, in 6 ms. So stage 0 ends behind the first layer, stage 1 from there behind the third (4 ms),
and the fourth is left: infeasible. Limit 6 ms: stage 0 ends behind the second, stage 1 behind the fourth: feasible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from trimtab.compiled import compiled, inlined, inner
from trimtab.partition.tiers import (
    IMPOSSIBLE,
    Records,
    TierTable,
    allowed,
    clear,
    least_extra,
)
from trimtab.specs import IntArray

SUMS = np.dtype(
    [
        ("time", np.int64),  # composite, forward and backward on the first tiers
        ("state", np.int64),  # bytes
        ("saved_first", np.int64),  # bytes of one micro-batch, every layer on its first (cheapest) tier
        ("saved_least", np.int64),  # the same on its smallest tier
        ("whole", np.int64),  # the same on tier "none"
        ("entry", np.int64),  # no sum: saved bytes more of a stage that begins here
    ]
)
ROOM = np.dtype(
    [
        ("in_flight", np.int64),  # micro-batches, at least 0
        ("pending", np.int64),  # further ones that hold everything
        ("cap", np.int64),  # bytes
    ]
)


class Pipeline(NamedTuple):
    """One split problem in integers."""

    sums: Records  # (K + 1,) of SUMS: of the layers before each allowed cut
    rooms: Records  # (S,) of ROOM
    num_alike: IntArray  # (K + 1, C) layers of each class before each allowed cut
    transient: IntArray  # (log2 K, K) first tiers', sparse table: [p, a] is the largest of segments a .. a + 2**p - 1
    known: IntArray  # (S, K + 1, K + 1) 1 + extra where already solved, else 0; empty: remember nothing


@inner
def _time_left(pipeline: Pipeline, a: int, b: int, limit: int) -> int:
    """The recompute time that `limit` leaves to the stage; negative when it is too slow without any."""
    return limit - (pipeline.sums[b].time - pipeline.sums[a].time)


@inner
def first_transient(pipeline: Pipeline, a: int, b: int) -> int:
    """The most that a backward of the stage needs where all its layers keep their first tiers."""
    power = 0
    while 2 << power <= b - a:
        power += 1
    return max(pipeline.transient[power, a], pipeline.transient[power, b - (1 << power)])


@inner
def _bytes_to_free(pipeline: Pipeline, i: int, a: int, b: int, transient: int) -> int:
    """Bytes of one micro-batch by which the first tiers overfill stage i; `IMPOSSIBLE` if the smallest tiers do too."""
    here, start, stop = pipeline.rooms[i], pipeline.sums[a], pipeline.sums[b]
    room = here.cap - (stop.state - start.state) - transient
    room -= here.pending * (stop.whole - start.whole + start.entry)
    if room < 0:
        return np.int64(IMPOSSIBLE)
    if here.in_flight == 0:
        return np.int64(0)
    room = room // here.in_flight - start.entry
    if stop.saved_least - start.saved_least > room:
        return np.int64(IMPOSSIBLE)
    return stop.saved_first - start.saved_first - room


@inner
def _count_alike(pipeline: Pipeline, a: int, b: int) -> IntArray:
    """(C,) layers of each class in the stage."""
    alike = np.empty(pipeline.num_alike.shape[1], np.int64)
    for g in range(len(alike)):
        alike[g] = pipeline.num_alike[b, g] - pipeline.num_alike[a, g]
    return alike


@inner
def _highest(tiers: TierTable, pipeline: Pipeline, i: int, alike: IntArray, transient: int) -> int:
    """The most that a backward of the stage can need, whatever is recomputed."""
    if pipeline.rooms[i].pending == 0:
        for g in range(alike.shape[0]):
            for u in range(tiers.upgrades.shape[1]):
                if alike[g] > 0:
                    transient = max(transient, tiers.upgrades[g, u].reach)
    return transient


@compiled
def stage_extra(pipeline: Pipeline, tiers: TierTable, i: int, a: int, b: int, limit: int, counts: IntArray) -> int:
    """Least recompute time of the stage, or `IMPOSSIBLE` if its time then exceeds `limit` or its bytes the cap.

    For each transient that some upgrade of its layers brings about: the least time with the upgrades that need no more.
    """
    most = _time_left(pipeline, a, b, limit)
    if most < 0:
        return np.int64(IMPOSSIBLE)
    lowest = first_transient(pipeline, a, b)
    need = _bytes_to_free(pipeline, i, a, b, lowest)
    if need == IMPOSSIBLE:
        return np.int64(IMPOSSIBLE)
    clear(counts)
    if need <= 0:
        return np.int64(0)
    alike = _count_alike(pipeline, a, b)
    highest = _highest(tiers, pipeline, i, alike, lowest)
    best, num_allowed = np.int64(IMPOSSIBLE), np.int64(-1)
    trial = np.zeros_like(counts)
    for v in range(-1, tiers.levels.shape[0]):
        # 1. the next transient that makes a difference
        transient = lowest if v < 0 else tiers.levels[v]
        if transient < lowest or (v >= 0 and transient == lowest):
            continue
        if transient > highest:
            break
        # 2. the upgrades that need no more; where micro-batches are pending, what is computed again is counted there
        prefix = allowed(tiers, np.int64(IMPOSSIBLE) if pipeline.rooms[i].pending > 0 else transient)
        now = np.int64(0)
        for g in range(len(alike)):
            now += prefix[g] if alike[g] > 0 else 0
        if now == num_allowed:
            continue
        num_allowed = now
        # 3. the least time with them
        need = _bytes_to_free(pipeline, i, a, b, transient)
        if need == IMPOSSIBLE:
            break
        extra = least_extra(tiers, alike, prefix, need, min(most, best - 1), trial)
        if extra != IMPOSSIBLE:
            best = extra
            for g in range(counts.shape[0]):
                for u in range(counts.shape[1]):
                    counts[g, u] = trial[g, u]
    return best


@inlined
def _fits(pipeline: Pipeline, tiers: TierTable, i: int, a: int, b: int, limit: int, counts: IntArray) -> bool:
    """Whether `stage_extra` finds a choice; no stage is solved twice where results are remembered."""
    # 1. nothing to recompute, or nothing that helps
    most = _time_left(pipeline, a, b, limit)
    if most < 0:
        return False
    lowest = first_transient(pipeline, a, b)
    need = _bytes_to_free(pipeline, i, a, b, lowest)
    if need <= 0 or need == IMPOSSIBLE:
        return need <= 0
    # 2. solved before
    remembers = pipeline.known.size > 0
    if remembers and pipeline.known[i, a, b] > 0:
        return pipeline.known[i, a, b] - 1 <= most
    # 3. exactly, whatever the limit where the result is remembered
    extra = stage_extra(pipeline, tiers, i, a, b, np.int64(IMPOSSIBLE // 2) if remembers else limit, counts)
    if remembers:
        pipeline.known[i, a, b] = 1 + extra
    return extra <= most


@compiled
def furthest_ends(pipeline: Pipeline, tiers: TierTable, limit: int) -> IntArray:
    """(S + 1,) R[i]: the furthest end of i stages within `limit`, 0 from the first i that cannot; exists iff R[S] = K.

    No split ends further: if one ends stage i at c > R[i], then [R[i - 1], c), part of its own stage i, is within the
    limit. Every end in i .. R[i] is reached: cutting a split off at p and handing one segment each to the stages that
    would be left empty gives these part of what an earlier, more expensive stage held. So R[i + 1] is the greedy end
    from R[i], or, where stage i cannot take one segment there, R[i] itself, reached from R[i] - 1.
    """
    S, K = pipeline.rooms.shape[0], pipeline.sums.shape[0] - 1
    counts = np.empty((tiers.upgrades.shape[0], tiers.upgrades.shape[1]), np.int64)
    ends = np.zeros(S + 1, np.int64)
    for i in range(S):
        a = ends[i]
        low, high = a, np.int64(K)
        while low < high:
            middle = (low + high + 1) // 2
            if _fits(pipeline, tiers, i, a, middle, limit, counts):
                low = middle
            else:
                high = middle - 1
        if low < i + 1:
            break
        ends[i + 1] = low
    return ends


@inlined
def _peak(pipeline: Pipeline, tiers: TierTable, i: int, a: int, b: int, extra: int, counts: IntArray) -> int:
    """Bytes of the stage at its fullest under the choice `counts`, which costs `extra`."""
    here, start, stop = pipeline.rooms[i], pipeline.sums[a], pipeline.sums[b]
    saved = stop.saved_first - start.saved_first
    transient = first_transient(pipeline, a, b)
    for g in range(counts.shape[0]):
        for u in range(counts.shape[1]):
            saved -= counts[g, u] * tiers.upgrades[g, u].gain
            if counts[g, u] > 0 and here.pending == 0 and extra > 0:
                transient = max(transient, tiers.upgrades[g, u].reach)
    size = stop.state - start.state + transient
    size += here.pending * (stop.whole - start.whole + start.entry)
    return size + here.in_flight * (saved + start.entry)


@compiled
def _best_tied(pipeline: Pipeline, tiers: TierTable, limit: int, ends: IntArray) -> IntArray:
    """(S + 1, K + 1) end of stage i that begins at a, in the best split of what is left; 0: there is none."""
    S, K = pipeline.rooms.shape[0], pipeline.sums.shape[0] - 1
    counts = np.empty((tiers.upgrades.shape[0], tiers.upgrades.shape[1]), np.int64)
    extra = np.empty((S + 1, K + 1), np.int64)
    fullest = np.zeros((S + 1, K + 1), np.int64)
    following = np.zeros((S + 1, K + 1), np.int64)
    for i in range(S + 1):
        for a in range(K + 1):
            extra[i, a] = IMPOSSIBLE
    extra[S, K] = 0
    for i in range(S - 1, -1, -1):
        for a in range(i, ends[i] + 1):
            for b in range(a + 1, ends[i + 1] + 1):
                if extra[i + 1, b] == IMPOSSIBLE:
                    continue
                own = stage_extra(pipeline, tiers, np.int64(i), np.int64(a), np.int64(b), limit, counts)
                if own == IMPOSSIBLE:
                    break
                size = _peak(pipeline, tiers, np.int64(i), np.int64(a), np.int64(b), own, counts)
                size = max(size, fullest[i + 1, b])
                total = own + extra[i + 1, b]
                if total < extra[i, a] or (total == extra[i, a] and size < fullest[i, a]):
                    extra[i, a], fullest[i, a], following[i, a] = total, size, b
    return following


def best_tied_cuts(pipeline: Pipeline, tiers: TierTable, limit: int) -> IntArray:
    """(S + 1,) cuts of the split within `limit` that recomputes least in sum, then has the smallest fullest stage.

    Then the earliest first cut, the earliest second ... Dynamic programme from the last stage over the ends that
    `furthest_ends` allows; both objectives (a sum, then a maximum) keep an optimal rest optimal. Zeros at the end where
    no split within `limit` exists.
    """
    following = _best_tied(pipeline, tiers, limit, furthest_ends(pipeline, tiers, limit))
    cuts = np.zeros(len(following), np.int64)
    for i in range(len(cuts) - 1):
        cuts[i + 1] = following[i, cuts[i]]
    return cuts


def least_bottleneck(pipeline: Pipeline, tiers: TierTable, *, high: int) -> int | None:
    """The smallest limit on every stage's time that some split keeps; None if even `high` is too small.

    Bisection over integers: some 50 calls of `furthest_ends`. Exact only where that is; else a bound from below.
    """
    num_segments = len(pipeline.sums) - 1
    return _bisect(lambda limit: bool(furthest_ends(pipeline, tiers, limit)[-1] == num_segments), -1, high)


def least_reachable_bottleneck(pipeline: Pipeline, tiers: TierTable, *, low: int, high: int) -> int | None:
    """`least_bottleneck`, exact whatever the order of the stages' costs; `low` is too small.

    Every probe is the dynamic programme of `best_tied_cuts`, which takes up to K times as long as `furthest_ends`.
    """
    num_segments = len(pipeline.sums) - 1
    return _bisect(lambda limit: bool(best_tied_cuts(pipeline, tiers, limit)[-1] == num_segments), low, high)


def _bisect(feasible: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest feasible number of low < x <= high."""
    if not feasible(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return high


def least_memory(pipeline: Pipeline, tiers: TierTable) -> int:
    """Bytes of the smallest cap, the same for every stage, under which a split exists, whatever its time."""
    anything = IMPOSSIBLE // 2
    nothing = np.zeros((0, 0, 0), np.int64)  # what is known holds for one cap
    num_segments = len(pipeline.sums) - 1

    def feasible(cap: int) -> bool:
        rooms = pipeline.rooms.copy()
        rooms["cap"] = cap
        capped = pipeline._replace(rooms=rooms, known=nothing)
        return bool(furthest_ends(capped, tiers, anything)[-1] == num_segments)

    entry, everything = int(pipeline.sums["entry"].max()), pipeline.sums[-1]
    held = pipeline.rooms["in_flight"] * (everything["saved_first"] + entry)
    held += pipeline.rooms["pending"] * (everything["whole"] + entry)
    transient = max(int(pipeline.transient.max()), int(tiers.upgrades["reach"].max(initial=0)))
    least = _bisect(feasible, -1, int(everything["state"] + held.max()) + transient)
    assert least is not None, "everything on every device at once is more than any stage needs"
    return least
