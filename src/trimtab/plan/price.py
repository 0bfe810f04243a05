"""What it costs that a framework cannot make some cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trimtab.errors import PartitionError
from trimtab.partition.stages import SplitProblem, solve
from trimtab.plan.compare import steps_of, times_of
from trimtab.plan.reload import ReloadedPlan
from trimtab.plan.split import refine_split, split_problem
from trimtab.plan.work import packed_work
from trimtab.specs import FloatArray, Stage


def price_without_cuts(found: ReloadedPlan, cuts: frozenset[int]) -> float | None:
    """Predicted epoch of the best plan that makes none of `cuts`, over this plan's; None if no such plan fits."""
    samples_work = found.samples.work(token_window=found.model.token_window)
    problem = split_problem(found.model, found.packing, samples_work, found.setting, found.budget, found.options)
    allowed = replace(problem, forbidden_cuts=problem.forbidden_cuts | cuts)
    work = packed_work(found.packing, samples_work)
    try:
        best = refine_split(allowed, solve(allowed), found.packing, found.schedule, samples_work, found.cluster)
    except PartitionError:
        return None
    return _epoch_s(found, allowed, best.stages, work) / _epoch_s(found, problem, found.stages, work)


def _epoch_s(found: ReloadedPlan, problem: SplitProblem, stages: Sequence[Stage], work: FloatArray) -> float:
    times = times_of(work, stages, problem, found.cluster)
    return float(steps_of(times, found.schedule.table, stages, problem, found.cluster, found.options).sum())
