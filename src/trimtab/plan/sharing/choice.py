"""What a user may ask of vision data parallel, and what no plan can hold of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from trimtab.errors import PlanError, join_problems
from trimtab.options import Option, Rule, VisionExchange, VisionGroup, VisionObjective, VisionReduction

if TYPE_CHECKING:
    from trimtab.plan.plan import ParallelDecision, ScheduleDecision, VisionDecision
    from trimtab.specs import ModelSpec

GroupChoice = Literal["none", "auto", "tp", "cp", "sp", "dp"]
GROUPS: tuple[VisionGroup, ...] = get_args(VisionGroup)

_EXCHANGES: dict[VisionGroup, tuple[VisionExchange, ...]] = {
    "tp": ("gather",),
    "cp": ("gather", "routed"),
    "sp": ("gather", "routed"),
    "dp": ("dispatch",),
}
"""What each group can do, the default first. Ranks of tp embed all tokens, so that no one could be sent fewer rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionChoice:
    """Vision data parallel as asked for; None leaves a choice to the planner."""

    group: Annotated[
        GroupChoice,
        Option(
            "Ranks that share images, each encoding a part; auto: those that gain most, if any do.", flag="--vision-dp"
        ),
    ] = "none"  # auto: the group whose simulated epoch is shortest, or none
    exchange: Annotated[
        VisionExchange | None,
        Option("How their features come together; default: gather, for dp dispatch.", flag="--vision-exchange"),
    ] = None
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
    reduction: Annotated[
        VisionReduction | None,
        Option("How the trainer adds gradients up over these ranks; default: mean.", flag="--vision-reduction"),
    ] = None  # None: mean, as FSDP and DDP do

    def problems(self) -> Iterator[str]:
        """What no plan could follow of values that options take, a sentence each."""
        if self.group == "none" and self != VisionChoice():
            yield "vision data parallel was described without a group to share the images: give --vision-dp too"
        if self.group == "auto" and (self.exchange is not None or self.reduction is not None):
            yield "a vision exchange or reduction was asked for, which depends on the group: name it instead of auto"
        if self.group in GROUPS and self.exchange in (None, *get_args(VisionExchange)):
            yield from _group_problems(self.group, self.exchange or exchanges_of(self.group)[0], self.reduction)


def exchanges_of(group: VisionGroup) -> tuple[VisionExchange, ...]:
    """What the group's ranks can do, the default first."""
    return _EXCHANGES[group]


def _group_problems(group: VisionGroup, exchange: VisionExchange, reduction: VisionReduction | None) -> Iterator[str]:
    if exchange not in _EXCHANGES[group]:
        held = "images of their own" if group == "dp" else "the same images"
        held = "the same images and embed all of their tokens" if group == "tp" and exchange == "routed" else held
        yield (
            f"vision exchange {exchange} was asked for over {group}, whose ranks hold {held}: "
            f"choose {' or '.join(_EXCHANGES[group])}"
        )
    if group == "dp" and reduction is not None:
        yield f"vision reduction {reduction} was asked for over dp, where a dispatch changes no sum: leave it out"
    if group == "tp" and reduction == "sum":
        yield (
            "vision reduction sum was asked for over tp, where each rank has the whole loss, so that a sum is as many "
            "times too large: choose mean"
        )


def group_degree(group: VisionGroup, parallel: "ParallelDecision") -> int:
    """Ranks of the group; those of sp are the plan's cp ranks."""
    return {"tp": parallel.tp, "cp": parallel.cp, "sp": parallel.cp, "dp": parallel.dp}[group]


def decision_problems(
    decision: "VisionDecision", parallel: "ParallelDecision", schedule: "ScheduleDecision", model: "ModelSpec"
) -> Iterator[str]:
    """Why a plan of this model, these degrees and this schedule cannot share images so, a sentence each."""
    group, degree = decision.group, group_degree(decision.group, parallel)
    axis = "cp" if group == "sp" else group
    if degree == 1:
        others = [other for other in GROUPS if other != "sp" and group_degree(other, parallel) > 1]
        cure = f"choose {' or '.join(others)}, or leave it out" if others else "leave it out"
        yield (
            f"vision data parallel over {group} was asked for, and the plan has {axis} 1, a group of one that shares "
            f"with nobody: {cure}"
        )
    elif decision.degree != degree:
        yield (
            f"vision data parallel over {group} has degree {decision.degree}, and the plan has {axis} {degree}: "
            "make them equal"
        )
    if group != "dp" and decision.reduction is None:
        yield f"vision data parallel over {group} has no reduction: say whether gradients are summed or averaged"
    yield from _group_problems(group, decision.exchange, decision.reduction)
    if decision.pooling > 1:
        if parallel.pp > 1 or schedule.name == "GPipe":
            why = f"a pipeline of {parallel.pp} stages" if parallel.pp > 1 else "GPipe, which holds all micro-batches,"
            yield (
                f"vision pooling {decision.pooling} was asked for on {why} where the plan does not price it: "
                "leave it out" + ("" if parallel.pp > 1 else ", or give --schedule 1F1B")
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
