"""The space of settings: every division of the devices (dp, pp, tp, cp, ep) x ZeRO stage x schedule x M packs a rank.

A member has a lower bound of its step:

    u T / (1 - (1 - 1/M)^P) + S      1F1B and GPipe: M micro-batches on P stages in sequence
    max(u B, T) + S                  interleaved: B is T M / P and a V-th of what 1F1B waits on top (heuristic)
    max(u T M / P, 2/3 T) + S        others, which fill their bubble: one micro-batch passes all stages, and waits for
                                     all but weight gradients, which are put off

with T the forward and backward of a mean pack on all layers, nothing recomputed, u the slowest rank's work over the
mean, and S the gradient exchange and optimizer, shared evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from trimtab.balance.packing import PackResult
from trimtab.costs.profile import mean_seconds, with_tiers
from trimtab.errors import PartitionError
from trimtab.options import Attention, ScheduleName
from trimtab.partition.schedules import microbatch_unit, splits_backward
from trimtab.plan.decide.case import MemoryBudget
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.decide.steps import (
    Tried,
    TriedPacks,
    fill_tried,
    group_tried,
    open_steps,
    refuse_over,
    share_tried,
    too_few_samples,
)
from trimtab.plan.decide.work import MICROBATCHES, join_samples, joins_samples, pad_documents, price_samples
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec, FloatArray, ModelSpec, ParallelDims, Profile, SampleTable
from trimtab.units import format_bytes

_SAMPLES_PER_STEP, _SAMPLES_PER_DEVICE = 256, 8  # global batch if none is given: the larger of the two
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # packs a rank and step that are tried
_WITHOUT_WEIGHTS = 2 / 3  # of forward and backward: gradients of weights are at most half of the backward
_ZERO_STAGES = (1, 2, 3)
"""Where the stage is open: 0 sends as many bytes as 1, updates every parameter on every rank and holds more."""

_SCHEDULES: tuple[ScheduleName, ...] = ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble")
"""Those that some trainer runs; ZBH1 is priced where it is asked for."""

Filled = tuple[float, PackResult, FloatArray]  # samples a pack, packs, and the rows that decide the largest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """Packs that may be tried; made once their price is asked for."""

    num_microbatches: int
    samples_per_step: float
    samples_per_pack: float
    mean_work: FloatArray  # (len(WORK_TERMS),) of a pack
    make: Callable[[], TriedPacks]

    @staticmethod
    def of(packs: TriedPacks) -> Offer:
        """Return the packs that are made already."""
        return Offer(
            num_microbatches=packs.num_microbatches,
            samples_per_step=packs.samples_per_step,
            samples_per_pack=packs.samples_per_pack,
            mean_work=packs.mean_work,
            make=lambda: packs,
        )


PacksOf = Callable[[PlanOptions, ParallelDims], Iterator[Offer]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Member:
    """One member of the space, not priced yet."""

    options: PlanOptions  # name ZeRO stage and schedule
    profile: Profile
    offer: Offer
    pack_s: float  # forward and backward of a mean pack on all layers, nothing recomputed
    update_s: float  # gradient exchange and optimizer of a mean device

    @property
    def packs(self) -> TriedPacks:
        """Return its packs, made where they were not."""
        return self.offer.make()

    def bound_s(self, *, slowest_over_mean: float = 1.0, again: float = 0.0) -> float:
        """Return the seconds a sample that none of its steps is shorter than: see the module.

        `again`: recompute, as a share of forward and backward.
        """
        T, M = self.pack_s * (1 + again), self.offer.num_microbatches
        step_s = least_step_s(T, M, self.profile.dims.pp, self.options, slowest_over_mean=slowest_over_mean)
        return (step_s + self.update_s) / self.offer.samples_per_step

    @property
    def series(self) -> tuple[ParallelDims, int, str]:
        """Return what members of other packs share: the smaller the packs, the less they hold."""
        return self.profile.dims, self.options.sharding, self.options.schedule

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """Return how it divides the work: what the plan lists one of."""
        dims = self.profile.dims
        return self.options.sharding, dims.pp > 1, dims.tp > 1


def least_step_s(pack_s: float, M: int, P: int, options: PlanOptions, *, slowest_over_mean: float = 1.0) -> float:
    """Return seconds that no pipeline of P stages runs M packs in, of `pack_s` on all layers each: see the module."""
    even_s = pack_s * M / P  # every device busy all the time
    in_turn_s = pack_s / -math.expm1(P * math.log1p(-1 / M)) if M > 1 else pack_s
    if options.schedule in ("1F1B", "GPipe"):
        return slowest_over_mean * in_turn_s
    if options.schedule == "Interleaved1F1B":  # V chunks a device wait a V-th of that
        return max(slowest_over_mean * (even_s + (in_turn_s - even_s) / options.num_chunks), pack_s)
    return max(slowest_over_mean * even_s, pack_s * _WITHOUT_WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A division of the devices that cannot be, and why."""

    dims: ParallelDims
    error: PartitionError


