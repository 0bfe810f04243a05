"""A plan's decisions as assignments to a Megatron-Bridge configuration.

Megatron-Bridge's model providers are Megatron-Core's `TransformerConfig` with more fields, so what a layout cannot say
it cannot say either. Written for 0.4 to 0.6; `bench/hosts.py` reads fields, families and what a tower copies from the
sources of the newest release.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trimtab.adapters.lora import canonical_layers
from trimtab.adapters.megatron import ENERGON, can_run, megatron_flags, megatron_ladders
from trimtab.adapters.running import Decided, Exported, Target, blocks_of, full_blocks, recomputed_blocks, refuse
from trimtab.errors import UnsupportedPlanError
from trimtab.lora import Lora
from trimtab.options import Tower
from trimtab.plan.decide.expressible import Expressible
from trimtab.specs import LayerSpec, ModelSpec, Stage, recomputing

_TRAIN = {"micro_batch_size": "cfg.train", "global_batch_size": "cfg.train", "use_distributed_optimizer": "cfg.ddp"}
PROVIDERS: Mapping[str, str] = {  # model_type, and the class of Transformers that it registers
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
}
COPIES_RECOMPUTE = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "exaone4_5", "ernie4_5_vl_moe")
"""Where the provider makes the tower's configuration with the language model's recompute settings, since 0.4."""
_OWN_WORDS = ("bf16", "fp16", "fp8_format", "fp8_recipe", "grad_reduce_in_bf16", "optimizer")
_PRECISION: Mapping[str, str | None] = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp32": None,
    "fp8": "bf16_with_fp8_delayed_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
_FREEZES: Mapping[str, Tower] = {
    "language_model": "language",
    "vision_model": "vision",
    "vision_projection": "projector",
}
_LAYOUT = "cfg.model.pipeline_model_parallel_layout"


def export(plan: Decided, price: float | None) -> Exported:
    """Assignments to a recipe's `cfg`, to run between the recipe that makes it and the training that takes it.

    `cfg.model` is the provider of the whole model. Its vision tower needs no clearing: it is Hugging Face's class, or
    its configuration is made afresh; Qwen3-VL's takes the language model's recompute settings.
    """
    _refuse_family(plan.model)
    flags = megatron_flags(plan, price)
    settings = {name: setting for name, setting in flags.settings.items() if name not in _OWN_WORDS}
    fields = {f"{_TRAIN.get(name, 'cfg.model')}.{name}": setting for name, setting in settings.items()}
    fields |= _launch(plan)
    values: dict[str, object] = {
        name: list(setting) if isinstance(setting, tuple) else setting for name, setting in fields.items()
    }
    if _LAYOUT in fields:
        values |= dict.fromkeys(
            ("cfg.model.num_layers_in_first_pipeline_stage", "cfg.model.num_layers_in_last_pipeline_stage")
        )
        values |= dict.fromkeys(
            (
                "cfg.model.account_for_embedding_in_pipeline_split",
                "cfg.model.account_for_loss_in_pipeline_split",
            ),
            False,
        )
    lines = {name: repr(value) for name, value in values.items()}
    if plan.dims.pp > 1:  # recipes for one stage leave it None
        lines["cfg.model.pipeline_dtype"] = "cfg.model.params_dtype"
    if plan.lora is not None:
        lines["cfg.peft"] = _lora(plan.model, plan.lora)
    runs = _with_towers_share(plan.model, flags.runs)
    return Exported(
        text="\n".join(f"{name} = {value}" for name, value in lines.items()),
        fields=fields,
        runs=runs,
        warnings=(*flags.warnings, *_about_tower(plan, runs[0])),
    )


def _launch(plan: Decided) -> dict[str, Any]:
    """Return what Bridge says in words of its own."""
    launch = plan.launch
    overlaps = (("tp_overlap", launch.tp_overlap), ("ep_overlap", launch.ep_overlap))
    refuse(
        [
            f"{name} was planned, and a recipe has it in cfg.comm_overlap: plan with --set {name}=false"
            for name, on in overlaps
            if on
        ]
    )
    found: dict[str, Any] = {
        "cfg.mixed_precision": _PRECISION[launch.dtype],
        "cfg.ddp.grad_reduce_in_fp32": launch.grad_dtype == "fp32",
        "cfg.optimizer.optimizer": {"adamw": "adam", "sgd_momentum": "sgd"}[launch.optimizer],
    }
    return found | {f"cfg.model.freeze_{name}": tower in plan.frozen_towers for name, tower in _FREEZES.items()}


def _lora(model: ModelSpec, lora: Lora) -> str:
    """Its own class of adapters, only on the language model; they are made in the model's format."""
    if lora.weights not in (None, "same") or lora.towers != ("language",):
        raise UnsupportedPlanError(
            f"LoRA ({lora}) was planned, and Megatron-Bridge's adapters have the model's own number format, in its "
            "language model: plan with weights=same,towers=language"
        )
    names = [f"*language_model*.{name}" for name in canonical_layers(model, lora, "Megatron-Bridge")]
    return (
        f"CanonicalLoRA(dim={lora.r}, alpha={round(lora.alpha)}, dropout={lora.dropout}, target_modules={names!r})"
        "  # from megatron.bridge.peft.canonical_lora"
    )


