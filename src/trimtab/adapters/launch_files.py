"""A run as its own launcher's files say it: Megatron's flags or DeepSpeed's JSON, as a `GivenRun`.

What says nothing about time or memory is passed over. What would change both and cannot be priced is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.adapters.megatron_check import MegatronFlags, parse_megatron_flags, stage_counts
from trimtab.errors import PlanError, join_problems
from trimtab.files import read_small
from trimtab.plan.given import GivenRun
from trimtab.specs import ModelSpec
from trimtab.typed_json import parse_json

_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "sgd": "sgd_momentum",
    "adamw8bit": "adamw_8bit",
}


def from_megatron(text: str, model: ModelSpec) -> GivenRun:
    """Megatron-LM's flags, as typed or in a file; also those that Pai-Megatron-Patch and ms-swift pass on.

    The vision tower runs on the first stage, as their launchers build it. `model` says how many blocks there are to
    split; a split that Megatron-Core refuses is refused in the words of `trimtab check --flags`.

    >>> from trimtab import describe
    >>> flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 --bf16"
    >>> run = from_megatron(flags, describe("Qwen2.5-VL-7B"))
    >>> run.tp, run.pp, run.stages, run.zero_stage
    (2, 4, 'vision-first', 0)
    """
    said = _read_flags(text)
    problems: list[str] = []
    if said.encoder_pipeline_model_parallel_size:
        problems.append(
            f"encoder-pipeline-model-parallel-size {said.encoder_pipeline_model_parallel_size} is not priced yet: "
            "leave it out, and read the result as without it"
        )
    given: dict[str, Any] = {field: getattr(said, flag) for flag, field in _MEGATRON_NUMBERS.items()}
    counts: tuple[int, ...] = ()
    try:
        counts = stage_counts(said, len(model.indices("language", "block")))
    except PlanError as error:
        problems.append(str(error))
    given["stages"] = _megatron_stages(counts, len(model.indices("vision", "block")))
    if len(counts) > said.pipeline_model_parallel_size:
        given["num_chunks"] = len(counts) // said.pipeline_model_parallel_size
        given["schedule"] = "Interleaved1F1B"
    given["recompute"] = _megatron_recompute(said, problems)
    given["zero_stage"] = 1 if said.use_distributed_optimizer else 0
    given["dtype"] = "bf16" if said.bf16 else "fp16" if said.fp16 else "fp32"
    if said.fp8_format not in (None, "", "0"):
        given["dtype"] = "mxfp8" if said.fp8_recipe == "mxfp8" else "fp8"
    given["tp_overlap"] = said.tp_comm_overlap
    given["fused_kernels"] = said.transformer_impl == "transformer_engine"
    if said.optimizer is not None:
        given["optimizer"] = _optimizer(said.optimizer, problems)
    return _run(given, problems, "Megatron's flags")


def from_deepspeed(path: Path) -> GivenRun:
    """DeepSpeed's JSON; what it leaves to the launcher ("auto") stays open."""
    read = _read_deepspeed(path)
    problems: list[str] = []
    zero = read.get("zero_optimization", {})
    given: dict[str, Any] = {
        "batch": read.get("train_micro_batch_size_per_gpu"),
        "num_microbatches": read.get("gradient_accumulation_steps"),
        "zero_stage": zero.get("stage", 0) if isinstance(zero, dict) else 0,
        "tp": _inside(read, "tensor_parallel", "autotp_size") or None,
    }
    given = {name: None if value == "auto" else value for name, value in given.items()}
    for name in ("offload_optimizer", "offload_param"):
        if isinstance(zero, dict) and _inside(zero, name, "device") not in (None, "none"):
            problems.append(f"zero_optimization.{name} is not priced: leave it out, and read the result as without it")
    for name in ("bf16", "fp16"):
        if _inside(read, name, "enabled") is True:
            given["dtype"] = name
    optimizer = _inside(read, "optimizer", "type")
    if optimizer is not None:
        given["optimizer"] = _optimizer(str(optimizer), problems)
    if given["num_microbatches"] is None and isinstance(read.get("train_batch_size"), int):
        given["global_batch"] = read["train_batch_size"]
    return _run(given, problems, str(path))


