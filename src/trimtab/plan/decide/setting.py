"""Degrees of parallelism, schedule, pack limits and micro-batches per step, for whatever the user left open.

All candidates run the same number of samples a step, and are priced the same way: profile, exact split with recompute
under the memory cap, then samples per second of the full pipeline,

    dp M k u / (T + S)

with M micro-batches of k samples, T the simulated step of M mean micro-batches on that split, sends included, and S the
gradient exchange and optimizer step. k and the utilisation u are those of a part of the samples, packed under the
candidate's limits. Heuristic: a grid, and a simulation that knows only the mean pack; each candidate's split is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import numpy as np

from trimtab.costs.formula.exchange import document_multiple
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.measured.saved import carry_bytes, carry_probed_bytes, carry_seconds, refuse_unlike
from trimtab.costs.profile import profile_model, with_tiers
from trimtab.errors import PartitionError, PlanError
from trimtab.options import ScheduleName, same_fields
from trimtab.partition.schedules import microbatch_unit
from trimtab.partition.simulate import simulate
from trimtab.partition.stages import split_stages
from trimtab.plan.decide.candidates import TriedLimits, parallel_dims, try_limits
from trimtab.plan.decide.case import MemoryBudget, Setting, split_problem
from trimtab.plan.decide.simplest import CHOICE_ERROR, ChosenSetting, Priced
from trimtab.plan.decide.work import (
    MICROBATCHES,
    joins_samples,
    limit_work,
    pad_documents,
    price_samples,
    rank_step_s,
    times_of,
)
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec, DeviceSpec, LayerSpec, ModelSpec, ParallelDims, Profile, SampleTable
from trimtab.units import format_degrees, format_number

_GOOD_ENOUGH = 0.98  # of the best speed: then the smaller pack, which leaves memory and makes more, smaller steps
_MOST_OVER = 1.25  # of the global batch
_SAMPLES_PER_STEP, _SAMPLES_PER_DEVICE = 256, 8  # global batch if none is given: the larger of the two
_RESCHEDULED = 3  # fastest divisions of the devices that are tried with other schedules


def choose_setting(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    *,
    tiers: Callable[[LayerSpec], Collection[str]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ChosenSetting:
    """The settings that fit, and which is taken; a global batch of our own choice is halved until something does.

    Schedule "auto": 1F1B, which needs least memory, decides which divisions of the devices are fastest; these are tried
    with the other schedules. ZeRO stage left open: 1, and plain data parallel with stage 3 too. `tiers`: the recompute
    that the framework has of a layer, so that packs are no larger than it can hold. Raises `PlanError` when the degrees
    do not divide the devices, and `PartitionError` when nothing fits.
    """
    first = replace(options, zero_stage=options.sharding)
    if options.schedule == "auto":
        first = replace(first, schedule="1F1B", num_chunks=1)
    longest = int(samples.num_tokens.max())
    candidates = [(first, dims) for dims in parallel_dims(model, cluster, first, longest=longest)]
    if _leaves_sharding_open(options, cluster):
        sharded = replace(first, pp=1, tp=1, zero_stage=3), ParallelDims(dp=cluster.num_devices)
        candidates.insert(1, sharded)  # the last is the most divided
    profiles, refused = _profile_candidates(model, cluster, candidates)
    if not profiles:
        assert refused is not None, "every candidate was profiled or refused"
        raise refused
    # how samples pack hardly depends on the degrees but cp: once is enough
    limits_at = cache(partial(_limits_at, profiles[0][1], samples, model.token_window, options))
    price = partial(_price_limits, model, cluster, budget, tiers, limits_at)
    global_batch, pending = default_global_batch(cluster, options, len(samples)), profiles
    while True:
        priced = list[Priced]()
        for number, (own, profile) in enumerate(pending):
            if progress is not None:
                progress(number, len(pending))
            try:
                priced.append(price(own, profile, global_batch))
            except PartitionError as error:
                refused = PartitionError(f"{format_degrees(profile.dims)}: {error}")  # the last divides the model most
        if priced:
            break
        if options.cp is None and len(pending) == len(profiles):  # packs that do not fit one device may fit several
            crowded = [(first, d) for d in parallel_dims(model, cluster, first, longest=longest, crowded=True)]
            candidates += (more := [x for x in crowded if x not in candidates])
            profiles += (pending := _profile_candidates(model, cluster, more)[0])
            if pending:
                continue
        if global_batch is None or options.global_batch is not None or global_batch == 1:
            assert refused is not None, "every profile was priced or does not fit"
            if len(profiles) == 1:
                raise refused
            raise PartitionError(
                f"none of {len(profiles)} divisions of the devices fits; the one that divides most:\n{refused}\n"
                "Memory is also saved by a higher ZeRO stage, fused kernels, frozen towers, smaller images."
            )
        global_batch, pending = global_batch // 2, profiles
    num_fitting = len(priced)
    if options.schedule == "auto":
        for found in sorted(priced, key=lambda x: -x.samples_per_s)[:_RESCHEDULED]:
            for other in _other_schedules(found.options, options.num_chunks, found.setting.dims):
                with suppress(PartitionError):
                    priced.append(price(other, found.setting.profile, global_batch))
    priced.sort(key=lambda x: -x.samples_per_s)  # stable: of equals the one that was tried first
    band = 0.0 if options.prefer == "fastest" else min(CHOICE_ERROR, profiles[0][1].time_error)
    return ChosenSetting(considered=tuple(priced), num_misfits=len(candidates) - num_fitting, error=band)


def _limits_at(
    profile: Profile, samples: SampleTable, token_window: int | None, options: PlanOptions, cp: int
) -> list[TriedLimits]:
    """Limits that are tried where cp devices share a pack, and how the documents pack, padded as cp cuts them."""
    dims = ParallelDims(cp=cp)
    if options.max_tokens is not None:
        unit = document_multiple(dims)
        options = replace(options, max_tokens=-(-options.max_tokens // unit) * unit)
    padded = pad_documents(samples, dims)
    work = padded.work(token_window=token_window)
    return try_limits(padded, work, options, price_samples(profile, work))


def _leaves_sharding_open(options: PlanOptions, cluster: ClusterSpec) -> bool:
    """Whether plain data parallel with ZeRO-3 may be taken: nobody asked for another division, stage or sharing."""
    others = (options.pp, options.tp, options.cp, options.ep, options.etp)
    asked = (options.dp not in (None, cluster.num_devices), *(degree not in (None, 1) for degree in others))
    return (
        cluster.num_devices > 1
        and options.zero_stage is None
        and not any(asked)
        and options.schedule in ("1F1B", "auto")
        and options.vision.group == "none"
        and (options.profile is None or options.profile.method != "probed")  # whose state was measured at one stage
    )


def _other_schedules(options: PlanOptions, num_chunks: int, dims: ParallelDims) -> list[PlanOptions]:
    """What "auto" tries beside 1F1B."""
    if dims.pp == 1:
        return []
    chunks = max(2, num_chunks)
    names: tuple[tuple[ScheduleName, int], ...] = (
        ("GPipe", 1),
        ("Interleaved1F1B", chunks),
        ("ZBH1", 1),
        ("ZBVZeroBubble", 2),
    )
    return [replace(options, schedule=name, num_chunks=number, pp=dims.pp) for name, number in names]


def _profile_candidates(
    model: ModelSpec, cluster: ClusterSpec, candidates: Sequence[tuple[PlanOptions, ParallelDims]]
) -> tuple[list[tuple[PlanOptions, Profile]], PartitionError | None]:
    """Cost tables of the degrees that the model's shapes allow, and why the last other one is ruled out."""
    profiles: list[tuple[PlanOptions, Profile]] = []
    refused: PartitionError | None = None
    for options, dims in candidates:
        try:
            profiles.append((options, profile_setting(model, cluster, options, dims)))
        except PartitionError as error:
            refused = PartitionError(f"{format_degrees(dims)}: {error}")
    return profiles, refused


