"""A plan as settings of a launcher's YAML file, for those that run a whole model on every rank.

LLaMA-Factory and axolotl train with Transformers' Trainer, which `runtime.training.launchers` balances. NeMo Automodel
and VeOmni have loops and packers of their own: they are told steps, sharding, freezing and the recompute that they
have, and the step is priced without the packs. Read at llamafactory 0.9.5, axolotl 0.21.0, nemo-automodel 0.7.0 and
veomni 0.1.12.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import yaml

from trimtab.adapters.blocks import recompute_first, recomputed_blocks
from trimtab.adapters.huggingface import check_whole, whole
from trimtab.adapters.running import Decided, Exported, Target, full_blocks, refuse
from trimtab.lora import ALL_LINEAR
from trimtab.options import Tower
from trimtab.plan.decide.expressible import Expressible
from trimtab.specs import ModelSpec, Stage

_TOWERS: tuple[Tower, ...] = ("vision", "language")
Settings = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """One of these launchers."""

    title: str
    checked_with: str
    packs: str | None
    zero_stages: tuple[int, ...]  # tried in this order where the user names none
    settings: Callable[[Decided, int, Sequence[Tower]], Settings]  # of a plan, ZeRO stage told, towers that recompute
    head: str = ""  # how the file is run
    beside: str | None = None
    recomputes: tuple[tuple[Tower, ...], ...] | None = None  # the sets of whole towers that it can; None: as planned
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


def _llama_factory(plan: Decided, zero_stage: int, _recomputed: Sequence[Tower]) -> Settings:
    frozen: Collection[Tower] = plan.frozen_towers
    tuning: Settings = {"finetuning_type": "full"}
    if (lora := plan.lora) is not None:
        if lora.weights not in (None, "fp32") or lora.towers != ("language",):
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


def _axolotl(plan: Decided, zero_stage: int, _recomputed: Sequence[Tower]) -> Settings:
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


_TOWER_NAMES = ("vision", "visual", "image_encoder")
"""Parts of the names of parameters that NeMo Automodel's `freeze_vision_tower` freezes."""


def _automodel(plan: Decided, zero_stage: int, recomputed: Sequence[Tower]) -> Settings:
    frozen = plan.frozen_towers
    seen = [layer for layer in plan.model.layers if layer.tower in ("vision", "projector")]
    together = {layer.tower for layer in seen if any(part in layer.name for part in _TOWER_NAMES)}
    if "vision" in frozen and together != set(frozen) - {"language"}:
        parts = " and ".join(sorted(together))
        given = " and ".join(frozen)
        refuse([f"frozen {given} was planned, and NeMo Automodel freezes {parts} together: plan with these frozen"])
    distributed: Settings = {
        "strategy": "fsdp2" if zero_stage else "ddp",
        "activation_checkpointing": bool(recomputed),
    }
    if zero_stage:
        distributed |= {"tp_size": 1, "pp_size": 1, "cp_size": 1}
    if recomputed:
        distributed["activation_checkpointing_scope"] = list(recomputed)
    return {
        "step_scheduler": {"local_batch_size": 1, "global_batch_size": plan.samples_per_step},
        "distributed": distributed,
        "freeze_config": {
            "freeze_vision_tower": "vision" in plan.frozen_towers,
            "freeze_language_model": "language" in plan.frozen_towers,
        },
    }


def _veomni(plan: Decided, zero_stage: int, recomputed: Sequence[Tower]) -> Settings:
    if set(plan.frozen_towers) not in (set(), {"vision", "projector"}):
        frozen = " and ".join(plan.frozen_towers)
        refuse(
            [f"frozen {frozen} was planned, and VeOmni freezes vision and projector together: plan with these frozen"]
        )
    return {
        "train": {
            "micro_batch_size": 1,
            "global_batch_size": plan.samples_per_step,
            "dyn_bsz": False,
            "freeze_vit": bool(plan.frozen_towers),
            "gradient_checkpointing": {"enable": bool(recomputed)},
            "accelerator": {"fsdp_config": {"fsdp_mode": "fsdp2" if zero_stage else "ddp"}},
        }
    }


