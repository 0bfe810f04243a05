"""A plan's decision to share images, carried out on a model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from trimtab.balance.cost import LinearCost
from trimtab.errors import PlanError
from trimtab.plan.plan import Plan
from trimtab.runtime.vision.apply import vision_dp
from trimtab.runtime.vision.gradients import Loss, Reduction
from trimtab.runtime.vision.handle import VisionDataParallel

_PATCHES = LinearCost(patches=1.0)  # bytes held grow with patches, whatever the widths


def vision_dp_from_plan(
    model: nn.Module,
    group: Any,
    plan: Plan,
    *,
    cost: LinearCost | None = None,
    host_reduces: bool = True,
    **others: Any,
) -> VisionDataParallel | None:
    """`vision_dp` as `plan` decides; None, and nothing replaced, where every rank encodes the images it holds.

    Use it where your own host (Megatron, a loop of yours) runs a plan; `trimtab train` calls it itself.
    docs/vision-data-parallel.md shows it.

    `group`: this process's ranks along the plan's axis. Each rank of tp has the whole loss, and gradients are averaged
    over them (κ = N, see `gradients.py`). `host_reduces` is False for a host that does not reduce gradients of tp
    replicas: then call the handle's `reduce_gradients()` after the backward. `cost` is None for multiply-adds by the
    configuration, or patches where the plan balances memory; with `tower_seconds` or `tower_bytes` of the plan's
    profile the shares are the plan's own. Where the plan pools micro-batches, encode as many at a time with
    `encode_pooled`. `others` are further arguments of `vision_dp`. Raises `PlanError` where the group has another size
    than the plan says, or the host cannot run what was decided.
    """
    decision = plan.decisions.vision_data_parallel
    if decision is None:
        return None
    if dist.get_world_size(group) != decision.degree:
        raise PlanError(
            f"the plan shares images among {decision.degree} ranks of {decision.group}, and the group that was given "
            f"has {dist.get_world_size(group)}: give the ranks along {decision.group}, or plan for as many"
        )
    if not host_reduces and decision.group != "tp":
        raise PlanError(
            f"the host was said to reduce no gradients over {decision.group}, where each rank has those of its own "
            "samples: reduce them there, and leave out host_reduces"
        )
    loss: Loss | None = "replicated" if decision.group == "tp" else None
    reduction: Reduction | None = decision.reduction if host_reduces else "none"
    if decision.pooling > 1 and decision.exchange == "dispatch":
        raise PlanError(
            f"the plan encodes {decision.pooling} micro-batches of {decision.degree} dp ranks in one call, which "
            "`trimtab train` does and no model's own forward: plan with --set vision_pooling=1 for this host"
        )
    return vision_dp(
        model,
        group,
        exchange=decision.exchange,
        rule=decision.rule,
        cost=_PATCHES if cost is None and decision.objective == "memory" else cost,
        loss=loss,
        reduction=reduction,
        **others,
    )
