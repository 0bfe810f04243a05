"""Local search on the simulated makespan around the exact split, with a lower bound that no split can undercut.

Minimising the slowest stage is not minimising the step when micro-batches are few: a stage behind others waits for them
before its first forward and after its last backward, so late stages should be smaller than early ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.errors import PartitionError
from trimtab.partition.assess import SplitResult
from trimtab.partition.schedules import block_order
from trimtab.partition.simulate import StageTimes, stage_times
from trimtab.partition.stages import SplitProblem, chunk_room, in_flight_of, layer_table_of, solve, stage_of
from trimtab.specs import NUM_WORK_TERMS, FloatArray, IntArray, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best split found; makespans are means over the sampled steps, without optimizer and all-reduce."""

    split: SplitResult
    makespan_s: float
    start_makespan_s: float  # of the split with the least bottleneck, where the search began
    lower_bound_s: float  # of every split's makespan under the same cap (see `makespan_bound`)
    num_simulated: int  # candidate splits

    @property
    def gap(self) -> float:
        """makespan / lower bound - 1: how much is at most left to gain."""
        return self.makespan_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else 0.0


def search_makespan(
    problem: SplitProblem,
    work: FloatArray,
    *,
    link_bytes_per_s: float | Sequence[float] | None = None,
    latency_s: float = 0.0,
    radius: int = 3,
    max_simulated: int = 4000,
) -> SearchResult:
    """The split of least mean simulated makespan that moves of cuts reach; never worse than the exact bottleneck split.

    `work` (steps, num_microbatches, len(WORK_TERMS)): sampled steps of real micro-batches, in the order they run.
    Descent from two starts: the split of least bottleneck, and the one that minimises the terms of `makespan_bound`.
    A round simulates every neighbour of one kind and takes the best: one cut moved by up to `radius` runs of layers,
    then neighbouring cuts moved together, then any two cuts. Each stage's recompute is solved again exactly under
    the cap (least time at `problem.work_mean`). Heuristic: `SearchResult.gap` bounds what it missed. Deterministic;
    each start stops after `max_simulated` candidates.
    """
    evaluator = _Evaluator(problem, _checked_work(problem, work), link_bytes_per_s, latency_s)
    start = solve(problem)
    best_makespan = start_makespan = evaluator.simulate(start.stages)
    best_stages = start.stages
    bound, bound_cuts = _bound(problem, work)

    positions = evaluator.table.positions
    own_cuts = (*(int(np.searchsorted(positions, stage.start)) for stage in start.stages), len(positions) - 1)
    for first in (own_cuts, bound_cuts):
        if first is None:
            continue
        cuts, makespan = _descend(evaluator, first, radius=radius, max_simulated=max_simulated)
        if makespan < best_makespan * (1 - 1e-12):
            stages = evaluator.stages(cuts)
            assert stages is not None, "it was simulated before"
            best_makespan, best_stages = makespan, stages
    split = start if best_stages is start.stages else problem.assess(best_stages)
    return SearchResult(
        split=replace(split, exact=start.exact and best_stages is start.stages),
        makespan_s=best_makespan,
        start_makespan_s=start_makespan,
        lower_bound_s=bound,
        num_simulated=len(evaluator.seen),
    )