def _about_tower(plan: Decided, first: Stage) -> Iterator[str]:
    """How the tower's recompute differs from the plan's."""
    planned = len(recomputed_blocks(plan.model, plan.stages[0], "vision"))
    runs = len(recomputed_blocks(plan.model, first, "vision"))
    if planned != runs:
        why = "copies the language model's recompute to the tower" if runs else "has no field for only the tower"
        yield (
            f"recompute of {planned} vision layers is planned, and a provider of {plan.model.family} {why}: {runs} are "
            "recomputed"
        )


def _with_towers_share(model: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """These stages, the vision tower recomputing as the provider makes it: as many first blocks as every stage of the
    language model, where it copies these settings; nothing elsewhere."""
    most = max(len(recomputed_blocks(model, stage)) for stage in stages)
    copied = any("full" in recomputed_blocks(model, stage).values() for stage in stages)
    result = []
    for stage in stages:
        chosen = recomputed_blocks(model, stage)
        if copied and model.family in COPIES_RECOMPUTE:
            chosen |= dict.fromkeys(blocks_of(model, stage, "vision")[:most], "full")
        result.append(recomputing(stage, chosen))
    return tuple(result)


def _can_run(model: ModelSpec, _pp: int) -> Expressible:
    """As Megatron-Core, the vision tower recomputing with the language model or not at all."""

    def ladders(stages: Sequence[Stage]) -> Iterator[list[tuple[Stage, ...]]]:
        without_tower = next(iter(megatron_ladders(model, stages)))
        yield [_with_towers_share(model, rung) for rung in without_tower]

    def tiers(layer: LayerSpec) -> Collection[str]:
        return full_blocks(layer) if layer.tower == "language" or model.family in COPIES_RECOMPUTE else ()

    _refuse_family(model)
    return replace(can_run(model, _pp), ladders=ladders, tiers=tiers)


def _refuse_family(model: ModelSpec) -> None:
    if model.family not in PROVIDERS:
        raise UnsupportedPlanError(
            f"{model.name} is of the family {model.family}, and Megatron-Bridge 0.6 has vision-language providers for "
            f"{', '.join(PROVIDERS)}: export to megatron or ms-swift, or train by `trimtab train`"
        )


TARGETS = {
    "megatron-bridge": Target(
        title="Megatron-Bridge",
        checked_with="megatron-bridge 0.3.1 and 0.6.2, its sources; megatron-core 0.16.1 and 0.19.2",
        packs=ENERGON,
        can=_can_run,
        export=export,
        lora=(16,),
    )
}
