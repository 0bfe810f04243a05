"""What of a plan the pipeline runs: stages, schedule and recompute, and whether torch's schedules can run it.

No torch here: `trimtab plan --for trimtab` asks this file before a plan is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from trimtab.errors import PartitionError, UnsupportedPlanError, join_problems
from trimtab.options import RecomputedTier, ScheduleName
from trimtab.partition.schedules import check_schedule, device_of_stage
from trimtab.plan.file.yaml import unfold_modules
from trimtab.plan.plan import Plan, VisionDecision

TorchSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"]
"""Schedules that torch.distributed.pipelining 2.13 has under the same name and runs in the same order."""
SPLIT_BACKWARD: frozenset[str] = frozenset({"ZBVZeroBubble"})
"""Schedules that compute the gradients of a stage's inputs and of its weights apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Layers of one stage whose activations are computed again in the backward."""

    modules: tuple[str, ...]
    granularity: RecomputedTier = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """The stages of a pipeline as module paths in forward order, and the schedule; checks itself.

    Use it to run stages of your own with `build_pipeline`, without a plan.

    >>> layout = PipelineLayout(stages=(("embed", "block"), ("head",)), schedule="1F1B", num_microbatches=4)
    >>> layout.num_devices, layout.modules
    (2, ('embed', 'block', 'head'))
    """

    stages: tuple[tuple[str, ...], ...]
    schedule: TorchSchedule
    num_microbatches: int  # of a data-parallel rank, in a step
    num_chunks: int = 1  # stages of a device
    recompute: tuple[Recompute, ...] = ()
    images: VisionDecision | None = None  # how data-parallel ranks share images; None: each encodes its own

    def __post_init__(self) -> None:
        problems = _problems_of(self)
        if problems:
            raise UnsupportedPlanError(join_problems(problems))

    @property
    def num_devices(self) -> int:
        return len(self.stages) // self.num_chunks

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module of the model, in forward order."""
        return tuple(name for stage in self.stages for name in stage)

    def device_of(self, stage: int) -> int:
        return device_of_stage(self.schedule, stage, num_devices=self.num_devices, num_chunks=self.num_chunks)

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Stages that a device holds, first to last."""
        return tuple(stage for stage in range(len(self.stages)) if self.device_of(stage) == device)


def read_layout(plan: Plan) -> PipelineLayout:
    """The part of the plan's decisions that a pipeline runs; its data-parallel ranks and packing are the loop's."""
    decisions = plan.decisions
    for axis in ("tp", "cp", "ep"):
        degree = getattr(decisions.parallel, axis)
        if degree > 1:
            raise UnsupportedPlanError(
                f"a plan with {axis} {degree} was given, but this runtime divides a model among dp x pp devices only: "
                f"plan with {axis} 1, or export the plan to a framework that has it"
            )
    images = decisions.vision_data_parallel
    if images is not None and (images.group, images.exchange) != ("dp", "dispatch"):
        raise UnsupportedPlanError(
            f"a plan in which {images.group} ranks share images by {images.exchange} was given, but this runtime "
            "shares them among data-parallel ranks only: train with --vision-dp dispatch or off, or plan for that group"
        )
    return PipelineLayout(
        images=images,
        stages=tuple(unfold_modules(stage.modules) for stage in decisions.stages),
        schedule=decisions.schedule.name,  # type: ignore[arg-type]  # checked in PipelineLayout
        num_microbatches=decisions.schedule.num_microbatches,
        num_chunks=decisions.schedule.num_chunks,
        recompute=tuple(
            Recompute(modules=unfold_modules(choice.modules), granularity=choice.granularity)
            for choice in decisions.recompute
        ),
    )


def _problems_of(layout: PipelineLayout) -> list[str]:
    S, V, M = len(layout.stages), layout.num_chunks, layout.num_microbatches
    if layout.schedule not in get_args(TorchSchedule):
        known = layout.schedule in get_args(ScheduleName)
        why = "torch.distributed.pipelining has no schedule of that order" if known else "it is unknown"
        return [f"schedule {layout.schedule!r} was asked for, but {why}: choose {', '.join(get_args(TorchSchedule))}"]
    if V < 1 or S % V or not S:
        return [f"{S} stages with {V} chunks a device were asked for, which is no whole number of devices: correct one"]
    try:
        check_schedule(layout.schedule, num_devices=S // V, num_chunks=V, num_microbatches=M)
    except PartitionError as problem:
        return [str(problem)]
    problems = [
        f"stage {i} of {S} holds no module, but every stage has to run something: plan with fewer stages"
        for i, stage in enumerate(layout.stages)
        if not stage
    ]
    if layout.schedule == "1F1B" and M < S:
        problems.append(
            f"1F1B with {M} micro-batches on {S} stages was asked for, but torch's Schedule1F1B needs at least as many "
            f"micro-batches as stages: take {S} micro-batches, or schedule GPipe"
        )
    in_part = sorted({choice.granularity for choice in layout.recompute} & {"selective", "attention"})
    if in_part and layout.schedule in SPLIT_BACKWARD:
        problems.append(
            f"{' and '.join(in_part)} recompute was asked for under {layout.schedule}, which runs through a layer's "
            "graph twice, for its inputs and for its weights, while torch's selective checkpointing allows one pass: "
            "plan with --recompute full or none"
        )
    return problems
