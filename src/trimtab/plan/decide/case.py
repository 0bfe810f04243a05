"""How much of a device's memory the plan may use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from trimtab.balance.packing import PackResult
from trimtab.costs.bands import MemoryBand, memory_band
from trimtab.errors import PartitionError, PlanError
from trimtab.partition.stages import SplitProblem, split_stages
from trimtab.plan.decide.epoch import Epoch
from trimtab.plan.decide.steps import fill_epoch, share_epoch
from trimtab.plan.decide.work import (
    IMAGE_TERMS,
    Apart,
    Lanes,
    Phases,
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

_LEAST_LOSS = 0.01  # of the layers' time that is worth a sentence
_MORE_ROOM = (1.01, 1.02, 1.05)  # of open limits, where a step of the epoch would need more micro-batches than priced


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of one device: all that it has, and how many of them a plan may expect to fill."""

    total_bytes: int
    fill_bytes: float
    band: MemoryBand
    slack: float = 0.0  # expected on top of the counted bytes, as a share of them
    outside_bytes: float = 0.0  # and whatever they are

    @staticmethod
    def of(cluster: ClusterSpec, options: PlanOptions) -> MemoryBudget:
        """Make it by the risk that was accepted, or by the bytes to keep free that a probe or an older plan named."""
        # a part of the device may be asked for; never more than it has
        device = cluster.device
        total = options.memory_bytes if options.memory_bytes is not None else device.memory_bytes
        if 0 < total < MIB:
            raise PlanError(f"{total} bytes of memory per device were asked for: give a unit, as in {total}GiB")
        if not 0 < total <= device.memory_bytes:
            raise PlanError(
                f"{device.name} has {format_bytes(device.memory_bytes)}, not {format_bytes(total)}: give that, or less"
            )
        band = memory_band(options.profile)
        # bytes that a probe or an older plan keeps free; else by the risk of running out
        reserve = options.reserve_bytes
        if reserve is not None:
            if not 0 <= reserve < total:
                raise PlanError(f"{format_bytes(reserve)} free of {format_bytes(total)} leave nothing: free less")
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
    apart: Apart | None = None  # None: the pipeline holds the tower
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
    extremes: FloatArray | None = None  # samples that decide the largest pack, where these packs are a part of them

    @cached_property
    def problem(self) -> SplitProblem:
        """State the split: time at the mean pack, memory at the largest pack that the limits allow."""
        # memory by what the limits allow, not by the packs that came out: other epochs pack otherwise
        work_max = limit_work(
            self.work if self.extremes is None else self.extremes,
            self.setting.max_patches,
            self.setting.max_tokens,
            joined=joins_samples(self.options.attention),
        )
        model, apart, budget = self.model, self.apart, self.budget
        # a share of the images in place of whole packs; the tower stays in one piece
        if self.vision is not None:
            work_max[IMAGE_TERMS] = self.vision.largest
            cuts = tower_cuts(model)
            if isinstance(apart, Lanes):  # the first stage of a pipeline holds a part of the decoder
                cuts |= {max(cuts) + 1}
            model = replace(model, forbidden_cuts=model.forbidden_cuts | cuts)
        if isinstance(apart, Phases):  # on every device, whatever its stage
            everywhere = apart.state_bytes + apart.saved_bytes
            budget = replace(budget, outside_bytes=budget.outside_bytes + everywhere)
        return split_problem(
            model,
            self.setting.profile,
            self.options,
            budget,
            work_mean=self.work.mean(axis=0),
            work_max=work_max,
            num_microbatches=self.setting.num_microbatches,
        )

    @property
    def apart(self) -> Apart | None:
        """Return what a tower does outside of the pipeline; None: nothing."""
        return None if self.vision is None else self.vision.apart

    @cached_property
    def held_work(self) -> FloatArray:
        """Return `work` of what a rank holds: pooled calls whole."""
        return self.work if self.vision is None else self.vision.held

    def without_vision(self) -> Case:
        """The same run where no image is shared."""
        if self.vision is None:
            return self
        return replace(
            self, work=self.vision.work, setting=replace(self.setting, profile=self.vision.profile), vision=None
        )


