"""A plan's decisions as Megatron-Core flags, or a refusal with its reason.

A layout string is one field a stage, parted by `|`: E embedding, t decoder block, L norm, head and loss; `t*7` repeats.
It has no letter for vision layers: Megatron-Core builds the whole tower and its projector next to the embedding, on the
first stage. Checked against megatron-core 0.16.1 by tests/integration/test_megatron_core.py; nothing is imported here.
"""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trimtab.adapters.running import (
    Decided,
    Exported,
    Target,
    blocks_of,
    cut_problems,
    full_blocks,
    head_problems,
    is_block,
    lost_tiers,
    padded_heads,
    recompute_first,
    recomputed_blocks,
    refuse,
    schedule_problems,
)
from trimtab.costs.profile import has_experts
from trimtab.options import Attention, Optimizer, Precision, RecomputedTier, Tower
from trimtab.plan.decide.stages import Expressible
from trimtab.specs import ModelSpec, ParallelDims, Stage, recomputing
from trimtab.units import format_count

# -- recompute, and the vision tower's fields -----------------------------------------------------------------------
# Its full recompute by the "block" method covers the first n blocks of every stage, its selective recompute all blocks;
# one setting holds for all stages of the language model, another for the vision tower.


Setting = int | str | bool | tuple[str, ...]
_FULL: RecomputedTier = "full"
VisionSetting = int | str | bool | None


def norm_cuts(model: ModelSpec) -> list[int]:
    """The cut between final norm and head: Megatron-Core keeps both where the loss is."""
    return [i for i in model.indices("language", "head") if i > 0 and model.layers[i - 1].kind == "norm"]


def megatron_ladders(model: ModelSpec, stages: Sequence[Stage]) -> Iterator[list[tuple[Stage, ...]]]:
    """Yield the full recomputes that Megatron-Core does on these stages by one setting: of the tower none or all,
    and for each of them the first n blocks of every stage."""
    stages = _norm_next_to_head(model, stages)
    most = max(len(blocks_of(model, stage)) for stage in stages)
    for vision in (0, None) if blocks_of(model, stages[0], "vision") else (0,):
        yield [recompute_first(model, stages, {"vision": vision, "language": number}) for number in range(most + 1)]


def language_recompute(
    model: ModelSpec, stages: Sequence[Stage], counts: Sequence[int], warnings: list[str]
) -> dict[str, Setting]:
    """Return one setting for all stages that holds no more than the plan anywhere; what that costs is a warning.

    Megatron-Core's full recompute by the "block" method covers the first n blocks of every stage, its selective
    recompute all blocks; it cannot mix them.
    """
    chosen = [recomputed_blocks(model, stage) for stage in stages]
    tiers = Counter(tier for choice in chosen for tier in choice.values())
    if not tiers:
        return {}
    settings: dict[str, Setting]
    if tiers["full"]:
        most = max(len(choice) for choice in chosen)
        covered = [min(most, count) for count in counts]
        settings = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": most}
        how = f"Megatron-Core recomputes the first {most} blocks of every stage"
        if tiers["selective"]:
            warnings.append(
                f"Megatron-Core recomputes {tiers['selective']} selective and {tiers['full']} full blocks alike: all "
                "full"
            )
    else:
        covered = list(counts)
        moe = any(is_block(model, i) and _num_experts(model, i) for choice in chosen for i in choice)
        modules = ("layernorm", "moe_act") if moe else ("layernorm", "mlp")
        settings = {"recompute_granularity": "selective", "recompute_modules": modules}
        how = "Megatron-Core's selective recompute covers all blocks of every stage"
        nearest = "norms and moe_act (with --moe-grouped-gemm)" if moe else "norms and the whole MLP"
        warnings.append(f"Megatron-Core has no selective recompute of the plan's kind: it recomputes {nearest}")
    extra = [
        (s, cover, len(choice))
        for s, (cover, choice) in enumerate(zip(covered, chosen, strict=True))
        if cover > len(choice)
    ]
    if extra:
        listing = ", ".join(f"{cover} instead of {planned} on stage {s}" for s, cover, planned in extra)
        total = sum(cover - planned for _, cover, planned in extra)
        warnings.append(f"{how}, {total} more than planned ({listing}): the step takes longer than the plan says")
    for s, (stage, choice, cover) in enumerate(zip(stages, chosen, covered, strict=True)):
        taken = Counter(model.layers[i].alike for i in blocks_of(model, stage)[:cover])
        if Counter(model.layers[i].alike for i in choice) - taken:
            warnings.append(
                f"stage {s} recomputes its first {cover} blocks, other kinds than planned: check its memory"
            )
    return settings


