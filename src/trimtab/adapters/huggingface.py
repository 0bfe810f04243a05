"""A plan for trainers that run a whole model on every rank.

Transformers, TRL, Accelerate and FSDP2 get lines of Python; LLaMA-Factory and axolotl, which train with Transformers'
Trainer, settings of their YAML files (read at llamafactory 0.9.5 and axolotl 0.21.0). LoRA comes as lines for PEFT.

Packs come by the runtime's own data set and collator, state is sharded by the host, and recompute is set layer by
layer (`trimtab.torch.apply_recompute`). Transformers' own switch stays off: it knows every n-th layer, counted through
both towers alike.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import yaml

from trimtab.adapters.running import IMPLEMENTATIONS, TIERS, Decided, Exported, Target, refuse
from trimtab.costs.formula.adapters import adapt_layer
from trimtab.costs.formula.flops import layer_matmuls
from trimtab.errors import UnsupportedPlanError
from trimtab.lora import ALL_LINEAR, Lora
from trimtab.options import Optimizer, Tower
from trimtab.plan.decide.stages import Expressible
from trimtab.specs import ModelSpec, tiers_of
from trimtab.units import fold_modules

# -- LoRA: lines for PEFT, and the names of Megatron-Core's linear layers --------------------------------------------


_MLP = {"gate": "linear_fc1_gate", "up": "linear_fc1_up", "down": "linear_fc2"}
CANONICAL: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"linear_{name}" for name in "qkv"},
        "o": "linear_proj",
        **{name: f"mlp.{matrix}" for name, matrix in _MLP.items()},
        **{f"shared {name}": f"shared_experts.{matrix}" for name, matrix in _MLP.items()},
    }
)
"""Products of a block by Megatron-Core's names; experts lie one module deeper (`mlp.experts.linear_fc1`)."""


def peft_config(model: ModelSpec, lora: Lora) -> dict[str, Any]:
    """Return the arguments of `peft.LoraConfig`: adapters where `lora` has them, and in no other tower."""
    targets = ALL_LINEAR if ALL_LINEAR in lora.targets else list(lora.targets)
    found = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": targets}
    elsewhere = _modules_of_other_towers(model, lora)
    if elsewhere:
        found["exclude_modules"] = rf"({'|'.join(map(re.escape, elsewhere))})(\..*)?"
    return found


def quantisation_config(model: ModelSpec, lora: Lora, *, sharded: bool) -> dict[str, Any]:
    """Return the arguments of `transformers.BitsAndBytesConfig` that store what the plan prices in 4 bits; none for 16.

    `sharded`: FSDP shards only weights of one dtype, so packed ones are stored as bfloat16.
    """
    if lora.bits == 16:
        return {}
    head = [x.name for x in model.layers if x.kind == "head"]
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        **({"bnb_4bit_quant_storage": "bfloat16"} if sharded else {}),
        "llm_int8_skip_modules": [*head, *_modules_of_other_towers(model, lora)],
    }


def peft_lines(model: ModelSpec, lora: Lora, *, sharded: bool) -> str:
    """Return Python lines: how the base is loaded, and the adapters, to run after the lines of recompute."""
    quantised = quantisation_config(model, lora, sharded=sharded)
    loaded = f"# load the model with quantization_config=BitsAndBytesConfig({_call(quantised)})\n" if quantised else ""
    cast = "" if lora.weights != "same" else ", autocast_adapter_dtype=False"
    return (
        f"{loaded}from peft import LoraConfig, get_peft_model\n\n"
        f"model = get_peft_model(model, LoraConfig({_call(peft_config(model, lora))}){cast})"
    )


def canonical_layers(model: ModelSpec, lora: Lora, host: str) -> tuple[str, ...]:
    """Ends of names in Megatron-Core, q, k, v and gate, up apart, as Megatron-Bridge's `CanonicalLoRA` has them."""
    return tuple(CANONICAL[product] for product in _adapted_products(model, lora, host))


