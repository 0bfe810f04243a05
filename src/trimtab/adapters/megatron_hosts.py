"""A plan for Megatron-Bridge (assignments to a configuration) and ms-swift (arguments of `megatron sft`).

Megatron-Bridge's model providers are Megatron-Core's `TransformerConfig` with more fields, so what a layout cannot say
it cannot say either. Written for 0.4 to 0.6; `bench/hosts.py` reads fields, families and what a tower copies from the
sources of the newest release.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trimtab.adapters.huggingface import canonical_layers, joined_layers
from trimtab.adapters.megatron import ENERGON, can_run, megatron_flags, megatron_ladders
from trimtab.adapters.running import Decided, Exported, Target, blocks_of, full_blocks, recomputed_blocks, refuse
from trimtab.costs.profile import has_experts
from trimtab.errors import UnsupportedPlanError
from trimtab.lora import ALL_LINEAR, Lora
from trimtab.options import RecomputedTier, Tower
from trimtab.plan.decide.stages import Expressible
from trimtab.specs import LayerSpec, ModelSpec, Stage, recomputing, tiers_of

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
_RECIPE_GRADS: Mapping[str, bool] = {"bf16": True, "fp16": False, "fp8": True, "mxfp8": True}
"""Whether a precision's recipe reduces gradients in fp32; Bridge writes it over `cfg.ddp` when training starts."""
_FREEZES: Mapping[str, Tower] = {
    "language_model": "language",
    "vision_model": "vision",
    "vision_projection": "projector",
}
_LAYOUT = "cfg.model.pipeline_model_parallel_layout"
_GRADS = "cfg.mixed_precision.grad_reduce_in_fp32"


def export_bridge(plan: Decided) -> Exported:
    """Return assignments to a recipe's `cfg`, to run between the recipe that makes it and the training that takes it.

    `cfg.model` is the provider of the whole model. Its vision tower needs no clearing: it is Hugging Face's class, or
    its configuration is made afresh; Qwen3-VL's takes the language model's recompute settings.
    """
    _refuse_family(plan.model)
    flags = megatron_flags(plan)
    settings = {name: setting for name, setting in flags.settings.items() if name not in _OWN_WORDS}
    fields = {f"{_TRAIN.get(name, 'cfg.model')}.{name}": setting for name, setting in settings.items()}
    fields |= _launch(plan)
    own = plan.vision is not None and plan.vision.group == "own"
    if plan.vision is not None and own:  # counted in samples, and a micro-batch is that of all ranks
        counted = {"micro_batch_size": plan.dims.dp, "global_batch_size": plan.samples_per_step}
        fields |= {f"cfg.train.{name}": count for name, count in counted.items()}
    if plan.vision is not None and plan.vision.group == "cp" and plan.model.family in _OVER_CP:
        fields["cfg.model.vision_dp_when_cp"] = True
    values: dict[str, object] = {
        name: list(setting) if isinstance(setting, tuple) else setting for name, setting in fields.items()
    }
    if _LAYOUT in fields:
        values |= {f"cfg.model.num_layers_in_{end}_pipeline_stage": None for end in ("first", "last")}
        values |= {f"cfg.model.account_for_{end}_in_pipeline_split": False for end in ("embedding", "loss")}
    lines = {name: repr(value) for name, value in values.items()}
    if plan.dims.pp > 1:  # packs differ in length; recipes for one stage leave the number format None
        lines["cfg.model.variable_seq_lengths"] = "True"
        lines["cfg.model.pipeline_dtype"] = "cfg.model.params_dtype"
    if _GRADS in fields:  # a field of the recipe's object, which a name alone does not have yet
        kind = lines["cfg.mixed_precision"]
        lines["cfg.mixed_precision"] = (
            f"get_mixed_precision_config({kind})  # from megatron.bridge.training.mixed_precision"
        )
    if plan.lora is not None:
        lines["cfg.peft"] = _lora(plan.model, plan.lora)
    runs = _with_towers_share(plan.model, flags.runs)
    warnings = [*flags.warnings, *_about_tower(plan, runs[0])]
    if plan.vision is not None and "cfg.model.vision_dp_when_cp" in fields and plan.vision.rule != "contiguous":
        warnings.append("Megatron-Bridge shares runs of images in order: plan with --set vision_rule=contiguous")
    if plan.vision is not None and own:
        modules = _mimo(plan, plan.vision.degree)
        fields |= {f"{module}.{name}": value for module, given in modules.items() for name, value in given.items()}
        lines["cfg.model"] = _mimo_provider(plan, modules)
        warnings.append("MegatronMIMO takes samples, not packs, and cuts a micro-batch by rows of its images' grids")
    return Exported(
        text="\n".join(f"{name} = {value}" for name, value in lines.items()),
        fields=fields,
        runs=runs,
        warnings=tuple(warnings),
    )


