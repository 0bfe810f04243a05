"""A plan's decisions as arguments of ColossalAI's `HybridParallelPlugin`, with its per-stage recompute.

`PipelineGradientCheckpointConfig` takes a number for every stage: its first decoder blocks run again, in full. That is
of the language model alone; ColossalAI's policies know no vision tower. Read from 0.5.0 (llama, mistral, qwen2 and
command keep to the numbers); its own class is asked by tests/integration/test_colossalai.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.adapters.blocks import blocks_of, has_other_kinds, is_block, lost_tiers, recomputed_blocks, recomputing
from trimtab.adapters.refusals import price_without_cuts
from trimtab.errors import UnsupportedPlanError, join_problems
from trimtab.specs import ModelSpec, ParallelDims, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ColossalExport:
    """Arguments of the plugin; what is not decided by a plan (precision, the optimizer) is the user's own."""

    plugin: tuple[tuple[str, int | bool | list[int]], ...]
    num_ckpt_layers_per_stage: tuple[int, ...] | None  # None: recompute of all decoder blocks or of none
    recomputes: bool
    runs: tuple[Stage, ...]
    warnings: tuple[str, ...]

    def python(self) -> str:
        """Lines for a training script, before `booster.boost`."""
        lines = ["from colossalai.booster.plugin import HybridParallelPlugin"]
        counts = self.num_ckpt_layers_per_stage
        if counts is not None:
            lines.append("from colossalai.shardformer import PipelineGradientCheckpointConfig")
        lines += ["", "plugin = HybridParallelPlugin(", *(f"    {name}={value!r}," for name, value in self.plugin)]
        if counts is not None:
            config = f"PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage={list(counts)})"
            lines.append(f"    gradient_checkpoint_config={config},")
        lines.append(")")
        if self.recomputes:
            lines.append("language_model.gradient_checkpointing_enable()  # without it the numbers above do nothing")
        return "\n".join(lines)


def colossal_unsupported_cuts(model: ModelSpec) -> frozenset[int]:
    """All cuts before the first decoder block, whose stage holds what comes before it, and any behind the norm."""
    embed, norms = model.indices("language", "embed")[0], model.indices("language", "norm")
    behind = range(norms[-1] + 1, len(model.layers)) if norms else range(0)
    return frozenset((*range(1, embed + 1), *behind))


def colossal_ladders(model: ModelSpec, stages: Sequence[Stage]) -> list[list[tuple[Stage, ...]]]:
    """Recompute of each stage's own number of first blocks; or, on each rung, of the first n of every stage.

    With one stage there is no number: all blocks or none.
    """
    counts = [len(recomputed_blocks(model, stage)) for stage in stages]
    most = max(len(blocks_of(model, stage)) for stage in stages)
    if len(stages) == 1:
        return [[_first_blocks(model, stages, [number]) for number in (0, most)]]
    return [
        [_first_blocks(model, stages, counts)],
        [_first_blocks(model, stages, [number] * len(stages)) for number in range(most + 1)],
    ]


def colossal_export(
    *,
    model: ModelSpec,
    stages: Sequence[Stage],
    dims: ParallelDims,
    schedule: str,
    num_microbatches: int,
    num_chunks: int = 1,
    zero_stage: int = 1,
    price: float | None = None,
) -> ColossalExport:
    """The plugin that runs these stages of the language model, or `UnsupportedPlanError` with everything it cannot.

    `price` is the step time of the best plan it can run, relative to this plan's; it is quoted where a cut is refused.
    """
    problems = _problems(model, stages, dims, schedule, num_microbatches, num_chunks, zero_stage, price)
    if problems:
        raise UnsupportedPlanError(join_problems(problems))
    chosen = [recomputed_blocks(model, stage) for stage in stages]
    counts = [len(blocks) for blocks in chosen]
    warnings = lost_tiers(
        Counter(tier for blocks in chosen for tier in blocks.values()),
        "decoder blocks",
        "ColossalAI recomputes blocks in full",
    )
    plugin: dict[str, int | bool | list[int]] = {"tp_size": dims.tp, "pp_size": dims.pp}
    recomputes = any(counts)
    if dims.pp > 1:
        plugin |= {"num_microbatches": num_microbatches, "microbatch_size": 1}
        plugin["num_layers_per_stage"] = [len(blocks_of(model, stage)) for stage in stages]
        plugin["enable_metadata_cache"] = False  # packs of different steps differ in length
        warnings.append("ColossalAI cuts one batch into micro-batches: pad the packs of a step to the longest of them")
    elif 0 < counts[0] < len(blocks_of(model, stages[0])):
        blocks = blocks_of(model, stages[0])
        warnings.append(
            f"recompute of {counts[0]} of {len(blocks)} decoder blocks is planned, and without a pipeline ColossalAI "
            "has one switch for all of them: all are recomputed, which holds less and takes longer"
        )
        counts = [len(blocks)]
    plugin["zero_stage"] = zero_stage
    runs = _first_blocks(model, stages, counts)
    warnings += _tower_warnings(model, stages)
    for planned, run in zip(chosen, runs, strict=True):
        if has_other_kinds(model, planned, recomputed_blocks(model, run)):
            warnings.append(
                f"stage {run.index} recomputes other kinds of blocks than its first {len(planned)}, which ColossalAI "
                "takes: check the memory of that stage"
            )
    return ColossalExport(
        plugin=tuple(plugin.items()),
        num_ckpt_layers_per_stage=tuple(counts) if recomputes and dims.pp > 1 else None,
        recomputes=recomputes,
        runs=runs,
        warnings=tuple(warnings),
    )


