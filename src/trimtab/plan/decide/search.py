"""Degrees of parallelism, ZeRO stage, schedule and micro-batches, for whatever the user left open.

The space: every division of the devices (dp, pp, tp, cp, ep) x ZeRO stage x schedule x M packs a rank and step. Each
member is priced alike: packs of some steps of the epoch, the exact split with recompute under the memory cap, then the
simulated steps. Branch and bound: a member has a lower bound of its step,

    u T / (1 - (1 - 1/M)^P) + S      1F1B and GPipe: M micro-batches on P stages in sequence
    max(u T M / P, T a) + S          others, which fill their bubble: one micro-batch passes all stages; a is the part
                                     of T that it waits for, all but weight gradients where these are put off

with T the forward and backward of a mean pack on all layers, nothing recomputed, u the slowest rank's work over the
mean, and S the gradient exchange and optimizer, shared evenly. Members are priced in the order of their bounds, until
the next is above all that is of interest. A member of a series (other packs, all else alike) is taken to be above its
bound by nearly as much as the least of those that were priced, for recompute and uneven stages hit all: heuristic, and
the tests compare with the whole space.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from trimtab.balance.packing import PackResult
from trimtab.costs.profile import with_tiers
from trimtab.errors import PartitionError
from trimtab.options import ScheduleName
from trimtab.partition.schedules import microbatch_unit
from trimtab.partition.stages import split_stages
from trimtab.plan.decide.case import Case, MemoryBudget, Setting, make_case
from trimtab.plan.decide.setting import EQUAL, ChosenSetting, Priced, parallel_dims, profile_setting
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
from trimtab.plan.decide.work import price_samples, steps_of, times_of
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec, FloatArray, LayerSpec, ModelSpec, ParallelDims, Profile, SampleTable
from trimtab.units import format_bytes, format_degrees

_SAMPLES_PER_STEP, _SAMPLES_PER_DEVICE = 256, 8  # global batch if none is given: the larger of the two
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # packs a rank and step that are tried
_WITHOUT_WEIGHTS = 2 / 3  # of forward and backward: gradients of weights are at most half of the backward
_SAME_SERIES, _SAME_DEGREES = 0.97, 0.9  # of what others of a series, or of its degrees, are above their bounds
_ZERO_STAGES = (1, 2, 3)
"""Where the stage is open: 0 sends as many bytes as 1, updates every parameter on every rank and holds more."""

_SCHEDULES: tuple[ScheduleName, ...] = ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble")
"""Those that some trainer runs; ZBH1 is priced where it is asked for."""

Tiers = Callable[[LayerSpec], Collection[str]]
Filled = tuple[float, PackResult, FloatArray]  # samples a pack, packs, and the rows that decide the largest
PacksOf = Callable[[PlanOptions, ParallelDims], Iterator[TriedPacks]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Member:
    """One member of the space, not priced yet."""

    options: PlanOptions  # name ZeRO stage and schedule
    profile: Profile
    packs: TriedPacks
    bound_s: float  # seconds a sample: none of its steps is shorter

    @property
    def series(self) -> tuple[ParallelDims, int, str]:
        """What members of other packs share: the smaller the packs, the less they hold."""
        return self.profile.dims, self.options.sharding, self.options.schedule

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """How it divides the work: what the plan lists one of."""
        dims = self.profile.dims
        return self.options.sharding, dims.pp > 1, dims.tp > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A division of the devices that cannot be, and why."""

    dims: ParallelDims
    error: PartitionError


def default_global_batch(cluster: ClusterSpec, options: PlanOptions, num_samples: int) -> int:
    """Samples a step over all ranks: as asked for, else a default, or the data set where that is smaller."""
    if options.global_batch is not None:
        return options.global_batch
    return min(max(_SAMPLES_PER_STEP, _SAMPLES_PER_DEVICE * cluster.num_devices), num_samples)