_OVER_CP = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")  # whose providers have vision_dp_when_cp
_MIMO = ("qwen3_5", "qwen3_5_moe")  # of PROVIDERS, those that build their towers and decoder apart


def _mimo(plan: Decided, num_devices: int) -> dict[str, dict[str, int]]:
    """Return both grids in MegatronMIMO's words; decoder first, no gaps. Its `micro_batch_size` is that of all ranks.

    Source: megatron/bridge/models/megatron_mimo/megatron_mimo_config.py, 0.6.2.
    """
    dims = plan.dims
    problems = []
    if plan.model.family not in _MIMO:
        problems.append(f"MegatronMIMO of Megatron-Bridge 0.6 knows {', '.join(_MIMO)}, not {plan.model.family}")
    if dims.dp % num_devices:
        problems.append(
            f"MegatronMIMO shares the {dims.dp} sequences of a micro-batch among ranks of the tower, not {num_devices}:"
            f" plan with --set tower_devices={dims.dp}"
        )
    if dims.tp & (dims.tp - 1):
        problems.append(f"MegatronMIMO takes a power of 2 as tp, not {dims.tp}: plan with one")
    if plan.launch.dtype != "bf16":
        problems.append(f"MegatronMIMO trains in bf16, not {plan.launch.dtype}: plan with --set dtype=bf16")
    if plan.lora is not None:
        problems.append("MegatronMIMO trains weights, not adapters: plan without --lora")
    refuse(problems)
    decoder = {
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "context_parallel_size": dims.cp,
        "expert_model_parallel_size": dims.ep,
        "expert_tensor_parallel_size": dims.expert_tp if dims.ep > 1 else 1,
        "data_parallel_size": dims.dp,
        "rank_offset": 0,
    }
    images = {"data_parallel_size": num_devices, "rank_offset": dims.dp * dims.pp * dims.tp * dims.cp}
    return {"language": decoder, "images": images}


def _mimo_provider(plan: Decided, modules: Mapping[str, Mapping[str, int]]) -> str:
    """The line that wraps the recipe's provider, whose settings are the decoder's."""
    grids = [
        f'    "{module}": ModuleParallelismConfig({", ".join(f"{name}={value}" for name, value in given.items())}),'
        for module, given in modules.items()
    ]
    frozen = [f"cfg.model.freeze_language_model = {'language' in plan.frozen_towers}"]
    for name, tower in (("encoders", "vision"), ("projections", "projector")):
        frozen.append(f'cfg.model.freeze_modality_{name} = {{"images": {tower in plan.frozen_towers}}}')
    return "\n".join(
        [
            "MegatronMIMOProvider.from_standard_provider(  # from megatron.bridge.models.megatron_mimo",
            "  cfg.model, MegatronMIMOParallelismConfig(module_parallelisms={",
            *grids,
            "  }),",
            ")",
            *frozen,
            f"# {modules['images']['rank_offset'] + modules['images']['data_parallel_size']} processes; start it with "
            "pretrain_megatron_mimo(cfg, ...)",
        ]
    )


def _launch(plan: Decided) -> dict[str, Any]:
    """Return what Bridge says in words of its own."""
    launch = plan.launch
    overlaps = (("tp_overlap", launch.tp_overlap), ("ep_overlap", launch.ep_overlap))
    refuse([f"recipes set {name} in cfg.comm_overlap: plan with --set {name}=false" for name, on in overlaps if on])
    fp32_grads = launch.grad_dtype == "fp32"
    found: dict[str, Any] = {"cfg.mixed_precision": _PRECISION[launch.dtype]}
    if _RECIPE_GRADS.get(launch.dtype, fp32_grads) != fp32_grads:
        found[_GRADS] = fp32_grads
    found |= {
        "cfg.ddp.grad_reduce_in_fp32": fp32_grads,
        "cfg.ddp.average_in_collective": False,  # as calculate_per_token_loss asks
        "cfg.optimizer.optimizer": {"adamw": "adam", "sgd_momentum": "sgd"}[launch.optimizer],
    }
    return found | {f"cfg.model.freeze_{name}": tower in plan.frozen_towers for name, tower in _FREEZES.items()}


def _lora(model: ModelSpec, lora: Lora) -> str:
    """Return its own class of adapters, only on the language model; they are made in the model's format."""
    if lora.weights not in (None, "same") or lora.towers != ("language",):
        raise UnsupportedPlanError(f"Megatron-Bridge's adapters: plan with weights=same,towers=language, not {lora}")
    names = [f"*language_model*.{name}" for name in canonical_layers(model, lora, "Megatron-Bridge")]
    return (
        f"CanonicalLoRA(dim={lora.r}, alpha={round(lora.alpha)}, dropout={lora.dropout}, target_modules={names!r})"
        "  # from megatron.bridge.peft.canonical_lora"
    )


