"""The plan's packs as a split problem, and the exact split refined on the simulated step."""

from __future__ import annotations

import numpy as np

from trimtab.partition.assess import SplitResult
from trimtab.partition.search import search_makespan
from trimtab.partition.stages import SplitProblem
from trimtab.plan.budget import MemoryBudget
from trimtab.plan.compare import pipeline_link
from trimtab.plan.options import PlanOptions
from trimtab.plan.setting import Setting
from trimtab.plan.work import limit_work, packed_work
from trimtab.specs import ClusterSpec, FloatArray, IntArray, ModelSpec, Packing, Schedule

_SAMPLED_STEPS = 32  # of one rank each: with 8, half of what the search gains is lost on other steps
_MAX_SIMULATED = 1500  # candidate splits: about 2 s at 16 stages x 64 micro-batches


def split_problem(
    model: ModelSpec,
    packing: Packing,
    samples_work: FloatArray,
    setting: Setting,
    budget: MemoryBudget,
    options: PlanOptions,
) -> SplitProblem:
    """Time at the mean pack, memory at the largest pack that the limits allow."""
    work = packed_work(packing, samples_work)
    return SplitProblem(
        profile=setting.profile,
        num_stages=setting.dims.pp,
        work_mean=work.mean(axis=0),
        work_max=limit_work(work, setting.max_patches, setting.max_tokens),
        memory_bytes=budget.total_bytes,
        num_microbatches=setting.num_microbatches,
        forbidden_cuts=model.forbidden_cuts,
        schedule=options.schedule,
        num_chunks=options.num_chunks,
        recompute=options.recompute,
        overhead_bytes=budget.reserve_bytes,
    )


def refine_split(
    problem: SplitProblem,
    split: SplitResult,
    packing: Packing,
    schedule: Schedule,
    samples_work: FloatArray,
    cluster: ClusterSpec,
) -> SplitResult:
    """The split of least simulated step near the exact one, never worse; the exact one where no step is full."""
    if problem.num_stages == 1:
        return split
    packs = _full_rows(schedule.table)
    if len(packs) == 0:
        return split
    work = packed_work(packing, samples_work)[packs]
    found = search_makespan(
        problem,
        work,
        link_bytes_per_s=pipeline_link(cluster),
        latency_s=cluster.latency_s,
        max_simulated=_MAX_SIMULATED,
    )
    return found.split


def _full_rows(table: IntArray) -> IntArray:
    """(n, num_microbatches) packs of some (step, rank) pairs without an empty slot, spread over the data set."""
    rows = table.reshape(-1, table.shape[2])
    rows = rows[(rows >= 0).all(axis=1)]
    chosen = np.unique(np.linspace(0, len(rows) - 1, num=min(_SAMPLED_STEPS, len(rows))).astype(np.int64))
    return rows[chosen]