def default_global_batch(cluster: ClusterSpec, options: PlanOptions, num_samples: int) -> int | None:
    """Samples a step over all ranks, one number for all candidates; None where micro-batches are given instead."""
    if options.num_microbatches is not None:
        return None
    if options.global_batch is not None:
        return options.global_batch
    return min(max(_SAMPLES_PER_STEP, _SAMPLES_PER_DEVICE * cluster.num_devices), num_samples)


def profile_setting(model: ModelSpec, cluster: ClusterSpec, options: PlanOptions, dims: ParallelDims) -> Profile:
    """The cost table for these degrees of parallelism: by formula, with the seconds of a profile that was given.

    A traced profile gives its bytes instead, a probed one both.
    """
    traced = options.profile is not None and options.profile.method == "traced"
    fused = {}  # left open: as in what was measured
    if options.profile is not None and options.fused_kernels is None:
        fused = {"fused_kernels": options.profile.fused_kernels}

    def formulas(device: DeviceSpec, dims: ParallelDims, *, links: bool = True, gathered: bool = True) -> Profile:
        rates = link_rates(cluster, dims)
        return profile_model(
            model,
            device,
            **same_fields(options, CostSettings)
            | {
                "dims": dims,
                "zero_stage": options.sharding if gathered else min(options.sharding, 2),
                "frozen_towers": frozenset(options.frozen_towers),
            }
            | fused
            | (rates if links else dict.fromkeys(rates, math.inf)),
        )

    target, saved = formulas(cluster.device, dims), options.profile
    if saved is None:
        return target
    refuse_unlike(saved, model, target)
    if saved.method == "probed" and (saved.optimizer, saved.zero_stage) != (options.optimizer, options.sharding):
        raise PlanError(
            f"the profile was probed with {saved.optimizer} at ZeRO stage {saved.zero_stage}, and the plan is to have "
            f"{options.optimizer} at stage {options.sharding}, whose state was not measured: plan with those, or "
            "probe again"
        )
    base = formulas(saved.device, saved.dims, gathered=not traced)
    carry = carry_bytes if traced else carry_seconds
    carried = carry(
        saved,
        base=base,
        target=target,
        # with such links gathering takes no seconds either
        linkless=formulas(replace(cluster.device, link_bytes_per_s=math.inf), dims, links=False, gathered=not traced),
    )
    return carry_probed_bytes(saved, carried, base=base) if saved.method == "probed" else carried