def choose_setting(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    *,
    tiers: Tiers | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ChosenSetting:
    """The settings that fit, and which is taken.

    `tiers`: the recompute that the framework has of a layer, so that packs are no larger than it can hold. Raises
    `PlanError` when the degrees do not divide the devices, and `PartitionError` when nothing fits, with its reason.
    """
    longest, crowded, refusals = int(samples.num_tokens.max()), False, list[Refusal]()
    if options.schedule == "auto":  # whose chunks are those of an interleaved schedule
        divided = replace(options, num_chunks=1)
    else:
        divided = options
    dims = list(parallel_dims(model, cluster, divided, longest=longest))
    while True:
        # 1. the members of the space, with their bounds
        members, impossible = list_members(model, samples, cluster, options, budget, dims)
        # 2. their prices, the least bound first
        priced, misfits = price_members(members, model, cluster, budget, tiers=tiers, progress=progress)
        refusals += impossible + misfits
        if priced or crowded or options.cp is not None:
            break
        # 3. packs that do not fit one device may fit several
        crowded = True
        dims = list(parallel_dims(model, cluster, divided, longest=longest, crowded=True))
    if not priced:
        raise _refused(refusals)
    fitting = {found.setting.dims for found in priced}
    fastest = dict[object, Priced]()  # of each series
    for found in priced:
        fastest.setdefault((found.setting.dims, found.options.sharding, found.options.schedule), found)
    return ChosenSetting(
        considered=tuple(fastest.values()),
        num_misfits=len({refusal.dims for refusal in refusals} - fitting),
        prefer=options.prefer,
    )


def _refused(refusals: Sequence[Refusal]) -> PartitionError:
    """Why nothing fits: the reason of the division that divides the model most."""
    last = max(refusals, key=lambda x: x.dims.pp * x.dims.tp * x.dims.cp)
    reason = PartitionError(f"{format_degrees(last.dims)}: {last.error}")
    number = len({refusal.dims for refusal in refusals})
    if number == 1:
        return reason
    return PartitionError(f"none of {number} divisions of the devices fits; the one that divides most:\n{reason}")


# -- the space --------------------------------------------------------------------------------------------------------


def list_members(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    divisions: Sequence[ParallelDims],
) -> tuple[list[Member], list[Refusal]]:
    """Every member of the space, and the divisions that model, data or batch rule out."""
    members, refusals = list[Member](), list[Refusal]()
    packs_of: PacksOf | None = None
    global_batch = default_global_batch(cluster, options, len(samples))
    num_blocks = sum(layer.kind == "block" for layer in model.layers)
    for dims in divisions:
        if options.pp is None and dims.pp > num_blocks:
            continue
        if dims.dp > global_batch and not options.fills_packs:
            refusals.append(Refusal(dims=dims, error=too_few_samples(global_batch, dims.dp)))
            continue
        for stage in _zero_stages(options, dims):
            sharded = replace(options, zero_stage=stage)
            try:
                _refuse_sharded_pipeline(sharded, dims)
                profile = profile_setting(model, cluster, sharded, dims)
                _refuse_state(profile, budget)
            except PartitionError as error:
                refusals.append(Refusal(dims=dims, error=error))
                continue
            # how samples pack hardly depends on the degrees but dp and cp: by the costs of the first
            packs_of = packs_of or _pack_maker(model, samples, cluster, options, profile)
            for schedule, num_chunks in _schedules(options, dims):
                if options.schedule == "auto" and num_chunks > 1 and dims.pp * num_chunks > num_blocks:
                    continue  # a stage would have no block
                own = replace(sharded, schedule=schedule, num_chunks=num_chunks, pp=dims.pp)
                try:
                    for packs in packs_of(own, dims):
                        bound_s = lower_bound_s(own, profile, packs) / packs.samples_per_step
                        members.append(Member(options=own, profile=profile, packs=packs, bound_s=bound_s))
                except PartitionError as error:
                    refusals.append(Refusal(dims=dims, error=error))
    return members, refusals


def _refuse_sharded_pipeline(options: PlanOptions, dims: ParallelDims) -> None:
    """ZeRO-2 frees gradients by exchanging them, which on a pipeline would be once a micro-batch: nobody runs that."""
    if options.sharding == 2 and dims.pp > 1:
        raise PartitionError(
            f"ZeRO-2 was asked for on a pipeline of {dims.pp} stages, which keeps the gradients of a step whole: give "
            "ZeRO stage 1 or 3, or pp 1"
        )


def _refuse_state(profile: Profile, budget: MemoryBudget) -> None:
    """What no split of the layers can hold."""
    state = sum(layer.state_bytes for layer in profile.layers) / profile.dims.pp
    if state > budget.fill_bytes:
        raise PartitionError(
            f"parameters, gradients and optimizer state alone take {format_bytes(state)} of each device, of "
            f"{format_bytes(budget.fill_bytes)} that may be expected: shard more of it (ZeRO stage, tp, pp)"
        )


def _zero_stages(options: PlanOptions, dims: ParallelDims) -> tuple[int, ...]:
    """ZeRO stages that may be taken at these degrees."""
    if options.zero_stage is not None:
        return (options.zero_stage,)
    if options.profile is not None and options.profile.method == "probed":
        return (options.profile.zero_stage or 1,)  # at which its state was measured
    stages = tuple(x for x in options.zero_stages if x or 1 not in options.zero_stages) or _ZERO_STAGES
    stages = tuple(x for x in stages if x != 2 or dims.pp == 1) or stages
    return stages if dims.replicas > 1 else stages[:1]


def _schedules(options: PlanOptions, dims: ParallelDims) -> Iterator[tuple[ScheduleName, int]]:
    """Schedules that are tried, and stages a device."""
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
    """A function that gives the packs to try at some degrees; each is made once."""
    cost = price_samples(profile, samples.work(token_window=model.token_window))
    global_batch = default_global_batch(cluster, options, len(samples))
    tried = open_steps(samples, options, global_batch=global_batch, cost=cost, token_window=model.token_window)

    @cache
    def shared(dp: int, cp: int, num_microbatches: int, unit: int) -> TriedPacks:
        return share_tried(tried, ParallelDims(dp=dp, cp=cp), num_microbatches, unit=unit)

    @cache
    def filled(cp: int) -> tuple[Filled, ...]:
        return tuple(fill_tried(tried, ParallelDims(cp=cp)))

    def packs_of(own: PlanOptions, dims: ParallelDims) -> Iterator[TriedPacks]:
        if own.fills_packs:
            yield from _filled_packs(own, dims, tried, filled(dims.cp), global_batch)
            return
        counts = _microbatch_counts(own, dims, tried.global_batch)
        unit = microbatch_unit(own.schedule, dims.pp)
        seen = set[int]()
        for count in counts:
            packs = shared(dims.dp, dims.cp, count, unit)
            if packs.num_microbatches not in seen:  # more than asked for, where limits demand it
                seen.add(packs.num_microbatches)
                yield packs

    return packs_of


def _microbatch_counts(options: PlanOptions, dims: ParallelDims, global_batch: int) -> list[int]:
    """Packs a rank and step that are tried; up to one for each of its samples."""
    unit = microbatch_unit(options.schedule, dims.pp)
    if options.num_microbatches is not None:
        return [options.num_microbatches]
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
    """Filled packs under every pair of limits, so many a step that it holds about the global batch."""
    unit, found = microbatch_unit(options.schedule, dims.pp), False
    reason: PartitionError | None = None
    for per_pack, packed, extremes in made:
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
            f"{options.schedule} runs micro-batches in multiples of {dims.pp}, and a step has {num_microbatches} "
            "samples a rank: give a larger batch, a smaller pp, or schedule 1F1B"
        )
    return PartitionError(
        f"1F1B with {num_microbatches} micro-batches on {dims.pp} stages was asked for, and torch's schedule "
        "needs as many micro-batches as stages: give a larger batch, a smaller pp, or --set schedule=GPipe"
    )