def makespan_bound(problem: SplitProblem, work: FloatArray) -> float:
    """Seconds below which no split's mean makespan over the steps `work` can be, sends counted as 0.

    Write F_m(x), B_m(x) for forward and backward seconds of micro-batch m on layers x, without recompute. Let stage k
    hold layers [a, b), run n = min(P - k, M) forwards before its first backward (GPipe: M), and e be its least
    recompute time under the cap. In 1F1B and GPipe, whatever the other stages are:

    1. Its first forward waits for F_0(< a), its last backward is followed by B_{M-1}(< a), in between it runs
       everything it has:  F_0(< a) + sum_m (F_m + B_m + e_m)[a, b) + B_{M-1}(< a).
    2. Its first backward waits for F_0(all) + B_0(>= b); behind it come all its backwards, its forwards m >= n, and
       B_{M-1}(< a):  F_0(all) + B_0(>= b) + sum_m (B_m + e_m)[a, b) + sum_{m >= n} F_m[a, b) + B_{M-1}(< a).
    3. If n < M, from that first backward's start to its last forward's end it runs forwards n .. M - 1 and backwards
       0 .. M - n - 1; then F_{M-1}(>= b) and the last micro-batch's whole backward follow:  F_0(all) + B_0(>= b) +
       sum_{m >= n} F_m[a, b) + sum_{m < M - n} (B_m + e_m)[a, b) + F_{M-1}(>= b) + B_{M-1}(all) + e_{M-1}[a, b).

    A makespan is at least the largest of these over all stages, the mean over steps at least the largest of the means.
    Each term falls as `a` grows and rises with `b`: the smallest bound over all splits under the cap follows by
    bisection, as in `split_stages`. With equal stages and n < M, 3 equals the 1F1B makespan (M + P - 1)(f + b).
    e is known at the mean micro-batch: sums over all m are M e, the sum in 3 is counted as w e with the largest whole w
    that no choice of tiers can undercut.

    Interleaved: the largest of the work of all layers / P, M times no more than one unsplittable run, and one
    micro-batch's way through all layers; mean over the steps.
    """
    return _bound(problem, work)[0]


def _bound(problem: SplitProblem, work: FloatArray) -> tuple[float, tuple[int, ...] | None]:
    """`makespan_bound`, and the cuts of a split that attains the bound's own terms where there is one."""
    from trimtab.partition.cuts import best_tied_cuts, least_bottleneck

    work = _checked_work(problem, work)
    M = problem.num_microbatches
    # e_m is linear in the work: its sum over micro-batches is M times the extra at their mean
    problem = replace(problem, work_mean=work.mean(axis=(0, 1)))
    forward = problem.profile.matrix("forward_s") @ work.mean(axis=0).T  # (L, M), mean over the steps
    backward = problem.profile.matrix("backward_s") @ work.mean(axis=0).T
    if problem.num_chunks > 1:
        both = forward + backward
        runs = np.add.reduceat(both, layer_table_of(problem).positions[:-1], axis=0)
        terms = (both.sum() / problem.num_stages, runs.sum(axis=1).max(), both.sum(axis=0).max())
        return float(max(terms)), None

    table = layer_table_of(problem, time_weight=M)
    in_flight = in_flight_of(problem)

    def prefix(seconds: FloatArray) -> FloatArray:
        return np.concatenate([[0.0], np.cumsum(seconds)])[table.positions]

    F_0, B_0, F_last, B_last = (prefix(x) for x in (forward[:, 0], backward[:, 0], forward[:, -1], backward[:, -1]))
    B_all, work_all = prefix(backward.sum(axis=1)), prefix((forward + backward).sum(axis=1))
    shape = (3, problem.num_stages, len(F_0))
    head, tail, weight = np.zeros(shape), np.zeros(shape), np.zeros(shape[:2], np.int64)
    for k, n in enumerate(in_flight.tolist()):
        F_late, B_early = prefix(forward[:, n:].sum(axis=1)), prefix(backward[:, : M - n].sum(axis=1))
        head[0, k], tail[0, k], weight[0, k] = work_all - F_0 - B_last, work_all, M
        head[1, k], weight[1, k] = B_all + F_late - B_last, M
        tail[1, k] = B_all + F_late - B_0 + F_0[-1] + B_0[-1]
        if n < M:
            weight[2, k] = _surely_recomputed(problem, work, M - n)
            head[2, k] = F_late + B_early
            tail[2, k] = F_late + B_early - B_0 - F_last + F_0[-1] + B_0[-1] + F_last[-1] + B_last[-1]

    def composite(seconds: FloatArray) -> IntArray:
        # rounded sums may fall by a tick where they should stay equal
        ticks = np.rint(seconds / table.tick_s).astype(np.int64) * table.scale
        return np.maximum.accumulate(ticks, axis=-1)

    pipeline = table.pipeline(
        in_flight=in_flight,
        cap=chunk_room(problem),
        head=composite(head),
        tail=composite(tail),
        weight=weight,
    )
    least = least_bottleneck(pipeline, table.tiers, high=4 * M * table.longest)
    assert least is not None, "the problem was solved before"
    cuts = tuple(best_tied_cuts(pipeline, table.tiers, least).tolist())
    bound = least // table.scale * table.tick_s * (1 - 1e-9)
    # a bound may hold although no split attains it
    return bound, cuts if cuts[-1] == table.num_segments else None


