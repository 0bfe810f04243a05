"""A plan's decisions as environment and arguments of Pai-Megatron-Patch's Qwen-VL scripts.

The scripts know one uneven split, a count for the first stage (`MP_PP0_LAYERS`) with even stages after it, and one
switch for recompute. Their positional arguments were read at commit a098ca5: examples/qwen2_vl and qwen2_5_vl take 24,
examples/qwen3_vl takes 26, with the experts' two degrees behind CP. `bench/hosts.py` reads them again.
"""

import shlex
from collections.abc import Collection, Mapping, Sequence

from trimtab.adapters.megatron import MegatronExport, megatron_flags, unsupported_cuts
from trimtab.adapters.running import (
    Decided,
    Exported,
    Target,
    blocks_of,
    count_by_tier,
    full_blocks,
    head_problems,
    lost_tiers,
    recompute_first,
    refuse,
)
from trimtab.errors import UnsupportedPlanError
from trimtab.options import Tower
from trimtab.plan.decide.stages import Expressible
from trimtab.specs import ModelSpec, Stage

_ARGUMENTS = (
    *("ENV", "MODEL_SIZE", "BATCH_SIZE", "GLOBAL_BATCH_SIZE", "LR", "MIN_LR", "SEQ_LEN", "PAD_LEN", "PR"),
    *("TP", "PP", "CP", "SP", "DO", "FL", "AC", "OPTIMIZER_OFFLOAD", "SAVE_INTERVAL", "DATASET_PATH"),
    *("VALID_DATASET_PATH", "PRETRAIN_CHECKPOINT_PATH", "TRAIN_ITERS", "LR_WARMUP_ITERS", "OUTPUT_BASEPATH"),
)
_WITH_EXPERTS = (*_ARGUMENTS[:12], "ETP", "EP", *_ARGUMENTS[12:])
SCRIPTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "qwen2_vl": ("qwen2_vl", _ARGUMENTS),
    "qwen2_5_vl": ("qwen2_5_vl", _ARGUMENTS),
    "qwen3_vl": ("qwen3_vl", _WITH_EXPERTS),
    "qwen3_vl_moe": ("qwen3_vl", _WITH_EXPERTS),
}
"""By family the folder under examples/ and the names of its script's arguments, in their order."""

_COPY_THE_COUNT = ("qwen2_vl",)  # the others clear num_layers_in_first_pipeline_stage in the vision tower's copy

_KNOWN: Mapping[str, Collection[object]] = {
    "dtype": ("bf16", "fp16", "fp8"),
    "attention": ("flash", "eager"),
    "grad_dtype": ("fp32", "fp16"),  # what Megatron-LM does by itself
    "fused_kernels": (True,),
    "sequence_parallel": (True, False),
}


def pai_splits(model: ModelSpec, pp: int) -> tuple[tuple[int, ...], ...]:
    """The cuts of every split that the scripts can say: a first stage of one or more blocks, then even ones."""
    blocks = model.indices("language", "block")
    if pp == 1:
        return ((),)
    splits = []
    for first in range(1, len(blocks)):
        each, rest = divmod(len(blocks) - first, pp - 1)
        if rest == 0 and each > 0 and (first == each or model.family not in _COPY_THE_COUNT):
            splits.append(tuple(blocks[0] + first + each * s for s in range(pp - 1)))
    return tuple(splits)


_ALL: Mapping[Tower, None] = {"vision": None, "language": None}


def pai_ladder(model: ModelSpec, stages: Sequence[Stage]) -> list[tuple[Stage, ...]]:
    """Recompute nowhere, or of every block of both towers."""
    return [recompute_first(model, stages, {}), recompute_first(model, stages, _ALL)]


