"""Whether images are shared, over which group and how many micro-batches at a time: the shortest simulated epoch."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import PartitionError, PlanError, join_problems
from trimtab.options import VisionGroup
from trimtab.plan.case import Case
from trimtab.plan.decide.stages import SplitChoice, choose_split, epoch_s
from trimtab.plan.decide.work import PATCHES
from trimtab.plan.plan import ScheduleDecision, VisionDecision
from trimtab.plan.sharing.decision import share_vision
from trimtab.plan.sharing.rules import decision_problems, exchange_of, group_degree
from trimtab.units import format_seconds

_GOOD_ENOUGH = 1.005  # of the shortest epoch: then the smaller pool, and no sharing at all before some
_DISPATCH_GAINS = 1.02  # asked of a dispatch: its ranks wait for each other at every call, which no simulated step does
_MAX_POOLED = 8  # where the pool is left open: what larger ones gain is little, what they hold is not


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSplit:
    """A case whose images are shared or not, and its split."""

    case: Case
    found: SplitChoice
    epoch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionChosen:
    """What was chosen, and what else was tried."""

    best: SharedSplit
    tried: tuple[SharedSplit, ...]  # the one without sharing first
    ruled_out: tuple[str, ...] = ()  # why others were not tried, or do not fit

    def sentences(self) -> tuple[str, ...]:
        """For the plan's reader; nothing where nothing was asked for."""
        about = []
        if len(self.tried) > 1:
            said = [f"{_label(x.case)} {format_seconds(x.epoch_s)}" for x in self.tried]
            about.append(f"Sharing the images was simulated over the whole data set: {', '.join(said)}.")
        if self.ruled_out:
            about.append(f"Sharing the images was not possible everywhere: {'; '.join(self.ruled_out)}.")
        vision = self.best.case.vision
        if vision is not None and vision.estimate.sizes_known < 1:
            about.append(
                f"The sizes of single images are known for {vision.estimate.sizes_known:.1%} of the patches; in "
                "samples of three or more unlike images they are spread as log-normal sizes of such sums are: "
                "`trimtab size` records them."
            )
        if vision is not None and vision.decision.group == "tp":
            about.append(
                f"Each of {vision.decision.degree} tensor-parallel ranks holds vision tower and projector whole."
            )
        return tuple(about)


def choose_vision(case: Case, found: SplitChoice) -> VisionChosen:
    """`case` with its images shared as `case.options.vision` asks; `found` is its split without that.

    Where the group is left open, sharing must shorten the epoch by 0.5 %, over dp by 2 %. Of pools of 1, 2, ... 8
    micro-batches that divide a step, the smallest within 0.5 % of the shortest epoch; recompute is decided again for
    each, so that a pool whose activations cost more recompute than it saves is not taken. Raises `PlanError` where the
    plan has no such group, `PartitionError` where nothing fits.
    """
    plain = SharedSplit(case=case, found=found, epoch_s=epoch_s(case, found.split.stages))
    choice = case.options.vision
    if choice.group == "none":
        return VisionChosen(best=plain, tried=(plain,))
    groups: tuple[VisionGroup, ...] = ("tp", "dp") if choice.group == "auto" else (choice.group,)
    problem = _lacking(case)
    if problem is not None and choice.group != "auto":
        raise PlanError(problem)
    tried, misfits, ruled_out = [plain], list[str](), [] if problem is None else [problem]
    for group in groups if problem is None else ():
        decisions, problems = _decisions(case, group)
        if problems and not decisions:
            if choice.group != "auto":
                raise PlanError(join_problems(problems))
            ruled_out += problems
        for decision in decisions:
            shared = share_vision(case, decision)
            try:
                split = choose_split(shared)
            except PartitionError as error:
                misfits.append(f"{_label(shared)}: {error}")
                ruled_out.append(f"{_label(shared)} does not fit the memory, or leaves too few cuts")
                continue
            tried.append(SharedSplit(case=shared, found=split, epoch_s=epoch_s(shared, split.split.stages)))
    if choice.group != "auto" and len(tried) == 1:
        raise PartitionError(join_problems(misfits))
    open_to = tried if choice.group == "auto" else tried[1:]
    if choice.group == "auto":
        open_to = [x for x in tried if not _is_dispatch(x.case) or x.epoch_s * _DISPATCH_GAINS <= plain.epoch_s]
    shortest = min(x.epoch_s for x in open_to)
    best = next(x for x in open_to if x.epoch_s <= _GOOD_ENOUGH * shortest)
    return VisionChosen(best=best, tried=tuple(tried), ruled_out=tuple(ruled_out))


def _lacking(case: Case) -> str | None:
    if not case.model.indices("vision") or not case.model.indices("projector"):
        return (
            f"vision data parallel was asked for, and {case.model.name} has no vision tower with a projector whose "
            "features could be exchanged: leave it out"
        )
    if not case.work[:, PATCHES].any():
        return "vision data parallel was asked for, and the data holds no image to share: leave it out"
    return None


def _decisions(case: Case, group: VisionGroup) -> tuple[list[VisionDecision], list[str]]:
    """What to try over this group, and why the first that cannot be cannot."""
    choice, dims = case.options.vision, case.setting.dims
    assert case.options.schedule != "auto", "it was chosen before"
    schedule = ScheduleDecision(
        name=case.options.schedule,
        num_microbatches=case.setting.num_microbatches,
        num_chunks=case.options.num_chunks,
    )
    degree = group_degree(group, dims)
    decisions, first_problems = list[VisionDecision](), list[str]()
    for pooling in [choice.pooling] if choice.pooling is not None else range(1, _MAX_POOLED + 1):
        decision = VisionDecision(
            group=group,
            degree=degree,
            exchange=exchange_of(group),
            pooling=pooling,
            rule=choice.rule,
            objective=choice.objective,
            reduction=None if group == "dp" else "mean",
        )
        problems = list(decision_problems(decision, dims, schedule, case.model))
        if problems:
            first_problems = first_problems or problems
        else:
            decisions.append(decision)
    return decisions, first_problems


def _is_dispatch(case: Case) -> bool:
    return case.vision is not None and case.vision.decision.exchange == "dispatch"


def _label(case: Case) -> str:
    if case.vision is None:
        return "not shared"
    decision = case.vision.decision
    pooled = f", {decision.pooling} micro-batches a call" if decision.pooling > 1 else ""
    return f"over {decision.group} {decision.degree}{pooled}"