def joined_layers(model: ModelSpec, lora: Lora, host: str) -> tuple[str, ...]:
    """Ends of names in Megatron-Core itself, which joins q, k, v and gate, up.

    One adapter stands next to each of these, with fewer weights than the plan counts.
    """
    products = _adapted_products(model, lora, host)
    for parts in (("q", "k", "v"), ("gate", "up"), ("shared gate", "shared up")):
        if 0 < len({*parts} & {*products}) < len(parts):
            raise UnsupportedPlanError(
                f"{host} has {', '.join(parts)} in one matrix: plan with all or none, as targets={ALL_LINEAR}"
            )
    apart = re.compile("_(gate|up)$")
    names = ("linear_qkv" if x in "qkv" else apart.sub("", CANONICAL[x]) for x in products)
    return tuple(dict.fromkeys(names))


def _adapted_products(model: ModelSpec, lora: Lora, host: str) -> tuple[str, ...]:
    """Return the products of the decoder's blocks that have adapters: in all blocks alike, for names are patterns."""
    found: dict[str, int] = {}
    there: dict[str, int] = {}
    for layer in (x for x in model.layers if x.tower == "language" and x.kind == "block"):
        for name in (p.name for p in layer_matmuls(layer, 1)):
            there[name] = there.get(name, 0) + 1
        for adapter in adapt_layer(layer, lora, 1):
            for name in adapter.products or (adapter.name,):
                found[name] = found.get(name, 0) + 1
    unlike = [name for name, number in found.items() if name not in CANONICAL or number < there.get(name, 0)]
    if unlike:
        raise UnsupportedPlanError(f"{host} has no pattern for {unlike[0]} (LoRA {lora}): name targets in every block")
    return tuple(found)


def _modules_of_other_towers(model: ModelSpec, lora: Lora) -> list[str]:
    """The lists of blocks and the projectors of towers without adapters."""
    names = [x.name for x in model.layers if x.tower not in lora.towers and x.kind in ("block", "projector", "embed")]
    return list(dict.fromkeys(re.sub(r"\.\d+$", "", name) for name in names if not name.endswith("embed_tokens")))


def _call(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


_APPLY = """from trimtab.torch import apply_recompute

RECOMPUTE = {{
{tiers}
}}
for granularity, modules in RECOMPUTE.items():
    apply_recompute(model, modules, granularity=granularity)  # leave the Trainer's own activation_checkpointing off"""


# -- trainers in Python ---------------------------------------------------------------------------------------------


_OWN_DATA = (
    'remove_unused_columns=False, max_length=None, train_sampling_strategy="sequential", '
    'dataset_kwargs={{"skip_prepare_dataset": True}}'
)


def _trainer_lines(arguments: str) -> Mapping[int, str]:
    said = "gradient_accumulation_steps={M}, per_device_train_batch_size=1, {arguments}"
    return {0: f"arguments = {arguments}({said})", 3: f"arguments = {arguments}({said}, fsdp=True)"}


_OPTIMIZERS: Mapping[Optimizer, tuple[str, str]] = {  # of `TrainingArguments`, and the class
    "adamw": ("adamw_torch_fused", "torch.optim.AdamW(model.parameters(), fused=True)"),
    "adamw_8bit": ("adamw_bnb_8bit", "bitsandbytes.optim.AdamW8bit(model.parameters())"),
    "sgd": ("sgd", "torch.optim.SGD(model.parameters())"),
}
_AUTOCAST = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}
KNOWN: Mapping[str, Collection[object]] = {
    "dtype": _AUTOCAST,
    "attention": IMPLEMENTATIONS,
    "optimizer": _OPTIMIZERS,
    "fused_kernels": (True, False),
    "sequence_parallel": (True, False),  # of tp, which these hosts leave to the model
}


def check_whole(plan: Decided, title: str, zero_stages: Sequence[int]) -> tuple[int, list[str]]:
    """The ZeRO stage that a host of whole models is given, of those that it has, and warnings; or refuses the plan."""
    dims, warnings = plan.dims, []
    if len(plan.stages) > 1:
        raise UnsupportedPlanError(f"{title} has no pipeline stages: plan with pp 1, or use `trimtab train`")
    if dims.tp > 1:
        warnings.append(f"tp {dims.tp} is not set here: load the model with tp_plan='auto' on {dims.tp} ranks")
    stage = plan.zero_stage if plan.zero_stage in zero_stages else max(zero_stages)
    if stage != plan.zero_stage and dims.dp > 1:
        warnings.append(f"{title} gets ZeRO stage {stage}, not {plan.zero_stage}: plan with --zero-stage {stage}")
    return stage, warnings


