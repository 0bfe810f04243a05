"""A plan's decisions as a Python module for DeepSpeed's `PipelineModule`.

`partition_method` knows even layers, even parameters and a pattern of class names, and no list of cuts. So the module
holds a subclass whose `_partition_layers` sets the plan's bounds, which is private: it works with DeepSpeed 0.19.8, as
tests/integration/test_deepspeed.py shows on two processes. Nothing is imported here.
"""

import json
import pprint
from collections.abc import Sequence
from importlib.resources import files

from trimtab.adapters.running import (
    IMPLEMENTATIONS,
    Decided,
    Exported,
    Target,
    count_by_tier,
    lost_tiers,
    refuse,
    schedule_problems,
)
from trimtab.plan.decide.stages import Expressible
from trimtab.specs import Stage, recomputing, tiers_of


def deepspeed_runs(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with all of their recompute in full."""
    return tuple(recomputing(stage, dict.fromkeys(tiers_of(stage), "full")) for stage in stages)


def export(plan: Decided) -> Exported:
    """Return a Python module to save next to the training script."""
    model, stages, dims = plan.model, plan.stages, plan.dims
    zero_stage = plan.zero_stage
    problems = schedule_problems(plan, "PipelineModule", ["1F1B"])
    if zero_stage > 1:
        problems.append(f"DeepSpeed's pipeline engine has no ZeRO stage {zero_stage}: plan with ZeRO stage 1")
    refuse(
        [
            *problems,
            *plan.launch.problems(
                "DeepSpeed",
                dtype=("bf16", "fp16", "fp32"),
                attention=IMPLEMENTATIONS,
                optimizer=("adamw",),
                grad_dtype=("bf16", "fp16", "fp32"),
                fused_kernels=(True, False),
                sequence_parallel=(True, False),  # of tp, which it leaves to the layers
            ),
        ]
    )

    warnings = lost_tiers(count_by_tier(stages), "layers", "DeepSpeed checkpoints layers in full")
    if dims.tp > 1:
        warnings.append(
            f"for tp {dims.tp} pass topology=PipeModelDataParallelTopology(num_pp={dims.pp}, num_mp={dims.tp}, "
            f"num_dp={dims.dp})"
        )
    runs = deepspeed_runs(stages)
    recompute = sorted(i for stage in runs for i in tiers_of(stage))
    parts = [*(stage.start for stage in stages), len(model.layers)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": {"stage": zero_stage},
        "bf16": {"enabled": plan.launch.dtype == "bf16"},
        "fp16": {"enabled": plan.launch.dtype == "fp16"},
        "data_types": {"grad_accum_dtype": plan.launch.grad_dtype},
        "optimizer": {"type": "AdamW"},
    }
    names = ",\n".join(f"    {json.dumps(layer.name)}" for layer in model.layers)
    template = files("trimtab.adapters").joinpath("deepspeed_module.txt").read_text(encoding="utf-8")
    python = template.format(
        name=model.name,
        layers=f"[\n{names},\n]",
        parts=parts,
        recompute=f"frozenset({recompute})",
        tied=list(model.tied),
        tied_note="; the pairs of TIED as TiedLayerSpec" if model.tied else "",
        config=pprint.pformat(config, width=100, sort_dicts=False),
        attention=IMPLEMENTATIONS[plan.launch.attention],
        frozen=list(plan.frozen_towers),
        fused=plan.launch.fused_kernels,
    )
    fields = {"parts": parts, "config": config, "python": python}
    return Exported(text=python, fields=fields, runs=runs, warnings=tuple(warnings))


TARGETS = {
    "deepspeed": Target(
        title="DeepSpeed",
        host="deepspeed",
        checked_with="DeepSpeed 0.19.8, trained on two CPU processes",
        packs="`PlanDataLoader`, handed to `train_batch`",
        can=lambda _model, _pp: Expressible(
            tiers=lambda _layer: ("full",),
            ladders=lambda stages: [[deepspeed_runs(stages)]],
            choices={"host": ("deepspeed",), "tp": (1,), "schedule": ("1F1B",), "zero_stage": (1, 0)},
        ),
        export=export,
    )
}
