"""Can S stages cover the model within a time and a memory limit, how far do they reach, which cuts tie best.

K *segments* are runs of layers between two allowed cuts; a stage is an interval [a, b) of them, never empty, and costs
    time[b] - time[a] + extra(i, a, b)
where extra is the least recompute time (module `tiers`) for which
    state[b] - state[a] + in_flight[i] * saved + pending[i] * whole + transient <= cap[i],
`saved` by the chosen tiers and `whole` without recompute, `entry[a]` in both, `transient` the most that one layer's
backward needs next to: a layer that recomputes needs what it computes again as well (`Upgrade.reach`), so that a stage
that recomputes nothing has more room, and a stage may do better with a weaker tier. Where a micro-batch is pending,
`whole` holds that already. Time and bytes rise when the interval grows: what it enters with is no more than what
earlier segments hold for it. Where also no later stage is more expensive than an earlier one for the same interval
(true of in-flight counts where backwards are whole), `reach` is exact; else it still never calls a feasible limit
infeasible.

Example: four layers of 3, 2, 2 and 3 ms, a cut allowed between any two, on S = 2 stages. Each layer keeps 3 GB of a
micro-batch, or 1 GB if it recomputes for 1 ms. Stage 0 has 2 micro-batches in flight, stage 1 has 1; the cap is 10 GB.
Limit 5 ms: two layers on stage 0 take 5 ms, but hold 12 GB; recomputing one of them holds 2 x (1 + 3) GB, and 2 GB more
while it is computed again, in 6 ms. So stage 0 ends after the first layer, stage 1 from there after the third (4 ms),
and the fourth is left: infeasible. Limit 6 ms: stage 0 ends after the second, stage 1 after the fourth: feasible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple, TypeAlias

from trimtab.errors import PartitionError
from trimtab.partition.tiers import (
    Choice,
    Menu,
    TierTable,
    least_bound,
    least_extra,
    menus_of,
    most_saved,
    no_choice,
    round_up,
)


class Room(NamedTuple):
    """What a stage may hold."""

    in_flight: int  # micro-batches, at least 0
    pending: int  # further ones that hold everything
    cap: int  # bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineCuts:
    """One split problem in whole numbers. Sums are of the layers before each of the K + 1 allowed cuts."""

    time: Sequence[int]  # composite, forward and backward on the first tiers
    state: Sequence[int]  # bytes
    saved_first: Sequence[int]  # bytes of one micro-batch, every layer on its first (cheapest) tier
    saved_least: Sequence[int]  # the same on its smallest tier
    whole: Sequence[int]  # the same on tier "none"
    num_alike: Sequence[Sequence[int]]  # layers of each class
    entry: Sequence[int]  # no sum: saved bytes more of a stage that begins here
    transient: Sequence[Sequence[int]]  # first tiers', sparse table: [p][a] is the most of segments a .. a + 2**p - 1
    rooms: Sequence[Room]  # of the S stages
    tiers: TierTable
    # what was solved before
    choices: dict[tuple[int, int, int], Choice | None] = field(default_factory=dict)  # of stage i over [a, b)
    menus: dict[tuple[bool, ...], list[Menu]] = field(default_factory=dict)  # of stages with layers of these classes

    @property
    def num_segments(self) -> int:
        return len(self.time) - 1


def least_choice(pipeline: PipelineCuts, i: int, a: int, b: int) -> Choice | None:
    """The recompute of least time with which stage i holds [a, b) under its cap; None if there is none.

    Solved once for each stage, whatever the limit on its time.
    """
    key = (i, a, b)
    if key not in pipeline.choices:
        pipeline.choices[key] = _solve(pipeline, i, a, b)
    return pipeline.choices[key]


def _solve(pipeline: PipelineCuts, i: int, a: int, b: int) -> Choice | None:
    # 1. Nothing to recompute, or nothing that helps.
    lowest = _first_transient(pipeline, a, b)
    need = _bytes_to_free(pipeline, i, a, b, lowest)
    if need is None or need <= 0:
        return None if need is None else no_choice(pipeline.tiers)
    # 2. For each transient that some upgrade brings about: the least time with the upgrades that need no more.
    alike = _count_alike(pipeline, a, b)
    best: Choice | None = None
    for menu in _menus(pipeline, i, alike, lowest):
        need = _bytes_to_free(pipeline, i, a, b, max(lowest, menu.transient))
        if need is None:
            break
        best = least_extra(pipeline.tiers, menu, alike, need, None if best is None else best.extra - 1) or best
    return best


def _menus(pipeline: PipelineCuts, i: int, alike: Sequence[int], lowest: int) -> list[Menu]:
    """Return what stage i may choose from, its transient rising from `lowest`."""
    present = tuple(number > 0 for number in alike)
    if present not in pipeline.menus:
        pipeline.menus[present] = menus_of(pipeline.tiers, present)
    menus = pipeline.menus[present]
    if pipeline.rooms[i].pending > 0:  # what is computed again is counted with the pending micro-batches
        return [menus[-1]._replace(transient=lowest)]
    while len(menus) > 1 and menus[1].transient <= lowest:
        menus = menus[1:]
    return menus


def _count_alike(pipeline: PipelineCuts, a: int, b: int) -> list[int]:
    """Return the layers of each class in the stage."""
    return [y - x for x, y in zip(pipeline.num_alike[a], pipeline.num_alike[b], strict=True)]


def _first_transient(pipeline: PipelineCuts, a: int, b: int) -> int:
    """The most that a backward of the stage needs where all its layers keep their first tiers."""
    power = (b - a).bit_length() - 1
    row = pipeline.transient[power]
    return max(row[a], row[b - (1 << power)])


def _bytes_to_free(pipeline: PipelineCuts, i: int, a: int, b: int, transient: int) -> int | None:
    """Return bytes of one micro-batch by which the first tiers overfill stage i; None if the smallest tiers do too."""
    here, entry = pipeline.rooms[i], pipeline.entry[a]
    room = here.cap - (pipeline.state[b] - pipeline.state[a]) - transient
    room -= here.pending * (pipeline.whole[b] - pipeline.whole[a] + entry)
    if room < 0:
        return None
    if here.in_flight == 0:
        return 0
    room = room // here.in_flight - entry
    if pipeline.saved_least[b] - pipeline.saved_least[a] > room:
        return None
    return pipeline.saved_first[b] - pipeline.saved_first[a] - room


Cost: TypeAlias = "Callable[[int, int, int, int], int | None]"
"""Of stage i over [a, b), and a limit: what the stage needs, which rises with b; None: more than any limit.

