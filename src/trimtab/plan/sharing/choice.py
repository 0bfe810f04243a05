"""What a user may ask of vision data parallel, and what no plan can hold of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from trimtab.balance.images import RULES, Rule
from trimtab.errors import PlanError, join_problems
from trimtab.plan.decide.image_sizes import tile_rows
from trimtab.plan.plan import (
    ParallelDecision,
    ScheduleDecision,
    VisionDecision,
    VisionExchange,
    VisionGroup,
    VisionObjective,
    VisionReduction,
)
from trimtab.specs import ModelSpec

GroupChoice = VisionGroup | Literal["none", "auto"]
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

    group: GroupChoice = "none"  # auto: the group whose simulated epoch is shortest, or none
    exchange: VisionExchange | None = None
    pooling: int | None = None  # micro-batches of one call; None: those of the shortest epoch that fit the memory
    rule: Rule = "balanced"
    objective: VisionObjective = "time"
    reduction: VisionReduction | None = None  # None: mean, as FSDP and DDP do

    def problems(self) -> Iterator[str]:
        """What no plan could follow, a sentence each."""
        if self.group not in (*GROUPS, "none", "auto"):
            yield f"vision_dp {self.group!r} was asked for: choose one of none, auto, {', '.join(GROUPS)}"
            return
        for name, value, known in (
            ("exchange", self.exchange, (None, *get_args(VisionExchange))),
            ("rule", self.rule, RULES),
            ("objective", self.objective, get_args(VisionObjective)),
            ("reduction", self.reduction, (None, *get_args(VisionReduction))),
        ):
            if value not in known:
                words = ", ".join(str(word) for word in known if word is not None)
                yield f"vision {name} {value!r} was asked for: choose one of {words}"
                return
        if self.pooling is not None and self.pooling < 1:
            yield f"vision pooling {self.pooling} was asked for, and it counts micro-batches: give 1 or more"
        if self.group == "none" and self != VisionChoice():
            yield "vision data parallel was described without a group to share the images: give --vision-dp too"
        if self.group == "auto" and (self.exchange is not None or self.reduction is not None):
            yield "a vision exchange or reduction was asked for, which depends on the group: name it instead of auto"
        if self.group in GROUPS:
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


def group_degree(group: VisionGroup, parallel: ParallelDecision) -> int:
    """Ranks of the group; those of sp are the plan's cp ranks."""
    return {"tp": parallel.tp, "cp": parallel.cp, "sp": parallel.cp, "dp": parallel.dp}[group]


def decision_problems(
    decision: VisionDecision, parallel: ParallelDecision, schedule: ScheduleDecision, model: ModelSpec
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
        if group != "dp" and tile_rows(model) is not None:  # a host's own loop pools what all of its ranks hold
            yield (
                f"vision pooling {decision.pooling} was asked for over {group}, and pools are known there for families "
                f"with a grid of patches, while {model.name} cuts images into tiles: leave it out"
            )


def raise_problems(
    decision: VisionDecision, parallel: ParallelDecision, schedule: ScheduleDecision, model: ModelSpec
) -> None:
    """`PlanError` with all that keeps a plan of this model from sharing images so."""
    problems = list(decision_problems(decision, parallel, schedule, model))
    if problems:
        raise PlanError(join_problems(problems))