# -- prices -----------------------------------------------------------------------------------------------------------


def lower_bound_s(options: PlanOptions, profile: Profile, packs: TriedPacks) -> float:
    """Seconds that no step takes less than: see the module."""
    P, M = profile.dims.pp, packs.num_microbatches
    T = float(price_samples(profile, packs.mean_work))  # nothing recomputed
    S = sum(layer.step_s for layer in profile.layers) / P
    in_turn = options.schedule in ("1F1B", "GPipe")
    if in_turn:
        return packs.slowest_over_mean * (T / -math.expm1(P * math.log1p(-1 / M)) if M > 1 else T) + S
    least = T * (_WITHOUT_WEIGHTS if options.schedule in ("ZBH1", "ZBVZeroBubble") else 1.0)
    return max(packs.slowest_over_mean * T * M / P, least) + S


def price_members(
    members: Sequence[Member],
    model: ModelSpec,
    cluster: ClusterSpec,
    budget: MemoryBudget,
    *,
    tiers: Tiers | None = None,
    progress: Callable[[int, int], None] | None = None,
    prune: bool = True,
) -> tuple[list[Priced], list[Refusal]]:
    """The members that fit, the fastest first, and reasons of others.

    Priced are all that may be within 1 % of the fastest, and one of each kind.
    """
    found, refusals = dict[int, Priced | None](), list[Refusal]()
    series = dict[object, list[int]]()  # members of one series, the largest packs first
    for number in sorted(range(len(members)), key=lambda i: -members[i].packs.samples_per_pack):
        series.setdefault(members[number].series, []).append(number)

    best, listed, above = math.inf, set[object](), dict[object, float]()

    def note(member: Member, seconds: float) -> None:
        nonlocal best
        best = min(best, seconds)
        for key in (member.series, member.series[:2]) if member.options.schedule != "ZBVZeroBubble" else ():
            above[key] = min(above.get(key, math.inf), seconds / member.bound_s)

    def price(number: int) -> bool:
        """Whether the member fits; its price is kept."""
        if number not in found:
            try:
                found[number] = one = price_member(members[number], model, cluster, budget, tiers)
            except PartitionError as error:
                found[number] = None
                refusals.append(Refusal(dims=members[number].profile.dims, error=error))
            else:
                note(members[number], 1 / one.samples_per_s)
        return found[number] is not None

    def expected_s(member: Member) -> float:
        """Its bound, raised by nearly as much as others of its series, or of its degrees, are above theirs."""
        if member.options.schedule == "ZBVZeroBubble":  # its devices hold alike: what others exceed says nothing of it
            return member.bound_s
        ratio = max(_SAME_SERIES * above.get(member.series, 0.0), _SAME_DEGREES * above.get(member.series[:2], 0.0))
        return member.bound_s * max(1.0, ratio)

    # plain schedules first: they say how far members of the same degrees are above their bounds
    plain = [member.options.schedule == "1F1B" for member in members]
    for number in sorted(range(len(members)), key=lambda i: (not plain[i], members[i].bound_s)):
        member, own = members[number], series[members[number].series]
        if prune:
            # 1. too slow, and not the first of its kind
            if expected_s(member) > best * (1 + EQUAL) and member.kind in listed:
                continue
            # 2. of a series only packs small enough to fit, which bisection finds
            if number in own and own[0] not in found:
                first = bisect_left(own, True, key=price)
                del own[:first]
            if number not in own:
                continue
        if progress is not None:
            progress(len(found), len(members))
        if price(number):
            listed.add(member.kind)
    priced = [x for x in found.values() if x is not None]
    priced.sort(key=lambda x: -x.samples_per_s)  # stable: of equals the one of the lower bound
    return priced, refusals


