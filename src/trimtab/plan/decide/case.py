"""How much of a device's memory the plan may use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from trimtab.balance.packing import PackResult, pack_samples, refuse_empty
from trimtab.balance.schedule import fill_table
from trimtab.costs.profile import MemoryBand, memory_band
from trimtab.errors import PlanError
from trimtab.partition.stages import SplitProblem
from trimtab.plan.decide.epoch import Epoch
from trimtab.plan.decide.work import (
    PATCHES,
    PATCHES_WINDOWED,
    join_samples,
    joins_samples,
    limit_work,
    packed_work,
    pad_documents,
    padded_work,
    price_samples,
)
from trimtab.plan.options import PlanOptions
from trimtab.plan.plan import VisionDecision, VisionEstimate
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
from trimtab.units import MIB, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of one device: all that it has, and how many of them a plan may expect to fill."""

    total_bytes: int
    fill_bytes: float
    band: MemoryBand
    slack: float = 0.0  # expected beside the counted bytes, as a share of them
    outside_bytes: float = 0.0  # and whatever they are

    @staticmethod
    def of(cluster: ClusterSpec, options: PlanOptions) -> MemoryBudget:
        """By the risk that was accepted; where a probe or an older plan named bytes to keep free, by those."""
        device = cluster.device
        total = options.memory_bytes if options.memory_bytes is not None else device.memory_bytes
        if 0 < total < MIB:
            raise PlanError(f"{total} bytes of memory per device were asked for: give a unit, as in {total}GiB")
        if not 0 < total <= device.memory_bytes:
            raise PlanError(
                f"{format_bytes(total)} of memory per device was asked for, and {device.name} has "
                f"{format_bytes(device.memory_bytes)}: give that or less, or another device"
            )
        band = memory_band(options.profile)
        reserve = options.reserve_bytes
        if reserve is not None:
            if not 0 <= reserve < total:
                raise PlanError(
                    f"{format_bytes(reserve)} of {format_bytes(total)} were to stay free, which leaves nothing: free "
                    "less"
                )
            return MemoryBudget(total_bytes=total, fill_bytes=total - reserve, band=band)
        return MemoryBudget(
            total_bytes=total,
            fill_bytes=total * band.largest_share(options.risk),
            band=band,
            slack=band.slack,
            outside_bytes=total * band.outside,
        )


# The nouns of a decision: memory budget, setting, case. `make_case` is the one way to a `Case`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Degrees of parallelism, pack limits and micro-batches per step, with the cost table they imply."""

    dims: ParallelDims
    max_patches: int
    max_tokens: int
    num_microbatches: int
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedVision:
    """How a case's images are shared, and what its work and its profile are without it."""

    decision: VisionDecision
    work: FloatArray  # (num_packs, len(WORK_TERMS))
    held: FloatArray  # as `work`, of what a rank holds: a pooled call is held whole by each of its micro-batches
    profile: Profile
    largest: FloatArray  # (3,) patches, patches_sq, patches_windowed: the most of a share, with the limits' margin
    estimate: VisionEstimate  # but for bytes of state and activations, which depend on the stages


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
    work: FloatArray  # (num_packs, len(WORK_TERMS)); of images that are shared, the share of the slowest rank
    vision: SharedVision | None = None  # None: every rank encodes the images it holds

    @cached_property
    def problem(self) -> SplitProblem:
        """Time at the mean pack, memory at the largest pack that the limits allow."""
        work_max = limit_work(
            self.work,
            self.setting.max_patches,
            self.setting.max_tokens,
            joined=joins_samples(self.options.attention),
        )
        model = self.model
        if self.vision is not None:
            work_max[PATCHES : PATCHES_WINDOWED + 1] = self.vision.largest
            model = replace(model, forbidden_cuts=model.forbidden_cuts | tower_cuts(model))
        return split_problem(
            model,
            self.setting.profile,
            self.options,
            self.budget,
            work_mean=self.work.mean(axis=0),
            work_max=work_max,
            num_microbatches=self.setting.num_microbatches,
        )

    @cached_property
    def held_work(self) -> FloatArray:
        """As `work`, of what a rank holds: attention's pairs between a pack's samples too, pooled calls whole."""
        held = self.work if self.vision is None else self.vision.held
        return join_samples(held) if joins_samples(self.options.attention) else held

    def without_vision(self) -> Case:
        """The same run where no image is shared."""
        if self.vision is None:
            return self
        return replace(
            self, work=self.vision.work, setting=replace(self.setting, profile=self.vision.profile), vision=None
        )


