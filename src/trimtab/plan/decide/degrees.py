"""Degrees of parallelism that are tried: every division of the devices that model, nodes and options allow."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trimtab.errors import PlanError
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec, ModelSpec, ParallelDims

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
