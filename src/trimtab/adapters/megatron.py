"""A plan's decisions as Megatron-Core flags, or a refusal with its reason and price.

A layout string is one field a stage, parted by `|`: E embedding, t decoder block, L norm, head and loss; `t*7` repeats.
It has no letter for vision layers: Megatron-Core builds the whole tower and its projector beside the embedding, on the
first stage. Checked against megatron-core 0.16.1 by tests/integration/test_megatron_core.py; nothing is imported here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from trimtab.adapters.blocks import head_problems, is_block
from trimtab.adapters.megatron_recompute import (
    Setting,
    VisionSetting,
    as_run,
    language_recompute,
    megatron_ladders,
    norm_cuts,
    vision_fields,
    warn_of_neglected,
)
from trimtab.adapters.running import (
    Decided,
    Exported,
    Target,
    cut_problems,
    full_blocks,
    price_without_cuts,
    refuse,
    schedule_problems,
)
from trimtab.costs.profile import has_experts
from trimtab.options import Attention, Optimizer, Precision, Tower
from trimtab.plan.decide.expressible import Expressible
from trimtab.specs import ModelSpec, Stage

ENERGON = "`trimtab export energon-packs`: shards of packs that Megatron-Energon reads in order"
SCHEDULES = ("1F1B", "Interleaved1F1B")
_PRECISION: Mapping[Precision, Mapping[str, Setting]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp32": {},
    "fp8": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "mxfp8": {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
}
_FREEZES: Mapping[Tower, str] = {"vision": "--freeze-ViT", "language": "--freeze-LM"}  # of examples/multimodal
_ATTENTION: Mapping[Attention, str] = {"flash": "flash", "eager": "unfused"}
_OPTIMIZER: Mapping[Optimizer, str] = {"adamw": "adam", "sgd_momentum": "sgd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronExport:
    """What to pass to a Megatron-LM launcher; flags of the model and of the data are the launcher's own."""

    settings: Mapping[str, Setting]  # Megatron-LM's arguments, named as its parser stores them
    layout: str  # among `settings`, unless there is one stage only
    vision_fields: Mapping[str, VisionSetting]  # to set on the vision tower's TransformerConfig
    runs: tuple[Stage, ...]  # what Megatron-Core makes of the plan: norm beside the head, recompute as it knows it
    warnings: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(word for words in self._words() for word in words)

    def shell(self) -> str:
        """The flags as lines of a shell command, quoted."""
        return " \\\n".join(shlex.join(words) for words in self._words())

    def _words(self) -> Iterator[list[str]]:
        """Every flag with its values."""
        for name, setting in self.settings.items():
            values = setting if isinstance(setting, tuple) else () if setting is True else (setting,)
            yield ["--" + name.replace("_", "-"), *map(str, values)]

    def vision_python(self) -> str:
        """The assignments that belong after the copy of the language model's config, one a line."""
        return "\n".join(f"vision_config.{name} = {value!r}" for name, value in self.vision_fields.items())


def unsupported_cuts(model: ModelSpec) -> frozenset[int]:
    """Cuts that no Megatron-Core layout makes; a split that forbids them, too, can be exported.

    All cuts before the end of the token embedding, since tower, projector and embedding stay on the first stage, and
    the one between the final norm and the head.
    """
    embed = model.indices("language", "embed")[0]
    return frozenset((*range(1, embed + 1), *norm_cuts(model)))