_MEGATRON_NUMBERS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "micro_batch_size": "batch",
    "global_batch_size": "global_batch",
}


def _read_flags(text: str) -> MegatronFlags:
    """Of flags as typed, or of the file that `text` names."""
    typed = text if text.lstrip().startswith("--") else read_small(Path(text)).decode("utf-8")
    if "--" not in typed:
        raise PlanError(f"{text[:60]!r} holds no flag of Megatron: give a file with them, or the flags in quotes")
    return parse_megatron_flags(typed)


def _megatron_stages(counts: Sequence[int], num_vision: int) -> str | None:
    """Blocks of each stage, the tower on the first; None where there is one stage."""
    if len(counts) < 2:
        return None
    if len(set(counts)) == 1:
        return "vision-first"
    first = f"{num_vision}v+{counts[0]}l" if counts[0] else f"{num_vision}v"
    return "|".join([first, *(f"{number}l" for number in counts[1:])])


def _megatron_recompute(said: MegatronFlags, problems: list[str]) -> str | None:
    """All blocks or none: `block` recomputes the first language blocks of each stage, which depend on its cuts."""
    granularity = said.recompute_granularity or ("selective" if said.recompute_activations else "")
    if granularity in ("", "selective"):  # of attention's core, which flash attention never keeps
        return "none"
    if granularity != "full":
        problems.append(f"recompute-granularity {granularity!r} is unknown: write full or selective")
        return None
    if said.recompute_method == "block" and said.pipeline_model_parallel_size > 1:
        problems.append(
            "recompute-method block recomputes some language blocks of every stage: leave it out, and give --recompute "
            "the number of blocks of each stage"
        )
    return "full"


def _optimizer(name: str, problems: list[str]) -> str | None:
    found = _OPTIMIZERS.get(name.lower().replace("_", ""))
    priced = " or ".join(dict.fromkeys(_OPTIMIZERS.values()))
    if found is None:
        problems.append(f"optimizer {name!r} has no price: give --optimizer {priced}")
    return found


def _read_deepspeed(path: Path) -> dict[str, Any]:
    what = "DeepSpeed configuration"
    try:
        read = parse_json(read_small(path))
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"{path} is no {what} ({' '.join(str(error).split())[:120]}): give the launcher's own file"
        ) from None
    if not isinstance(read, dict) or any(not isinstance(read.get(name, {}), dict) for name in _TABLES):
        raise PlanError(f"{path} is no {what}: its settings should be objects by name")
    return read


_TABLES = ("zero_optimization", "bf16", "fp16", "optimizer")


def _inside(read: Mapping[str, Any], table: str, key: str) -> Any:
    found = read.get(table)
    return found.get(key) if isinstance(found, dict) else None


def _run(given: Mapping[str, Any], problems: list[str], what: str) -> GivenRun:
    """The run, or every reason why there is none."""
    if not problems:
        try:
            return GivenRun(**{name: value for name, value in given.items() if value is not None})
        except (PlanError, TypeError) as error:
            problems.append(str(error))
    raise PlanError(join_problems([f"{what}: {problem}" for problem in problems]))


def completed(run: GivenRun, by: GivenRun) -> GivenRun:
    """`run`, with what it leaves open as `by` says it."""
    empty = GivenRun()
    own = {name for name in GivenRun.__dataclass_fields__ if getattr(run, name) != getattr(empty, name)}
    if own & {"batch", "max_patches", "max_tokens"}:
        own |= {"batch", "max_patches", "max_tokens"}
    if own & {"num_microbatches", "global_batch"}:
        own |= {"num_microbatches", "global_batch"}
    return replace(run, **{name: getattr(by, name) for name in GivenRun.__dataclass_fields__ if name not in own})
