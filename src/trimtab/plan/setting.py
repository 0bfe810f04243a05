"""Degrees of parallelism, pack limits and micro-batches per step, for whatever the user left open.

All candidates run the same number of samples a step, and are priced the same way: profile, exact split with recompute
under the memory cap, then samples per second of the full pipeline,

    dp M k u / ((M + P - 1) T + sends + S)

with M micro-batches of k samples, P stages, slowest stage T, the sends of one micro-batch there and back, and S the
gradient exchange and optimizer step. k and the utilisation u are those of a part of the samples, packed under the
candidate's limits. Heuristic: a grid, and a formula that knows only the mean pack; each candidate's split is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.costs.profile import profile_model
from trimtab.errors import PartitionError, PlanError
from trimtab.partition.stages import solve
from trimtab.plan.budget import MemoryBudget
from trimtab.plan.case import Setting, split_problem
from trimtab.plan.limits import TriedLimits, try_limits
from trimtab.plan.options import PlanOptions
from trimtab.plan.times import rank_step_s, stage_link
from trimtab.plan.work import MICROBATCHES, limit_work, price_samples
from trimtab.specs import ClusterSpec, FloatArray, ModelSpec, ParallelDims, Profile, SampleTable, Stage

_GOOD_ENOUGH = 0.98  # of the best speed: then the smaller pack, which leaves memory and makes more, smaller steps
_MOST_OVER = 1.25  # of a global batch that was asked for
_SAMPLES_PER_STEP, _SAMPLES_PER_DEVICE = 256, 8  # global batch if none is given: the larger of the two


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    setting: Setting
    samples_per_s: float


def choose_setting(
    model: ModelSpec,
    samples: SampleTable,
    samples_work: FloatArray,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Setting:
    """The fastest setting that fits; a global batch of our own choice is halved until something does.

    Raises `PlanError` when the degrees do not divide the devices, and `PartitionError` when nothing fits.
    """
    candidates = list(_parallel_dims(model, cluster, options))
    profiles, refused = _profile_candidates(model, cluster, options, candidates)
    if not profiles:
        assert refused is not None, "every candidate was profiled or refused"
        raise refused
    # how samples pack hardly depends on the degrees: once is enough
    limits = try_limits(samples, samples_work, options, price_samples(profiles[0], samples_work))
    global_batch = default_global_batch(cluster, options, len(samples))
    while True:
        best: _Priced | None = None
        misfit: PartitionError | None = None
        for number, profile in enumerate(profiles):
            if progress is not None:
                progress(number, len(profiles))
            try:
                priced = _price_limits(model, cluster, options, profile, budget, limits, global_batch)
            except PartitionError as error:
                misfit = PartitionError(f"{_degrees_of(profile.dims)}: {error}")  # the last divides the model most
                continue
            if best is None or priced.samples_per_s > best.samples_per_s:
                best = priced
        if best is not None:
            return best.setting
        if global_batch is None or options.global_batch is not None or global_batch == 1:
            break
        global_batch //= 2
    assert misfit is not None, "every profile was priced or does not fit"
    if len(profiles) == 1:
        raise misfit
    raise PartitionError(
        f"none of {len(profiles)} divisions of the devices fits; the one that divides most:\n{misfit}\n"
        "Memory is also saved by a higher ZeRO stage, fused kernels, frozen towers, smaller images."
    )


def _profile_candidates(
    model: ModelSpec, cluster: ClusterSpec, options: PlanOptions, candidates: Sequence[ParallelDims]
) -> tuple[list[Profile], PartitionError | None]:
    """Cost tables of the degrees that the model's shapes allow, and why the last other one is ruled out."""
    profiles: list[Profile] = []
    refused: PartitionError | None = None
    for dims in candidates:
        try:
            profiles.append(profile_setting(model, cluster, options, dims))
        except PartitionError as error:
            refused = PartitionError(f"{_degrees_of(dims)}: {error}")
    return profiles, refused


def _degrees_of(dims: ParallelDims) -> str:
    return f"dp {dims.dp} x pp {dims.pp} x tp {dims.tp}"


def default_global_batch(cluster: ClusterSpec, options: PlanOptions, num_samples: int) -> int | None:
    """Samples a step over all ranks, one number for all candidates; None where micro-batches are given instead."""
    if options.num_microbatches is not None:
        return None
    if options.global_batch is not None:
        return options.global_batch
    return min(max(_SAMPLES_PER_STEP, _SAMPLES_PER_DEVICE * cluster.num_devices), num_samples)


def profile_setting(model: ModelSpec, cluster: ClusterSpec, options: PlanOptions, dims: ParallelDims) -> Profile:
    """The cost table for these degrees of parallelism."""
    return profile_model(
        model,
        cluster.device,
        dims=dims,
        dtype=options.dtype,
        zero_stage=options.zero_stage,
        optimizer=options.optimizer,
        attention=options.attention,
        fused_kernels=options.fused_kernels,
        dp_bytes_per_s=cluster.slowest_link_bytes_per_s,
        frozen_towers=frozenset(options.frozen_towers),
    )


