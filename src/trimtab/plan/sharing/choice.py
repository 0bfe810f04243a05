"""What a user may ask of vision data parallel, and what no plan can hold of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from trimtab.errors import PlanError, join_problems
from trimtab.options import Option, Rule, VisionExchange, VisionGroup, VisionObjective

if TYPE_CHECKING:
    from trimtab.plan.plan import ParallelDecision, ScheduleDecision, VisionDecision
    from trimtab.specs import ModelSpec, ParallelDims

GroupChoice = Literal["none", "auto", "tp", "dp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionChoice:
    """Vision data parallel as asked for; None leaves a choice to the planner.

    Use it as `PlanOptions(vision=...)`, to let ranks share the images of a micro-batch.

    >>> VisionChoice(group="auto").rule
    'balanced'
    """

    group: Annotated[
        GroupChoice,
        Option(
            "Ranks that share images; auto: if it gains.",
            flag="--vision-dp",
            common=True,
        ),
    ] = "none"  # auto: the group whose simulated epoch is shortest, or none
    pooling: Annotated[
        int | None,
        Option(
            "Micro-batches whose images are encoded in one call; default: chosen.", flag="--vision-pooling", least=1
        ),
    ] = None  # None: those of the shortest epoch that fit the memory
    rule: Annotated[Rule, Option("Any image to any rank, or runs of images in order.", flag="--vision-rule")] = (
        "balanced"
    )
    objective: Annotated[
        VisionObjective, Option("What the shares of images are balanced by.", flag="--vision-objective")
    ] = "time"

    def problems(self) -> Iterator[str]:
        """What no plan could follow of values that options take, a sentence each."""
        if self.group == "none" and self != VisionChoice():
            yield "vision data parallel was described without a group to share the images: give --vision-dp too"


def exchange_of(group: VisionGroup) -> VisionExchange:
    """How features come together among ranks that hold the same images, or images of their own."""
    return "gather" if group == "tp" else "dispatch"


def group_degree(group: VisionGroup, parallel: "ParallelDecision | ParallelDims") -> int:
    """Ranks of the group."""
    return parallel.tp if group == "tp" else parallel.dp


def decision_problems(
    decision: "VisionDecision",
    parallel: "ParallelDecision | ParallelDims",
    schedule: "ScheduleDecision",
    model: "ModelSpec",
) -> Iterator[str]:
    """Why a plan of this model, these degrees and this schedule cannot share images so, a sentence each."""
    group, degree = decision.group, group_degree(decision.group, parallel)
    other: VisionGroup = "dp" if group == "tp" else "tp"
    if degree == 1:
        cure = f"choose {other}, or leave it out" if group_degree(other, parallel) > 1 else "leave it out"
        yield (
            f"vision data parallel over {group} was asked for, and the plan has {group} 1, a group of one that shares "
            f"with no other rank: {cure}"
        )
    elif decision.degree != degree:
        yield (
            f"vision data parallel over {group} has degree {decision.degree}, and the plan has {group} {degree}: "
            "make them equal"
        )
    reduction = "mean" if group == "tp" else None
    if (decision.exchange, decision.reduction) != (exchange_of(group), reduction):
        yield (
            f"vision data parallel over {group} was asked for with exchange {decision.exchange} and reduction "
            f"{decision.reduction or 'null'}: over {group} they are {exchange_of(group)} and {reduction or 'null'}"
        )
    if decision.pooling > 1:
        if parallel.pp > 1 or schedule.name == "GPipe":
            why = f"a pipeline of {parallel.pp} stages" if parallel.pp > 1 else "GPipe, which holds all micro-batches,"
            yield (
                f"vision pooling {decision.pooling} was asked for on {why} where the plan does not price it: "
                "leave it out" + ("" if parallel.pp > 1 else ", or give --set schedule=1F1B")
            )
        elif schedule.num_microbatches % decision.pooling:
            yield (
                f"vision pooling {decision.pooling} was asked for, and a step has {schedule.num_microbatches} "
                "micro-batches a rank: choose a number that divides them"
            )
        from trimtab.plan.decide.image_sizes import tile_rows

        if group != "dp" and tile_rows(model) is not None:  # a host's own loop pools what all of its ranks hold
            yield (
                f"vision pooling {decision.pooling} was asked for over {group}, and pools are known there for families "
                f"with a grid of patches, while {model.name} cuts images into tiles: leave it out"
            )


def raise_problems(
    decision: "VisionDecision", parallel: "ParallelDecision", schedule: "ScheduleDecision", model: "ModelSpec"
) -> None:
    """`PlanError` with all that keeps a plan of this model from sharing images so."""
    problems = list(decision_problems(decision, parallel, schedule, model))
    if problems:
        raise PlanError(join_problems(problems))