def export(
    plan: Decided,
    *,
    title: str,
    lines: Mapping[int, str],
    has_switch: bool,
) -> Exported:
    """Write lines to run once between making and training the model: every layer that the plan recomputes, by tier, and
    how the host accumulates and shards.

    `lines`: by the host's ZeRO stages, what to set next to recompute ({M}: micro-batches). `has_switch`: recompute has
    one in its `TrainingArguments`.
    """
    stages, launch = plan.stages, plan.launch
    refuse(launch.problems(title, **KNOWN))
    stage, warnings = check_whole(plan, title, tuple(lines))
    also = None
    if plan.frozen_towers and has_switch:
        towers = " and ".join(plan.frozen_towers)
        also = f"the {towers} tower is frozen: leave activation_checkpointing off, which back-propagates it"
    chosen = {i: tier for stage in stages for i, tier in sorted(tiers_of(stage).items())}
    named = {tier: [plan.model.layers[i].name for i in chosen if chosen[i] == tier] for tier in TIERS}
    modules = {tier: fold_modules(found) for tier, found in named.items() if found}
    recompute = "# the plan recomputes nothing: leave activation_checkpointing off"
    if modules:
        recompute = _APPLY.format(tiers="\n".join(f"    {tier!r}: {list(found)!r}," for tier, found in modules.items()))
    adapters, said = "", {}
    if plan.lora is not None:
        adapters = peft_lines(plan.model, plan.lora, sharded=stage == 3) + "\n"
        quantised = quantisation_config(plan.model, plan.lora, sharded=stage == 3)
        said = {"peft": peft_config(plan.model, plan.lora), "quantisation": quantised}
    name, optimizer = _OPTIMIZERS[launch.optimizer]
    arguments = [f'optim="{name}"']
    arguments += [f"{launch.dtype}=True"] if launch.dtype != "fp32" else []
    arguments += ["use_liger_kernel=True"] if launch.fused_kernels else []
    policy = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[launch.dtype]
    words = {
        "M": plan.num_microbatches,
        "arguments": ", ".join(arguments),
        "autocast": _AUTOCAST[launch.dtype],
        "optimizer": optimizer,
        "policy": f"param_dtype={policy}, reduce_dtype=torch.float32",
    }
    # weights are loaded in 32 bits and run in 16 by autocast, as the plan prices them
    load = f'MODEL = {{"dtype": "float32", "attn_implementation": "{IMPLEMENTATIONS[launch.attention]}"}}'
    load += "  # model = AutoModelForImageTextToText.from_pretrained(..., **MODEL)"
    if launch.fused_kernels and not has_switch:
        load += "\nliger_kernel.transformers._apply_liger_kernel_to_instance(model=model)"
    freeze = "".join(f"{line}\n" for line in _frozen_lines(plan))
    text = f"{load}\n{freeze}{recompute}\n{adapters}{lines[stage].format(**words)}"
    fields = {"recompute": modules, "python": text, **said}
    return Exported(text=text, fields=fields, runs=stages, warnings=tuple(warnings), also=also)


def frozen_modules(plan: Decided) -> list[str]:
    """Return the modules of the frozen towers, lists of blocks as one."""
    names = [layer.name for layer in plan.model.layers if layer.tower in plan.frozen_towers]
    return list(dict.fromkeys(re.sub(r"\.\d+$", "", name) for name in names))


def _frozen_lines(plan: Decided) -> list[str]:
    if not plan.frozen_towers:
        return []
    return [f"for name in {frozen_modules(plan)!r}:", "    model.get_submodule(name).requires_grad_(False)"]