def tower_cuts(model: ModelSpec) -> frozenset[int]:
    """Cuts in front of the last layer of vision tower and projector: what is shared is whole, on the first stage."""
    return frozenset(range(1, max(model.indices("vision") + model.indices("projector"), default=0) + 1))


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
        memory_bytes=budget.fill_bytes,
        num_microbatches=num_microbatches,
        forbidden_cuts=model.forbidden_cuts,
        schedule=options.schedule,
        num_chunks=options.num_chunks,
        recompute=options.recompute,
        overhead_bytes=budget.outside_bytes,
        overhead_share=budget.slack,
    )


def pack_case(
    model: ModelSpec,
    epoch: Epoch,
    cluster: ClusterSpec,
    budget: MemoryBudget,
    setting: Setting,
    options: PlanOptions,
) -> Case:
    """The epoch in packs for this setting; stages are still to come."""
    samples_work = pad_documents(epoch.samples, setting.dims).work(token_window=model.token_window)
    packed = pack_epoch(epoch, setting, options, cost=price_samples(setting.profile, samples_work)[epoch.rows])
    setting = replace(setting, num_microbatches=packed.schedule.table.shape[2])
    return make_case(model, epoch.samples, cluster, options, budget, setting, packed)


def make_case(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    setting: Setting,
    packed: PackResult,
    *,
    padded: bool = False,
) -> Case:
    """The case of these packs of `samples`, images not shared; `padded`: each pack to its longest sample."""
    samples_work = pad_documents(samples, setting.dims).work(token_window=model.token_window)
    return Case(
        model=model,
        samples=samples,
        samples_work=samples_work,
        cluster=cluster,
        options=options,
        budget=budget,
        setting=setting,
        packing=packed.packing,
        schedule=packed.schedule,
        work=(padded_work if padded else packed_work)(packed.packing, samples_work),
    )


def pack_epoch(epoch: Epoch, setting: Setting, options: PlanOptions, *, cost: FloatArray) -> PackResult:
    """Packs within the setting's limits, and steps of equal length where their number of packs was left open."""
    packed = epoch.of_table(
        pack_samples(
            pad_documents(epoch.drawn, setting.dims),
            limits=(setting.max_patches, setting.max_tokens),
            dp=setting.dims.dp,
            num_microbatches=setting.num_microbatches,
            method=options.method,
            order=options.order,
            cost=cost,
            seed=options.seed,
            oversize=options.oversize,
        )
    )
    refuse_empty(packed.packing)
    if not options.leaves_steps_open:
        return packed
    return replace(packed, schedule=even_steps(packed.schedule, setting.num_microbatches))


def even_steps(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The same rows of packs in the same order, in steps of equal length near `num_microbatches` rows.

    A row is what the ranks run at the same time. R rows are cut into about round(R / M) steps of equally many rows, the
    last of them shorter: steps of exactly M rows may leave it almost empty.
    """
    num_rows = int((schedule.table >= 0).any(axis=1).sum())
    per_step = max(1, math.ceil(num_rows / max(1, round(num_rows / num_microbatches))))
    slots = schedule.table.transpose(0, 2, 1).reshape(-1)
    return fill_table(slots[slots >= 0], schedule.table.shape[1], per_step, schedule.order)