def _first_blocks(model: ModelSpec, stages: Sequence[Stage], counts: Sequence[int]) -> tuple[Stage, ...]:
    return tuple(
        recomputing(stage, blocks_of(model, stage)[:number]) for stage, number in zip(stages, counts, strict=True)
    )


def _tower_warnings(model: ModelSpec, stages: Sequence[Stage]) -> list[str]:
    warnings = []
    if model.indices("vision"):
        warnings.append(
            "ColossalAI 0.5.0 has policies for language models alone: vision tower and projector need a custom_policy "
            "of your own, which holds them whole on the first stage beside the embedding"
        )
    outside = [i for stage in stages for c in stage.recompute for i in c.layers if not is_block(model, i)]
    if outside:
        warnings.append(
            f"recompute of {len(outside)} layers outside the decoder ({model.layers[outside[0]].name} is the first) is "
            "planned, and num_ckpt_layers_per_stage counts decoder blocks alone: they keep their activations, unless "
            "your policy recomputes them"
        )
    return warnings


def _problems(
    model: ModelSpec,
    stages: Sequence[Stage],
    dims: ParallelDims,
    schedule: str,
    num_microbatches: int,
    num_chunks: int,
    zero_stage: int,
    price: float | None,
) -> list[str]:
    problems: list[str] = []
    cuts = sorted(colossal_unsupported_cuts(model) & {stage.start for stage in stages})
    if cuts:
        problems.append(
            f"the plan cuts stages before {', '.join(model.layers[cut].name for cut in cuts)}, and ColossalAI's "
            "num_layers_per_stage counts decoder blocks alone, with all before them on the first stage and norm and "
            f"head on the last: export with --fit FOLDER{price_without_cuts(price)}"
        )
    if schedule != "1F1B" or num_chunks > 1:
        problems.append(
            f"schedule {schedule} with {num_chunks} chunks a rank was planned, and ColossalAI 0.5.0 takes an uneven "
            "split with one stage a rank alone: plan with 1F1B"
        )
    if num_microbatches < dims.pp:
        problems.append(
            f"{num_microbatches} micro-batches were planned for pp {dims.pp}, and ColossalAI wants no fewer than "
            "stages: plan more"
        )
    if zero_stage > 2 or (zero_stage > 1 and dims.pp > 1):
        problems.append(
            f"ZeRO stage {zero_stage} was planned with pp {dims.pp}, and ColossalAI's hybrid plugin shards by stage 0 "
            "or 1, and by 2 without a pipeline: plan with ZeRO stage 1"
        )
    if dims.cp > 1:
        problems.append(f"cp {dims.cp} was planned, which this export cannot say for ColossalAI: plan with cp 1")
    heads = {x.attention for x in model.layers if x.tower == "language" and x.attention is not None}
    for count in sorted({count for a in heads for count in (a.num_heads, a.num_kv_heads)}):
        if count % dims.tp:
            problems.append(
                f"tp {dims.tp} was planned, and it does not divide the language model's {count} heads (of queries, or "
                "of keys and values), as ColossalAI wants: choose a tp that does"
            )
    return problems