On the same side of the limit any bound will do: where it is within, one from above; where it is not, one from below.
"""


def time_cost(pipeline: PipelineCuts) -> Cost:
    """Return the composite time of a stage with its least recompute."""

    def cost(i: int, a: int, b: int, limit: int) -> int | None:
        own = pipeline.time[b] - pipeline.time[a]
        if own > limit:
            return own
        if (i, a, b) not in pipeline.choices:
            least, most = _extra_bounds(pipeline, i, a, b, limit - own)
            if least == inf:
                return None
            if most <= limit - own:
                return own + int(most)
            if least > limit - own:
                return own + ceil(least)
        choice = least_choice(pipeline, i, a, b)
        return None if choice is None else own + choice.extra

    return cost


def _extra_bounds(pipeline: PipelineCuts, i: int, a: int, b: int, limit: int) -> tuple[float, float]:
    """Bound the stage's least recompute time: the relaxation, as it is and rounded up; inf where none helps.

    Stops at the first upper bound within `limit`; there is none where the lower one is not.
    """
    lowest = _first_transient(pipeline, a, b)
    need = _bytes_to_free(pipeline, i, a, b, lowest)
    if need is None or need <= 0:
        return (0, 0) if need is not None else (inf, inf)
    alike = _count_alike(pipeline, a, b)
    least = inf
    for menu in _menus(pipeline, i, alike, lowest):
        need = _bytes_to_free(pipeline, i, a, b, max(lowest, menu.transient))
        if need is None:
            break
        bound = least_bound(menu, alike, need)
        least = min(least, bound)
        if bound <= limit and (most := round_up(pipeline.tiers, menu, alike, need).extra) <= limit:
            return least, most
    return least, inf


def memory_cost(pipeline: PipelineCuts) -> Cost:
    """Return the bytes of a stage under the recompute that makes them least."""

    def cost(i: int, a: int, b: int, _: int) -> int:
        here, lowest, alike = pipeline.rooms[i], _first_transient(pipeline, a, b), _count_alike(pipeline, a, b)
        saved = pipeline.saved_first[b] - pipeline.saved_first[a] + pipeline.entry[a]
        whole = pipeline.whole[b] - pipeline.whole[a] + pipeline.entry[a]
        return (
            pipeline.state[b]
            - pipeline.state[a]
            + here.pending * whole
            + min(
                max(lowest, menu.transient) + here.in_flight * (saved - most_saved(menu, alike))
                for menu in _menus(pipeline, i, alike, lowest)
            )
        )

    return cost


class Reach(NamedTuple):
    """How far the stages get within a limit on what each costs."""

    ends: list[int]  # (S + 1,) R[i]: the furthest end of i stages, 0 from the first i that cannot
    largest: int  # of them: within any limit from here to the one asked for they get as far
    next_limit: int | None  # within less none gets further; None: none ever does


def reach(cost: Cost, S: int, K: int, limit: int) -> Reach:
    """The furthest ends of S stages within `limit`; a split of K segments exists iff R[S] = K.

    No split ends further: if one ends stage i at c > R[i], then [R[i - 1], c), part of its own stage i, is within the
    limit. Every end in i .. R[i] is reached: cutting a split off at p and handing one segment each to the stages that
    would be left empty gives these part of what an earlier, more expensive stage held. So R[i + 1] is the greedy end
    from R[i], or, where stage i cannot take one segment there, R[i] itself, reached from R[i] - 1.
    """
    ends, largest, next_limits = [0] * (S + 1), 0, []
    for i in range(S):
        a = low = ends[i]
        high = K
        # the furthest end of this stage, by bisection
        own, next_own = 0, None  # what the stage costs as far as it gets, and one segment further
        while low < high:
            middle = (low + high + 1) // 2
            found = cost(i, a, middle, limit)
            if found is not None and found <= limit:
                low, own = middle, found
            else:
                high, next_own = middle - 1, found
        if next_own is not None:
            next_limits.append(next_own)
        if low < i + 1:
            break
        ends[i + 1], largest = low, max(largest, own)
    return Reach(ends, largest, min(next_limits, default=None))


def least_limit(cost: Cost, S: int, K: int, *, low: int, high: int) -> int | None:
    """The smallest limit, above `low`, within which `reach` covers all; None if even `high` is too small.

    Bisection that skips limits which change nothing: some ten calls of `reach`, not one for each bit of a limit.
    """
    found = reach(cost, S, K, high)
    if found.ends[S] != K:
        return None
    high = found.largest
    # down to the largest stage that was needed, or up to the least that gets further
    while high - low > 1:
        found = reach(cost, S, K, (low + high) // 2)
        if found.ends[S] == K:
            high = found.largest
        else:
            assert found.next_limit is not None, "within `high` the stages get further"
            low = found.next_limit - 1
    return high


def least_bottleneck(pipeline: PipelineCuts, *, high: int) -> int | None:
    """The smallest limit on every stage's time that some split keeps; None if even `high` is too small.

    Exact only where `reach` is; else a bound from below.
    """
    S, K = len(pipeline.rooms), pipeline.num_segments
    mean = -(-pipeline.time[K] // S)  # no split is faster
    return least_limit(time_cost(pipeline), S, K, low=mean - 1, high=high)


def least_reachable_bottleneck(pipeline: PipelineCuts, *, low: int, high: int) -> int | None:
    """Return `least_bottleneck`, exact whatever the order of the stages' costs; `low` is too small.

    Every probe is the dynamic programme of `best_tied_cuts`, which takes up to K times as long as `reach`.
    """
    if best_tied_cuts(pipeline, high) is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if best_tied_cuts(pipeline, middle) is None else (low, middle)
    return high


def least_memory(pipeline: PipelineCuts) -> int:
    """Count the bytes of the smallest cap, the same for every stage, under which a split exists, whatever its time."""
    S, K = len(pipeline.rooms), pipeline.num_segments
    cost = memory_cost(pipeline)
    least = least_limit(cost, S, K, low=-1, high=max(cost(i, 0, K, 0) or 0 for i in range(S)))
    if least is None:  # more bytes than its whole numbers hold; else everything on every device would do
        raise PartitionError("a micro-batch of this size takes more bytes than can be counted: ask for smaller packs")
    return least


def best_tied_cuts(pipeline: PipelineCuts, limit: int) -> list[int] | None:
    """Find (S + 1,) cuts of the split within `limit` that recomputes least in sum, then has the smallest fullest stage.

    Then the earliest first cut, the earliest second ... Dynamic programme from the last stage over the ends that
    `reach` allows; both objectives (a sum, then a maximum) keep an optimal rest optimal. None where no split is within
    `limit`.
    """
    # 1. from the last stage on: the best rest behind every cut
    S, K, time = len(pipeline.rooms), pipeline.num_segments, pipeline.time
    ends = reach(time_cost(pipeline), S, K, limit).ends
    rest: dict[int, tuple[int, int]] = {K: (0, 0)}  # recompute and fullest stage of the stages that begin here
    following: list[dict[int, int]] = []  # end of the stage that begins here
    for i in reversed(range(S)):
        best: dict[int, tuple[int, int]] = {}
        cut: dict[int, int] = {}
        for a in range(i, ends[i] + 1):
            for b in range(a + 1, ends[i + 1] + 1):
                if b not in rest:
                    continue
                # all rises with b: once a stage is too slow or too full, those that end further on are
                most = limit - (time[b] - time[a])
                choice = least_choice(pipeline, i, a, b) if most >= 0 else None
                if choice is None or choice.extra > most:
                    break
                extra, fullest = rest[b]
                total = (choice.extra + extra, max(_peak(pipeline, i, a, b, choice), fullest))
                if a not in best or total < best[a]:
                    best[a], cut[a] = total, b
        rest = best
        following.append(cut)
    # 2. from the first on: the cuts of the best
    if 0 not in rest:
        return None
    cuts = [0]
    for cut in reversed(following):
        cuts.append(cut[cuts[-1]])
    return cuts


def _peak(pipeline: PipelineCuts, i: int, a: int, b: int, choice: Choice) -> int:
    """Count the bytes of the stage at its fullest under the choice."""
    here, entry = pipeline.rooms[i], pipeline.entry[a]
    saved, transient = pipeline.saved_first[b] - pipeline.saved_first[a], _first_transient(pipeline, a, b)
    if choice.extra > 0:
        for counts, upgrades in zip(choice.counts, pipeline.tiers.upgrades, strict=True):
            for number, upgrade in zip(counts, upgrades, strict=True):
                saved -= number * upgrade.gain
                if number > 0 and here.pending == 0:
                    transient = max(transient, upgrade.reach)
    size = pipeline.state[b] - pipeline.state[a] + transient
    size += here.pending * (pipeline.whole[b] - pipeline.whole[a] + entry)
    return size + here.in_flight * (saved + entry)
