"""Bytes and FLOPs of a model's real layers, counted in steps on weights that take no memory.

Needs torch and Transformers, loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from trimtab.costs.profile import profile_model
from trimtab.costs.settings import Attention, CostSettings
from trimtab.costs.traced_fit import (
    PATCHES,
    PATCHES_SQ,
    PATCHES_WINDOWED,
    TOKENS,
    TOKENS_SQ,
    Probe,
    Terms,
    TracedProfile,
    fit_counts,
    traced_profile,
)
from trimtab.costs.traced_inputs import check_family, find_unit, make_batch
from trimtab.costs.traced_kernels import fuse_kernels
from trimtab.costs.traced_step import trace_step
from trimtab.costs.traced_weights import build_weightless
from trimtab.errors import ConfigError
from trimtab.specs import NUM_WORK_TERMS, DeviceSpec, ModelSpec, ParallelDims, Tower

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_THREE_AXES = ("qwen2_vl", "qwen2_5_vl")  # whose rotary sections have no default
_SMALL = ((2, 48), (3, 16), (4, 120), (3, 176), (5, 80))
"""(multiples of the smallest images, text tokens) of the steps that give bytes and FLOPs."""
_LARGE = (2048, 4096)
"""Rows of each tower, about, in the steps that give transients: so many that rows outweigh weights' gradients."""
_LARGE_EAGER = (1024, 2048, 3072)
_FUSED = 1  # of the small steps, taken with fused kernels: what these save is so much a row


def profile_traced(
    config: Mapping[str, Any],
    model: ModelSpec,
    device: DeviceSpec,
    *,
    dtype: str = "bf16",
    attention: Attention = "sdpa",
    packed: bool = True,
    fused_kernels: bool = False,
    frozen_towers: frozenset[Tower] = frozenset(),
    compare_fused: bool = True,
) -> TracedProfile:
    """The profile of `model` (described from `config`) with bytes counted on its layers as Transformers builds them.

    At tp 1; one layer of each kind is real, the others hand their rows on; nothing takes the memory of weights.
    `packed`: samples share a row of tokens, so SDPA and eager attention are handed masks. `compare_fused`: count what
    fused norms and gates would keep too. Seconds are the formulas'.
    """
    check_family(model)
    settings = CostSettings(
        dims=ParallelDims(),
        dtype=dtype,
        attention=attention,
        packed=packed,
        fused_kernels=fused_kernels,
        frozen_towers=frozen_towers,
    )
    analytic = profile_model(
        model,
        device,
        dtype=dtype,
        attention=attention,
        packed=packed,
        fused_kernels=fused_kernels,
        frozen_towers=frozen_towers,
    )
    groups: dict[int, int] = {}
    for number, cost in enumerate(analytic.layers):
        if cost.group not in groups.values():
            groups[number] = cost.group
    tracer = _Tracer(config, model, settings, sorted(groups))
    kept = [tracer.probe(size, text) for size, text in tracer.small_sizes()]
    large = _LARGE_EAGER if attention == "eager" else _LARGE
    recomputed = [tracer.probe(size, size, recompute=True) for size in large]
    fused = []
    if compare_fused and not fused_kernels:
        fuse_kernels(tracer.module)
        fused = [tracer.probe(size, text, backward=False) for size, text in tracer.small_sizes()[:_FUSED]]
    warnings = []
    if attention == "eager":
        warnings.append(
            "Eager attention keeps the scores of every pair: bytes grow with the square of the rows; "
            "use sdpa or flash attention."
        )
    how = f"{dtype}, {attention} attention{', fused norms and gates' if fused_kernels else ''}"
    if packed and attention != "flash":
        how += ", several samples to a row, so with masks"
    kinds = fit_counts(model, settings, groups, kept, recomputed, fused)
    return traced_profile(analytic, model, settings, kinds, how=how, warnings=warnings)


