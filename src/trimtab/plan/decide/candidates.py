"""Degrees of parallelism that are tried: every division of the devices that model, nodes and options allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trimtab.balance.packing import pack_samples, report_packing
from trimtab.errors import PackingError, PlanError
from trimtab.plan.decide.work import PATCHES, TOKENS, extreme_rows, select_rows
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec, FloatArray, ModelSpec, ParallelDims, SampleTable

_MOST_STAGES = 16  # pipeline degree, where it is left open
_LONG_TOKENS = 8192
"""Rows that a device of cp has left, where cp is tried though packs fit: Megatron-Core's guide advises cp for sequences
of 8K tokens and more (megatron/core/transformer/moe/README.md, rule 5)."""
_LEAST_TOKENS = 1024
"""The same where nothing fits otherwise: with fewer, products are too narrow for their device."""


def parallel_dims(
    model: ModelSpec, cluster: ClusterSpec, options: PlanOptions, *, longest: int, crowded: bool = False
) -> Iterator[ParallelDims]:
    """Degrees whose product is the number of devices; those that divide less come first.

    cp is tried where the longest document (or pack that was asked for) of `longest` tokens leaves each device many;
    `crowded`: nothing fits without it. ep is tried for models with experts, one expert on one device: inside a node,
    and over as many devices as there are. Raises `PlanError` where the degrees asked for do not divide the devices.
    """
    _refuse_unequal(cluster, options)
    devices, found = cluster.num_devices, False
    tokens = max(longest, options.max_tokens or 0)
    least = _LEAST_TOKENS if crowded else _LONG_TOKENS
    for tp in _degrees(options.tp, devices, limit=cluster.devices_per_node):
        if options.tp_degrees and tp not in options.tp_degrees:
            continue
        for pp in _degrees(options.pp, devices, limit=min(_MOST_STAGES, len(model.layers))):
            if cluster.devices_per_node % tp or (pp == 1 and options.num_chunks > 1):
                continue
            for cp in _context_degrees(options.cp, devices, limit=tokens // least, crowded=crowded):
                if devices % (tp * pp * cp) or options.dp not in (None, devices // (tp * pp * cp)):
                    continue
                for ep, etp in _expert_degrees(model, cluster, options, devices // pp, tp):
                    found = True
                    yield ParallelDims(dp=devices // (tp * pp * cp), pp=pp, tp=tp, cp=cp, ep=ep, etp=etp)
    if not found and not crowded:
        names = ("dp", "pp", "tp", "cp", "ep", "etp")
        asked = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
        raise PlanError(
            f"{asked} was asked for on {devices} devices, and no whole number of replicas uses them all: "
            f"leave one of {', '.join(asked) or 'the degrees'} out, or change the cluster"
        )


def _refuse_unequal(cluster: ClusterSpec, options: PlanOptions) -> None:
    asked = {name: getattr(options, name) for name in ("dp", "pp", "tp", "cp")}
    product = math.prod(degree for degree in asked.values() if degree is not None)
    names = "dp x pp x tp" if options.cp is None else "dp x pp x tp x cp"
    if cluster.num_devices % product:
        raise PlanError(
            f"{names} was asked to be a multiple of {product}, and the cluster has {cluster.num_devices} devices: "
            f"choose degrees whose product divides {cluster.num_devices}"
        )
    if options.tp is not None and cluster.devices_per_node % options.tp:
        raise PlanError(
            f"tp {options.tp} was asked for, and nodes have {cluster.devices_per_node} devices: "
            "choose a tp that divides a node, tensor-parallel devices talk in every layer"
        )


def _degrees(asked: int | None, devices: int, *, limit: int) -> list[int]:
    """The degree asked for, or every divisor of the devices up to `limit`."""
    if asked is not None:
        return [asked]
    return [degree for degree in range(1, limit + 1) if devices % degree == 0]


def _context_degrees(asked: int | None, devices: int, *, limit: int, crowded: bool) -> list[int]:
    found = _degrees(asked, devices, limit=max(1, min(limit, devices)))
    return [cp for cp in found if cp > 1] if crowded else found


def _expert_degrees(
    model: ModelSpec, cluster: ClusterSpec, options: PlanOptions, ranks: int, tp: int
) -> list[tuple[int, int | None]]:
    """Pairs of ep and etp for the `ranks` devices of a pipeline stage; etp None is that of the dense layers."""
    mlps = [layer.mlp for layer in model.layers if layer.mlp is not None]
    experts = math.gcd(*(m.num_experts for m in mlps if m.num_experts is not None))
    if options.ep is not None or not experts:
        size = (options.ep or 1) * (options.etp or tp)
        return [(options.ep or 1, options.etp)] if ranks % size == 0 else []
    etp = options.etp or 1
    divisors = [ep for ep in range(2, experts + 1) if experts % ep == 0 and ranks % (ep * etp) == 0]
    inside = [ep for ep in divisors if ep * etp <= cluster.devices_per_node]
    return [(1, options.etp), *((ep, options.etp or (1 if tp > 1 else None)) for ep in {*inside, *divisors[-1:]})]


# Candidate pack limits, and how the data packs under each.


_PACK_SIZES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # samples per pack that are tried
_TOKEN_SLACK = 1.04  # both limits bind at once only if samples are alike: room that lets packs fill in patches
_TRIED_SAMPLES, _TRIED_RANKS = 8192, 8  # of the data set, and data-parallel ranks, to see how packs come out
_LARGE = 0.99  # quantile of sizes that open limits must hold, where larger samples may be skipped or go alone


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TriedLimits:
    """A pair of limits, and the packs it makes of the data."""

    max_patches: int
    max_tokens: int
    samples_per_pack: float
    cost: FloatArray  # (rows, 8) of the packs that as many data-parallel ranks run at the same time
    mean: FloatArray  # (len(WORK_TERMS),) of the samples that are packed
    extremes: FloatArray  # (few, len(WORK_TERMS)) samples that decide the largest pack

    def utilisation(self, num_microbatches: int) -> float:
        """Useful share of the ranks' time, where each waits for the slowest after so many packs.

        The more packs lie between two waits, the less it costs that they are uneven.
        """
        rows = self.cost[: max(1, len(self.cost) // num_microbatches) * num_microbatches]
        steps = np.add.reduceat(rows, np.arange(0, len(rows), num_microbatches))
        return float(steps.mean() / steps.max(axis=1).mean())


def try_limits(
    samples: SampleTable, samples_work: FloatArray, options: PlanOptions, cost: FloatArray
) -> list[TriedLimits]:
    """Each candidate pair, with a random part of the samples packed under it."""
    count = min(len(samples), _TRIED_SAMPLES)
    rows = np.sort(
        np.random.Generator(np.random.PCG64(options.seed % 2**128)).choice(len(samples), count, replace=False)
    )
    part, part_cost = select_rows(samples, rows), cost[rows]
    mean, extremes = samples_work.mean(axis=0), extreme_rows(samples_work)
    tried = []
    for max_patches, max_tokens in candidate_limits(samples_work, options):
        packed = pack_samples(
            part,
            limits=(max_patches, max_tokens),
            dp=_TRIED_RANKS,
            method=options.method,
            order=options.order,
            cost=part_cost,
            seed=options.seed,
            oversize=options.oversize if options.oversize != "error" else "skip",
        )
        if packed.packing.num_packs == 0:
            continue
        if options.oversize == "skip":
            packable = (samples_work[:, PATCHES] <= max_patches) & (samples_work[:, TOKENS] <= max_tokens)
            mean, extremes = samples_work[packable].mean(axis=0), extreme_rows(samples_work[packable])
        balance = report_packing(part, packed, cost=part_cost)
        tried.append(
            TriedLimits(
                max_patches=max_patches,
                max_tokens=max_tokens,
                samples_per_pack=balance.samples_per_pack,
                cost=np.append(packed.packing.sums(part_cost), 0.0)[packed.schedule.table[:, :, 0]],
                mean=mean,
                extremes=extremes,
            )
        )
    if not tried:
        limits = {"max_patches": options.max_patches, "max_tokens": options.max_tokens}
        given = " and ".join(f"{name} {limit}" for name, limit in limits.items() if limit is not None)
        raise PackingError(
            f"{given} was given, and hardly a sample is that small: raise it, or leave it out to have it chosen"
        )
    return tried


def candidate_limits(samples_work: FloatArray, options: PlanOptions) -> Iterator[tuple[int, int]]:
    """Pairs of limits, growing, in the ratio of the mean sample.

    They hold the largest sample; or, where larger ones may be skipped or go alone, 99 % of the samples.
    """
    if options.max_patches is not None and options.max_tokens is not None:
        yield options.max_patches, options.max_tokens
        return
    mean = samples_work.mean(axis=0)
    quantile = 1.0 if options.oversize == "error" else _LARGE
    least_patches = int(np.quantile(samples_work[:, PATCHES], quantile, method="higher"))
    least_tokens = int(np.quantile(samples_work[:, TOKENS], quantile, method="higher"))
    patches = samples_work[:, PATCHES].astype(np.int64)
    positive = patches[patches > 0]
    unit = int(np.gcd.reduce(positive)) if len(positive) else 1  # rows of one tile, where images come in tiles
    seen = set[tuple[int, int]]()
    for size in _PACK_SIZES:
        # a limit that is given says how many samples a pack holds, if the data has what it limits
        if options.max_patches is not None and mean[PATCHES] > 0:
            size = options.max_patches / mean[PATCHES]
        elif options.max_tokens is not None and mean[TOKENS] > 0:
            size = options.max_tokens / mean[TOKENS]
        max_patches, max_tokens = options.max_patches, options.max_tokens
        if max_patches is None:
            max_patches = max(1, math.ceil(size * mean[PATCHES] / unit) * unit, least_patches)
        if max_tokens is None:
            max_tokens = max(1, math.ceil(_TOKEN_SLACK * size * mean[TOKENS]), least_tokens)
        if (max_patches, max_tokens) not in seen:
            seen.add((max_patches, max_tokens))
            yield max_patches, max_tokens
