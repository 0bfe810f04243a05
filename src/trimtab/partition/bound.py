"""A makespan that no split can undercut, for every schedule: what must come before, on and after one stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trimtab.partition.assess import SplitProblem
from trimtab.partition.backward import weight_matrix
from trimtab.partition.schedules import BACKWARD, FORWARD, WEIGHT, block_order, splits_backward
from trimtab.partition.stages import chunk_room
from trimtab.specs import FloatArray, IntArray

if TYPE_CHECKING:
    from trimtab.partition.cuts import Pipeline
    from trimtab.partition.layer_table import LayerTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundTerms:
    """The bound as a split problem: a stage "costs" the makespan that it alone enforces."""

    table: LayerTable
    pipeline: Pipeline
    least_s: float  # of every split, whatever its stages
    least: int  # composite time of the largest term of terms 1 to 3 in the split where that is smallest

    @property
    def makespan_s(self) -> float:
        """See `makespan_bound`."""
        return max(self.least_s, float(self.seconds(self.least)))

    def cuts(self) -> tuple[int, ...] | None:
        """Cuts (of the layer table) that attain terms 1 to 3, where a split does: a good start."""
        from trimtab.partition.cuts import best_tied_cuts

        cuts = tuple(int(cut) for cut in best_tied_cuts(self.pipeline, self.table.tiers, self.least))
        return cuts if cuts[-1] == self.table.num_segments else None  # a bound may hold although no split attains it

    def seconds(self, composite: IntArray | int) -> FloatArray:
        """Of composite times, rounded down."""
        ticks = np.asarray(composite) // self.table.scale
        return np.asarray(ticks * self.table.tick_s * (1 - 1e-9))


def makespan_bound(problem: SplitProblem, work: FloatArray) -> float:
    """Seconds below which no split's mean makespan over the steps `work` can be, sends counted as 0.

    `work` (steps, num_microbatches, len(WORK_TERMS)). Write F_m(x), B_m(x), W_m(x) for seconds of micro-batch m on
    layers x, without recompute; W is 0 where backwards are whole. Let stage k hold layers [a, b), run n forwards before
    its first backward and i backwards and w weight blocks before its last forward, and e be its least recompute time
    under the cap. Each stage runs micro-batches in order, so, whatever the other stages are:

    1. Its first forward waits for F_0(< a), its last backward is followed by B_{M-1}(< a), in between it runs what
       it has:  F_0(< a) + sum_m (F_m + B_m + e_m)[a, b) + B_{M-1}(< a),  or all with W and nothing behind.
    2. Its first backward waits for F_0(all) + B_0(>= b); behind it come its backwards, its forwards m >= n, and
       B_{M-1}(< a):  F_0(all) + B_0(>= b) + sum_m (B_m + e_m)[a, b) + sum_{m >= n} F_m[a, b) + B_{M-1}(< a),  or
       with every W instead of the last term.
    3. If n < M, from that first backward's start to its last forward's end it runs forwards m >= n, backwards m < i,
       weights m < w; then F_{M-1}(>= b) and the last micro-batch's backward follow:  F_0(all) + B_0(>= b) +
       sum_{m >= n} F_m[a, b) + sum_{m < i} (B_m + e_m)[a, b) + sum_{m < w} W_m[a, b) + F_{M-1}(>= b) + B_{M-1}(all) +
       e_{M-1}[a, b).
    4. The work of all layers, divided by the devices.

    A makespan is at least the largest of these over all stages, the mean over steps at least the largest of the means.
    Terms 1 to 3 fall as `a` grows and rise with `b`: the smallest bound over all splits under the cap follows by
    bisection, as in `split_stages`. With equal stages and n < M, 3 equals the 1F1B makespan (M + P - 1)(f + b).
    e is known at the mean micro-batch: sums over all m are M e, the sum in 3 is counted as x e with the largest whole x
    that no choice of tiers can undercut. Chunks share their device's room: there e is 0.
    """
    return bound_terms(problem, work).makespan_s


def bound_terms(problem: SplitProblem, work: FloatArray) -> BoundTerms:
    """Terms 1 to 4 of `makespan_bound`."""
    from trimtab.partition.cuts import least_bottleneck
    from trimtab.partition.layer_table import layer_table, pipeline_of

    S, M = problem.num_stages * problem.num_chunks, problem.num_microbatches
    # e_m is linear in the work: its sum over micro-batches is M times the extra at their mean
    problem = replace(problem, work_mean=work.mean(axis=(0, 1)))
    table = layer_table(problem, time_weight=M)
    mean_step = work.mean(axis=0).T
    order = block_order(
        problem.schedule, num_devices=problem.num_stages, num_chunks=problem.num_chunks, num_microbatches=M
    )
    whole = problem.profile.matrix("backward_s") @ mean_step
    weight_s = weight_matrix(problem.profile) @ mean_step if splits_backward(problem.schedule) else np.zeros_like(whole)
    seconds = np.array([problem.profile.matrix("forward_s") @ mean_step, whole - weight_s, weight_s])

    def prefix(values: FloatArray) -> FloatArray:
        return np.concatenate([[0.0], np.cumsum(values)])[table.positions]

    F, B, W = seconds  # (L, M), mean over the steps
    F_0, B_0, F_last, B_last = (prefix(x) for x in (F[:, 0], B[:, 0], F[:, -1], B[:, -1]))
    B_all, W_all = prefix(B.sum(axis=1)), prefix(W.sum(axis=1))
    work_all = prefix(seconds.sum(axis=(0, 2)))
    shape = (5, S, len(F_0))
    head, tail, weight = np.zeros(shape), np.zeros(shape), np.zeros(shape[:2], np.int64)
    for k in range(S):
        kinds = order.kind[order.stage == k]  # in the order in which its device runs them
        n = np.count_nonzero(kinds[: np.argmax(kinds == BACKWARD)] == FORWARD)
        before_last = kinds[: np.flatnonzero(kinds == FORWARD)[-1]]
        i, w = np.count_nonzero(before_last == BACKWARD), np.count_nonzero(before_last == WEIGHT)
        late = prefix(F[:, n:].sum(axis=1))
        weight[:4, k] = M
        head[0, k], tail[0, k] = work_all - F_0, work_all
        head[1, k], tail[1, k] = work_all - W_all - F_0 - B_last, work_all - W_all
        behind = B_all + late
        head[2, k], tail[2, k] = behind + W_all, behind + W_all - B_0 + F_0[-1] + B_0[-1]
        head[3, k], tail[3, k] = behind - B_last, behind - B_0 + F_0[-1] + B_0[-1]
        if n < M:
            weight[4, k] = _surely_recomputed(problem, work, int(i))
            own = late + prefix(B[:, :i].sum(axis=1)) + prefix(W[:, :w].sum(axis=1))
            head[4, k] = own
            tail[4, k] = own - B_0 - F_last + F_0[-1] + B_0[-1] + F_last[-1] + B_last[-1]

    def composite(values: FloatArray) -> IntArray:
        # rounded sums may fall by a tick where they should stay equal
        ticks = np.rint(values / table.tick_s).astype(np.int64) * table.scale
        return np.maximum.accumulate(ticks, axis=-1)

    cap = chunk_room(problem) if problem.num_chunks == 1 else np.full(S, np.inf)
    terms = {"head": composite(head), "tail": composite(tail), "weight": weight}
    pipeline = pipeline_of(problem, table, cap)._replace(**terms)
    least = least_bottleneck(pipeline, table.tiers, high=4 * M * table.longest)
    assert least is not None, "the problem was solved before"
    least_s = float(seconds.sum()) / problem.num_stages * (1 - 1e-9)
    return BoundTerms(table=table, pipeline=pipeline, least_s=least_s, least=least)


def _surely_recomputed(problem: SplitProblem, work: FloatArray, num_early: int) -> int:
    """Largest whole x: any tiers' extra over `num_early` and the last micro-batch is >= x times that of the mean."""
    tiers = [tier.extra_backward_s for layer in problem.profile.layers for tier in layer.tiers]
    if min(map(min, tiers)) < 0:
        return 0
    used = np.any(np.array(tiers) > 0, axis=0) & (problem.work_mean > 0)
    part = (work[:, :num_early].sum(axis=1) + work[:, -1]).mean(axis=0)
    ratios = part[used] / problem.work_mean[used]
    return int(np.floor(ratios.min() + 1e-9)) if len(ratios) else 0
