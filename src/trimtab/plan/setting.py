"""Degrees of parallelism, pack limits and micro-batches per step, for whatever the user left open.

Every candidate is priced the same way: profile, exact split with recompute under the memory cap, then samples per
second of the full pipeline, `dp M k u / ((M + P - 1) T + S)` with M micro-batches of k samples, P stages, slowest stage
T, and S the gradient exchange and optimizer step. k and the utilisation u (how even packs of that size come out) are
those of a random part of the samples, packed under the candidate's limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.balance.packing import pack_samples, report_packing
from trimtab.costs.profile import profile_model
from trimtab.errors import PartitionError, PlanError
from trimtab.partition.stages import split_stages
from trimtab.plan.budget import MemoryBudget
from trimtab.plan.exchange import step_overhead_s
from trimtab.plan.options import PlanOptions
from trimtab.plan.work import MICROBATCHES, PATCHES, TOKENS, extreme_rows, limit_work, price_samples, select_rows
from trimtab.specs import ClusterSpec, FloatArray, ModelSpec, ParallelDims, Profile, SampleTable

_PACK_SIZES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # samples per pack that are tried
_TOKEN_SLACK = 1.04  # both limits bind at once only if samples are alike: room that lets packs fill in patches
_TRIED_SAMPLES, _TRIED_RANKS = 8192, 8  # of the data set, and data-parallel ranks, to see how packs come out
_GOOD_ENOUGH = 0.98  # of the best speed: then the smaller pack, which leaves memory and makes more, smaller steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the plan runs with."""

    dims: ParallelDims
    max_patches: int
    max_tokens: int
    num_microbatches: int
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """A candidate pair of limits, and how samples pack under it."""

    max_patches: int
    max_tokens: int
    samples_per_pack: float
    utilisation: float


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
    """The fastest setting that fits; heuristic in k (a grid), exact in the split of each candidate.

    Raises `PlanError` when the degrees do not divide the devices, and `PartitionError` when nothing fits.
    """
    candidates = list(_parallel_dims(model, cluster, options))
    mean, extremes = samples_work.mean(axis=0), extreme_rows(samples_work)
    limits: list[_Limits] | None = None
    best: _Priced | None = None
    refused: PartitionError | None = None  # degrees that the model's shapes rule out
    misfit: PartitionError | None = None  # degrees under which nothing fits the memory
    for number, dims in enumerate(candidates):
        degrees = f"dp {dims.dp} x pp {dims.pp} x tp {dims.tp}"
        try:
            profile = profile_setting(model, cluster, options, dims)
        except PartitionError as error:
            refused = PartitionError(f"{degrees}: {error}")
            continue
        if limits is None:  # how samples pack hardly depends on the degrees: once is enough
            limits = list(_try_limits(samples, samples_work, options, price_samples(profile, samples_work)))
        try:
            priced = _price_limits(model, mean, extremes, cluster, options, profile, budget, limits)
        except PartitionError as error:
            misfit = PartitionError(f"{degrees}: {error}")  # the last candidate divides the model most
            continue
        if best is None or priced.samples_per_s > best.samples_per_s:
            best = priced
        if progress is not None:
            progress(number + 1, len(candidates))
    if best is None:
        reason = misfit or refused
        assert reason is not None, "every candidate was priced or refused"
        raise reason
    return best.setting


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
        dp_bytes_per_s=cluster.node_link_bytes_per_s if cluster.num_nodes > 1 else None,
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
    found = False
    for tp in _degrees(options.tp, limit=cluster.devices_per_node):
        for pp in _degrees(options.pp, limit=min(16, len(model.layers))):
            if devices % (tp * pp):
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
    mean: FloatArray,
    extremes: FloatArray,
    cluster: ClusterSpec,
    options: PlanOptions,
    profile: Profile,
    budget: MemoryBudget,
    limits: Sequence[_Limits],
) -> _Priced:
    """The smallest pack within 2 % of the fastest, for one cost table."""
    dims, priced = profile.dims, list[_Priced]()
    reason: PartitionError | None = None
    for tried in limits:
        num_microbatches = _num_microbatches(options, dims, tried.samples_per_pack)
        work_mean = mean * tried.samples_per_pack
        work_mean[MICROBATCHES] = 1.0
        try:
            split = split_stages(
                profile,
                num_stages=dims.pp,
                work_mean=work_mean,
                work_max=limit_work(extremes, tried.max_patches, tried.max_tokens),
                memory_bytes=budget.total_bytes,
                overhead_bytes=budget.reserve_bytes,
                num_microbatches=num_microbatches,
                forbidden_cuts=model.forbidden_cuts,
                schedule=options.schedule,
                num_chunks=options.num_chunks,
                recompute=options.recompute,
            )
        except PartitionError as error:
            reason = error if reason is None else reason
            continue
        ramp = (num_microbatches + (dims.pp - 1) / options.num_chunks) * options.num_chunks
        step_s = ramp * split.bottleneck_s + step_overhead_s(profile, split.stages, cluster, options.zero_stage)
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
        assert reason is not None
        raise reason
    fastest = max(p.samples_per_s for p in priced)
    return next(p for p in priced if p.samples_per_s >= _GOOD_ENOUGH * fastest)