def link_rates(cluster: ClusterSpec, dims: ParallelDims) -> dict[str, float]:
    """Bytes per second between the devices that share something; neighbours as `ParallelDims` orders them."""
    return {
        "dp_bytes_per_s": cluster.ring_bytes_per_s(dims.replicas, stride=dims.tp),
        "expert_dp_bytes_per_s": cluster.ring_bytes_per_s(dims.expert_replicas, stride=dims.ep * dims.expert_tp),
        "cp_bytes_per_s": cluster.ring_bytes_per_s(dims.cp, stride=dims.tp),
        "ep_bytes_per_s": cluster.node_link_bytes_per_s,
        "ep_in_node": max(1, cluster.devices_per_node // dims.expert_tp),
    }


def _price_limits(
    model: ModelSpec,
    cluster: ClusterSpec,
    budget: MemoryBudget,
    tiers: Callable[[LayerSpec], Collection[str]] | None,
    limits_at: Callable[[int], Sequence[TriedLimits]],
    options: PlanOptions,
    profile: Profile,
    global_batch: int | None,
) -> Priced:
    """The smallest pack within 2 % of the fastest, for one cost table."""
    dims, priced, own = profile.dims, list[Priced](), with_tiers(profile, model, tiers)
    reason: PartitionError | None = None
    for tried in limits_at(dims.cp):
        num_microbatches = _num_microbatches(options, dims, tried.samples_per_pack, global_batch)
        over = global_batch is not None and dims.dp * tried.samples_per_pack > _MOST_OVER * global_batch
        if over and priced:
            continue  # larger steps than other settings are priced with would look like speed
        if over and options.global_batch is not None:
            reason = reason or PartitionError(
                f"global_batch {options.global_batch} was asked for, and one pack of "
                f"{format_number(tried.samples_per_pack)} samples on each of {dims.dp} ranks is "
                "more: ask for a larger batch, or for a smaller dp"
            )
            continue
        if options.fills_pipeline and options.schedule == "1F1B" and num_microbatches < dims.pp:
            reason = reason or _unfilled(num_microbatches, dims.pp)
            continue
        try:
            found = _price_packs(model, cluster, options, own, budget, tried, num_microbatches)
            priced.append(replace(found, setting=replace(found.setting, profile=profile)))
        except PartitionError as error:
            reason = reason or error
    if not priced:
        assert reason is not None, "there is at least one pair of limits"
        raise reason
    return _smallest_good(priced)


def _price_packs(
    model: ModelSpec,
    cluster: ClusterSpec,
    options: PlanOptions,
    profile: Profile,
    budget: MemoryBudget,
    tried: TriedLimits,
    num_microbatches: int,
) -> Priced:
    """Packs of one size: the exact split for them, simulated; `PartitionError` where they do not fit."""
    work_mean = tried.mean * tried.samples_per_pack
    work_mean[MICROBATCHES] = 1.0
    problem = split_problem(
        model,
        profile,
        options,
        budget,
        work_mean=work_mean,
        work_max=limit_work(
            tried.extremes, tried.max_patches, tried.max_tokens, joined=joins_samples(options.attention)
        ),
        num_microbatches=num_microbatches,
    )
    split = split_stages(problem)
    times = times_of(np.tile(work_mean, (num_microbatches, 1)), split.stages, profile, cluster)
    line = simulate(times, schedule=problem.schedule, num_devices=problem.num_stages)
    # without a pipeline ranks wait once a step; in one, stages wait for uneven packs, for which rows that wait stand
    useful_share = tried.utilisation(num_microbatches if profile.dims.pp == 1 else 1)
    useful = profile.dims.dp * num_microbatches * tried.samples_per_pack * useful_share
    step_s = line.makespan_s + rank_step_s(problem, split.stages)
    return Priced(
        setting=Setting(
            dims=profile.dims,
            max_patches=tried.max_patches,
            max_tokens=tried.max_tokens,
            num_microbatches=num_microbatches,
            profile=profile,
        ),
        options=options,
        step_s=step_s,
        samples_per_s=useful / step_s,
        samples_per_pack=tried.samples_per_pack,
        peak_bytes=split.peak_bytes,
    )


def _smallest_good(priced: Sequence[Priced]) -> Priced:
    """Of settings in the order of their packs' size, the first that is nearly as fast as any; with the one after it."""
    fastest = max(p.samples_per_s for p in priced)
    best = next(i for i, p in enumerate(priced) if p.samples_per_s >= _GOOD_ENOUGH * fastest)
    return replace(priced[best], larger=priced[best + 1] if best + 1 < len(priced) else None)


def _unfilled(num_microbatches: int, num_stages: int) -> PartitionError:
    return PartitionError(
        f"1F1B with {num_microbatches} micro-batches on {num_stages} stages was asked for, and torch's schedule "
        "needs as many micro-batches as stages: give a larger batch, a smaller pp, or --set schedule=GPipe"
    )


def _num_microbatches(
    options: PlanOptions, dims: ParallelDims, samples_per_pack: float, global_batch: int | None
) -> int:
    """Micro-batches of one rank; interleaved schedules take them in multiples of the pipeline's devices."""
    if global_batch is None:
        assert options.num_microbatches is not None
        return options.num_microbatches
    unit = microbatch_unit(options.schedule, dims.pp)
    return max(1, round(global_batch / (dims.dp * samples_per_pack * unit))) * unit