def whole(model: ModelSpec, zero_stages: Sequence[int]) -> Expressible:
    """Return what a host can run that has the whole model on every rank, recompute as planned."""
    choices = {"pp": (1,), "tp": (1,), "zero_stage": tuple(zero_stages)}
    return Expressible(forbidden_cuts=frozenset(range(1, len(model.layers))), choices=choices)


def _target(title: str, checked_with: str, packs: str, lines: Mapping[int, str], *, has_switch: bool) -> Target:
    return Target(
        title=title,
        host="eager",
        checked_with=checked_with,
        packs=packs,
        can=lambda model, _pp: whole(model, tuple(lines)),
        export=partial(export, title=title, lines=lines, has_switch=has_switch),
        lora=(16, 4),
    )


# -- LLaMA-Factory, axolotl -----------------------------------------------------------------------------------------


_ZERO_STAGES = (0, 3, 2, 1)  # tried in this order where the user names none
Settings = dict[str, object]


def _deepspeed(zero_stage: int) -> Settings:
    if not zero_stage:
        return {}
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        "deepspeed": {
            "zero_optimization": {"stage": zero_stage},
            **dict.fromkeys(auto, "auto"),
            "bf16": {"enabled": "auto"},
            "zero_allow_untested_optimizer": True,
        }
    }


def _llama_factory(plan: Decided, zero_stage: int) -> Settings:
    frozen: Collection[Tower] = plan.frozen_towers
    tuning: Settings = {"finetuning_type": "full"}
    if (lora := plan.lora) is not None:
        if lora.weights not in (None, "fp32") or lora.towers != ("language",):
            refuse([f"LLaMA-Factory's adapters: plan with weights=fp32,towers=language, not {lora}"])
        frozen = ("vision", "projector")
        tuning = {
            "finetuning_type": "lora",
            "lora_rank": lora.r,
            "lora_alpha": round(lora.alpha),
            "lora_dropout": lora.dropout,
            "lora_target": "all" if ALL_LINEAR in lora.targets else ",".join(lora.targets),
            **({"quantization_method": "bnb", "quantization_bit": 4} if lora.bits == 4 else {}),
        }
    return {
        "stage": "sft",
        "do_train": True,
        **tuning,
        "freeze_vision_tower": "vision" in frozen,
        "freeze_multi_modal_projector": "projector" in frozen,
        "freeze_language_model": "language" in frozen,
        "dataset": "planned",  # it asks for a name; the packs come from PLAN
        "packing": False,
        "neat_packing": False,
        "disable_gradient_checkpointing": True,
        "flash_attn": {"flash": "fa2", "sdpa": "sdpa", "eager": "disabled"}[plan.launch.attention],
        "enable_liger_kernel": plan.launch.fused_kernels,
        **_precision(plan),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": plan.num_microbatches,
        **_deepspeed(zero_stage),
    }


def _precision(plan: Decided) -> Settings:
    words = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "sgd": "sgd"}
    dtype = plan.launch.dtype
    optimizer = words[plan.launch.optimizer]
    return {"bf16": dtype == "bf16", "fp16": dtype == "fp16", "optim": optimizer}


_LIGER = ("axolotl.integrations.liger.LigerPlugin",)


def _stem(name: str) -> str:
    """Return the module list of a block, or the layer itself."""
    return re.sub(r"\.\d+$", "", name)


def _axolotl(plan: Decided, zero_stage: int) -> Settings:
    precision, fused = _precision(plan), plan.launch.fused_kernels
    trained = {}
    if plan.frozen_towers:
        names = [layer.name for layer in plan.model.layers if layer.tower not in plan.frozen_towers]
        trained = {"unfrozen_parameters": [f"^{re.escape(x)}" for x in dict.fromkeys(map(_stem, names))]}
    return {
        "bf16": precision["bf16"],
        "fp16": precision["fp16"],
        "optimizer": precision["optim"],
        "attn_implementation": IMPLEMENTATIONS[plan.launch.attention],
        **trained,
        "plugins": ["trimtab.runtime.training.axolotl_plugin.PlannedPacks", *(_LIGER if fused else ())],
        **({"liger_rms_norm": True, "liger_rope": True, "liger_glu_activation": True} if fused else {}),
        "datasets": [{"path": "PLAN", "type": "chat_template"}],
        "skip_prepare_dataset": True,
        "sample_packing": False,
        "pad_to_sequence_len": False,
        "remove_unused_columns": False,
        "gradient_checkpointing": False,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": plan.num_microbatches,
        **_deepspeed(zero_stage),
    }