def _surely_recomputed(problem: SplitProblem, work: FloatArray, num_early: int) -> int:
    """Largest whole w: any tiers' extra over the first `num_early` and the last micro-batch is >= w x the mean's."""
    tiers = [tier.extra_backward_s for layer in problem.profile.layers for tier in layer.tiers]
    if min(map(min, tiers)) < 0:
        return 0
    used = np.any(np.array(tiers) > 0, axis=0) & (problem.work_mean > 0)
    part = (work[:, :num_early].sum(axis=1) + work[:, -1]).mean(axis=0)
    ratios = part[used] / problem.work_mean[used]
    return int(np.floor(ratios.min() + 1e-9)) if len(ratios) else 0


class _Evaluator:
    """Simulated makespans of cuts, remembering stages already priced and cuts already seen."""

    def __init__(
        self,
        problem: SplitProblem,
        work: FloatArray,
        link_bytes_per_s: float | Sequence[float] | None,
        latency_s: float,
    ) -> None:
        self.problem = problem
        self.rows = work.reshape(-1, NUM_WORK_TERMS)
        self.slots = np.arange(len(self.rows)).reshape(work.shape[0], 1, work.shape[1])
        self.link, self.latency_s = link_bytes_per_s, latency_s
        self.table = layer_table_of(problem)
        self.pipeline = self.table.pipeline(in_flight=in_flight_of(problem), cap=chunk_room(problem))
        self.order = block_order(
            problem.schedule,
            num_devices=problem.num_stages,
            num_chunks=problem.num_chunks,
            num_microbatches=problem.num_microbatches,
        )
        self.priced: dict[tuple[int, int, int], tuple[Stage, StageTimes] | None] = {}
        self.sent: dict[tuple[int, int], FloatArray] = {}
        self.seen: dict[tuple[int, ...], float] = {}

    def makespan(self, cuts: tuple[int, ...]) -> float:
        """Mean makespan with the stages' least recompute; infinite where a stage does not fit."""
        if cuts not in self.seen:
            stages = self.stages(cuts)
            self.seen[cuts] = np.inf if stages is None else self.simulate(stages)
        return self.seen[cuts]

    def stages(self, cuts: tuple[int, ...]) -> tuple[Stage, ...] | None:
        found = []
        for i, (a, b) in enumerate(itertools.pairwise(cuts)):
            if (i, a, b) not in self.priced:
                stage = stage_of(self.table, self.pipeline, index=i, first=a, last=b)
                self.priced[i, a, b] = None if stage is None else (stage, self._alone(stage))
            entry = self.priced[i, a, b]
            if entry is None:
                return None
            found.append(entry[0])
        return tuple(found)

    def simulate(self, stages: Sequence[Stage]) -> float:
        from trimtab.partition.replay import replay_steps

        S = len(stages)
        forward, backward = np.empty((2, S, len(self.rows)))
        send_forward, send_backward = np.zeros((2, S, len(self.rows)))
        for i, stage in enumerate(stages):
            a, b = (int(np.searchsorted(self.table.positions, c)) for c in (stage.start, stage.stop))
            entry = self.priced.get((i, a, b))
            times = entry[1] if entry is not None and entry[0] == stage else self._alone(stage)
            forward[i], backward[i] = times.forward_s[0], times.backward_s[0]
            if i + 1 < S:
                send_forward[i] = send_backward[i + 1] = self._send(i, stage)
        order = self.order
        makespans = replay_steps(
            order.stage, order.microbatch, order.kind, forward, backward, send_forward, send_backward, self.slots
        )
        return float(makespans.mean())

    def _alone(self, stage: Stage) -> StageTimes:
        return stage_times(self.problem.profile, (stage,), self.rows)

    def _send(self, i: int, stage: Stage) -> FloatArray | float:
        if self.link is None:
            return 0.0
        if (i, stage.stop) not in self.sent:
            rate = np.broadcast_to(np.asarray(self.link, np.float64), (len(self.pipeline.in_flight) - 1,))[i]
            coefficients = np.array(self.problem.profile.layers[stage.stop - 1].output_bytes)
            self.sent[i, stage.stop] = self.latency_s + self.rows @ coefficients / rate
        return self.sent[i, stage.stop]


