"""Is the plan in force? What the first step runs, and each place where that is not what was planned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trimtab.plan.plan import Plan
from trimtab.runtime.data.collate import loaded_attention
from trimtab.runtime.recompute import applied_to
from trimtab.units import unfold_modules

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one step runs; over all ranks but for the largest pack and the layers, which are this rank's."""

    ranks: int
    num_packs: int
    most_tokens: int
    dtype: torch.dtype  # of products
    attention: str  # as Transformers spells it
    recomputed: Mapping[str, str]  # layer -> how


def recomputed_layers(model: nn.Module) -> dict[str, str]:
    """Return the layers that recompute, by a plan or by Transformers' own switch."""
    own = {name: "full" for name, layer in model.named_modules() if _is_switched_on(layer)}
    return {_WRAPPERS.sub("", name): how for name, how in (own | dict(applied_to(model))).items()}


def attention_in(model: Any) -> str:
    """Return the implementation that the language model runs, as Transformers spells it."""
    return str(loaded_attention(model.config))


def _is_switched_on(layer: Any) -> bool:
    kinds = {kind.__name__ for kind in type(layer).__mro__}
    return "GradientCheckpointingLayer" in kinds and bool(getattr(layer, "gradient_checkpointing", False))


def differences(plan: Plan, ran: Ran, *, own_layers: bool = False) -> Iterator[str]:
    """Yield a sentence a difference; `own_layers`: this rank holds a part of the model, `ran` names what it has."""
    parallel, schedule, training = plan.decisions.parallel, plan.decisions.schedule, plan.inputs.training
    ranks = plan.decisions.num_devices
    if ran.ranks != ranks:
        yield f"{ran.ranks} ranks run, and {ranks} were planned: their memory and the time of a step are others"
    packs = parallel.dp * schedule.num_microbatches
    if ran.num_packs != packs:
        yield f"a step has {ran.num_packs} packs, and {packs} were planned"
    if ran.most_tokens > plan.decisions.packing.max_tokens:
        yield f"a pack has {ran.most_tokens} tokens, and at most {plan.decisions.packing.max_tokens} were planned"
    dtype = _NAMES.get(ran.dtype, str(ran.dtype))
    planned = "bf16" if training.dtype in ("fp8", "mxfp8") else training.dtype
    if dtype != planned:
        yield f"products are {dtype}, and {training.dtype} was planned"
    attention = "flash" if ran.attention.startswith("flash") else ran.attention
    if attention != training.attention:
        yield f"attention is {ran.attention}, and {training.attention} was planned"
    layers = {name: x.granularity for x in plan.decisions.recompute for name in unfold_modules(x.modules)}
    left = [] if own_layers else [name for name in layers if name not in ran.recomputed]
    more = [name for name in ran.recomputed if name not in layers]
    other = [name for name, how in ran.recomputed.items() if layers.get(name, how) != how]
    for names, what in (
        (left, "do not recompute, and should"),
        (more, "recompute, and should not"),
        (other, "recompute another part of themselves than planned"),
    ):
        if names:
            yield f"{len(names)} layers {what} ({names[0]} the first)"
