"""A plan's decisions as arguments of ms-swift's `megatron sft`.

ms-swift hands Megatron-Core's settings on under its own names, and builds the vision tower from Hugging Face's class,
whole on the first stage: nothing truncates it. Names and choices checked against ms-swift 4.6.0 by
tests/integration/test_megatron_launchers.py.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from trimtab.adapters.megatron import MegatronExport, can_run, megatron_flags
from trimtab.adapters.megatron_recompute import Setting
from trimtab.adapters.running import Decided, Exported, Target
from trimtab.specs import ModelSpec, RecomputeChoice, Stage


def swift_arguments(export: MegatronExport) -> tuple[tuple[str, Setting], ...]:
    """Arguments and their values, with those whose defaults would add something to the plan.

    ms-swift recomputes core attention, the vision tower, and shards the optimizer unless told otherwise.
    """
    given = dict(export.settings)
    given.setdefault("use_distributed_optimizer", False)
    given.setdefault("recompute_granularity", "none")
    vision = dict(export.vision_fields)
    if vision:
        given["vit_gradient_checkpointing"] = vision["recompute_granularity"] is not None
    return tuple(given.items())


def swift_runs(model: ModelSpec, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """These stages with recompute of all vision blocks where one of them recomputes."""
    tower = set(model.indices("vision", "block"))
    chosen = [
        {i for choice in stage.recompute if choice.tier != "selective" for i in choice.layers} for stage in stages
    ]
    if not tower & set().union(*chosen):
        return stages
    result = []
    for stage, full in zip(stages, chosen, strict=True):
        layers = tuple(sorted(full | {i for i in tower if stage.start <= i < stage.stop}))
        others = tuple(choice for choice in stage.recompute if choice.tier == "selective")
        own = (RecomputeChoice(tier="full", layers=layers),) if layers else ()
        result.append(replace(stage, recompute=(*own, *others)))
    return tuple(result)


def swift_shell(export: MegatronExport) -> str:
    """The arguments as lines of a shell command, quoted; the model and the data are the user's own."""
    lines = ["megatron sft"]
    for name, setting in swift_arguments(export):
        words = (
            setting if isinstance(setting, tuple) else (str(setting).lower() if isinstance(setting, bool) else setting,)
        )
        lines.append(" ".join((f"--{name}", *(shlex.quote(str(word)) for word in words))))
    return " \\\n    ".join(lines)


def swift_warnings(export: MegatronExport, num_vision_layers: int) -> tuple[str, ...]:
    """Those of the export that hold here, and what this launcher adds."""
    warnings = [w for w in export.warnings if "launchers that deep-copy" not in w and "pad them to" not in w]
    vision = dict(export.vision_fields)
    number = vision.get("recompute_num_layers")
    if isinstance(number, int) and number < num_vision_layers:
        warnings.append(
            f"recompute of {number} of {num_vision_layers} vision layers is planned, and ms-swift recomputes the tower "
            "as a whole or not at all: all of it is, which holds less and takes longer"
        )
    return tuple(warnings)


def export(plan: Decided, price: float | None) -> Exported:
    """Arguments of `megatron sft`."""
    flags = megatron_flags(plan, price)
    return Exported(
        text=swift_shell(flags),
        fields=dict(swift_arguments(flags)),
        runs=swift_runs(plan.model, flags.runs),
        warnings=swift_warnings(flags, len(plan.model.indices("vision", "block"))),
    )


TARGET = Target(
    title="ms-swift", checked_with="ms-swift 4.6.0, its fields in its own parser", can=can_run, export=export
)
