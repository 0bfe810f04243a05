"""A plan's decisions as Megatron-Core flags, or a refusal with its reason and price.

A layout string is one field a stage, parted by `|`: E embedding, t decoder block, L norm, head and loss; `t*7` repeats.
It has no letter for vision layers: Megatron-Core builds the whole tower and its projector beside the embedding, on the
first stage. Checked against megatron-core 0.16.1 by tests/integration/test_megatron_core.py; nothing is imported here.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.errors import UnsupportedPlanError, join_problems
from trimtab.specs import AttentionSpec, ModelSpec, ParallelDims, Stage, Tower
from trimtab.units import format_count

_SCHEDULES = ("1F1B", "Interleaved1F1B")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronExport:
    """What to pass to a Megatron-LM launcher; flags of the model and of the data are the launcher's own."""

    flags: tuple[str, ...]
    layout: str  # among `flags`, unless there is one stage only
    simple_flags: tuple[str, ...] | None  # the same split where a launcher has no layout flag; None: cannot be said
    vision_fields: tuple[tuple[str, int | str | bool | None], ...]  # to set on the vision tower's TransformerConfig
    warnings: tuple[str, ...]

    def shell(self, *, simple: bool = False) -> str:
        """The flags as lines of a shell command, quoted."""
        flags = self.simple_flags if simple else self.flags
        assert flags is not None
        lines: list[str] = []
        for word in flags:
            if word.startswith("--"):
                lines.append(word)
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n".join(lines)

    def vision_python(self) -> str:
        """The assignments that belong behind the copy of the language model's config, one a line."""
        return "\n".join(f"vision_config.{name} = {value!r}" for name, value in self.vision_fields)


def unsupported_cuts(model: ModelSpec) -> frozenset[int]:
    """Cuts that no Megatron-Core layout makes; a split that forbids them, too, can be exported.

    All cuts before the end of the token embedding, since tower, projector and embedding stay on the first stage, and
    the one between the final norm and the head.
    """
    embed = model.indices("language", "embed")[0]
    return frozenset((*range(1, embed + 1), *_norm_cuts(model)))


def megatron_flags(
    *,
    model: ModelSpec,
    stages: Sequence[Stage],
    dims: ParallelDims,
    schedule: str,
    num_microbatches: int,
    num_chunks: int = 1,
    microbatch_size: int = 1,
    zero_stage: int = 1,
    sequence_parallel: bool = False,
    price: float | None = None,
) -> MegatronExport:
    """Flags that make Megatron-Core run these stages, or `UnsupportedPlanError` with everything it cannot express.

    `stages` hold every layer once, in forward order; stage s runs on pipeline rank s mod pp. A pack is one micro-batch,
    hence `microbatch_size` 1. `price` is the step time of the best plan without `unsupported_cuts`, relative to this
    plan's, infinite if none fits; it is quoted where such a cut is refused. Degrees come out as flags, except dp, which
    Megatron derives from the number of processes.
    """
    assert [stage.start for stage in stages[1:]] == [stage.stop for stage in stages[:-1]]
    assert stages[0].start == 0
    assert stages[-1].stop == len(model.layers)
    problems = [
        *_schedule_problems(len(stages), dims.pp, schedule, num_microbatches, num_chunks),
        *_cut_problems(model, stages, price),
        *_head_problems(model, dims.tp),
    ]
    if zero_stage > 1:
        problems.append(
            f"ZeRO stage {zero_stage} was planned, and Megatron-Core's distributed optimizer shards optimizer state "
            "alone: plan with ZeRO stage 1"
        )
    if problems:
        raise UnsupportedPlanError(join_problems(problems))

    counts = tuple(sum(_is_block(model, i) for i in range(stage.start, stage.stop)) for stage in stages)
    layout = "|".join(
        ("E" if s == 0 else "") + _blocks(count) + ("L" if s == len(counts) - 1 else "")
        for s, count in enumerate(counts)
    )
    warnings: list[str] = []
    recompute = _language_recompute(model, stages, counts, warnings)
    vision = _vision_fields(model, stages[0], dims, warnings)
    _warn_of_neglected(model, stages, warnings)
    if vision and num_chunks > 1:
        warnings.append(
            "Megatron-LM's vision-language examples know no interleaving (NVIDIA/Megatron-LM#2866): make sure that "
            "your launcher builds the vision tower in the first chunk of the first rank alone"
        )
    flags = ["--tensor-model-parallel-size", str(dims.tp), "--pipeline-model-parallel-size", str(dims.pp)]
    if dims.cp > 1:
        flags += ["--context-parallel-size", str(dims.cp)]
    if sequence_parallel and dims.tp > 1:
        flags.append("--sequence-parallel")
    batch = ["--micro-batch-size", str(microbatch_size)]
    batch += ["--global-batch-size", str(microbatch_size * dims.dp * num_microbatches)]
    sharding = ["--use-distributed-optimizer"] if zero_stage == 1 else []
    tail = (*recompute, *batch, *sharding)
    split = ("--pipeline-model-parallel-layout", layout) if dims.pp > 1 else ()
    simple = _simple_split(counts, dims.pp, num_chunks)
    return MegatronExport(
        flags=(*flags, *split, *tail),
        layout=layout,
        simple_flags=None if simple is None else (*flags, *simple, *tail),
        vision_fields=vision,
        warnings=tuple(warnings),
    )