def _about_tower(plan: Decided, first: Stage) -> Iterator[str]:
    """Yield how the tower's recompute differs from the plan's."""
    planned = len(recomputed_blocks(plan.model, plan.stages[0], "vision"))
    runs = len(recomputed_blocks(plan.model, first, "vision"))
    if planned != runs:
        why = "copies the language model's recompute to the tower" if runs else "has no field for only the tower"
        yield f"{runs} vision layers recompute, {planned} are planned: a provider of {plan.model.family} {why}"


def _with_towers_share(model: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return these stages, the tower recomputing as the provider makes it: as many first blocks as every stage of the
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
    """Return what Megatron-Core can run; the vision tower recomputes with the language model or not at all."""

    def ladders(stages: Sequence[Stage]) -> Iterator[list[tuple[Stage, ...]]]:
        without_tower = next(iter(megatron_ladders(model, stages)))
        yield [_with_towers_share(model, stages) for stages in without_tower]

    def tiers(layer: LayerSpec) -> Collection[str]:
        return full_blocks(layer) if layer.tower == "language" or model.family in COPIES_RECOMPUTE else ()

    _refuse_family(model)
    return replace(can_run(model, _pp), ladders=ladders, tiers=tiers)


def _refuse_family(model: ModelSpec) -> None:
    if model.family not in PROVIDERS:
        raise UnsupportedPlanError(f"Megatron-Bridge 0.6 has no {model.family}: export to megatron or ms-swift")


# -- ms-swift ---------------------------------------------------------------------------------------------------------
# ms-swift hands Megatron-Core's settings on under its own names, and builds the vision tower from Hugging Face's class,
# whole on the first stage: nothing truncates it. Names and choices checked against ms-swift 4.6.0 by
# tests/integration/test_megatron_launchers.py.


_FULL: RecomputedTier = "full"
# it says them otherwise, or has one value
_NOT_TAKEN = ("bf16", "fp16", "grad_reduce_in_bf16", "transformer_impl", "seq_length", "calculate_per_token_loss")
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
_SWIFT_FREEZES: Mapping[str, Tower] = {"llm": "language", "vit": "vision", "aligner": "projector"}


def export_swift(plan: Decided) -> Exported:
    """Return the arguments of `megatron sft`, with those whose defaults would add something to the plan.

    ms-swift recomputes core attention, the vision tower, shards the optimizer, freezes tower and projector and shuffles
    unless its settings say otherwise. With packing, its batch sizes count packs; `export swift-packs` writes these and
    the plug-in that keeps them. The model is the user's own.
    """
    flags = megatron_flags(plan)
    refuse(plan.launch.problems("ms-swift", **_KNOWN))
    given: dict[str, object] = {name: x for name, x in flags.settings.items() if name not in _NOT_TAKEN}
    given["torch_dtype"] = _DTYPES[plan.launch.dtype]
    given["accumulate_allreduce_grads_in_fp32"] = plan.launch.grad_dtype == "fp32"
    given.setdefault("use_distributed_optimizer", False)
    given.setdefault("recompute_granularity", "none")
    given |= {f"freeze_{name}": tower in plan.frozen_towers for name, tower in _SWIFT_FREEZES.items()}
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
        warnings.append(f"ms-swift recomputes all {len(tower)} vision layers, {number} are planned")
    return Exported(
        text=" \\\n    ".join(lines),
        fields=given,
        runs=_whole_tower(plan.model, flags.runs) if number else flags.runs,
        warnings=tuple(warnings),
    )


def _lora_fields(model: ModelSpec, lora: Lora) -> dict[str, object]:
    """Return LoRA's fields: freezing says which towers get adapters; all-linear would take experts too."""
    layers = joined_layers(model, lora, "ms-swift")
    return {
        "tuner_type": "lora",
        "lora_rank": lora.r,
        "lora_alpha": round(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": layers if has_experts(model) or ALL_LINEAR not in lora.targets else (ALL_LINEAR,),
        **({"lora_dtype": "float32"} if lora.weights == "fp32" else {}),
        **{f"freeze_{name}": tower not in lora.towers for name, tower in _SWIFT_FREEZES.items()},
    }


def _whole_tower(model: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return these stages with full recompute of all vision blocks."""
    tower = dict.fromkeys(model.indices("vision", "block"), _FULL)
    return tuple(recomputing(stage, tiers_of(stage) | tower) for stage in stages)


TARGETS = {
    "megatron-bridge": Target(
        title="Megatron-Bridge",
        checked_with="megatron-bridge 0.3.1 and 0.6.2, its sources; megatron-core 0.16.1 and 0.19.2",
        packs=ENERGON,
        can=_can_run,
        export=export_bridge,
        lora=(16,),
        has_own=True,
        shares_over_cp=_OVER_CP,
    ),
    "ms-swift": Target(
        title="ms-swift",
        checked_with="ms-swift 4.6.0, its fields in its own parser",
        packs="`trimtab export swift-packs`: records in order, and a plug-in for --external_plugins",
        can=can_run,
        export=export_swift,
        lora=(16,),
        packs_by_tokens=True,
    ),
}