def price_member(
    member: Member, model: ModelSpec, cluster: ClusterSpec, budget: MemoryBudget, tiers: Tiers | None
) -> Priced:
    """The exact split of the member's packs, simulated; `PartitionError` where they do not fit."""
    case = tried_case(member, model, cluster, budget)
    own = with_tiers(member.profile, model, tiers)
    problem = case.problem if own is member.profile else replace(case.problem, profile=own)
    split = split_stages(problem)
    times = times_of(case.work, split.stages, member.profile, cluster)
    step_s = float(steps_of(times, case.schedule.table, split.stages, problem).mean())
    return Priced(
        setting=case.setting,
        options=member.options,
        step_s=step_s,
        samples_per_s=member.packs.samples_per_step / step_s,
        peak_bytes=split.peak_bytes,
    )


def tried_case(member: Member, model: ModelSpec, cluster: ClusterSpec, budget: MemoryBudget) -> Case:
    """The member as a case of the tried steps alone; memory as in the whole epoch."""
    packs = member.packs
    return make_case(
        model,
        packs.samples,
        cluster,
        member.options,
        budget,
        Setting(
            dims=member.profile.dims,
            max_patches=packs.limits[0],
            max_tokens=packs.limits[1],
            num_microbatches=packs.num_microbatches,
            profile=member.profile,
        ),
        packs.packed,
        samples_work=packs.samples_work,
        extremes=packs.extremes,
    )
