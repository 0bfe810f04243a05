"""Which ranks share the images of a micro-batch, and why a plan cannot share them so: refusals in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from trimtab.errors import PlanError, join_problems
from trimtab.options import VisionExchange, VisionGroup, VisionReduction
from trimtab.plan.decide.exchange import tile_rows
from trimtab.plan.options import GroupChoice
from trimtab.plan.plan import ParallelDecision, ScheduleDecision, VisionDecision
from trimtab.specs import ModelSpec, ParallelDims

GROUPS: tuple[VisionGroup, ...] = get_args(VisionGroup)


def groups_of(choice: GroupChoice) -> tuple[VisionGroup, ...]:
    """The groups that may be taken, of what was asked for."""
    if choice == "one-grid":
        return ()
    if choice == "auto":
        return tuple(group for group in GROUPS if group != "own")
    if choice == "shared":
        return tuple(group for group in GROUPS if group not in ("replica", "own"))
    return (choice,)


def over_tp(group: VisionGroup) -> bool:
    """Return whether ranks of tp share, so that each of them holds the whole tower."""
    return group in ("tp", "tp_cp")


def exchange_of(group: VisionGroup) -> VisionExchange:
    """Return how features come together: among ranks that hold the same images, or images of their own, or none."""
    exchanges: dict[VisionGroup, VisionExchange] = {"dp": "dispatch", "own": "send"}
    return exchanges.get(group, "gather")


def reduction_of(group: VisionGroup) -> VisionReduction | None:
    """Return how gradients of the tower come together over tp, whose ranks each have the whole loss.

    Ranks of cp and dp have losses of their own tokens, and their gradients are added up as without sharing.
    """
    return "mean" if over_tp(group) else None


def group_axes(group: VisionGroup) -> tuple[str, ...]:
    """The degrees whose product is that of the group."""
    return {"tp_cp": ("tp", "cp"), "replica": ("pp", "tp", "cp")}.get(group, (group,))


def group_degree(group: VisionGroup, parallel: ParallelDecision | ParallelDims) -> int:
    """Count the ranks of the group; 1 where it is not a group of its own: tp_cp needs both, a replica a pipeline.

    Devices of the tower's own are none of these ranks.
    """
    if group == "own":
        return 1
    degrees = [getattr(parallel, axis) for axis in group_axes(group)]
    needed = degrees[:1] if group == "replica" else degrees
    return 1 if min(needed) == 1 else math.prod(degrees)


def decision_problems(
    decision: VisionDecision,
    parallel: ParallelDecision | ParallelDims,
    schedule: ScheduleDecision,
    model: ModelSpec,
) -> Iterator[str]:
    """Yield why a plan of this model, these degrees and this schedule cannot share images so, a sentence each."""
    # the group itself: there is one, and it is as large as was decided
    group, degree = decision.group, group_degree(decision.group, parallel)
    if group == "own":
        yield from _own_problems(decision, parallel, schedule)
    elif degree == 1:
        alone = ["pp"] if group == "replica" else [x for x in group_axes(group) if getattr(parallel, x) == 1]
        others = [other for other in GROUPS if group_degree(other, parallel) > 1]
        cure = f"choose {' or '.join(others)}, or leave it out" if others else "leave it out"
        yield (f"vision data parallel over {group} shares nothing where {' and '.join(alone)} is 1: {cure}")
    elif decision.degree != degree:
        true = " x ".join(f"{axis} {getattr(parallel, axis)}" for axis in group_axes(group))
        yield (
            f"vision data parallel over {group} has degree {decision.degree}, and the plan has {true}: make them equal"
        )
    # how it exchanges, and what is decided apart from the stages
    reduction = reduction_of(group)
    if (decision.exchange, decision.reduction) != (exchange_of(group), reduction):
        yield (
            f"vision data parallel over {group} was asked for with exchange {decision.exchange} and reduction "
            f"{decision.reduction or 'null'}: over {group} they are {exchange_of(group)} and {reduction or 'null'}"
        )
    if decision.recompute and group not in ("replica", "own"):
        yield f"recompute of a tower shared over {group} is decided by stages: leave vision_data_parallel.recompute out"
    # how many micro-batches one call of the tower holds
    if group == "replica":
        if decision.pooling != schedule.num_microbatches:
            yield (
                f"vision pooling {decision.pooling} was asked for over a replica, which encodes the "
                f"{schedule.num_microbatches} micro-batches of a step at once: leave it out"
            )
    elif decision.pooling > 1 and group != "own":
        yield from _pooling_problems(decision, parallel, schedule, model)


def _own_problems(
    decision: VisionDecision, parallel: ParallelDecision | ParallelDims, schedule: ScheduleDecision
) -> Iterator[str]:
    degree, dp = decision.degree, parallel.dp
    if degree < 1 or max(degree, dp) % min(degree, dp):
        yield f"{degree} devices of the tower's own do not share dp {dp} evenly: make one a multiple of the other"
    if schedule.name != "1F1B" or decision.pooling > 1:
        yield (
            f"a tower on devices of its own was asked for with {schedule.name} and pooling {decision.pooling}: it "
            "encodes each micro-batch of 1F1B in one call"
        )


def _pooling_problems(
    decision: VisionDecision,
    parallel: ParallelDecision | ParallelDims,
    schedule: ScheduleDecision,
    model: ModelSpec,
) -> Iterator[str]:
    # a pool is held until its last backward, which stages in flight would multiply
    if parallel.pp > 1 or schedule.name == "GPipe":
        why = f"a pipeline of {parallel.pp} stages" if parallel.pp > 1 else "GPipe, which holds all micro-batches,"
        yield (
            f"vision pooling {decision.pooling} was asked for on {why} where the plan does not price it: "
            "leave it out" + ("" if parallel.pp > 1 else ", or give --schedule 1F1B")
        )
    elif schedule.num_microbatches % decision.pooling:
        yield (
            f"vision pooling {decision.pooling} of {schedule.num_microbatches} micro-batches: choose a number that "
            "divides them"
        )
    if decision.group != "dp" and tile_rows(model) is not None:  # a host's own loop pools what all of its ranks hold
        yield (
            f"vision pooling {decision.pooling} over {decision.group} needs a grid of patches, not {model.name}'s "
            "tiles: leave it out"
        )


def raise_problems(
    decision: VisionDecision, parallel: ParallelDecision, schedule: ScheduleDecision, model: ModelSpec
) -> None:
    """Raise `PlanError` with all that keeps a plan of this model from sharing images so."""
    problems = list(decision_problems(decision, parallel, schedule, model))
    if problems:
        raise PlanError(join_problems(problems))
