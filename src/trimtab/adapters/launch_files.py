"""A run as its own launcher's files say it: Megatron's flags, DeepSpeed's JSON, torchtitan's TOML, as a `GivenRun`.

What says nothing about time or memory is passed over. What would change both and cannot be priced is refused by name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from trimtab.adapters.megatron_check import flag_values, read_megatron_flags, stage_counts
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
    divide. Flags that Megatron-Core would refuse are refused.

    >>> from trimtab import describe
    >>> flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 --bf16"
    >>> run = from_megatron(flags, describe("Qwen2.5-VL-7B"))
    >>> run.tp, run.pp, run.stages, run.zero_stage
    (2, 4, '32v+7l|7l|7l|7l', 0)
    """
    typed = text if text.lstrip().startswith("--") else read_small(Path(text)).decode("utf-8", errors="replace")
    said = flag_values(typed)
    if not said:
        raise PlanError(f"{text[:60]!r} holds no flag of Megatron: give a file with them, or the flags in quotes")
    problems = [
        f"{flag.replace('_', '-')} {said[flag]} is not priced yet: leave it out, and read the result as without it"
        for flag in _MEGATRON_UNPRICED
        if said.get(flag, "1") not in ("0", "1", "")
    ]
    given: dict[str, Any] = {
        field: _number(flag, said[flag], problems) for flag, field in _MEGATRON_NUMBERS.items() if flag in said
    }
    try:
        given |= _megatron_split(said, model)
    except PlanError as error:
        problems += str(error).splitlines()
    given["recompute"] = _megatron_recompute(said, given.get("pp") or 1, problems)
    given["zero_stage"] = 1 if "use_distributed_optimizer" in said else 0
    given["dtype"] = "bf16" if "bf16" in said else "fp16" if "fp16" in said else "fp32"
    if said.get("fp8_format", "") not in ("", "0"):
        given["dtype"] = "mxfp8" if said.get("fp8_recipe") == "mxfp8" else "fp8"
    given["tp_overlap"] = "tp_comm_overlap" in said
    given["ep_overlap"] = "overlap_moe_expert_parallel_comm" in said
    given["fused_kernels"] = said.get("transformer_impl", "transformer_engine") == "transformer_engine"
    if "optimizer" in said:
        given["optimizer"] = _optimizer(said["optimizer"], problems)
    return _run(given, problems, "Megatron's flags")


def from_deepspeed(path: Path) -> GivenRun:
    """DeepSpeed's JSON; what it leaves to the launcher ("auto") stays open."""
    read = _object(path, parse_json, "DeepSpeed configuration")
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