def megatron_flags(plan: Decided, price: float | None = None) -> MegatronExport:
    """Flags that make Megatron-Core run these stages, or `UnsupportedPlanError` with everything it cannot express.

    A pack is one micro-batch, hence a micro-batch size of 1. Degrees come out as flags, except dp, which Megatron
    derives from the number of processes.
    """
    model, stages, dims = plan.model, plan.stages, plan.dims
    cost = price_without_cuts(price, then="; it chooses others")
    problems = [
        *schedule_problems(plan, "Megatron-Core", SCHEDULES),
        *cut_problems(
            plan,
            unsupported_cuts(model).difference(norm_cuts(model)),
            "and a Megatron-Core layout has no letter for vision layers, so that vision tower, projector and embedding "
            f"share the first stage: export with --fit FOLDER, or plan with --for megatron{cost}, or train with a "
            "runtime that makes them",
        ),
        *head_problems(model, dims.tp),
        *plan.launch.problems(
            "Megatron-Core",
            dtype=_PRECISION,
            attention=_ATTENTION,
            optimizer=_OPTIMIZER,
            grad_dtype=("fp32", "bf16") if plan.launch.dtype != "fp16" else ("fp16",),
            fused_kernels=(True, False),
            sequence_parallel=(True, False),
            tp_overlap=(True, False),
            ep_overlap=(True, False),
        ),
    ]
    if plan.zero_stage > 1:
        problems.append(
            f"ZeRO stage {plan.zero_stage} was planned, and Megatron-Core's distributed optimizer shards only "
            "optimizer state: plan with ZeRO stage 1"
        )
    refuse(problems)

    counts = tuple(sum(is_block(model, i) for i in range(stage.start, stage.stop)) for stage in stages)
    layout = layout_of(counts)
    warnings: list[str] = []
    recompute = language_recompute(model, stages, counts, warnings)
    vision = vision_fields(model, stages[0], dims, warnings)
    warn_of_neglected(model, stages, warnings)
    settings: dict[str, Setting] = {
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
    }
    if dims.cp > 1:
        settings["context_parallel_size"] = dims.cp
    if has_experts(model):  # said even where they divide nothing: launchers' own defaults do
        settings["expert_model_parallel_size"] = dims.ep
        settings["expert_tensor_parallel_size"] = dims.expert_tp
        if dims.ep > 1:
            settings["moe_token_dispatcher_type"] = {"alltoall": "alltoall", "deepep": "flex"}[plan.dispatcher]
            settings |= {"moe_enable_deepep": True} if plan.dispatcher == "deepep" else {}
        settings["moe_grouped_gemm"] = True
    if dims.pp > 1:
        settings["pipeline_model_parallel_layout"] = layout
    settings |= recompute | {"micro_batch_size": 1, "global_batch_size": plan.packs_per_step}
    settings |= _launch(plan)
    if plan.zero_stage == 1:
        settings["use_distributed_optimizer"] = True
    return MegatronExport(
        settings=settings,
        layout=layout,
        vision_fields=vision,
        runs=as_run(model, stages, recompute),
        warnings=tuple(warnings),
    )


def _launch(plan: Decided) -> dict[str, Setting]:
    """Return what the memory and the time of the plan rest on, next to its decisions."""
    launch = plan.launch
    found: dict[str, Setting] = {
        **_PRECISION[launch.dtype],
        "attention_backend": _ATTENTION[launch.attention],
        "optimizer": _OPTIMIZER[launch.optimizer],
        "transformer_impl": "transformer_engine" if launch.fused_kernels else "local",
    }
    switches = {
        # Megatron-Core's layers of experts refuse to train without, where tp is above 1
        "sequence_parallel": plan.dims.tp > 1 and (launch.sequence_parallel or has_experts(plan.model)),
        "grad_reduce_in_bf16": launch.grad_dtype == "bf16",
        "tp_comm_overlap": launch.tp_overlap,
        "overlap_moe_expert_parallel_comm": launch.ep_overlap,
    }
    return found | {name: True for name, on in switches.items() if on}


def export(plan: Decided, price: float | None) -> Exported:
    """The flags as lines of a shell command; the vision tower's fields beside them."""
    flags = megatron_flags(plan, price)
    beside = None
    if flags.vision_fields:
        beside = (
            "set on the vision tower's config; a launcher that copies the language model's and leaves its split in the "
            f"copy builds fewer vision layers silently:\n{flags.vision_python()}"
        )
        if "num_attention_heads" in flags.vision_fields:
            beside += "  # padded with zero weights, as Megatron-LM's InternViT does"
        if plan.num_chunks > 1:
            beside += "\nbuild the tower only in the first chunk of the first rank (NVIDIA/Megatron-LM#2866)"
    frozen = [_FREEZES[tower] for tower in plan.frozen_towers if tower in _FREEZES]
    if set(plan.frozen_towers) - set(_FREEZES):
        refuse(
            ["a frozen projector was planned, and Megatron-LM freezes only vision tower and language model: train it"]
        )
    fields = {"flags": (*flags.flags, *frozen), "layout": flags.layout, "vision_config": flags.vision_fields}
    text = " \\\n".join([flags.shell(), *frozen])
    return Exported(text=text, fields=fields, runs=flags.runs, warnings=flags.warnings, beside=beside)


def can_run(model: ModelSpec, _pp: int) -> Expressible:
    """What Megatron-Core and the launchers that hand on all of its settings can run."""
    return Expressible(
        forbidden_cuts=unsupported_cuts(model),
        tiers=full_blocks,
        ladders=partial(megatron_ladders, model),
        choices={"host": ("megatron", "recipe"), "schedule": SCHEDULES, "zero_stage": (1, 0)},
        tp_degrees=lambda tp: not head_problems(model, tp),
        degrees=("cp", "ep", "etp"),
    )


TARGETS = {
    "megatron": Target(
        title="Megatron-Core",
        checked_with="megatron-core 0.16.1 and 0.19.2, its own classes",
        packs=ENERGON,
        can=can_run,
        export=export,
    )
}


def layout_of(counts: Sequence[int]) -> str:
    """The layout of stages with so many decoder blocks.

    >>> layout_of((0, 1, 27))
    'E|t|t*27L'
    """
    return "E" + "|".join("t" * count if count < 2 else f"t*{count}" for count in counts) + "L"