def pair_sentences(case: Case) -> list[str]:
    """Return what packs of many samples lose where attention computes the pairs between them, if it can be seen."""
    own = packed_work(case.packing, case.samples_work)
    if not joins_samples(case.options.attention):
        return []
    apart, joined = (price_samples(case.setting.profile, work).sum() for work in (own, join_samples(own)))
    share = 1.0 - float(apart / joined)
    if share < _LEAST_LOSS:
        return []
    return [
        f"pairs between the samples of a pack take {share:.0%} of the layers' time with {case.options.attention} "
        "attention: use flash, or smaller packs"
    ]


def tower_cuts(model: ModelSpec) -> frozenset[int]:
    """List cuts before the last layer of vision tower and projector: what is shared is whole, on the first stage."""
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
        lockstep=options.sharding == 3 and profile.dims.dp > 1,
    )


def pack_case(
    model: ModelSpec,
    epoch: Epoch,
    cluster: ClusterSpec,
    budget: MemoryBudget,
    setting: Setting,
    options: PlanOptions,
) -> Case:
    """The epoch in packs for this setting; stages are still to come.

    Where limits were left open and a step needs more micro-batches under them than the setting was priced with, they
    grow by up to 5 %, while the packs fit the memory: one step would else give every step of the epoch more.
    """
    case = _pack_within(model, epoch, cluster, budget, setting, options)
    if options.fills_packs or case.setting.num_microbatches <= setting.num_microbatches:
        return case
    # one crowded step would give every step a micro-batch more: rather limits that are 1, 2 or 5 % wider
    given = (options.max_patches, options.max_tokens)
    limits = (setting.max_patches, setting.max_tokens)
    for room in _MORE_ROOM if None in given else ():
        patches, tokens = (math.ceil(x * room) if asked is None else x for x, asked in zip(limits, given, strict=True))
        wider = replace(setting, max_patches=patches, max_tokens=tokens)
        other = _pack_within(model, epoch, cluster, budget, wider, options)
        if other.setting.num_microbatches == setting.num_microbatches:
            try:
                split_stages(other.problem)
            except PartitionError:  # wider ones fit even less
                return case
            return other
    return case


def _pack_within(
    model: ModelSpec, epoch: Epoch, cluster: ClusterSpec, budget: MemoryBudget, setting: Setting, options: PlanOptions
) -> Case:
    """The epoch in packs within the setting's limits."""
    # the same cost column for every packer, so that what is even is seconds
    samples_work = pad_documents(epoch.samples, setting.dims).work(token_window=model.token_window)
    cost = price_samples(setting.profile, samples_work)[epoch.rows]
    limits, count = (setting.max_patches, setting.max_tokens), setting.num_microbatches
    if options.fills_packs:
        packed = fill_epoch(epoch.drawn, options, setting.dims, num_microbatches=count, limits=limits, cost=cost)
    else:
        assert options.global_batch is not None, "it was chosen before"
        packed = share_epoch(
            epoch.drawn,
            options,
            setting.dims,
            global_batch=options.global_batch,
            num_microbatches=count,
            limits=limits,
            cost=cost,
        )
    packed = epoch.of_table(packed)
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
    samples_work: FloatArray | None = None,
    extremes: FloatArray | None = None,
) -> Case:
    """The case of these packs of `samples`, images not shared; `padded`: each pack to its longest sample.

    `samples_work` and `extremes`: where they are known.
    """
    # sequences as long as cp makes them, then packs or padded batches of them
    if samples_work is None:
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
        work=padded_work(packed.packing, samples_work)
        if padded
        else packed_work(packed.packing, samples_work, options.attention),
        extremes=extremes,
    )
