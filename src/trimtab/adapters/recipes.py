"""A plan as settings of LLaMA-Factory's or axolotl's YAML file.

Both train with Transformers' Trainer, which `runtime.training.balanced` balances. Read at llamafactory 0.9.5 and
axolotl 0.21.0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import yaml

from trimtab.adapters.huggingface import check_whole, whole
from trimtab.adapters.running import Decided, Exported, Target, refuse
from trimtab.lora import ALL_LINEAR
from trimtab.options import Tower

_ZERO_STAGES = (0, 3, 2, 1)  # tried in this order where the user names none
Settings = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """One of these two launchers."""

    title: str
    checked_with: str
    packs: str
    settings: Callable[[Decided, int], Settings]  # of a plan and the ZeRO stage it gets
    head: str  # how the file is run
    lora: tuple[int, ...] = ()


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
        if lora.weights != "fp32" or lora.towers != ("language",):
            refuse(
                [
                    f"LoRA ({lora}) was planned, and LLaMA-Factory's export says adapters in fp32 and of the language "
                    "model: plan with weights=fp32,towers=language"
                ]
            )
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
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": plan.num_microbatches,
        **_deepspeed(zero_stage),
    }


def _axolotl(plan: Decided, zero_stage: int) -> Settings:
    return {
        "plugins": ["trimtab.runtime.training.axolotl_plugin.PlannedPacks"],
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


_HOSTS: Mapping[str, _Host] = {
    "llama-factory": _Host(
        title="LLaMA-Factory",
        checked_with="llamafactory 0.9.5, its own parser and trainer on a CPU",
        packs="`runtime.training.llama_factory_run` in place of `llamafactory-cli train`",
        settings=_llama_factory,
        lora=(16, 4),
        head="# torchrun --nproc-per-node N -m trimtab.runtime.training.llama_factory_run PLAN FILE",
    ),
    "axolotl": _Host(
        title="axolotl",
        checked_with="axolotl 0.21.0, its own schema, plug-in manager and trainer on a CPU",
        packs="a plug-in, `runtime.training.axolotl_plugin`",
        settings=_axolotl,
        head="# axolotl train FILE, with the plan's folder for PLAN",
    ),
}


def export(plan: Decided, _price: float | None, *, host: _Host) -> Exported:
    """The settings that the plan decides, to be merged into a file that names model, data and learning rate."""
    zero_stage, warnings = check_whole(plan, host.title, _ZERO_STAGES)
    settings = host.settings(plan, zero_stage)
    text = yaml.safe_dump(settings, sort_keys=False).rstrip()
    return Exported(text=f"{host.head}\n{text}", fields=settings, runs=plan.stages, warnings=tuple(warnings))


TARGETS = {
    name: Target(
        title=host.title,
        checked_with=host.checked_with,
        packs=host.packs,
        can=lambda model, _pp: whole(model, _ZERO_STAGES),
        export=partial(export, host=host),
        lora=host.lora,
    )
    for name, host in _HOSTS.items()
}
