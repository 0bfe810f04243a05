"""One run as far as it is decided: what the planner's steps hand on, and what a plan on disk is read back into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trimtab.partition.stages import SplitProblem
from trimtab.plan.budget import MemoryBudget
from trimtab.plan.options import PlanOptions
from trimtab.plan.work import limit_work
from trimtab.specs import (
    ClusterSpec,
    FloatArray,
    ModelSpec,
    Packing,
    ParallelDims,
    Profile,
    SampleTable,
    Schedule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Degrees of parallelism, pack limits and micro-batches per step, with the cost table they imply."""

    dims: ParallelDims
    max_patches: int
    max_tokens: int
    num_microbatches: int
    profile: Profile


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """All that a split, a simulation or a check is computed from; `options` name their schedule."""

    model: ModelSpec
    samples: SampleTable  # in patches
    samples_work: FloatArray  # (num_samples, len(WORK_TERMS))
    cluster: ClusterSpec
    options: PlanOptions
    budget: MemoryBudget
    setting: Setting
    packing: Packing
    schedule: Schedule
    work: FloatArray  # (num_packs, len(WORK_TERMS))

    @cached_property
    def problem(self) -> SplitProblem:
        """Time at the mean pack, memory at the largest pack that the limits allow."""
        return split_problem(
            self.model,
            self.setting.profile,
            self.options,
            self.budget,
            work_mean=self.work.mean(axis=0),
            work_max=limit_work(self.work, self.setting.max_patches, self.setting.max_tokens),
            num_microbatches=self.setting.num_microbatches,
        )


def split_problem(
    model: ModelSpec,
    profile: Profile,
    options: PlanOptions,
    budget: MemoryBudget,
    *,
    work_mean: FloatArray,
    work_max: FloatArray,
    num_microbatches: int,
) -> SplitProblem:
    """The model's layers, to be cut for micro-batches of this work."""
    assert options.schedule != "auto", "it was chosen before"
    return SplitProblem(
        profile=profile,
        num_stages=profile.dims.pp,
        work_mean=work_mean,
        work_max=work_max,
        memory_bytes=budget.total_bytes,
        num_microbatches=num_microbatches,
        forbidden_cuts=model.forbidden_cuts,
        schedule=options.schedule,
        num_chunks=options.num_chunks,
        recompute=options.recompute,
        overhead_bytes=budget.reserve_bytes,
        host_bytes=budget.host_bytes,
    )
