"""Compiled: can S stages cover the model within a time and a memory limit, how far do they reach, which cuts tie best.

K *segments* are runs of layers between two allowed cuts; a stage is an interval [a, b) of them, never empty, and costs
    time(i, a, b) = max over forms j of tail[j, i, b] - head[j, i, a] + weight[j, i] * extra(i, a, b)
where extra is the least recompute time (module `tiers`) for which
    state[b] - state[a] + in_flight[i] * saved + pending[i] * whole + transient <= cap[i],
`saved` by the chosen tiers and `whole` without recompute, `entry[a]` in both, `transient` the most that one layer's
backward needs beside: a layer that recomputes needs what it computes again as well (`TierTable.reach`), so that a stage
that recomputes nothing has more room, and a stage may do better with a weaker tier. Where a micro-batch is pending,
`whole` holds that already. Time and bytes rise when the interval grows: what it enters with is no more than what
earlier segments hold for it. Where besides no later stage is dearer than an earlier one for the same interval (true of
in-flight counts where backwards are whole), `furthest_ends` is exact; else it still never calls a feasible limit
infeasible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import njit

from trimtab.partition.tiers import IMPOSSIBLE, TierTable, allowed, least_extra, relax, round_up
from trimtab.specs import IntArray


class Pipeline(NamedTuple):
    """One split problem in integers; prefix sums run over the K + 1 allowed cuts."""

    head: IntArray  # (J, S, K + 1) composite time
    tail: IntArray  # (J, S, K + 1)
    weight: IntArray  # (J, S) of the recompute time
    state: IntArray  # (K + 1,) bytes
    saved_first: IntArray  # (K + 1,) bytes of one micro-batch, every layer on its first (cheapest) tier
    saved_least: IntArray  # (K + 1,) the same on its smallest tier
    num_alike: IntArray  # (K + 1, C) layers of each class
    transient: IntArray  # (log2 K, K) first tiers', sparse table: [p, a] is the largest of segments a .. a + 2**p - 1
    whole: IntArray  # (K + 1,) saved bytes on tier "none"
    entry: IntArray  # (K + 1,) saved bytes more of a stage that begins here
    in_flight: IntArray  # (S,) at least 0
    pending: IntArray  # (S,) further micro-batches that hold everything
    cap: IntArray  # (S,) bytes
    host: IntArray  # (S,) bytes of host memory for one micro-batch
    known: IntArray  # (S, K + 1, K + 1) 1 + extra where already solved, else 0; empty: remember nothing


@njit(cache=True)
def _most_extra(pipeline: Pipeline, i: int, a: int, b: int, limit: int) -> int:
    """The recompute time that `limit` leaves to the stage; negative when it is too slow without any."""
    most = IMPOSSIBLE
    for j in range(pipeline.head.shape[0]):
        left = limit - (pipeline.tail[j, i, b] - pipeline.head[j, i, a])
        if left < 0:
            return -1
        if pipeline.weight[j, i] > 0:
            most = min(most, left // pipeline.weight[j, i])
    return int(most)


@njit(cache=True)
def first_transient(pipeline: Pipeline, a: int, b: int) -> int:
    """The most that a backward of the stage needs where all its layers keep their first tiers."""
    power = 0
    while 2 << power <= b - a:
        power += 1
    return int(max(pipeline.transient[power, a], pipeline.transient[power, b - (1 << power)]))


@njit(cache=True)
def _bytes_to_free(pipeline: Pipeline, i: int, a: int, b: int, transient: int) -> int:
    """Bytes of one micro-batch by which the first tiers overfill stage i; `IMPOSSIBLE` if the smallest tiers do too."""
    room = pipeline.cap[i] - (pipeline.state[b] - pipeline.state[a]) - transient
    room -= pipeline.pending[i] * (pipeline.whole[b] - pipeline.whole[a] + pipeline.entry[a])
    if room < 0:
        return IMPOSSIBLE
    if pipeline.in_flight[i] == 0:
        return 0
    room = room // pipeline.in_flight[i] - pipeline.entry[a]
    if pipeline.saved_least[b] - pipeline.saved_least[a] > room:
        return IMPOSSIBLE
    return int(pipeline.saved_first[b] - pipeline.saved_first[a] - room)


@njit(cache=True)
def _highest(tiers: TierTable, pipeline: Pipeline, i: int, alike: IntArray, transient: int) -> int:
    """The most that a backward of the stage can need, whatever is recomputed."""
    if pipeline.pending[i] == 0:
        for g in range(alike.shape[0]):
            if alike[g] > 0:
                transient = max(transient, tiers.reach[g].max())
    return int(transient)


@njit(cache=True)
def stage_extra(pipeline: Pipeline, tiers: TierTable, i: int, a: int, b: int, limit: int, counts: IntArray) -> int:
    """Least recompute time of the stage, or `IMPOSSIBLE` if its time then exceeds `limit` or its bytes the cap.

    For each transient that some upgrade of its layers brings about: the least time with the upgrades that need no more.
    """
    most = _most_extra(pipeline, i, a, b, limit)
    if most < 0:
        return IMPOSSIBLE
    lowest = first_transient(pipeline, a, b)
    need = _bytes_to_free(pipeline, i, a, b, lowest)
    if need == IMPOSSIBLE:
        return IMPOSSIBLE
    counts[:] = 0
    if need <= 0:
        return 0
    alike = pipeline.num_alike[b] - pipeline.num_alike[a]
    highest = _highest(tiers, pipeline, i, alike, lowest)
    best, num_allowed = IMPOSSIBLE, np.int64(-1)
    trial = np.zeros_like(counts)
    for v in range(-1, tiers.levels.shape[0]):
        transient = lowest if v < 0 else tiers.levels[v]
        if transient < lowest or (v >= 0 and transient == lowest):
            continue
        if transient > highest:
            break
        # where micro-batches are pending, what is computed again is counted with them
        prefix = allowed(tiers, IMPOSSIBLE if pipeline.pending[i] > 0 else transient)
        now = np.sum(np.where(alike > 0, prefix, 0))
        if now == num_allowed:
            continue
        num_allowed = now
        need = _bytes_to_free(pipeline, i, a, b, transient)
        if need == IMPOSSIBLE:
            break
        extra = least_extra(tiers, alike, prefix, need, min(most, best - 1), pipeline.host[i], trial)
        if extra != IMPOSSIBLE:
            best = extra
            counts[:] = trial
    return int(best)


@njit(cache=True)
def _fits(pipeline: Pipeline, tiers: TierTable, i: int, a: int, b: int, limit: int, counts: IntArray) -> bool:
    """Whether `stage_extra` finds a choice; bounds settle most calls, and no stage is solved exactly twice."""
    most = _most_extra(pipeline, i, a, b, limit)
    if most < 0:
        return False
    lowest = first_transient(pipeline, a, b)
    need = _bytes_to_free(pipeline, i, a, b, lowest)
    if need <= 0 or need == IMPOSSIBLE:
        return bool(need <= 0)
    remembers = pipeline.known.size > 0
    if remembers and pipeline.known[i, a, b] > 0:
        return bool(pipeline.known[i, a, b] - 1 <= most)
    alike = pipeline.num_alike[b] - pipeline.num_alike[a]
    every = allowed(tiers, IMPOSSIBLE)
    if relax(tiers, alike, every, need) * (1.0 - 1e-14) > most:
        return False
    need = _bytes_to_free(pipeline, i, a, b, _highest(tiers, pipeline, i, alike, lowest))
    if (
        need != IMPOSSIBLE
        and round_up(tiers, alike, every, need, counts) <= most
        and (not tiers.uses_host or np.sum(counts * tiers.host) <= pipeline.host[i])
    ):
        return True
    if not remembers:
        return bool(stage_extra(pipeline, tiers, i, a, b, limit, counts) != IMPOSSIBLE)
    whatever = IMPOSSIBLE // 2
    extra = stage_extra(pipeline, tiers, i, a, b, whatever, counts)
    pipeline.known[i, a, b] = 1 + extra
    return bool(extra <= most)


@njit(cache=True)
def furthest_ends(pipeline: Pipeline, tiers: TierTable, limit: int) -> IntArray:
    """(S + 1,) R[i]: the furthest end of i stages within `limit`, 0 from the first i that cannot; exists iff R[S] = K.

    No split ends further: if one ends stage i at c > R[i], then [R[i - 1], c), part of its own stage i, is within the
    limit. Every end in i .. R[i] is reached: cutting a split off at p and handing one segment each to the stages that
    would be left empty gives these part of what an earlier, dearer stage held. So R[i + 1] is the greedy end from R[i],
    or, where stage i cannot take one segment there, R[i] itself, reached from R[i] - 1.
    """
    S, K = pipeline.in_flight.shape[0], pipeline.state.shape[0] - 1
    counts = np.zeros_like(tiers.gain)
    ends = np.zeros(S + 1, np.int64)
    for i in range(S):
        a = ends[i]
        low, high = a, K
        while low < high:
            middle = (low + high + 1) // 2
            if _fits(pipeline, tiers, i, a, middle, limit, counts):
                low = middle
            else:
                high = middle - 1
        if low < i + 1:
            ends[i + 1 :] = 0
            return ends
        ends[i + 1] = low
    return ends


@njit(cache=True)
def best_tied_cuts(pipeline: Pipeline, tiers: TierTable, limit: int) -> IntArray:
    """(S + 1,) cuts of the split within `limit` that recomputes least in sum, then has the smallest fullest stage.

    Then the earliest first cut, the earliest second ... Dynamic programme from the last stage over the ends that
    `furthest_ends` allows; both objectives (a sum, then a maximum) keep an optimal rest optimal. A split within `limit`
    must exist.
    """
    S, K = pipeline.in_flight.shape[0], pipeline.state.shape[0] - 1
    ends = furthest_ends(pipeline, tiers, limit)
    counts = np.zeros_like(tiers.gain)
    extra = np.full((S + 1, K + 1), IMPOSSIBLE, np.int64)
    fullest = np.zeros((S + 1, K + 1), np.int64)
    following = np.zeros((S + 1, K + 1), np.int64)
    extra[S, K] = 0
    for i in range(S - 1, -1, -1):
        for a in range(i, ends[i] + 1):
            for b in range(a + 1, ends[i + 1] + 1):
                if extra[i + 1, b] == IMPOSSIBLE:
                    continue
                own = stage_extra(pipeline, tiers, i, a, b, limit, counts)
                if own == IMPOSSIBLE:
                    break
                saved = pipeline.saved_first[b] - pipeline.saved_first[a] - np.sum(counts * tiers.gain)
                size = pipeline.state[b] - pipeline.state[a] + first_transient(pipeline, a, b)
                if pipeline.pending[i] == 0 and own > 0:
                    size += max(0, np.max(np.where(counts > 0, tiers.reach, 0)) - first_transient(pipeline, a, b))
                size += pipeline.pending[i] * (pipeline.whole[b] - pipeline.whole[a] + pipeline.entry[a])
                size += pipeline.in_flight[i] * (saved + pipeline.entry[a])
                size = max(size, fullest[i + 1, b])
                total = own + extra[i + 1, b]
                if total < extra[i, a] or (total == extra[i, a] and size < fullest[i, a]):
                    extra[i, a], fullest[i, a], following[i, a] = total, size, b
    cuts = np.zeros(S + 1, np.int64)
    for i in range(S):
        cuts[i + 1] = following[i, cuts[i]]
    return cuts


def least_bottleneck(pipeline: Pipeline, tiers: TierTable, *, high: int) -> int | None:
    """The smallest limit on every stage's time that some split keeps; None if even `high` is too small.

    Bisection over integers: some 50 calls of `furthest_ends`. Exact only where that is; else a bound from below.
    """
    num_segments = len(pipeline.state) - 1
    return _bisect(lambda limit: bool(furthest_ends(pipeline, tiers, limit)[-1] == num_segments), -1, high)


def least_reachable_bottleneck(pipeline: Pipeline, tiers: TierTable, *, low: int, high: int) -> int | None:
    """`least_bottleneck`, exact whatever the order of the stages' costs; `low` is too small.

    Every probe is the dynamic programme of `best_tied_cuts`, which takes up to K times as long as `furthest_ends`.
    """
    num_segments = len(pipeline.state) - 1
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
    num_segments = len(pipeline.state) - 1

    def feasible(cap: int) -> bool:
        capped = pipeline._replace(cap=np.full_like(pipeline.cap, cap), known=nothing)
        return bool(furthest_ends(capped, tiers, anything)[-1] == num_segments)

    entry = int(pipeline.entry.max())
    held = pipeline.in_flight * (pipeline.saved_first[-1] + entry) + pipeline.pending * (pipeline.whole[-1] + entry)
    transient = max(int(pipeline.transient.max()), int(tiers.reach.max(initial=0)))
    least = _bisect(feasible, -1, int(pipeline.state[-1] + held.max()) + transient)
    assert least is not None, "everything on every device at once is more than any stage needs"
    return least