def export(plan: Decided) -> Exported:
    """Return environment and command, quoted; arguments with a $ are the user's own variables, to be set before it."""
    model, stages, dims = plan.model, plan.stages, plan.dims
    problems = _unscripted(model, plan.num_chunks)
    flags: MegatronExport | None = None
    try:
        flags = megatron_flags(plan)
    except UnsupportedPlanError as error:
        problems.append(str(error))
    counts = [len(blocks_of(model, stage)) for stage in stages]
    if flags is not None:
        problems += _uneven(model, counts)
    problems += plan.launch.problems("Pai-Megatron-Patch", **_KNOWN)
    if plan.frozen_towers:
        problems.append(f"the scripts train every tower, and {' and '.join(plan.frozen_towers)} is frozen: train it")
    refuse(problems)
    assert flags is not None, "else there was a problem"

    recompute = any(stage.recompute for stage in stages)
    runs = recompute_first(model, flags.runs, _ALL) if recompute else flags.runs
    warnings = [w for w in flags.warnings if "recompute" not in w]
    if recompute:
        warnings += _recompute_warnings(stages, runs)
    folder, names = SCRIPTS[model.family]
    decided = {
        "PR": plan.launch.dtype,
        "FL": "true" if plan.launch.attention == "flash" else "false",
        "OPTIMIZER_OFFLOAD": "false",
        "SP": "true" if "sequence_parallel" in flags.settings else "false",
        "BATCH_SIZE": "1",
        "GLOBAL_BATCH_SIZE": str(plan.samples_per_step),
        "TP": str(dims.tp),
        "PP": str(dims.pp),
        "CP": str(dims.cp),
        "ETP": str(dims.expert_tp),
        "EP": str(dims.ep),
        "DO": "true" if plan.zero_stage == 1 else "false",
        "AC": "full" if recompute else "none",
    }
    arguments = tuple(decided.get(name, f"${name}") for name in names)
    environment = {"MP_PP0_LAYERS": str(counts[0])} if len(set(counts)) > 1 else {}
    if recompute:
        environment["MP_AC_LAYERS"] = "1"
    words = [f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in arguments]
    lines = [*(f"{name}={value}" for name, value in environment.items()), "sh run_mcore_qwen.sh", " ".join(words)]
    return Exported(
        text=f"# in examples/{folder}\n" + " \\\n    ".join(lines),
        fields={"environment": environment, "arguments": arguments},
        runs=runs,
        warnings=tuple(warnings),
    )


def _unscripted(model: ModelSpec, num_chunks: int) -> list[str]:
    problems = []
    if model.family not in SCRIPTS:
        problems.append(f"Pai-Megatron-Patch has scripts for {', '.join(SCRIPTS)}, not {model.family}: use megatron")
    if num_chunks > 1:
        problems.append(f"the scripts do not interleave uneven stages ({num_chunks} chunks a rank): plan with 1F1B")
    return problems


def _uneven(model: ModelSpec, counts: Sequence[int]) -> list[str]:
    """Return whether the stages' numbers of blocks are a first one and even ones after it."""
    if len(set(counts)) > 1 and model.family in _COPY_THE_COUNT:
        return [
            f"the script of {model.family} would build {counts[0]} vision layers by a first count (stages of "
            f"{', '.join(map(str, counts))} blocks): export with --fit FOLDER, which splits evenly"
        ]
    if len(set(counts[1:])) <= 1 and counts[0] > 0 and (len(counts) == 1 or counts[1] > 0):
        return []
    return [
        f"the scripts know a first count above 0 and even stages after it, not {', '.join(map(str, counts))} blocks: "
        "export with --fit FOLDER"
    ]


def _recompute_warnings(stages: Sequence[Stage], runs: Sequence[Stage]) -> list[str]:
    tiers = count_by_tier(stages)
    warnings = list(lost_tiers(tiers, "layers", "the scripts recompute blocks in full"))
    chosen, total = tiers.total(), sum(stage.num_recomputed() for stage in runs)
    if chosen < total:
        warnings.append(f"the scripts recompute all {total} blocks of both towers, {chosen} are planned")
    return warnings


def _can_run(model: ModelSpec, pp: int) -> Expressible:
    refuse(_unscripted(model, 1))
    return Expressible(
        forbidden_cuts=unsupported_cuts(model),
        splits=pai_splits(model, pp),
        tiers=full_blocks,
        ladders=lambda stages: [pai_ladder(model, stages)],
        choices={"host": ("megatron",), "schedule": ("1F1B",), "zero_stage": (1, 0)},
        tp_degrees=lambda tp: not head_problems(model, tp),
        degrees=("cp", "ep", "etp") if "EP" in SCRIPTS[model.family][1] else ("cp",),
    )


TARGETS = {
    "pai-megatron": Target(
        title="Pai-Megatron-Patch",
        checked_with="its scripts at a098ca5, their arguments read by `bench/hosts.py`; not run",
        packs=None,
        can=_can_run,
        export=export,
    )
}
