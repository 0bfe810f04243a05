"""The part of a plan that our own runtime carries out, and what it cannot: read without torch or the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from trimtab.address import place_of
from trimtab.errors import ConfigError, PartitionError, SampleError, UnsupportedPlanError, join_problems
from trimtab.lora import Lora
from trimtab.models.families import family_of
from trimtab.options import RecomputedTier, ScheduleName
from trimtab.partition.schedules import check_schedule, device_of_stage
from trimtab.plan.decide.stages import Expressible
from trimtab.plan.file.records import refuse_tars
from trimtab.plan.plan import Plan, VisionDecision
from trimtab.samples.table import is_saved_table, sized_files
from trimtab.specs import ModelSpec, SampleTable
from trimtab.units import unfold_modules

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
    images: VisionDecision | None = None  # how ranks share images; None: each encodes its own

    def __post_init__(self) -> None:
        problems = _problems_of(self)
        if problems:
            raise UnsupportedPlanError(join_problems(problems))

    @property
    def num_devices(self) -> int:
        return len(self.stages) // self.num_chunks

    @property
    def has_tower_everywhere(self) -> bool:
        """Return whether every rank of a pipeline holds the tower, which encodes images before the stages run."""
        return self.images is not None and self.images.group == "replica"

    @property
    def modules(self) -> tuple[str, ...]:
        """Return every module of the model, in forward order."""
        return tuple(name for stage in self.stages for name in stage)

    def device_of(self, stage: int) -> int:
        return device_of_stage(self.schedule, stage, num_devices=self.num_devices, num_chunks=self.num_chunks)

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Return the stages that a device holds, first to last."""
        return tuple(stage for stage in range(len(self.stages)) if self.device_of(stage) == device)


def read_layout(plan: Plan) -> PipelineLayout:
    """The part of the plan's decisions that a pipeline runs; its data-parallel ranks and packing are the loop's."""
    decisions = plan.decisions
    for axis in ("tp", "cp", "ep"):
        degree = getattr(decisions.parallel, axis)
        if degree > 1:
            raise UnsupportedPlanError(f"this runtime has no {axis} {degree}: plan with {axis} 1, or export the plan")
    images = decisions.vision_data_parallel
    if images is not None and images.group == "own":  # one more stage, in front
        dp = decisions.parallel.dp
        if images.degree != dp:
            raise UnsupportedPlanError(
                f"this runtime gives each of dp {dp} one device for the tower, not {images.degree} for all: plan with "
                f"--set tower_devices={dp}"
            )
        images = None
    if images is not None and images.group not in ("dp", "replica"):
        raise UnsupportedPlanError(
            f"images are not shared over {images.group} here: plan with --set towers=replica, own, dp or one-grid"
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
            f"torch's 1F1B needs {S} micro-batches for {S} stages, not {M}: take as many, or schedule GPipe"
        )
    in_part = sorted({choice.granularity for choice in layout.recompute} & {"selective"})
    if in_part and layout.schedule in SPLIT_BACKWARD:
        problems.append(
            f"{layout.schedule} cannot recompute {' and '.join(in_part)}: plan with --recompute full or none"
        )
    return problems


# What `trimtab train` can run of a model and its data.


CHOICES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "tp": (1,),
        "schedule": get_args(TorchSchedule),
        "fills_pipeline": (True,),
        "zero_stage": (0,),  # every data-parallel rank holds the whole state of its stages
        "host": ("eager",),
        "fused_kernels": (False,),
        "dtype": ("bf16", "fp32"),
        "optimizer": ("adamw", "sgd_momentum", "sgd"),  # of torch.optim
    }
)


def can_train(model: ModelSpec) -> Expressible:
    """Return what the loop can run of a model; raises `ConfigError` for one that it cannot run at all."""
    refuse_remote_code(model)
    return Expressible(choices=CHOICES)


def refuse_data(samples: SampleTable, files: Sequence[Path]) -> None:
    """Raises `SampleError` for data that the loop cannot read one by one, or whose sizes it could not meet.

    `files`: as `find_sources` found them.
    """
    if not samples.tokens_exact:
        raise SampleError("the data was sized without a tokenizer, which no training matches: give --tokenizer")
    saved = [file for file in files if is_saved_table(file)]
    behind = [place_of(file.path) for table in saved for file in sized_files(table)]
    refuse_tars([file for file in (*files, *behind) if file not in saved and file.is_file()])


def refuse_quantised(lora: Lora | None) -> None:
    """Raises `UnsupportedPlanError` for adapters over weights that the loop, which loads float32, does not hold."""
    if lora is not None and lora.bits < 16:
        raise UnsupportedPlanError(f"`trimtab train` has no {lora.bits}-bit weights ({lora}): see `trimtab export trl`")


def refuse_remote_code(model: ModelSpec) -> None:
    if family_of(model.family).is_remote_code:
        raise ConfigError(f"Transformers makes no samples of {model.family}: take a checkpoint named -hf")