def _parallel_dims(model: ModelSpec, cluster: ClusterSpec, options: PlanOptions) -> Iterator[ParallelDims]:
    devices = cluster.num_devices
    fixed = math.prod(d for d in (options.dp, options.pp, options.tp) if d is not None)
    if devices % fixed:
        raise PlanError(
            f"dp x pp x tp was asked to be a multiple of {fixed}, and the cluster has {devices} devices: "
            "choose degrees whose product divides them"
        )
    if options.tp is not None and cluster.devices_per_node % options.tp:
        raise PlanError(
            f"tp {options.tp} was asked for, and nodes have {cluster.devices_per_node} devices: "
            "choose a tp that divides a node, tensor-parallel devices talk in every layer"
        )
    found = False
    for tp in _degrees(options.tp, limit=cluster.devices_per_node):
        for pp in _degrees(options.pp, limit=min(16, len(model.layers))):
            if devices % (tp * pp) or cluster.devices_per_node % tp or (pp == 1 and options.num_chunks > 1):
                continue
            dp = devices // (tp * pp)
            if options.dp is not None and options.dp != dp:
                continue
            found = True
            yield ParallelDims(dp=dp, pp=pp, tp=tp)
    if not found:
        asked = {name: getattr(options, name) for name in ("dp", "pp", "tp") if getattr(options, name) is not None}
        raise PlanError(
            f"{asked} was asked for on {devices} devices, and no whole number of replicas uses them all: "
            "leave one of dp, pp, tp out, or change the cluster"
        )


def _degrees(asked: int | None, *, limit: int) -> list[int]:
    if asked is not None:
        return [asked]
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def _price_limits(
    model: ModelSpec,
    cluster: ClusterSpec,
    options: PlanOptions,
    profile: Profile,
    budget: MemoryBudget,
    limits: Sequence[TriedLimits],
    global_batch: int | None,
) -> _Priced:
    """The smallest pack within 2 % of the fastest, for one cost table."""
    dims, priced = profile.dims, list[_Priced]()
    reason: PartitionError | None = None
    for tried in limits:
        num_microbatches = _num_microbatches(options, dims, tried.samples_per_pack, global_batch)
        if options.global_batch is not None and dims.dp * tried.samples_per_pack > _MOST_OVER * options.global_batch:
            reason = reason or PartitionError(
                f"global_batch {options.global_batch} was asked for, and one pack of {tried.samples_per_pack:.3g} "
                f"samples on each of {dims.dp} ranks is more: ask for a larger batch, or for a smaller dp"
            )
            continue
        work_mean = tried.mean * tried.samples_per_pack
        work_mean[MICROBATCHES] = 1.0
        problem = split_problem(
            model,
            profile,
            options,
            budget,
            work_mean=work_mean,
            work_max=limit_work(tried.extremes, tried.max_patches, tried.max_tokens),
            num_microbatches=num_microbatches,
        )
        try:
            split = solve(problem)
        except PartitionError as error:
            reason = reason or error
            continue
        # a chunk is a stage: M V chunks, and a ramp of P - 1 of them
        blocks = num_microbatches * options.num_chunks + dims.pp - 1
        sends_s = 2 * _send_s(profile, split.stages, work_mean, cluster)
        step_s = blocks * split.bottleneck_s + sends_s + rank_step_s(profile, split.stages)
        setting = Setting(
            dims=dims,
            max_patches=tried.max_patches,
            max_tokens=tried.max_tokens,
            num_microbatches=num_microbatches,
            profile=profile,
        )
        useful = dims.dp * num_microbatches * tried.samples_per_pack * tried.utilisation
        priced.append(_Priced(setting=setting, samples_per_s=useful / step_s))
    if not priced:
        assert reason is not None, "there is at least one pair of limits"
        raise reason
    fastest = max(p.samples_per_s for p in priced)
    return next(p for p in priced if p.samples_per_s >= _GOOD_ENOUGH * fastest)


def _num_microbatches(
    options: PlanOptions, dims: ParallelDims, samples_per_pack: float, global_batch: int | None
) -> int:
    """Micro-batches of one rank; interleaved schedules take them in multiples of the pipeline's devices."""
    if global_batch is None:
        assert options.num_microbatches is not None
        return options.num_microbatches
    unit = dims.pp if options.num_chunks > 1 else 1
    return max(1, round(global_batch / (dims.dp * samples_per_pack * unit))) * unit


def _send_s(profile: Profile, stages: Sequence[Stage], work_mean: FloatArray, cluster: ClusterSpec) -> float:
    """Seconds in which the mean micro-batch's rows pass all boundaries of the pipeline, one after the other."""
    sent = profile.matrix("output_bytes")[[stage.stop - 1 for stage in stages[:-1]]] @ work_mean
    return float(np.sum(cluster.latency_s + sent / stage_link(cluster)))
