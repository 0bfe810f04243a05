"""The cost table of one setting: degrees on a cluster, with the seconds or bytes of a profile that was given."""

from __future__ import annotations

import math
from dataclasses import replace

from trimtab.costs.profile import profile_model
from trimtab.costs.saved import carry_bytes, carry_probed_bytes, carry_seconds, refuse_unlike
from trimtab.costs.settings import CostSettings
from trimtab.errors import PlanError
from trimtab.options import same_fields
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec, DeviceSpec, ModelSpec, ParallelDims, Profile


def profile_setting(model: ModelSpec, cluster: ClusterSpec, options: PlanOptions, dims: ParallelDims) -> Profile:
    """The cost table for these degrees of parallelism: by formula, with the seconds of a profile that was given.

    A traced profile gives its bytes instead, a probed one both.
    """
    traced = options.profile is not None and options.profile.method == "traced"

    def formulas(device: DeviceSpec, dims: ParallelDims, *, links: bool = True, gathered: bool = True) -> Profile:
        rates = link_rates(cluster, dims)
        return profile_model(
            model,
            device,
            **same_fields(options, CostSettings)
            | {
                "dims": dims,
                "zero_stage": options.sharding if gathered else min(options.sharding, 2),
                "sequence_parallel": dims.is_folded and dims.tp > 1,  # which dispatchers ask for
                "frozen_towers": frozenset(options.frozen_towers),
            }
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