def from_torchtitan(path: Path) -> GivenRun:
    """torchtitan's job file; its data-parallel state is sharded (FSDP) as far as `data_parallel_shard_degree` says."""
    read = _object(path, lambda content: tomllib.loads(content.decode()), "torchtitan job")
    problems: list[str] = []
    parallel, training = read.get("parallelism", {}), read.get("training", {})
    sizes = {name: training.get(name) for name in ("global_batch_size", "local_batch_size")}
    sizes |= {name: parallel.get(name) for name in ("pipeline_parallel_degree", "pipeline_parallel_microbatch_size")}
    problems += [f"{name} is {x!r}: give a whole number" for name, x in sizes.items() if type(x) not in (int, NoneType)]
    if problems:
        return _run({}, problems, str(path))
    pp = sizes["pipeline_parallel_degree"] or 1
    batch = sizes["pipeline_parallel_microbatch_size"] or sizes["local_batch_size"]
    given: dict[str, Any] = {
        "tp": parallel.get("tensor_parallel_degree"),
        "cp": parallel.get("context_parallel_degree"),
        "ep": parallel.get("expert_parallel_degree"),
        "etp": parallel.get("expert_tensor_parallel_degree"),
        "pp": pp,
        "zero_stage": 0 if parallel.get("data_parallel_shard_degree", -1) == 1 else 2 if pp > 1 else 3,
        "global_batch": sizes["global_batch_size"],
        "batch": batch,
    }
    if given["global_batch"] in (-1, None):
        given["global_batch"] = None
        if pp > 1 and batch:
            given["num_microbatches"] = max(1, (sizes["local_batch_size"] or batch) // batch)
    schedule = parallel.get("pipeline_parallel_schedule")
    if pp > 1 and schedule is not None:
        given["schedule"] = schedule
        given["num_chunks"] = 2 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1
    mode = _inside(read, "activation_checkpoint", "mode") or _inside(read, "activation_checkpoint", "type") or "none"
    if mode not in ("none", "full", "selective"):
        problems.append(f"activation_checkpoint.mode {mode!r} is unknown: write none, full or selective")
    given["recompute"] = mode
    return _run(given, problems, str(path))


_MEGATRON_NUMBERS = {
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "micro_batch_size": "batch",
    "global_batch_size": "global_batch",
}
_MEGATRON_UNPRICED = ("encoder_pipeline_model_parallel_size",)


def _megatron_split(said: Mapping[str, str], model: ModelSpec) -> dict[str, Any]:
    """Degrees, and the blocks of the stages that Megatron-Core makes of the flags: all vision blocks on the first."""
    flags = read_megatron_flags(said)
    pp = flags.pipeline_model_parallel_size
    degrees = {"tp": flags.tensor_model_parallel_size, "pp": pp}
    if pp == 1:
        return degrees
    first, *others = stage_counts(flags, len(model.indices("language", "block")))
    tower = f"{len(model.indices('vision', 'block'))}v"
    stages = "|".join([f"{tower}+{first}l" if first else tower, *(f"{count}l" for count in others)])
    num_chunks = (1 + len(others)) // pp
    interleaved = {"num_chunks": num_chunks, "schedule": "Interleaved1F1B"} if num_chunks > 1 else {}
    return degrees | {"stages": stages} | interleaved


def _megatron_recompute(said: Mapping[str, str], pp: int, problems: list[str]) -> str | None:
    """All blocks or none: `block` recomputes the first language blocks of each stage, which depend on its cuts."""
    granularity = said.get("recompute_granularity", "selective" if "recompute_activations" in said else "")
    if granularity in ("", "selective"):  # of attention's core, which flash attention never keeps
        return "none"
    if granularity != "full":
        problems.append(f"recompute-granularity {granularity!r} is unknown: write full or selective")
        return None
    if said.get("recompute_method") == "block" and pp > 1:
        problems.append(
            "recompute-method block recomputes some language blocks of every stage: leave it out, and give --recompute "
            "the number of blocks of each stage"
        )
    return "full"


def _number(name: str, value: str, problems: list[str]) -> int:
    if value.isdecimal() and len(value) < 12 and int(value) > 0:
        return int(value)
    problems.append(f"--{name.replace('_', '-')} is {value[:40]!r}: give a whole number of 1 or more")
    return 1


def _optimizer(name: str, problems: list[str]) -> str | None:
    found = _OPTIMIZERS.get(name.lower().replace("_", ""))
    priced = " or ".join(dict.fromkeys(_OPTIMIZERS.values()))
    if found is None:
        problems.append(f"optimizer {name!r} has no price: give --set optimizer={priced}")
    return found


def _object(path: Path, parse: Callable[[bytes], Any], what: str) -> dict[str, Any]:
    try:
        read = parse(read_small(path))
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"{path} is no {what} ({' '.join(str(error).split())[:120]}): give the launcher's own file"
        ) from None
    if not isinstance(read, dict) or any(not isinstance(read.get(name, {}), dict) for name in _TABLES):
        raise PlanError(f"{path} is no {what}: its settings should be objects by name")
    return read


_TABLES = ("zero_optimization", "bf16", "fp16", "optimizer", "parallelism", "training", "activation_checkpoint")


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