def _descend(
    evaluator: _Evaluator, cuts: tuple[int, ...], *, radius: int, max_simulated: int
) -> tuple[tuple[int, ...], float]:
    """Best-improvement descent through ever wider neighbourhoods."""
    best = evaluator.makespan(cuts)
    budget = len(evaluator.seen) + max_simulated
    neighbourhoods = (_single_moves, _joint_moves, _pair_moves)
    kind = 0
    while kind < len(neighbourhoods):
        better, better_cuts = best, cuts
        for move in neighbourhoods[kind](len(cuts) - 2, radius):
            if len(evaluator.seen) >= budget:
                break
            moved = tuple(int(x) for x in np.add(cuts, (0, *move, 0)))
            if any(a >= b for a, b in itertools.pairwise(moved)):
                continue
            makespan = evaluator.makespan(moved)
            if makespan < better * (1 - 1e-12):
                better, better_cuts = makespan, moved
        kind = 0 if better < best else kind + 1
        best, cuts = better, better_cuts
    return cuts, best


def _single_moves(num_cuts: int, radius: int) -> Iterator[tuple[int, ...]]:
    for i in range(num_cuts):
        for step in _steps(radius):
            yield (0,) * i + (step,) + (0,) * (num_cuts - i - 1)


def _joint_moves(num_cuts: int, radius: int) -> Iterator[tuple[int, ...]]:
    """Runs of two or more neighbouring cuts by the same step."""
    for i, j in itertools.combinations(range(num_cuts + 1), 2):
        if j - i > 1:
            for step in _steps(radius):
                yield (0,) * i + (step,) * (j - i) + (0,) * (num_cuts - j)


def _pair_moves(num_cuts: int, radius: int) -> Iterator[tuple[int, ...]]:
    for i, j in itertools.combinations(range(num_cuts), 2):
        for first, second in itertools.product(_steps(radius), repeat=2):
            yield (0,) * i + (first,) + (0,) * (j - i - 1) + (second,) + (0,) * (num_cuts - j - 1)


def _steps(radius: int) -> list[int]:
    return [sign * size for size in range(1, radius + 1) for sign in (-1, 1)]


def _checked_work(problem: SplitProblem, work: FloatArray) -> FloatArray:
    rows = np.asarray(work, np.float64)
    expected = (problem.num_microbatches, NUM_WORK_TERMS)
    if rows.ndim != 3 or rows.shape[0] == 0 or rows.shape[1:] != expected:
        raise PartitionError(
            f"work of shape {rows.shape} cannot be simulated with {problem.num_microbatches} micro-batches a step: "
            f"give (steps, {expected[0]}, {expected[1]}), at least one step"
        )
    return rows
