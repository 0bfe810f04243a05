"""A plan for trainers that run a whole model on every rank: Transformers, TRL, Accelerate, FSDP2.

Packs come by the runtime's own data set and collator, state is sharded by the host, and recompute is set layer by
layer (`trimtab.torch.apply_recompute`). Transformers' own switch stays off: it knows every n-th layer, counted through
both towers alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from trimtab.adapters.lora import peft_config, peft_lines, quantisation_config
from trimtab.adapters.running import IMPLEMENTATIONS, TIERS, Decided, Exported, Target, refuse
from trimtab.options import Optimizer
from trimtab.plan.decide.expressible import Expressible
from trimtab.plan.file.yaml import fold_modules
from trimtab.specs import ModelSpec, tiers_of

_APPLY = """from trimtab import apply_recompute

RECOMPUTE = {{
{tiers}
}}
for granularity, modules in RECOMPUTE.items():
    apply_recompute(model, modules, granularity=granularity)  # leave the Trainer's own activation_checkpointing off"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """One of these trainers."""

    title: str
    checked_with: str
    packs: str
    lines: Mapping[int, str]  # by the ZeRO stages that it is told: what to set beside recompute; {M}: micro-batches
    has_switch: bool = False  # of recompute, in its `TrainingArguments`


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


_HOSTS: Mapping[str, _Host] = {
    "transformers": _Host(
        title="Transformers",
        checked_with="Transformers 5.23, its own models and `TrainingArguments`",
        packs="`trimtab.balanced(trainer, plan)`",
        lines=_trainer_lines("TrainingArguments"),
        has_switch=True,
    ),
    "trl": _Host(
        title="TRL",
        checked_with="TRL 1.16, its SFTTrainer trained on a CPU",
        packs="`trimtab.balanced(trainer, plan)`",
        lines={
            stage: line.replace("batch_size=1", f"batch_size=1, {_OWN_DATA}")
            for stage, line in _trainer_lines("SFTConfig").items()
        },
        has_switch=True,
    ),
    "accelerate": _Host(
        title="Accelerate",
        checked_with="Accelerate 1.15, its loaders on CPU ranks",
        packs="`trimtab.balanced(loader, plan, model=model)`",
        lines={
            0: "optimizer = {optimizer}\n"
            "accelerator = Accelerator(mixed_precision='{autocast}', gradient_accumulation_steps={M})",
            3: "optimizer = {optimizer}\nplugin = FullyShardedDataParallelPlugin(fsdp_version=2)\n"
            "accelerator = Accelerator("
            "mixed_precision='{autocast}', gradient_accumulation_steps={M}, fsdp_plugin=plugin)",
        },
    ),
    "fsdp2": _Host(
        title="FSDP2",
        checked_with="torch 2.13, recompute under `fully_shard` on CPU ranks",
        packs="`PlanDataLoader`",
        lines={
            3: "policy = MixedPrecisionPolicy({policy})  # this and fully_shard from torch.distributed.fsdp\n"
            "for name, module in reversed(list(model.named_modules())):\n"
            "    if type(module).__name__ in model._no_split_modules or not name:\n"
            "        fully_shard(module, mp_policy=policy)\n"
            "optimizer = {optimizer}"
        },
    ),
}


def check_whole(plan: Decided, title: str, zero_stages: Sequence[int]) -> tuple[int, list[str]]:
    """The ZeRO stage that a host of whole models is told, of those that it has, and warnings; or refuses the plan."""
    dims, problems, warnings = plan.dims, [], []
    if len(plan.stages) > 1:
        problems.append(
            f"{len(plan.stages)} stages were planned, and {title} runs the whole model on every rank: plan with pp 1, "
            "or train by `trimtab train`, which runs stages"
        )
    refuse(problems)
    if dims.tp > 1:
        warnings.append(
            f"tp {dims.tp} was planned, and the recompute of single layers does not set it: load the model with "
            f"tp_plan='auto' on {dims.tp} ranks"
        )
    told = plan.zero_stage if plan.zero_stage in zero_stages else max(zero_stages)
    if told != plan.zero_stage and dims.dp > 1:
        warnings.append(
            f"ZeRO stage {plan.zero_stage} was planned, and {title} is told stage {told}: plan with --zero-stage "
            f"{told}, or its memory and times do not hold"
        )
    return told, warnings


def export(plan: Decided, _price: float | None, *, host: _Host = _HOSTS["transformers"]) -> Exported:
    """Lines to run once between making the model and training it: every layer that the plan recomputes, by tier, and
    how the host accumulates and shards."""
    stages, launch = plan.stages, plan.launch
    refuse(launch.problems(host.title, **KNOWN))
    told, warnings = check_whole(plan, host.title, tuple(host.lines))
    beside = None
    if plan.frozen_towers and host.has_switch:
        beside = (
            f"the {' and '.join(plan.frozen_towers)} tower is frozen: Transformers' own activation_checkpointing makes "
            "the embeddings' results need gradients, so that in most families a frozen vision tower is recomputed and "
            "back-propagated for nothing; the lines of this export leave it alone"
        )
    chosen = {i: tier for stage in stages for i, tier in sorted(tiers_of(stage).items())}
    named = {tier: [plan.model.layers[i].name for i in chosen if chosen[i] == tier] for tier in TIERS}
    modules = {tier: fold_modules(found) for tier, found in named.items() if found}
    recompute = "# the plan recomputes nothing: leave activation_checkpointing off"
    if modules:
        recompute = _APPLY.format(tiers="\n".join(f"    {tier!r}: {list(found)!r}," for tier, found in modules.items()))
    adapters, said = "", {}
    if plan.lora is not None:
        adapters = peft_lines(plan.model, plan.lora, sharded=told == 3) + "\n"
        quantised = quantisation_config(plan.model, plan.lora, sharded=told == 3)
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
    if launch.fused_kernels and not host.has_switch:
        load += "\nliger_kernel.transformers._apply_liger_kernel_to_instance(model=model)"
    freeze = "".join(f"{line}\n" for line in _frozen_lines(plan))
    text = f"{load}\n{freeze}{recompute}\n{adapters}{host.lines[told].format(**words)}"
    fields = {"recompute": modules, "python": text, **said}
    return Exported(text=text, fields=fields, runs=stages, warnings=tuple(warnings), beside=beside)


def frozen_modules(plan: Decided) -> list[str]:
    """Return the modules of the frozen towers, lists of blocks as one."""
    names = [layer.name for layer in plan.model.layers if layer.tower in plan.frozen_towers]
    return list(dict.fromkeys(re.sub(r"\.\d+$", "", name) for name in names))


def _frozen_lines(plan: Decided) -> list[str]:
    if not plan.frozen_towers:
        return []
    return [f"for name in {frozen_modules(plan)!r}:", "    model.get_submodule(name).requires_grad_(False)"]


def whole(model: ModelSpec, zero_stages: Sequence[int]) -> Expressible:
    """What a host can run that has the whole model on every rank, recompute as planned."""
    choices = {"pp": (1,), "tp": (1,), "zero_stage": tuple(zero_stages)}
    return Expressible(forbidden_cuts=frozenset(range(1, len(model.layers))), choices=choices)


def _target(host: _Host) -> Target:
    return Target(
        title=host.title,
        host="eager",
        checked_with=host.checked_with,
        packs=host.packs,
        can=lambda model, _pp: whole(model, tuple(host.lines)),
        export=partial(export, host=host),
        lora=(16, 4),
    )


TARGETS = {name: _target(host) for name, host in _HOSTS.items()}
