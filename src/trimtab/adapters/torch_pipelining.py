"""A plan's decisions as data for torch.distributed.pipelining: modules, rank and recompute of each stage.

torch.distributed.pipelining takes stages that are modules already; it has no format of its own for who holds what, so
this one is ours, plain enough for JSON. Class names checked against torch 2.13 by tests/torch/test_torch_pipelining.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

from trimtab.errors import UnsupportedPlanError
from trimtab.options import ScheduleName
from trimtab.partition.schedules import device_of_stage
from trimtab.plan.decide.expressible import recompute_offloaded
from trimtab.specs import ModelSpec, ParallelDims, Stage

SCHEDULE_CLASSES: dict[str, str] = {
    "1F1B": "Schedule1F1B",
    "GPipe": "ScheduleGPipe",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "ZBH1": "ScheduleInterleavedZeroBubble",  # with one stage a rank
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage; module paths as Hugging Face spells them, in forward order."""

    stage: int
    rank: int  # in the pipeline's process group
    modules: tuple[str, ...]
    recompute: tuple[str, ...]  # modules to wrap in torch.utils.checkpoint
    recompute_selective: tuple[str, ...]  # the same with a policy that keeps the results of matrix products
    recompute_attention: tuple[str, ...]  # the same with a policy that keeps the results of fused attention alone


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeliningExport:
    """Everything that a training script needs to build stages and schedule."""

    schedule_class: str  # of torch.distributed.pipelining.schedules
    num_stages: int
    pp: int
    num_microbatches: int
    stages: tuple[StageSpec, ...]
    tied: tuple[tuple[str, str], ...]  # on different stages: sum their gradients after every step
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        content = asdict(self)
        del content["warnings"]
        return content

    def json(self) -> str:
        """One stage a line."""
        content = self.as_dict()
        stages = ",\n  ".join(json.dumps(asdict(stage)) for stage in self.stages)
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items() if name != "stages"]
        return "{\n " + ",\n ".join([*lines, f'"stages": [\n  {stages}\n ]']) + "\n}"


def pipelining_export(
    *,
    model: ModelSpec,
    stages: Sequence[Stage],
    dims: ParallelDims,
    schedule: str,
    num_microbatches: int,
    num_chunks: int = 1,
) -> PipeliningExport:
    """Every split can be said; `UnsupportedPlanError` for a schedule that torch does not have."""
    if schedule not in SCHEDULE_CLASSES:
        raise UnsupportedPlanError(
            f"schedule {schedule} was planned, and torch.distributed.pipelining has {', '.join(SCHEDULE_CLASSES)}: "
            "plan with one of them"
        )
    name = cast(ScheduleName, schedule)
    names = [layer.name for layer in model.layers]
    specs = []
    for stage in stages:
        tiers: dict[str, list[str]] = {"full": [], "selective": [], "attention": []}
        for choice in recompute_offloaded([stage])[0].recompute:
            tiers[choice.tier] += [names[i] for i in choice.layers]
        specs.append(
            StageSpec(
                stage=stage.index,
                rank=device_of_stage(name, stage.index, num_devices=dims.pp, num_chunks=num_chunks),
                modules=tuple(names[stage.start : stage.stop]),
                recompute=tuple(tiers["full"]),
                recompute_selective=tuple(tiers["selective"]),
                recompute_attention=tuple(tiers["attention"]),
            )
        )
    held = {module: spec.stage for spec in specs for module in spec.modules}
    tied = tuple((a, b) for a, b in model.tied if held.get(a) != held.get(b))
    warnings = [
        f"{b} shares the weight of {a} on another stage, and torch.distributed.pipelining does not sum their "
        "gradients: all-reduce both before every optimizer step"
        for a, b in tied
    ]
    if dims.pp > 1:
        warnings.append(
            "stock stages take one shape for all micro-batches: pad the packs, or use `trimtab train`, whose stages "
            "take each pack's own shape"
        )
    return PipeliningExport(
        schedule_class=SCHEDULE_CLASSES[schedule],
        num_stages=len(specs),
        pp=dims.pp,
        num_microbatches=num_microbatches,
        stages=tuple(specs),
        tied=tied,
        warnings=tuple(warnings),
    )