def as_run(model: ModelSpec, stages: Sequence[Stage], recompute: dict[str, Setting]) -> tuple[Stage, ...]:
    """The stages with the recompute that `recompute` sets; selective modules count as the plan's selective tier."""
    tower = dict.fromkeys(recomputed_blocks(model, stages[0], "vision"), _FULL)
    result = []
    for stage in _norm_next_to_head(model, stages):
        language: dict[int, RecomputedTier] = {}
        if recompute.get("recompute_granularity") == "full":
            language = dict.fromkeys(blocks_of(model, stage)[: int(str(recompute["recompute_num_layers"]))], _FULL)
        elif recompute:
            language = dict.fromkeys(blocks_of(model, stage), "selective")
        result.append(recomputing(stage, tower | language))
    return tuple(result)


def _norm_next_to_head(model: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    moved = {cut: cut - 1 for cut in norm_cuts(model)}
    return tuple(replace(x, start=moved.get(x.start, x.start), stop=moved.get(x.stop, x.stop)) for x in stages)


def _num_experts(model: ModelSpec, index: int) -> int:
    mlp = model.layers[index].mlp
    return 0 if mlp is None else mlp.num_experts or 0


def vision_fields(model: ModelSpec, first: Stage, dims: ParallelDims, warnings: list[str]) -> dict[str, VisionSetting]:
    """Return fields that launchers copy from the language model into the vision tower, and their right values there."""
    num_layers = len(model.indices("vision", "block"))
    if num_layers == 0:
        return {}
    chosen = recomputed_blocks(model, first, "vision")
    fields: dict[str, VisionSetting] = {
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        **({"num_moe_experts": None, "expert_model_parallel_size": 1} if dims.ep > 1 else {}),
        "recompute_granularity": "full" if chosen else None,
        "recompute_method": "block" if chosen else None,
        "recompute_num_layers": len(chosen) or None,
    }
    warnings += lost_tiers(Counter(chosen.values()), "vision layers", "the vision fields recompute them in full")
    for _, padded in padded_heads(model, dims.tp):
        fields |= {"num_attention_heads": padded, "num_query_groups": padded}
    return fields


def warn_of_neglected(model: ModelSpec, stages: Sequence[Stage], warnings: list[str]) -> None:
    names = [
        model.layers[i].name
        for stage in stages
        for choice in stage.recompute
        for i in choice.layers
        if model.layers[i].kind != "block"
    ]
    if names:
        warnings.append(f"Megatron-Core recomputes only blocks, not {', '.join(names)}: check their stages")
    for cut in sorted({stage.start for stage in stages}.intersection(norm_cuts(model))):
        norm = model.layers[cut - 1]
        warnings.append(f"Megatron-Core runs {norm.name} ({format_count(norm.num_params)} parameters) with the head")


ENERGON = "`trimtab export energon-packs`, read by `trimtab.runtime.training.energon` through Megatron-Energon"
SCHEDULES = ("1F1B", "Interleaved1F1B")
_FILLER = 2  # tokens of the smallest image of Qwen-VL, and one of text
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
    runs: tuple[Stage, ...]  # what Megatron-Core makes of the plan: norm next to the head, recompute as it knows it
    warnings: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(word for words in self._words() for word in words)

    def shell(self) -> str:
        """The flags as lines of a shell command, quoted."""
        return " \\\n".join(shlex.join(words) for words in self._words())

    def _words(self) -> Iterator[list[str]]:
        """Yield every flag with its values."""
        for name, setting in self.settings.items():
            values = setting if isinstance(setting, tuple) else () if setting is True else (setting,)
            yield ["--" + name.replace("_", "-"), *map(str, values)]

    def vision_python(self) -> str:
        """The assignments that belong after the copy of the language model's config, one a line."""
        return "\n".join(f"vision_config.{name} = {value!r}" for name, value in self.vision_fields.items())


def unsupported_cuts(model: ModelSpec) -> frozenset[int]:
    """Return the cuts that no Megatron-Core layout makes; a split that forbids them, too, can be exported.

    All cuts before the end of the token embedding, since tower, projector and embedding stay on the first stage, and
    the one between the final norm and the head.
    """
    embed = model.indices("language", "embed")[0]
    return frozenset((*range(1, embed + 1), *norm_cuts(model)))


def megatron_flags(plan: Decided) -> MegatronExport:
    """Write flags for Megatron-Core to run these stages, or `UnsupportedPlanError` with everything it cannot express.

    A pack is one micro-batch, hence a micro-batch size of 1. Degrees come out as flags, except dp, which Megatron
    derives from the number of processes.
    """
    model, stages, dims = plan.model, plan.stages, plan.dims
    problems = [
        *schedule_problems(plan, "Megatron-Core", SCHEDULES),
        *cut_problems(
            plan,
            unsupported_cuts(model).difference(norm_cuts(model)),
            "and tower, projector and embedding share Megatron-Core's first stage: export with --fit FOLDER, or plan "
            "with --for megatron",
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
        problems.append(f"Megatron-Core has ZeRO stage 1, not {plan.zero_stage}: plan with that")
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


def _sequence_length(max_tokens: int, dims: ParallelDims) -> int:
    """Return a length of packs that the ranks of tp and cp divide, with room for an image where a pack has none."""
    unit = math.lcm(128, 2 * dims.cp * dims.tp)
    return -(-(max_tokens + _FILLER) // unit) * unit


def _launch(plan: Decided) -> dict[str, Setting]:
    """Return what the memory and the time of the plan rest on, next to its decisions."""
    launch = plan.launch
    found: dict[str, Setting] = {
        **_PRECISION[launch.dtype],
        "attention_backend": _ATTENTION[launch.attention],
        "optimizer": _OPTIMIZER[launch.optimizer],
        "transformer_impl": "transformer_engine" if launch.fused_kernels else "local",
        "calculate_per_token_loss": True,  # else packs weigh alike
    }
    if plan.max_tokens is not None:
        found["seq_length"] = _sequence_length(plan.max_tokens, plan.dims)
    switches = {
        # Megatron-Core's layers of experts refuse to train without, where tp is above 1
        "sequence_parallel": plan.dims.tp > 1 and (launch.sequence_parallel or has_experts(plan.model)),
        "grad_reduce_in_bf16": launch.grad_dtype == "bf16",
        "tp_comm_overlap": launch.tp_overlap,
        "overlap_moe_expert_parallel_comm": launch.ep_overlap,
    }
    return found | {name: True for name, on in switches.items() if on}


def export(plan: Decided) -> Exported:
    """The flags as lines of a shell command; the vision tower's fields next to them."""
    flags = megatron_flags(plan)
    also = None
    if flags.vision_fields:
        also = (
            "set on the vision tower's config: a launcher that copies the language model's split builds fewer vision "
            f"layers silently:\n{flags.vision_python()}"
        )
        if "num_attention_heads" in flags.vision_fields:
            also += "  # padded with zero weights, as Megatron-LM's InternViT does"
        if plan.num_chunks > 1:
            also += "\nbuild the tower only in the first chunk of the first rank (NVIDIA/Megatron-LM#2866)"
    frozen = [_FREEZES[tower] for tower in plan.frozen_towers if tower in _FREEZES]
    if set(plan.frozen_towers) - set(_FREEZES):
        refuse(["Megatron-LM freezes only vision tower and language model: train the projector"])
    fields = {"flags": (*flags.flags, *frozen), "layout": flags.layout, "vision_config": flags.vision_fields}
    text = " \\\n".join([flags.shell(), *frozen])
    return Exported(text=text, fields=fields, runs=flags.runs, warnings=flags.warnings, also=also)


def can_run(model: ModelSpec, _pp: int) -> Expressible:
    """Return what Megatron-Core and the launchers that hand on all of its settings can run."""
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
