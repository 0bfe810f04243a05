"""A plan's decisions as environment and arguments of Pai-Megatron-Patch's Qwen-VL scripts.

The scripts know one uneven split, a count for the first stage (`MP_PP0_LAYERS`) with even stages behind it, and one
switch for recompute. Read from examples/qwen2_vl, qwen2_5_vl and qwen3_vl/run_mcore_qwen.sh, whose 24 positional
arguments are the same; not run against them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from trimtab.adapters.blocks import blocks_of, count_by_tier, lost_tiers
from trimtab.adapters.megatron import MegatronExport, megatron_flags, unsupported_cuts
from trimtab.adapters.running import Decided, Exported, Target, full_blocks, refuse
from trimtab.errors import UnsupportedPlanError
from trimtab.options import RecomputedTier
from trimtab.plan.decide.expressible import Expressible
from trimtab.specs import ModelSpec, Stage, recomputing

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_OWN = {  # arguments that a plan does not decide, by position
    1: "$ENV", 2: "$MODEL_SIZE", 5: "$LR", 6: "$MIN_LR", 7: "$SEQ_LEN", 8: "$PAD_LEN", 9: "bf16", 15: "true",
    17: "false", 18: "$SAVE_INTERVAL", 19: "$DATASET_PATH", 20: "$VALID_DATASET_PATH",
    21: "$PRETRAIN_CHECKPOINT_PATH", 22: "$TRAIN_ITERS", 23: "$LR_WARMUP_ITERS", 24: "$OUTPUT_BASEPATH",
}  # fmt: skip


def pai_splits(model: ModelSpec, pp: int) -> tuple[tuple[int, ...], ...]:
    """The cuts of every split that the scripts can say: a first stage of one or more blocks, then even ones."""
    blocks = model.indices("language", "block")
    if pp == 1:
        return ((),)
    splits = []
    for first in range(1, len(blocks)):
        each, rest = divmod(len(blocks) - first, pp - 1)
        if rest == 0 and each > 0:
            splits.append(tuple(blocks[0] + first + each * s for s in range(pp - 1)))
    return tuple(splits)


def pai_ladder(model: ModelSpec, stages: Sequence[Stage]) -> list[tuple[Stage, ...]]:
    """Recompute nowhere, or of every block of both towers."""
    return [
        tuple(replace(stage, recompute=()) for stage in stages),
        tuple(_recompute_all(model, stage) for stage in stages),
    ]


def export(plan: Decided, price: float | None) -> Exported:
    """Environment and command, quoted; arguments with a $ are the user's own variables, to be set before it."""
    model, stages, dims = plan.model, plan.stages, plan.dims
    problems = _unscripted(model, plan.num_chunks)
    flags: MegatronExport | None = None
    try:
        flags = megatron_flags(plan, price)
    except UnsupportedPlanError as error:
        problems.append(str(error))
    counts = [len(blocks_of(model, stage)) for stage in stages]
    if flags is not None:
        problems += _uneven(counts, price)
    refuse(problems)
    assert flags is not None, "else there was a problem"

    recompute = any(stage.recompute for stage in stages)
    runs = tuple(_recompute_all(model, stage) if recompute else stage for stage in flags.runs)
    # the other examples clear a first stage's count in the vision tower's copy of the configuration
    cleared = model.family != "qwen2_vl"
    warnings = [w for w in flags.warnings if "recompute" not in w and not (cleared and "deep-copy" in w)]
    if recompute:
        warnings += _recompute_warnings(stages, runs)
    by_position = _OWN | {
        3: "1",
        4: str(dims.dp * plan.num_microbatches),
        10: str(dims.tp),
        11: str(dims.pp),
        12: str(dims.cp),
        13: "false",
        14: "true" if plan.zero_stage == 1 else "false",
        16: "full" if recompute else "none",
    }
    arguments = tuple(by_position[position] for position in range(1, 25))
    environment = {"MP_PP0_LAYERS": str(counts[0])} if len(set(counts)) > 1 else {}
    if recompute:
        environment["MP_AC_LAYERS"] = "1"
    words = [f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in arguments]
    lines = [*(f"{name}={value}" for name, value in environment.items()), "sh run_mcore_qwen.sh", " ".join(words)]
    return Exported(
        text=" \\\n    ".join(lines),
        fields={"environment": environment, "arguments": arguments},
        runs=runs,
        warnings=tuple(warnings),
    )


def _unscripted(model: ModelSpec, num_chunks: int) -> list[str]:
    problems = []
    if model.family not in FAMILIES:
        problems.append(
            f"{model.name} is of the family {model.family}, and Pai-Megatron-Patch has scripts with an uneven split "
            f"for {', '.join(FAMILIES)}: export to megatron instead"
        )
    if num_chunks > 1:
        problems.append(
            f"{num_chunks} chunks a rank were planned, and the scripts take interleaving only with an even split of "
            "the language model alone: plan with 1F1B"
        )
    return problems


def _uneven(counts: Sequence[int], price: float | None) -> list[str]:
    """Whether the stages' numbers of blocks are a first one and even ones behind it."""
    if len(set(counts[1:])) <= 1 and counts[0] > 0 and (len(counts) == 1 or counts[1] > 0):
        return []
    cost = "" if price is None else f" (the best such split takes {price:.2f} x as long a step)"
    return [
        f"stages of {', '.join(map(str, counts))} blocks were planned, and the scripts know a count above 0 for "
        f"the first stage and even ones behind it: export with --fit FOLDER{cost}"
    ]


def _recompute_warnings(stages: Sequence[Stage], runs: Sequence[Stage]) -> list[str]:
    tiers = count_by_tier(stages)
    warnings = list(lost_tiers(tiers, "layers", "the scripts recompute blocks in full"))
    chosen, total = tiers.total(), sum(stage.num_recomputed() for stage in runs)
    if chosen < total:
        warnings.append(
            f"recompute of {chosen} layers is planned, and the scripts recompute every block of both towers or "
            f"none: all {total} are, which holds less and takes longer"
        )
    return warnings


def _recompute_all(model: ModelSpec, stage: Stage) -> Stage:
    tiers: dict[int, RecomputedTier] = {i: "full" for i, layer in enumerate(model.layers) if layer.kind == "block"}
    return recomputing(stage, tiers)


def _can_run(model: ModelSpec, pp: int) -> Expressible:
    return Expressible(
        forbidden_cuts=unsupported_cuts(model),
        splits=pai_splits(model, pp),
        tiers=full_blocks,
        ladders=lambda stages: [pai_ladder(model, stages)],
    )


TARGET = Target(title="Pai-Megatron-Patch", checked_with="its scripts, read and not run", can=_can_run, export=export)