# -- what is refused ------------------------------------------------------------------------------------------------


def _schedule_problems(num_stages: int, pp: int, schedule: str, num_microbatches: int, num_chunks: int) -> list[str]:
    problems: list[str] = []
    if schedule not in _SCHEDULES:
        problems.append(
            f"schedule {schedule} was planned, and Megatron-Core runs {' or '.join(_SCHEDULES)}: plan with one of them"
        )
    elif (schedule == "Interleaved1F1B") != (num_chunks > 1):
        problems.append(
            f"schedule {schedule} was planned with {num_chunks} chunks a rank, and 1F1B has one, Interleaved1F1B more: "
            "change the schedule or the chunks"
        )
    if num_stages != pp * num_chunks:
        problems.append(
            f"{num_stages} stages were planned, and pp {pp} with {num_chunks} chunks a rank has {pp * num_chunks}: "
            "make them equal"
        )
    if num_chunks > 1 and pp == 1:
        problems.append(
            f"{num_chunks} chunks on one rank were planned, and Megatron-Core interleaves over ranks: use pp > 1"
        )
    elif num_chunks > 1 and num_microbatches % pp:
        problems.append(
            f"{num_microbatches} micro-batches were planned, and Megatron-Core interleaves them in groups of pp {pp}: "
            f"plan a multiple of {pp}"
        )
    return problems


def _cut_problems(model: ModelSpec, stages: Sequence[Stage], price: float | None) -> list[str]:
    cuts = sorted(unsupported_cuts(model).difference(_norm_cuts(model)) & {stage.start for stage in stages})
    if not cuts:
        return []
    before = ", ".join(model.layers[cut].name for cut in cuts)
    cost = ""
    if price is not None and math.isinf(price):
        cost = " (without such cuts nothing fits these degrees of parallelism; it chooses others)"
    elif price is not None:
        cost = f" (the best plan without such cuts takes {price:.2f} x as long a step)"
    return [
        f"the plan cuts stages before {before}, and a Megatron-Core layout has no letter for vision layers, so that "
        f"vision tower, projector and embedding share the first stage: plan with --for megatron{cost}, or train "
        "with a runtime that makes them"
    ]


def _head_problems(model: ModelSpec, tp: int) -> list[str]:
    problems: list[str] = []
    for heads in sorted({(a.num_heads, a.num_kv_heads) for a in _attentions(model, "language")}):
        if heads[0] % tp:
            problems.append(
                f"tp {tp} was planned, and the language model's {heads[0]} attention heads do not divide by it: choose "
                "a tp that divides them"
            )
        elif heads[1] % tp and tp % heads[1]:
            problems.append(
                f"tp {tp} was planned, and it neither divides the language model's {heads[1]} key-value heads nor is a "
                "multiple of them: choose a tp that does"
            )
    return problems


def _norm_cuts(model: ModelSpec) -> list[int]:
    """The cut between final norm and head: Megatron-Core keeps both where the loss is."""
    return [i for i in model.indices("language", "head") if i > 0 and model.layers[i - 1].kind == "norm"]


# -- the split ------------------------------------------------------------------------------------------------------


def _is_block(model: ModelSpec, index: int, tower: Tower = "language") -> bool:
    return model.layers[index].tower == tower and model.layers[index].kind == "block"


def _attentions(model: ModelSpec, tower: Tower) -> list[AttentionSpec]:
    return [x.attention for x in model.layers if x.tower == tower and x.attention is not None]


def _blocks(count: int) -> str:
    return "t" * count if count < 2 else f"t*{count}"


def _simple_split(counts: Sequence[int], pp: int, num_chunks: int) -> tuple[str, ...] | None:
    """First and last count with even middles, where that says the same: every rank's chunks alike, no stage empty."""
    ranks = [counts[rank::pp] for rank in range(pp)]
    if any(len(set(chunks)) > 1 or chunks[0] == 0 for chunks in ranks):
        return None
    totals = [sum(chunks) for chunks in ranks]
    chunks = () if num_chunks == 1 else ("--num-virtual-stages-per-pipeline-rank", str(num_chunks))
    if len(set(totals)) == 1:
        return chunks
    middles = set(totals[1:-1]) or {totals[-1]}
    if len(middles) > 1:
        return None
    (middle,) = middles
    flags: list[str] = []
    if totals[0] != middle:
        flags += ["--decoder-first-pipeline-num-layers", str(totals[0])]
    if totals[-1] != middle:
        flags += ["--decoder-last-pipeline-num-layers", str(totals[-1])]
    return (*flags, *chunks)


