"""Random tiny models under random caps: a plan from traced bytes, beside what the real model holds when it runs it.

`held_bytes` looks at the real model alone and shares no code with what it checks. Needs torch and Transformers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import ODD_CONFIGS, as_saved, describe_here, make_config, preprocessor_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.costs.devices import DEVICES
from trimtab.costs.traced import profile_traced
from trimtab.models.asking.batches import Batches
from trimtab.models.asking.units import split_units
from trimtab.partition.assess import SplitResult
from trimtab.partition.stages import SplitProblem, split_stages
from trimtab.plan.plan import RecomputeDecision
from trimtab.runtime.recompute import apply
from trimtab.specs import WORK_TERMS, FloatArray, ModelSpec, Profile

CASES = (
    "llava llama",
    "llava_next",
    "llava_onevision",
    "internvl qwen2",
    "internvl qwen3, rms, qk norm, mask token, pooled by class token, tied",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "gemma3",
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NO_LIMIT = 2.0**50


# -- what a real model holds ------------------------------------------------------------------------------------------


class Held(TorchDispatchMode):
    """Storages made inside of recomputed layers that still live, by their stage; and where the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.inside = 0, False
        self.alive: dict[int, tuple[int, int]] = {}  # bytes, stage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside:
            return result
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.alive and storage._cdata not in known:
                    self.alive[storage._cdata] = storage.nbytes(), self.stage
                    weakref.finalize(storage, self.alive.pop, storage._cdata)
        return result


class _Saved:
    """What autograd holds in place of a tensor it saved."""

    def __init__(self, tensor: torch.Tensor, stage: int) -> None:
        self.tensor, self.stage = tensor.detach(), stage


def held_bytes(model: nn.Module, inputs: dict[str, Any], stages: Sequence[Sequence[str]]) -> list[int]:
    """Bytes that each of `stages` (names of layers, in forward order) holds when the forward of `model` is over.

    What autograd saved there; what a recomputed layer was handed; and what was made inside one and still lives (results
    that its checkpoint holds), other than for another stage. Parameters and buffers left out.
    """
    boxes: weakref.WeakSet[_Saved] = weakref.WeakSet()
    handed: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    mode, parts = Held(), dict(model.named_modules())

    def enter(stage: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        mode.stage, mode.inside = stage, "forward" in module.__dict__
        if mode.inside:  # recompute is on: its closure holds them all
            handed.extend((stage, weakref.ref(x)) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))

    def pack(tensor: torch.Tensor) -> _Saved:
        box = _Saved(tensor, mode.stage)
        boxes.add(box)
        return box

    with ExitStack() as stack:
        for stage, names in enumerate(stages):
            for name in names:
                if name in parts:
                    hook = parts[name].register_forward_pre_hook(
                        lambda module, args, kwargs, stage=stage: enter(stage, module, args, kwargs), with_kwargs=True
                    )
                    stack.callback(hook.remove)
                    stack.callback(parts[name].register_forward_hook(lambda *_: setattr(mode, "inside", False)).remove)
        stack.enter_context(mode)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor))
        loss = model(**inputs).loss
    gc.collect()
    fixed = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers(), loss)}
    saved = [(box.stage, box.tensor) for box in boxes]
    saved += [(stage, x) for stage, reference in handed if (x := reference()) is not None]
    sizes = {(stage, x.untyped_storage()._cdata): x.untyped_storage().nbytes() for stage, x in saved}
    wanted = {key for _, key in sizes}
    sizes |= {(stage, key): size for key, (size, stage) in mode.alive.items() if key not in wanted}
    found = [0] * len(stages)
    for (stage, key), size in sizes.items():
        found[stage] += 0 if key in fixed else size
    return found


# -- plans under random caps ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomModel:
    """A tiny model drawn at random, traced; and one batch for it."""

    case: str
    attention: str
    spec: ModelSpec
    profile: Profile
    model: Any
    inputs: dict[str, Any]
    work: FloatArray


@dataclass(frozen=True)
class CappedRun:
    """One plan under a cap, and each device's bytes with what the real model holds in place of what was planned."""

    cap_bytes: float
    split: SplitResult
    real_bytes: tuple[float, ...]  # of each device; state, transient and reserve as planned
    saved_ratio: tuple[float, ...]  # real / planned saved bytes of a micro-batch, of each stage

    @property
    def utilisation(self) -> float:
        return max(self.real_bytes) / self.cap_bytes

    @property
    def tiers(self) -> set[str]:
        return {choice.tier for stage in self.split.stages for choice in stage.recompute}