def export_recipe(plan: Decided, *, title: str, settings: Callable[[Decided, int], Settings], head: str) -> Exported:
    """The settings that the plan decides, to be merged into a file that names model, data and learning rate.

    `settings`: of a plan and the ZeRO stage that it gets. `head`: how the file is run.
    """
    refuse(plan.launch.problems(title, **KNOWN))
    zero_stage, warnings = check_whole(plan, title, _ZERO_STAGES)
    fields = settings(plan, zero_stage)
    text = yaml.safe_dump(fields, sort_keys=False).rstrip()
    return Exported(text=f"{head}\n{text}", fields=fields, runs=plan.stages, warnings=tuple(warnings))


def _recipe(
    title: str,
    checked_with: str,
    packs: str,
    settings: Callable[[Decided, int], Settings],
    head: str,
    lora: tuple[int, ...] = (),
) -> Target:
    return Target(
        title=title,
        host="eager",
        checked_with=checked_with,
        packs=packs,
        packs_by_tokens=True,
        can=lambda model, _pp: whole(model, _ZERO_STAGES),
        export=partial(export_recipe, title=title, settings=settings, head=head),
        lora=lora,
    )


TARGETS: Mapping[str, Target] = {
    "transformers": _target(
        "Transformers",
        "Transformers 5.23, its own models and `TrainingArguments`",
        "`trimtab.balanced(trainer, plan)`",
        _trainer_lines("TrainingArguments"),
        has_switch=True,
    ),
    "trl": _target(
        "TRL",
        "TRL 1.16, its SFTTrainer trained on a CPU",
        "`trimtab.balanced(trainer, plan)`",
        {
            n: line.replace("batch_size=1", f"batch_size=1, {_OWN_DATA}")
            for n, line in _trainer_lines("SFTConfig").items()
        },
        has_switch=True,
    ),
    "accelerate": _target(
        "Accelerate",
        "Accelerate 1.15, its loaders on CPU ranks",
        "`trimtab.balanced(loader, plan, model=model)`",
        {
            0: "optimizer = {optimizer}\n"
            "accelerator = Accelerator(mixed_precision='{autocast}', gradient_accumulation_steps={M})",
            3: "optimizer = {optimizer}\nplugin = FullyShardedDataParallelPlugin(fsdp_version=2)\n"
            "accelerator = Accelerator("
            "mixed_precision='{autocast}', gradient_accumulation_steps={M}, fsdp_plugin=plugin)",
        },
        has_switch=False,
    ),
    "fsdp2": _target(
        "FSDP2",
        "torch 2.13, recompute under `fully_shard` on CPU ranks",
        "`PlanDataLoader`",
        {
            3: "policy = MixedPrecisionPolicy({policy})  # this and fully_shard from torch.distributed.fsdp\n"
            "for name, module in reversed(list(model.named_modules())):\n"
            "    if type(module).__name__ in model._no_split_modules or not name:\n"
            "        fully_shard(module, mp_policy=policy)\n"
            "optimizer = {optimizer}"
        },
        has_switch=False,
    ),
    "llama-factory": _recipe(
        "LLaMA-Factory",
        "llamafactory 0.9.5, its own parser and trainer on a CPU",
        "`runtime.training.llama_factory_run` in place of `llamafactory-cli train`",
        _llama_factory,
        "# torchrun --nproc-per-node N -m trimtab.runtime.training.llama_factory_run PLAN FILE",
        lora=(16, 4),
    ),
    "axolotl": _recipe(
        "axolotl",
        "axolotl 0.21.0, its own schema, plug-in manager and trainer on a CPU",
        "a plug-in, `runtime.training.axolotl_plugin`",
        _axolotl,
        "# axolotl train FILE, with the plan's folder for PLAN",
    ),
}