class _Tracer:
    """A weightless model of which one layer of each kind is real, and steps of it."""

    def __init__(
        self,
        config: Mapping[str, Any],
        model: ModelSpec,
        settings: CostSettings,
        chosen: Sequence[int],
    ) -> None:
        self.model, self.settings, self.dtype = model, settings, DTYPES[settings.dtype]
        idle = [x.name for i, x in enumerate(model.layers) if x.kind == "block" and i not in chosen]
        self.module = build_weightless(
            _build_config(config, model),
            dtype=self.dtype,
            attention=settings.attention,
            fused_kernels=settings.fused_kernels,
            idle=idle,
        )
        parts = dict(self.module.named_modules())
        idle_names = set(idle)
        self.numbers = tuple(i for i, x in enumerate(model.layers) if x.name in parts and x.name not in idle_names)
        self.names = [model.layers[i].name for i in self.numbers]
        _compare_sizes(parts, model, self.numbers)
        for layer in model.layers:
            if layer.tower in settings.frozen_towers and layer.name in parts:
                parts[layer.name].requires_grad_(False)
        self.unit = find_unit(self.module, model, self.dtype)

    def small_sizes(self) -> list[tuple[int, int]]:
        return [(self.unit.patches * times, text) for times, text in _SMALL]

    def probe(self, size: int, num_text: int, *, recompute: bool = False, backward: bool = True) -> Probe:
        model, settings = self.model, self.settings
        batch = make_batch(
            self.module,
            model,
            self.unit,
            size=size,
            num_text=num_text,
            packed=settings.packed,
            dtype=self.dtype,
        )
        blocks = [name for i, name in zip(self.numbers, self.names, strict=True) if model.layers[i].kind == "block"]
        rows: dict[int, tuple[int, int]] = {}
        with ExitStack() as stack:
            for number, name in zip(self.numbers, self.names, strict=True):
                if model.layers[number].tower == "vision" and model.layers[number].kind == "block":
                    part = self.module.get_submodule(name)
                    stack.callback(part.register_forward_pre_hook(_note_pairs(rows, number), with_kwargs=True).remove)
            # the first micro-batch aside, gradients of earlier ones are there
            trace = trace_step(
                self.module,
                self.names,
                batch.inputs,
                recomputed=blocks if recompute else (),
                rng_state_bytes=16,
                accumulate=True,
                backward=backward,
            )
        return Probe(trace=trace, numbers=self.numbers, work=self._work(rows, batch.num_tokens))

    def _work(self, rows: Mapping[int, tuple[int, int]], num_tokens: int) -> dict[int, Terms]:
        """Of each layer: a windowed block's own pairs are in its windowed term, those of others in the squares."""
        patches = next(iter(rows.values()))[0]
        squares = next((pairs for i, (_, pairs) in rows.items() if self._is_full(i)), patches**2)
        result = {}
        for number in self.numbers:
            terms = [0.0] * NUM_WORK_TERMS
            terms[0], terms[PATCHES], terms[TOKENS] = 1.0, float(patches), float(num_tokens)
            terms[PATCHES_SQ] = float(squares)
            terms[PATCHES_WINDOWED] = float(rows[number][1] if number in rows else squares)
            terms[TOKENS_SQ] = terms[TOKENS_SQ + 1] = float(num_tokens**2)
            result[number] = tuple(terms)
        return result

    def _is_full(self, number: int) -> bool:
        attention = self.model.layers[number].attention
        return attention is not None and attention.window is None


def _note_pairs(rows: dict[int, tuple[int, int]], number: int) -> Callable[..., None]:
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows[number] = _count_pairs(args, kwargs)

    return note


def _count_pairs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows that enter a block of the vision tower, and the pairs between them that its attention computes."""
    hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    rows = hidden.shape[:-1].numel()
    ends = kwargs.get("cu_seqlens")
    if ends is None:
        return rows, rows * hidden.shape[-2]
    return rows, int((ends.diff().long() ** 2).sum())


def _build_config(config: Mapping[str, Any], model: ModelSpec) -> Any:
    fields = dict(config)
    built = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    if model.family in _THREE_AXES and "mrope_section" not in (built.text_config.rope_parameters or {}):
        raise ConfigError(
            f"mrope_section of text_config is missing in the configuration of {model.family}, and Transformers' layers "
            "read it, as a description needs not: give the config.json as the model ships it"
        )
    return built


def _compare_sizes(parts: Mapping[str, nn.Module], model: ModelSpec, numbers: Sequence[int]) -> None:
    for layer in (model.layers[i] for i in numbers):
        count = sum(p.numel() for p in parts[layer.name].parameters())
        if layer.num_params and count != layer.num_params:  # a tied head owns none
            raise ConfigError(
                f"{layer.name} has {layer.num_params} parameters by its description, and Transformers "
                f"{transformers.__version__} builds it with {count}: give the config.json as the model ships it"
            )
