"""A plan's decisions as arguments of ms-swift's `megatron sft`.

ms-swift hands Megatron-Core's settings on under its own names, and builds the vision tower from Hugging Face's class,
whole on the first stage: nothing truncates it. Names and choices checked against ms-swift 4.6.0 by
tests/integration/test_megatron_launchers.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence

from trimtab.adapters.lora import joined_layers
from trimtab.adapters.megatron import can_run, megatron_flags
from trimtab.adapters.running import Decided, Exported, Target, refuse
from trimtab.costs.profile import has_experts
from trimtab.lora import ALL_LINEAR, Lora
from trimtab.options import RecomputedTier, Tower
from trimtab.specs import ModelSpec, Stage, recomputing, tiers_of

_FULL: RecomputedTier = "full"
_NOT_TAKEN = ("bf16", "fp16", "grad_reduce_in_bf16", "transformer_impl")  # it says them otherwise, or has one value
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "bfloat16", "mxfp8": "bfloat16"}
_KNOWN: Mapping[str, Collection[object]] = {
    "dtype": _DTYPES,
    "attention": ("flash", "eager"),
    "optimizer": ("adamw", "sgd_momentum"),
    "grad_dtype": ("fp32", "bf16", "fp16"),
    "fused_kernels": (True,),
    "sequence_parallel": (True, False),
    "tp_overlap": (True, False),
}
_FREEZES: Mapping[str, Tower] = {"llm": "language", "vit": "vision", "aligner": "projector"}


def export(plan: Decided, price: float | None) -> Exported:
    """Arguments of `megatron sft`, with those whose defaults would add something to the plan.

    ms-swift recomputes core attention, the vision tower, shards the optimizer, freezes tower and projector and shuffles
    unless told otherwise. With packing, its batch sizes count packs; `export swift-packs` writes these packs and the
    plug-in that keeps them. The model is the user's own.
    """
    flags = megatron_flags(plan, price)
    refuse(plan.launch.problems("ms-swift", **_KNOWN))
    given: dict[str, object] = {name: x for name, x in flags.settings.items() if name not in _NOT_TAKEN}
    given["torch_dtype"] = _DTYPES[plan.launch.dtype]
    given["accumulate_allreduce_grads_in_fp32"] = plan.launch.grad_dtype == "fp32"
    given.setdefault("use_distributed_optimizer", False)
    given.setdefault("recompute_granularity", "none")
    given |= {f"freeze_{name}": tower in plan.frozen_towers for name, tower in _FREEZES.items()}
    if plan.lora is not None:
        given |= _lora_fields(plan.model, plan.lora)
    given |= {"packing": True, "packing_strategy": "sequential", "packing_num_proc": 1}
    given |= {"dataset_shuffle": False, "train_dataloader_shuffle": False}
    if plan.max_tokens is not None:
        given["packing_length"] = plan.max_tokens
    if flags.vision_fields:
        given["vit_gradient_checkpointing"] = flags.vision_fields["recompute_granularity"] is not None
    lines = ["megatron sft"]
    for name, setting in given.items():
        words = setting if isinstance(setting, tuple) else (setting,)
        values = [str(word).lower() if isinstance(word, bool) else str(word) for word in words]
        lines.append(f"--{name} {shlex.join(values)}")
    warnings = [*flags.warnings]
    number, tower = flags.vision_fields.get("recompute_num_layers"), plan.model.indices("vision", "block")
    if isinstance(number, int) and number < len(tower):
        warnings.append(
            f"recompute of {number} of {len(tower)} vision layers is planned, and ms-swift recomputes the tower as a "
            "whole or not at all: all of it is, which holds less and takes longer"
        )
    return Exported(
        text=" \\\n    ".join(lines),
        fields=given,
        runs=_whole_tower(plan.model, flags.runs) if number else flags.runs,
        warnings=tuple(warnings),
    )


def _lora_fields(model: ModelSpec, lora: Lora) -> dict[str, object]:
    """Freezing says which towers get adapters; all-linear takes experts too, so beside these layers are named."""
    layers = joined_layers(model, lora, "ms-swift")
    return {
        "tuner_type": "lora",
        "lora_rank": lora.r,
        "lora_alpha": round(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": layers if has_experts(model) or ALL_LINEAR not in lora.targets else (ALL_LINEAR,),
        **({"lora_dtype": "float32"} if lora.weights == "fp32" else {}),
        **{f"freeze_{name}": tower not in lora.towers for name, tower in _FREEZES.items()},
    }


def _whole_tower(model: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """These stages with full recompute of all vision blocks."""
    tower = dict.fromkeys(model.indices("vision", "block"), _FULL)
    return tuple(recomputing(stage, tiers_of(stage) | tower) for stage in stages)


TARGETS = {
    "ms-swift": Target(
        title="ms-swift",
        checked_with="ms-swift 4.6.0, its fields in its own parser",
        packs="`trimtab export swift-packs`: records in order, and a plug-in for --external_plugins",
        can=can_run,
        export=export,
        lora=(16,),
    )
}