def default_global_batch(cluster: ClusterSpec, options: PlanOptions, num_samples: int) -> int:
    """Count the samples a step over all ranks: as asked for, else a default, or the data set where that is smaller."""
    if options.global_batch is not None:
        return options.global_batch
    return min(max(_SAMPLES_PER_STEP, _SAMPLES_PER_DEVICE * cluster.num_devices), num_samples)


def list_members(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    divisions: Sequence[ParallelDims],
) -> tuple[list[Member], list[Refusal]]:
    """Return every member of the space, and the divisions that model, data or batch rule out."""
    members, refusals = list[Member](), list[Refusal]()
    packs_of: PacksOf | None = None
    global_batch = default_global_batch(cluster, options, len(samples))
    num_blocks = sum(layer.kind == "block" for layer in model.layers)
    for dims in divisions:
        # divisions that neither model nor batch allows
        if options.pp is None and dims.pp > num_blocks:
            continue
        if dims.dp > global_batch and not options.fills_packs:
            refusals.append(Refusal(dims=dims, error=too_few_samples(global_batch, dims.dp)))
            continue
        # ZeRO stages change state and exchange, so the cost table; schedules and packs do not
        for stage in _zero_stages(options, dims):
            sharded = replace(options, zero_stage=stage)
            try:
                _refuse_sharded_pipeline(sharded, dims)
                profile = profile_setting(model, cluster, sharded, dims)
                _refuse_state(profile, budget)
            except PartitionError as error:
                refusals.append(Refusal(dims=dims, error=error))
                continue
            update_s = sum(layer.step_s for layer in profile.layers) / dims.pp
            # how samples pack hardly depends on the degrees but dp and cp: by the costs of the first
            packs_of = packs_of or _pack_maker(model, samples, cluster, options, profile)
            for schedule, num_chunks in _schedules(options, dims):
                if options.schedule == "auto" and num_chunks > 1 and dims.pp * num_chunks > num_blocks:
                    continue  # a stage would have no block
                own = replace(sharded, schedule=schedule, num_chunks=num_chunks, pp=dims.pp)
                try:
                    offers = list(packs_of(own, dims))
                except PartitionError as error:
                    refusals.append(Refusal(dims=dims, error=error))
                    continue
                # with its packs each is a member; bounds of all of them in one product
                forward, backward = mean_seconds(profile, np.array([x.mean_work for x in offers]))
                pack_s = (forward + backward).sum(axis=0)
                # a backward that runs in two parts recomputes whole layers or nothing
                tiers = (lambda _: ("full",)) if splits_backward(schedule) else None
                priced = with_tiers(profile, model, tiers)
                members += [
                    Member(options=own, profile=priced, offer=offer, pack_s=float(seconds), update_s=update_s)
                    for offer, seconds in zip(offers, pack_s, strict=True)
                ]
    return members, refusals


def _refuse_sharded_pipeline(options: PlanOptions, dims: ParallelDims) -> None:
    """Refuse ZeRO-2 on a pipeline: it frees gradients by exchanging them once a micro-batch, and nobody runs that."""
    if options.sharding == 2 and dims.pp > 1:
        raise PartitionError(f"ZeRO-2 shards no gradients on {dims.pp} pipeline stages: give ZeRO 1 or 3, or pp 1")


def _refuse_state(profile: Profile, budget: MemoryBudget) -> None:
    """Refuse a state that no split of the layers can hold."""
    # a mean stage is a bound: some stage holds at least as much
    state = sum(layer.state_bytes for layer in profile.layers) / profile.dims.pp
    if state > budget.fill_bytes:
        raise PartitionError(
            f"the state takes {format_bytes(state)} of a device's {format_bytes(budget.fill_bytes)}: shard more (ZeRO "
            "stage, tp, pp)"
        )


def _zero_stages(options: PlanOptions, dims: ParallelDims) -> tuple[int, ...]:
    """Return the ZeRO stages that may be taken at these degrees."""
    if options.zero_stage is not None:
        return (options.zero_stage,)
    if options.profile is not None and options.profile.method == "probed":
        return (options.profile.zero_stage or 1,)  # at which its state was measured
    # stage 0 holds more than 1 and is no faster: it is tried only where a framework has no other
    stages = tuple(x for x in options.zero_stages if x or 1 not in options.zero_stages) or _ZERO_STAGES
    stages = tuple(x for x in stages if x != 2 or dims.pp == 1) or stages
    return stages if dims.replicas > 1 else stages[:1]


def _schedules(options: PlanOptions, dims: ParallelDims) -> Iterator[tuple[ScheduleName, int]]:
    """Yield schedules that are tried, and stages a device."""
    if options.schedule != "auto":
        yield options.schedule, options.num_chunks
        return
    if dims.pp == 1:
        yield "1F1B", 1
        return
    chunks = {"Interleaved1F1B": max(2, options.num_chunks), "ZBVZeroBubble": 2}
    for name in options.schedules or _SCHEDULES:
        yield name, chunks.get(name, 1)