_HOSTS: Mapping[str, _Host] = {
    "llama-factory": _Host(
        title="LLaMA-Factory",
        checked_with="llamafactory 0.9.5, its own parser and trainer on a CPU",
        packs="`runtime.training.llama_factory_run` in place of `llamafactory-cli train`",
        zero_stages=(0, 3, 2, 1),
        settings=_llama_factory,
        lora=(16, 4),
        head="# torchrun --nproc-per-node N -m trimtab.runtime.training.llama_factory_run PLAN FILE",
    ),
    "axolotl": _Host(
        title="axolotl",
        checked_with="axolotl 0.21.0, its own schema, plug-in manager and trainer on a CPU",
        packs="a plug-in, `runtime.training.axolotl_plugin`",
        zero_stages=(0, 3, 2, 1),
        settings=_axolotl,
        head="# axolotl train FILE, with the plan's folder for PLAN",
    ),
    "automodel": _Host(
        title="NeMo Automodel",
        checked_with="nemo-automodel 0.7.0, its sources",
        packs=None,
        zero_stages=(0, 3),
        settings=_automodel,
        beside="its own packer comes nearest (`packed_sequence: {pack_size: N}`); batch sizes then count packs, and "
        "`distributed.multimodal.vision.frame_sharding` shares frames under cp",
        recomputes=((), ("language",), ("vision",), ("vision", "language")),
    ),
    "veomni": _Host(
        title="VeOmni",
        checked_with="veomni 0.1.12, its sources",
        packs=None,
        zero_stages=(0, 3),
        settings=_veomni,
        beside="its own packer comes nearest (`train.dyn_bsz: true`, `data.max_seq_len`), and for Qwen3-VL "
        "`model.encoder_data_balance: true` shares images over the ranks; trimtab prices neither",
        recomputes=((), ("vision", "language")),
    ),
}


def export(plan: Decided, _price: float | None, *, host: _Host) -> Exported:
    """The settings that the plan decides, to be merged into a file that names model, data and learning rate."""
    told, warnings = check_whole(plan, host.title, host.zero_stages)
    (stage,) = plan.stages
    recomputed = [tower for tower in _TOWERS if recomputed_blocks(plan.model, stage, tower)]
    runs = stage
    if host.recomputes is not None:
        towers = min((x for x in host.recomputes if set(x) >= set(recomputed)), key=len)
        (runs,) = recompute_first(plan.model, plan.stages, dict.fromkeys(towers))
        if runs != stage:
            warnings.append(
                f"recompute of single layers or by other tiers is planned, and {host.title} recomputes "
                f"{' and '.join(towers)} blocks all and in full"
            )
        recomputed = list(towers)
    settings = host.settings(plan, told, recomputed)
    text = yaml.safe_dump(settings, sort_keys=False).rstrip()
    return Exported(
        text="\n".join(filter(None, (host.head, text))),
        fields=settings,
        runs=(runs,),
        warnings=tuple(warnings),
        beside=host.beside,
    )


def _can_run(model: ModelSpec, _pp: int, *, host: _Host) -> Expressible:
    can = whole(model, host.zero_stages)
    if host.recomputes is None:
        return can

    def ladders(stages: Sequence[Stage]) -> Iterator[list[tuple[Stage, ...]]]:
        for towers in host.recomputes or ():
            yield [recompute_first(model, stages, dict.fromkeys(towers))]

    return Expressible(forbidden_cuts=can.forbidden_cuts, choices=can.choices, tiers=full_blocks, ladders=ladders)


TARGETS = {
    name: Target(
        title=host.title,
        checked_with=host.checked_with,
        packs=host.packs,
        can=partial(_can_run, host=host),
        export=partial(export, host=host),
        lora=host.lora,
    )
    for name, host in _HOSTS.items()
}
