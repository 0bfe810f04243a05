"""A plan for trainers that run a whole model on every rank: Transformers, TRL, Accelerate, FSDP2.

Packs come by the runtime's own data set and collator, state is sharded by the host, and recompute is set layer by
layer (`trimtab.torch.apply_recompute`). Transformers' own switch stays off: it knows every n-th layer, counted through
both towers alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from trimtab.adapters.blocks import TIERS
from trimtab.adapters.lora import peft_config, peft_lines, quantisation_config
from trimtab.adapters.running import Decided, Exported, Target, refuse
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
    return {
        0: f"arguments = {arguments}(gradient_accumulation_steps={{M}}, per_device_train_batch_size=1)",
        3: f"arguments = {arguments}(gradient_accumulation_steps={{M}}, per_device_train_batch_size=1, fsdp=True)",
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
            0: "accelerator = Accelerator(gradient_accumulation_steps={M})",
            3: "plugin = FullyShardedDataParallelPlugin(fsdp_version=2)\n"
            "accelerator = Accelerator(gradient_accumulation_steps={M}, fsdp_plugin=plugin)",
        },
    ),
    "fsdp2": _Host(
        title="FSDP2",
        checked_with="torch 2.13, recompute under `fully_shard` on CPU ranks",
        packs="`PlanDataLoader`",
        lines={
            3: "for name, module in reversed(list(model.named_modules())):\n"
            "    if type(module).__name__ in model._no_split_modules or not name:\n"
            "        fully_shard(module)  # from torch.distributed.fsdp"
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
    stages = plan.stages
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
    text = f"{recompute}\n{adapters}{host.lines[told].format(M=plan.num_microbatches)}"
    fields = {"recompute": modules, "python": text, **said}
    return Exported(text=text, fields=fields, runs=stages, warnings=tuple(warnings), beside=beside)


def whole(model: ModelSpec, zero_stages: Sequence[int]) -> Expressible:
    """What a host can run that has the whole model on every rank, recompute as planned."""
    choices = {"pp": (1,), "tp": (1,), "zero_stage": tuple(zero_stages)}
    return Expressible(forbidden_cuts=frozenset(range(1, len(model.layers))), choices=choices)


def _target(host: _Host) -> Target:
    return Target(
        title=host.title,
        checked_with=host.checked_with,
        packs=host.packs,
        can=lambda model, _pp: whole(model, tuple(host.lines)),
        export=partial(export, host=host),
        lora=(16, 4),
    )


TARGETS = {name: _target(host) for name, host in _HOSTS.items()}