def _pack_maker(
    model: ModelSpec, samples: SampleTable, cluster: ClusterSpec, options: PlanOptions, profile: Profile
) -> PacksOf:
    """Return a function that gives the packs to try at some degrees; each is made once."""
    cost = price_samples(profile, samples.work(token_window=model.token_window))
    global_batch = default_global_batch(cluster, options, len(samples))
    tried = open_steps(samples, options, global_batch=global_batch, cost=cost, token_window=model.token_window)

    # members of equal dp, cp and M share their packs
    @cache
    def shared(dp: int, cp: int, num_microbatches: int, unit: int) -> TriedPacks:
        return share_tried(tried, ParallelDims(dp=dp, cp=cp), num_microbatches, unit=unit)

    @cache
    def filled(cp: int) -> tuple[Filled, ...]:
        return tuple(fill_tried(tried, ParallelDims(cp=cp)))

    @cache
    def work(cp: int) -> FloatArray:
        dims = ParallelDims(cp=cp)
        return np.asarray(pad_documents(tried.samples, dims).work(token_window=model.token_window).sum(axis=0))

    def packs_of(own: PlanOptions, dims: ParallelDims) -> Iterator[Offer]:
        if own.fills_packs:
            yield from map(Offer.of, _filled_packs(own, dims, tried, filled(dims.cp), global_batch))
            return
        counts = _microbatch_counts(own, dims, tried.global_batch)
        unit = microbatch_unit(own.schedule, dims.pp)
        if own.max_patches is not None or own.max_tokens is not None:
            # more packs than asked for, where limits demand it
            made = {x.num_microbatches: x for x in (shared(dims.dp, dims.cp, count, unit) for count in counts)}
            yield from map(Offer.of, made.values())
            return
        for count in counts:
            slots = dims.dp * count * len(tried.samples) // tried.global_batch
            yield Offer(
                num_microbatches=count,
                samples_per_step=float(tried.global_batch),
                samples_per_pack=tried.global_batch / (dims.dp * count),
                mean_work=_of_one_pack(work(dims.cp) / slots, own.attention),
                make=partial(shared, dims.dp, dims.cp, count, unit),
            )

    return packs_of


def _of_one_pack(work: FloatArray, attention: Attention) -> FloatArray:
    """The mean pack, with at least the pairs that `attention` computes in it."""
    work[MICROBATCHES] = 1.0
    return np.maximum(work, join_samples(work)) if joins_samples(attention) else work


def _microbatch_counts(options: PlanOptions, dims: ParallelDims, global_batch: int) -> list[int]:
    """Return the packs a rank and step that are tried; up to one for each of its samples."""
    unit = microbatch_unit(options.schedule, dims.pp)
    if options.num_microbatches is not None:
        return [-(-options.num_microbatches // unit) * unit]
    # powers and multiples of pp: between them time changes by less than predictions are off
    most = -(-global_batch // dims.dp)
    counts = {*_COUNTS, dims.pp, 2 * dims.pp, most, max(1, global_batch // dims.dp)}
    fills = options.schedule == "ZBVZeroBubble" or (options.fills_pipeline and options.schedule == "1F1B")
    least = dims.pp if fills else 1
    found = sorted({-(-count // unit) * unit for count in counts})
    found = [count for count in found if least <= count <= most]
    if not found:
        raise _unfilled(options, dims, most)
    return found


def _filled_packs(
    options: PlanOptions, dims: ParallelDims, tried: Tried, made: Sequence[Filled], global_batch: int
) -> Iterator[TriedPacks]:
    """Yield filled packs under every pair of limits, so many a step that it holds about the global batch."""
    unit, found = microbatch_unit(options.schedule, dims.pp), False
    reason: PartitionError | None = None
    for per_pack, packed, extremes in made:
        # as many packs as hold about the batch; many more would be another training
        count = options.num_microbatches or max(1, round(global_batch / (dims.dp * per_pack * unit))) * unit
        over = options.num_microbatches is None and dims.dp * unit * per_pack > 1.25 * global_batch
        if over and found:
            break  # larger steps than other settings are priced with would look like speed
        if refused := refuse_over(options, dims, per_pack):
            reason = reason or refused
            break
        if options.fills_pipeline and options.schedule == "1F1B" and count < dims.pp:
            reason = reason or _unfilled(options, dims, count)
            continue
        found = True
        yield group_tried(tried, packed, extremes, dims, count)
    if not found:
        assert reason is not None, "there is at least one pair of limits"
        raise reason


def _unfilled(options: PlanOptions, dims: ParallelDims, num_microbatches: int) -> PartitionError:
    if microbatch_unit(options.schedule, dims.pp) > 1:
        return PartitionError(
            f"{options.schedule} needs a multiple of {dims.pp} micro-batches, not {num_microbatches}: give a larger "
            "batch, a smaller pp, or schedule 1F1B"
        )
    return PartitionError(
        f"1F1B on {dims.pp} stages needs as many micro-batches, not {num_microbatches}: give a larger batch, a smaller "
        "pp, or --set schedule=GPipe"
    )
