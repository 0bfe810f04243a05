"""A run as Megatron's flags say it, as a `GivenRun`.

Every flag of Megatron-Core's parser stands in megatron_flags.txt: it is priced here, or changes neither time nor
memory, or is refused by name. So is a flag that does not stand there.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.adapters.megatron_check import flag_values, read_megatron_flags, stage_counts
from trimtab.errors import PlanError, join_problems
from trimtab.files import read_small
from trimtab.plan.options import GivenRun
from trimtab.specs import ModelSpec

_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd_momentum"}
_NUMBERS = {
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "micro_batch_size": "batch",
    "global_batch_size": "global_batch",
}
_ATTENTION = {"flash": "flash", "fused": "flash", "auto": "flash", "unfused": "eager", "local": "eager"}
# Flags of ms-swift and Pai-Megatron-Patch alone, without effect on a step.
_LAUNCHERS = frozenset(
    (
        *("add_version", "columns", "dataset", "dataset_num_proc", "dataloader_num_workers", "load_from_cache_file"),
        *("load_safetensors", "max_epochs", "max_length", "max_pixels", "model", "model_type", "num_train_epochs"),
        *("output_dir", "save_safetensors", "split_dataset_ratio", "system", "template", "val_dataset"),
    )
)
_TOWERS = {"freeze_aligner": "projector"} | dict.fromkeys(("freeze_vit", "freeze_ViT"), "vision")
_TOWERS |= dict.fromkeys(("freeze_llm", "freeze_LM"), "language")


def from_megatron(text: str, model: ModelSpec) -> GivenRun:
    """Return the run of Megatron-LM's flags, typed or in a file; also of those that Pai and ms-swift pass on.

    The vision tower runs on the first stage, as their launchers build it. `model` says how many blocks there are to
    divide. Raises `PlanError` with every flag that would change time or memory and has no price, and with those that
    Megatron-Core would refuse. Overlap of gradients and weights with computing is not priced: times are upper bounds.

    >>> from trimtab import describe
    >>> flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 --bf16"
    >>> run = from_megatron(flags, describe("Qwen2.5-VL-7B"))
    >>> run.tp, run.pp, run.stages, run.zero_stage
    (2, 4, '32v+7l|7l|7l|7l', 0)
    """
    typed = text if text.lstrip().startswith("--") else read_small(Path(text)).decode("utf-8", errors="replace")
    said = {name: value for name, value in flag_values(typed).items() if value.lower() not in ("false", "none")}
    if not said:
        raise PlanError(f"{text[:60]!r} holds no flag of Megatron: give a file with them, or the flags in quotes")
    problems = [*_unpriced(said), *_other_model(said, model)]
    given: dict[str, Any] = {
        field: _number(flag, said[flag], problems) for flag, field in _NUMBERS.items() if flag in said
    }
    try:
        given |= _split(said, model)
    except PlanError as error:
        problems += str(error).splitlines()
    given["host"] = "megatron"
    given["recompute"] = _recompute(said, given.get("pp") or 1, problems)
    given["zero_stage"] = 1 if "use_distributed_optimizer" in said else 0
    given["dtype"] = "bf16" if "bf16" in said else "fp16" if "fp16" in said else "fp32"
    if said.get("fp8_format", "") not in ("", "0"):
        given["dtype"] = "mxfp8" if said.get("fp8_recipe") == "mxfp8" else "fp8"
    given["grad_dtype"] = "bf16" if "grad_reduce_in_bf16" in said else None
    given["sequence_parallel"] = "sequence_parallel" in said
    given["tp_overlap"] = "tp_comm_overlap" in said
    given["ep_overlap"] = "overlap_moe_expert_parallel_comm" in said
    given["fused_kernels"] = said.get("transformer_impl", "transformer_engine") == "transformer_engine"
    given["attention"] = _choice("attention_backend", said, _ATTENTION, problems)
    if "use_flash_attn" in said:
        given["attention"] = "flash"
    given["optimizer"] = _choice("optimizer", said, _OPTIMIZERS, problems)
    given["frozen_towers"] = tuple(dict.fromkeys(tower for flag, tower in _TOWERS.items() if flag in said))
    given |= _experts(said, given.get("ep") or 1, problems)
    if problems:
        raise PlanError(join_problems([f"Megatron's flags: {problem}" for problem in problems]))
    return GivenRun(**{name: value for name, value in given.items() if value is not None})


def completed(run: GivenRun, by: GivenRun) -> GivenRun:
    """Return `run`, with what it leaves open as `by` says it."""
    empty = GivenRun()
    own = {name for name in GivenRun.__dataclass_fields__ if getattr(run, name) != getattr(empty, name)}
    if own & {"batch", "max_patches", "max_tokens"}:
        own |= {"batch", "max_patches", "max_tokens"}
    if own & {"num_microbatches", "global_batch"}:
        own |= {"num_microbatches", "global_batch"}
    return replace(run, **{name: getattr(by, name) for name in GivenRun.__dataclass_fields__ if name not in own})


@cache
def megatron_flags() -> Mapping[str, str]:
    """Return every flag of Megatron-Core's parser by its stored name.

    "read": `from_megatron` prices it; "": it has no effect; "bound": priced as without it; "= VALUE": any other value
    is refused, and "=" any.
    """
    lines = resources.files("trimtab.adapters").joinpath("megatron_flags.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for line in lines:
        name, _, what = line.partition(" ")
        if not line.startswith("#"):
            found[name.replace("-", "_")] = what.removeprefix(": ")
    return found


def _unpriced(said: Mapping[str, str]) -> list[str]:
    """Return a sentence for each flag that changes time or memory in a way that has no price, or that is unknown."""
    problems = []
    for flag, value in said.items():
        what = megatron_flags().get(flag)
        shown = f"{flag.replace('_', '-')} {value}".strip()
        if what is None and flag not in _LAUNCHERS and flag not in _TOWERS:
            problems.append(f"--{shown} is no flag of Megatron-Core 0.19's: leave it out")
        elif what is not None and what.startswith("=") and what.removeprefix("=").strip() != (value or "given"):
            problems.append(f"--{shown} is not priced: leave it out, and read the result without it")
    return problems


def _other_model(said: Mapping[str, str], model: ModelSpec) -> list[str]:
    """Return a sentence for each size that another model has."""
    blocks = [model.layers[i] for i in model.indices("language", "block")]
    own: dict[str, set[int | None]] = {
        "hidden_size": {block.hidden_size for block in blocks},
        "num_attention_heads": {block.attention.num_heads for block in blocks if block.attention is not None},
        "num_query_groups": {block.attention.num_kv_heads for block in blocks if block.attention is not None},
        "num_experts": {block.mlp.num_experts for block in blocks if block.mlp is not None and block.mlp.num_experts},
        "ffn_hidden_size": {block.mlp.intermediate_size for block in blocks if block.mlp is not None},
    }
    return [
        f"--{flag.replace('_', '-')} {said[flag]} is another model's: {model.name} has {' or '.join(map(str, known))}"
        for flag, known in own.items()
        if flag in said and said[flag] not in map(str, known)
    ]


def _split(said: Mapping[str, str], model: ModelSpec) -> dict[str, Any]:
    """Return degrees, and the blocks of the stages that Megatron-Core makes: all vision blocks on the first."""
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


def _recompute(said: Mapping[str, str], pp: int, problems: list[str]) -> str | None:
    """Return all blocks or none: `block` recomputes the first language blocks of each stage, which depend on its cuts.

    Selective recompute is of attention's core, which flash attention never keeps, unless other modules are named.
    """
    granularity = said.get("recompute_granularity", "selective" if "recompute_activations" in said else "")
    if granularity in ("", "selective"):
        modules = said.get("recompute_modules", "core_attn")
        if granularity and modules != "core_attn":
            problems.append(f"--recompute-modules {modules} is not priced: give --recompute selective")
        return "none"
    if granularity != "full":
        problems.append(f"--recompute-granularity {granularity!r} is unknown: write full or selective")
        return None
    if said.get("recompute_method") == "block" and pp > 1:
        problems.append(
            "--recompute-method block: leave it out, and give --recompute the number of blocks of each stage"
        )
    return "full"


def _experts(said: Mapping[str, str], ep: int, problems: list[str]) -> dict[str, Any]:
    """Return what is said of experts: how rows travel, how evenly, and by which products."""
    kind = said.get("moe_token_dispatcher_type", "allgather")
    if ep > 1 and kind == "allgather":
        problems.append("--moe-token-dispatcher-type allgather is not priced: write alltoall or flex")
    if kind == "flex" and said.get("moe_flex_dispatcher_backend", "deepep") != "deepep":
        problems.append(f"--moe-flex-dispatcher-backend {said['moe_flex_dispatcher_backend']} is not priced")
    found: dict[str, Any] = {"dispatcher": "deepep" if kind == "flex" or "moe_enable_deepep" in said else None}
    if "moe_router_force_load_balancing" in said:
        found["expert_imbalance"] = 1.0
    if "num_experts" in said:
        found["expert_products"] = "grouped" if "moe_grouped_gemm" in said else "loop"
    return found


def _number(name: str, value: str, problems: list[str]) -> int:
    if value.isdecimal() and len(value) < 12 and int(value) > 0:
        return int(value)
    problems.append(f"--{name.replace('_', '-')} is {value[:40]!r}: give a whole number of 1 or more")
    return 1


def _choice(flag: str, said: Mapping[str, str], known: Mapping[str, str], problems: list[str]) -> str | None:
    """Return ours for the host's word; None where the flag is not given."""
    word = said.get(flag)
    if word is None or word.lower() in known:
        return None if word is None else known[word.lower()]
    problems.append(f"--{flag.replace('_', '-')} {word!r} has no price: priced are {', '.join(known)}")
    return None