def draw_model(rng: np.random.Generator, case: str, attention: str, dtype: str) -> RandomModel:
    """Random depths, widths and sizes of the batch; weights are random."""
    depth = int(rng.integers(4, 7))
    config = make_config(
        case,
        vision={"depth": depth, "num_hidden_layers": depth, "intermediate_size": int(rng.integers(40, 150))},
        text={
            "num_hidden_layers": int(rng.integers(3, 8)),
            "intermediate_size": int(rng.integers(60, 300)),
            "vocab_size": int(rng.integers(203, 600)),
        },
    )
    saved = as_saved(config)
    spec = describe_here(config, preprocessor=preprocessor_of(config.model_type, ODD_CONFIGS[case][1]))
    traced = profile_traced(saved, spec, DEVICES["H200"], dtype=dtype, attention=attention, packed=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation=attention, dtype=DTYPES[dtype]
    ).train()
    times, text = int(rng.integers(2, 7)), int(rng.integers(20, 400))
    batch = Batches(model, split_units(model), packed=True).make(times, text)
    work = _work_of(model, spec, batch.inputs, batch.num_tokens)
    return RandomModel(case, attention, spec, traced.profile, model, batch.inputs, work)


def run_capped(made: RandomModel, rng: np.random.Generator) -> CappedRun:
    """A random pipeline and a cap between all recomputed and nothing: the solver's plan, run by the real model."""
    num_stages = int(rng.integers(1, 5))
    problem = SplitProblem(
        profile=made.profile,
        num_stages=num_stages,
        work_mean=made.work,
        work_max=made.work,
        memory_bytes=NO_LIMIT,
        num_microbatches=int(rng.integers(1, 9)),
        forbidden_cuts=made.spec.forbidden_cuts,
    )
    most, least = (
        max(device.total_bytes for device in split_stages(replace(problem, recompute=how)).memory)
        for how in ("none", "full")
    )
    cap = float(least + rng.random() * max(0.0, most - least)) + 1.0
    split = split_stages(replace(problem, memory_bytes=cap))
    names = [layer.name for layer in made.spec.layers]
    decision = [
        RecomputeDecision(stage=stage.index, granularity=choice.tier, modules=tuple(names[i] for i in choice.layers))
        for stage in split.stages
        for choice in stage.recompute
    ]
    with apply(made.model, decision):
        held = held_bytes(made.model, made.inputs, [names[s.start : s.stop] for s in split.stages])
    planned = [memory.saved_bytes / n for memory, n in zip(split.memory, split.in_flight, strict=True)]
    real = tuple(
        memory.total_bytes - memory.saved_bytes + n * own
        for memory, n, own in zip(split.memory, split.in_flight, held, strict=True)
    )
    ratio = tuple(own / plan if plan else 1.0 for own, plan in zip(held, planned, strict=True))
    return CappedRun(cap, split, real, ratio)


def _work_of(model: nn.Module, spec: ModelSpec, inputs: dict[str, Any], num_tokens: int) -> FloatArray:
    """Rows and pairs as the vision tower's blocks see them; all pairs of the pack for its text."""
    seen: dict[int, tuple[int, int]] = {}
    parts = dict(model.named_modules())

    def note(number: int, args: Any, kwargs: Any) -> None:
        hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        rows, ends = hidden.shape[:-1].numel(), kwargs.get("cu_seqlens")
        pairs = rows * hidden.shape[-2] if ends is None else int((ends.diff().long() ** 2).sum())
        seen[number] = rows, pairs

    with ExitStack() as stack:
        for i in spec.indices("vision", "block"):
            hook = parts[spec.layers[i].name].register_forward_pre_hook(
                lambda _, args, kwargs, i=i: note(i, args, kwargs), with_kwargs=True
            )
            stack.callback(hook.remove)
        with torch.no_grad():
            model(**inputs)
    windows = {i: spec.layers[i].attention.window for i in seen}
    rows = next(iter(seen.values()))[0]
    work = np.zeros(len(WORK_TERMS))
    work[:2] = 1, rows
    work[2] = next((pairs for i, (_, pairs) in seen.items() if windows[i] is None), rows**2)
    work[3] = next((pairs for i, (_, pairs) in seen.items() if windows[i] is not None), work[2])
    work[4:] = num_tokens, num_tokens**2, num_tokens**2
    return work
