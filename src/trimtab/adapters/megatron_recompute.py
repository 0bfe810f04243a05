"""What Megatron-Core makes of a plan's recompute, and of the vision tower beside it.

Its full recompute by the "block" method covers the first n blocks of every stage, its selective recompute all blocks;
one setting holds for all stages of the language model, another for the vision tower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trimtab.adapters.blocks import (
    blocks_of,
    is_block,
    lost_tiers,
    padded_heads,
    recompute_first,
    recomputed_blocks,
)
from trimtab.options import RecomputedTier
from trimtab.specs import ModelSpec, ParallelDims, Stage, recomputing
from trimtab.units import format_count

Setting = int | str | bool | tuple[str, ...]
_FULL: RecomputedTier = "full"
VisionSetting = int | str | bool | None


def norm_cuts(model: ModelSpec) -> list[int]:
    """The cut between final norm and head: Megatron-Core keeps both where the loss is."""
    return [i for i in model.indices("language", "head") if i > 0 and model.layers[i - 1].kind == "norm"]


def megatron_ladders(model: ModelSpec, stages: Sequence[Stage]) -> Iterator[list[tuple[Stage, ...]]]:
    """Every full recompute that Megatron-Core can do on these stages with one setting: of the vision tower none or all,
    and on each rung the first n blocks of every stage."""
    stages = _norm_beside_head(model, stages)
    most = max(len(blocks_of(model, stage)) for stage in stages)
    for vision in (0, None) if blocks_of(model, stages[0], "vision") else (0,):
        yield [recompute_first(model, stages, {"vision": vision, "language": number}) for number in range(most + 1)]


def language_recompute(
    model: ModelSpec, stages: Sequence[Stage], counts: Sequence[int], warnings: list[str]
) -> dict[str, Setting]:
    """One setting for all stages that holds no more than the plan anywhere; what that costs is a warning.

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
                f"{tiers['selective']} language blocks are planned with selective recompute and {tiers['full']} with "
                "full, and Megatron-Core cannot mix them: all are recomputed in full, which holds less and takes longer"
            )
    else:
        covered = list(counts)
        moe = any(is_block(model, i) and _num_experts(model, i) for choice in chosen for i in choice)
        modules = ("layernorm", "moe_act") if moe else ("layernorm", "mlp")
        settings = {"recompute_granularity": "selective", "recompute_modules": modules}
        how = "Megatron-Core's selective recompute covers all blocks of every stage"
        warnings.append(
            "the plan's selective recompute keeps the results of matrix products, and Megatron-Core has no such mode: "
            + (
                "layernorm and moe_act come nearest, and need --moe-grouped-gemm"
                if moe
                else "it recomputes norms and the whole MLP instead, which holds less and takes longer"
            )
        )
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
                f"stage {s} recomputes other kinds of blocks than its first {cover}, which Megatron-Core takes: check "
                "the memory of that stage"
            )
    return settings


def as_run(model: ModelSpec, stages: Sequence[Stage], recompute: dict[str, Setting]) -> tuple[Stage, ...]:
    """The stages with the recompute that `recompute` sets; selective modules count as the plan's selective tier."""
    tower = dict.fromkeys(recomputed_blocks(model, stages[0], "vision"), _FULL)
    result = []
    for stage in _norm_beside_head(model, stages):
        language: dict[int, RecomputedTier] = {}
        if recompute.get("recompute_granularity") == "full":
            language = dict.fromkeys(blocks_of(model, stage)[: int(str(recompute["recompute_num_layers"]))], _FULL)
        elif recompute:
            language = dict.fromkeys(blocks_of(model, stage), "selective")
        result.append(recomputing(stage, tower | language))
    return tuple(result)


def _norm_beside_head(model: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    moved = {cut: cut - 1 for cut in norm_cuts(model)}
    return tuple(replace(x, start=moved.get(x.start, x.start), stop=moved.get(x.stop, x.stop)) for x in stages)


def _num_experts(model: ModelSpec, index: int) -> int:
    mlp = model.layers[index].mlp
    return 0 if mlp is None else mlp.num_experts or 0


def vision_fields(model: ModelSpec, first: Stage, dims: ParallelDims, warnings: list[str]) -> dict[str, VisionSetting]:
    """Fields that launchers copy from the language model into the vision tower, and their right values there."""
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
        warnings.append(
            f"recompute of {', '.join(names)} is planned, and Megatron-Core recomputes only blocks: these layers keep "
            "their activations, so check the memory of their stages"
        )
    for cut in sorted({stage.start for stage in stages}.intersection(norm_cuts(model))):
        norm = model.layers[cut - 1]
        warnings.append(
            f"Megatron-Core runs {norm.name} ({format_count(norm.num_params)} parameters) beside the head, one stage "
            "later than planned"
        )
