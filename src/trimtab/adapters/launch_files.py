"""A run as its own launcher's files say it: Megatron's flags, DeepSpeed's JSON, torchtitan's TOML, as a `GivenRun`.

What says nothing about time or memory is passed over. What would change both and cannot be priced is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.adapters.megatron_check import flag_values, read_megatron_flags, stage_counts
from trimtab.errors import PlanError, join_problems
from trimtab.files import read_small
from trimtab.plan.given import GivenRun
from trimtab.specs import ModelSpec

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