def _try_limits(
    samples: SampleTable, samples_work: FloatArray, options: PlanOptions, cost: FloatArray
) -> Iterator[_Limits]:
    """Each candidate pair, with a random part of the samples packed under it."""
    count = min(len(samples), _TRIED_SAMPLES)
    rows = np.sort(np.random.Generator(np.random.PCG64(options.seed)).choice(len(samples), count, replace=False))
    part, part_cost = select_rows(samples, rows), cost[rows]
    for max_patches, max_tokens in _limits(samples_work, options):
        packed = pack_samples(
            part,
            limits=(max_patches, max_tokens),
            dp=_TRIED_RANKS,
            method=options.method,
            order=options.order,
            cost=part_cost,
            seed=options.seed,
            oversize="skip",
        )
        if packed.packing.num_packs == 0:
            continue
        balance = report_packing(part, packed, cost=part_cost)
        yield _Limits(
            max_patches=max_patches,
            max_tokens=max_tokens,
            samples_per_pack=balance.samples_per_pack,
            utilisation=balance.utilisation,
        )


def _limits(samples_work: FloatArray, options: PlanOptions) -> Iterator[tuple[int, int]]:
    """Pairs of limits, growing: in the ratio of the mean sample, and never below the largest one."""
    if options.max_patches is not None and options.max_tokens is not None:
        yield options.max_patches, options.max_tokens
        return
    mean, largest = samples_work.mean(axis=0), samples_work.max(axis=0)
    patches = samples_work[:, PATCHES].astype(np.int64)
    positive = patches[patches > 0]
    unit = int(np.gcd.reduce(positive)) if len(positive) else 1  # rows of one tile, where images come in tiles
    seen = set[tuple[int, int]]()
    for size in _PACK_SIZES:
        max_tokens = options.max_tokens
        if max_tokens is None:
            size_by_patches = _ratio(options.max_patches, mean[PATCHES]) if options.max_patches is not None else size
            max_tokens = max(math.ceil(_TOKEN_SLACK * size_by_patches * mean[TOKENS]), int(largest[TOKENS]))
        max_patches = options.max_patches
        if max_patches is None:
            size_by_tokens = options.max_tokens / mean[TOKENS] if options.max_tokens is not None else size
            max_patches = max(1, math.ceil(size_by_tokens * mean[PATCHES] / unit) * unit, int(largest[PATCHES]))
        if (max_patches, max_tokens) not in seen:
            seen.add((max_patches, max_tokens))
            yield max_patches, max_tokens


def _num_microbatches(options: PlanOptions, dims: ParallelDims, samples_per_pack: float) -> int:
    if options.num_microbatches is not None:
        return options.num_microbatches
    if options.global_batch is not None:
        return max(1, round(options.global_batch / (dims.dp * samples_per_pack)))
    return 4 * dims.pp


def _ratio(limit: float, mean: float) -> float:
    return limit / mean if mean > 0 else math.inf