# -- recompute ------------------------------------------------------------------------------------------------------


def _chosen(stage: Stage, model: ModelSpec, tower: Tower) -> dict[int, str]:
    """Blocks of the tower that the stage recomputes, with their tier."""
    return {i: choice.tier for choice in stage.recompute for i in choice.layers if _is_block(model, i, tower)}


def _language_recompute(
    model: ModelSpec, stages: Sequence[Stage], counts: Sequence[int], warnings: list[str]
) -> tuple[str, ...]:
    """One setting for all stages that holds no more than the plan anywhere; what that costs is a warning.

    Megatron-Core's full recompute by the "block" method covers the first n blocks of every stage, its selective
    recompute all blocks; it cannot mix them.
    """
    chosen = [_chosen(stage, model, "language") for stage in stages]
    tiers = Counter(tier for choice in chosen for tier in choice.values())
    if not tiers:
        return ()
    if tiers["full"]:
        most = max(len(choice) for choice in chosen)
        covered = [min(most, count) for count in counts]
        flags: tuple[str, ...] = (
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "block",
            "--recompute-num-layers",
            str(most),
        )
        how = f"Megatron-Core recomputes the first {most} blocks of every stage"
        if tiers["selective"]:
            warnings.append(
                f"{tiers['selective']} language blocks are planned with selective recompute and {tiers['full']} with "
                "full, and Megatron-Core cannot mix them: all are recomputed in full, which holds less and takes longer"
            )
    else:
        covered = list(counts)
        moe = any(_is_block(model, i) and _num_experts(model, i) for choice in chosen for i in choice)
        modules = ("layernorm", "moe_act") if moe else ("layernorm", "mlp")
        flags = ("--recompute-granularity", "selective", "--recompute-modules", *modules)
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
        blocks = [i for i in range(stage.start, stage.stop) if _is_block(model, i)]
        wanted = Counter(model.layers[i].alike for i in choice)
        if wanted - Counter(model.layers[i].alike for i in blocks[:cover]):
            warnings.append(
                f"stage {s} recomputes other kinds of blocks than its first {cover}, which Megatron-Core takes: check "
                "the memory of that stage"
            )
    return flags


def _num_experts(model: ModelSpec, index: int) -> int:
    mlp = model.layers[index].mlp
    return 0 if mlp is None else mlp.num_experts or 0


def _vision_fields(
    model: ModelSpec, first: Stage, dims: ParallelDims, warnings: list[str]
) -> tuple[tuple[str, int | str | bool | None], ...]:
    """Fields that launchers copy from the language model into the vision tower, and their right values there."""
    num_layers = len(model.indices("vision", "block"))
    if num_layers == 0:
        return ()
    chosen = _chosen(first, model, "vision")
    fields: dict[str, int | str | bool | None] = {
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "recompute_granularity": "full" if chosen else None,
        "recompute_method": "block" if chosen else None,
        "recompute_num_layers": len(chosen) or None,
    }
    if dims.pp > 1:
        warnings.append(
            "launchers that deep-copy the language model's config for the vision tower, and leave its split in the "
            f"copy, build fewer than {num_layers} vision layers without a word: set the vision fields of this export, "
            "and compare the number of parameters that Megatron prints for the first rank"
        )
    if "selective" in chosen.values():
        warnings.append(
            f"{list(chosen.values()).count('selective')} vision layers are planned with selective recompute, and the "
            "vision fields recompute them in full, which holds less and takes longer"
        )
    heads = sorted({a.num_heads for a in _attentions(model, "vision") if a.num_heads % dims.tp})
    for count in heads:
        padded = -(-count // dims.tp) * dims.tp
        fields |= {"num_attention_heads": padded, "num_query_groups": padded}
        warnings.append(
            f"the vision tower's {count} attention heads do not divide by tp {dims.tp}: pad them to {padded} with zero "
            "weights, as Megatron-LM's InternViT does, or run the tower with tp 1"
        )
    return tuple(fields.items())


def _warn_of_neglected(model: ModelSpec, stages: Sequence[Stage], warnings: list[str]) -> None:
    names = [
        model.layers[i].name
        for stage in stages
        for choice in stage.recompute
        for i in choice.layers
        if model.layers[i].kind != "block"
    ]
    if names:
        warnings.append(
            f"recompute of {', '.join(names)} is planned, and Megatron-Core recomputes blocks alone: these layers keep "
            "their activations, so check the memory of their stages"
        )
    for cut in sorted({stage.start for stage in stages}.intersection(_norm_cuts(model))):
        norm = model.layers[cut - 1]
        warnings.append(
            f"Megatron-Core runs {norm.name} ({format_count(norm.num_params)} parameters) beside the head, one stage "
            "later than planned"
        )
