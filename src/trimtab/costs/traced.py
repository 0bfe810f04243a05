"""Bytes and FLOPs of a model's real layers, counted in steps on weights that take no memory.

Needs torch and Transformers, loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trimtab.costs.profile import group_layers, is_unpriced, profile_model
from trimtab.costs.settings import Attention, CostSettings
from trimtab.costs.traced_fit import (
    PATCHES,
    PATCHES_SQ,
    PATCHES_WINDOWED,
    TOKENS,
    TOKENS_SQ,
    KindCounts,
    Probe,
    Terms,
    TracedProfile,
    fit_counts,
    traced_profile,
)
from trimtab.costs.traced_kernels import fuse_kernels
from trimtab.costs.traced_step import trace_step
from trimtab.costs.traced_weights import build_weightless
from trimtab.errors import ConfigError, UnknownModelError
from trimtab.models.asking.batches import Batch, Batches
from trimtab.models.asking.build import complete
from trimtab.models.asking.inputs import quietly
from trimtab.models.asking.units import split_units
from trimtab.specs import NUM_WORK_TERMS, DeviceSpec, MeasuredWork, ModelSpec, ParallelDims, Tower

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROW = 256
"""Tokens of a step are multiples of this, which chunks of linear attention (64 to 256) divide."""
_LARGE = (2048, 4096)
"""Rows of each tower, about, in the steps that give transients: so many that rows outweigh weights' gradients."""
_LARGE_EAGER = (1024, 2048, 3072)
_SMALL = ((1, 16), (2, 300), (3, 16), (3, 560), (2, 560))
"""(multiples of the smallest images, words) of the steps that give bytes and FLOPs; few sizes, for fake operations of
one size are remembered."""


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
    rows: tuple[int, ...] | None = None,
) -> TracedProfile:
    """The profile of `model` (described from `config`) with bytes counted on its layers as Transformers builds them.

    At tp 1; one layer of each kind is real, the others hand their rows on; nothing takes the memory of weights.
    `packed`: samples share a row of tokens, so SDPA and eager attention are handed masks. `compare_fused`: count what
    fused norms and gates would keep too. `rows`: of the steps that give transients; few are enough for narrow layers.
    Seconds are the formulas'. Raises `UnknownModelError` where Transformers has no such model or takes no step.
    """
    settings = CostSettings(
        dims=ParallelDims(),
        dtype=dtype,
        attention=attention,
        packed=packed,
        fused_kernels=fused_kernels,
        frozen_towers=frozen_towers,
    )
    numbers = group_layers(model, frozen_towers)
    groups = {numbers.index(group): group for group in set(numbers)}  # by the first layer of each
    tracer = _Tracer(config, model, settings, sorted(groups))
    kept = [tracer.probe(times, words) for times, words in _SMALL]
    unit = max(1.0, kept[0].work[tracer.numbers[0]][PATCHES])
    large = rows or (_LARGE_EAGER if attention == "eager" else _LARGE)
    recomputed = [tracer.probe(max(1, round(size / unit)), size, recompute=True) for size in large]
    fused = []
    if compare_fused and not fused_kernels:
        fuse_kernels(tracer.module)
        fused = [tracer.probe(*_SMALL[0], backward=False)]
    warnings = tracer.say()
    if attention == "eager":
        warnings.append(
            "Eager attention keeps the scores of every pair: bytes grow with the square of the rows; "
            "use sdpa or flash attention."
        )
    how = f"{dtype}, {attention} attention{', fused norms and gates' if fused_kernels else ''}"
    if tracer.packed and attention != "flash":
        how += ", several samples to a row, so with masks"
    kinds = fit_counts(model, settings, groups, kept, recomputed, fused)
    warnings += _list_misfits(model, kinds)
    idle = set(groups.values()) - {x.group for x in kinds} if tracer.first.has_images else set()
    analytic = profile_model(
        price_layers(model, kinds, numbers, idle=idle),
        device,
        dtype=dtype,
        attention=attention,
        packed=packed,
        fused_kernels=fused_kernels,
        frozen_towers=frozen_towers,
    )
    return traced_profile(analytic, model, settings, kinds, how=how, warnings=warnings)


def _list_misfits(model: ModelSpec, kinds: Sequence[KindCounts]) -> list[str]:
    """A sentence for layers whose counts are no sums of rows and pairs."""
    loose = [x for x in kinds if x.misfit]
    if not loose:
        return []
    worst = max(loose, key=lambda x: x.misfit)
    return [
        f"Counts of {len(loose)} kinds of layers are no sums of rows and pairs of their own (cross-attention, "
        f"expert rows): the fit of {model.layers[worst.layer].name} leaves {worst.misfit:.1%}."
    ]


def price_layers(
    model: ModelSpec, kinds: Sequence[KindCounts], groups: Sequence[int], *, idle: Collection[int]
) -> ModelSpec:
    """`model` with the work that was counted of layers that no formula knows; `groups`: the kind of each layer.

    `idle`: kinds that steps with images never ran (decoders of images): they have no work. An audio tower's has.
    """
    counted = {kind.group: MeasuredWork(forward_flops=kind.forward_flops, kept_bytes=kind.kept_bytes) for kind in kinds}
    none = (0.0,) * NUM_WORK_TERMS
    layers = []
    for layer, group in zip(model.layers, groups, strict=True):
        work = counted.get(group)
        if work is None and group in idle and layer.tower != "audio":
            work = MeasuredWork(forward_flops=none, kept_bytes=none)
        if is_unpriced(layer) and work is not None:
            crosses = layer.attention is not None and layer.attention.cross  # its pairs have no term
            layer = replace(layer, measured=work, attention=None if crosses else layer.attention)
        layers.append(layer)
    return replace(model, layers=tuple(layers))


class _Tracer:
    """A weightless model of which one layer of each kind is real, and steps of it."""

    def __init__(
        self,
        config: Mapping[str, Any],
        model: ModelSpec,
        settings: CostSettings,
        chosen: Sequence[int],
    ) -> None:
        self.model, self.settings = model, settings
        likes = _find_idle(model, chosen)
        for idle in (likes, {}):
            self._build(config, idle)
            with quietly():
                self.batches = Batches(self.module, split_units(self.module), packed=settings.packed)
            try:
                self.first = self.batches.make(1, 16, multiple=_ROW)
            except UnknownModelError:
                if not idle:
                    raise
                continue
            if self.first.has_images:  # else a block that is real may lie in a tower that images never reach
                break
        self.packed = self.first.packed

    def _build(self, config: Mapping[str, Any], idle: Mapping[str, str]) -> None:
        model, settings = self.model, self.settings
        with quietly():
            self.module = build_weightless(
                complete(config),
                dtype=DTYPES[settings.dtype],
                attention=settings.attention,
                fused_kernels=settings.fused_kernels,
                idle=idle,
            )
        parts = dict(self.module.named_modules())
        self.numbers = tuple(i for i, x in enumerate(model.layers) if x.name in parts and x.name not in idle)
        self.names = [model.layers[i].name for i in self.numbers]
        _compare_sizes(parts, model, self.numbers)
        for layer in model.layers:
            if layer.tower in settings.frozen_towers and layer.name in parts:
                parts[layer.name].requires_grad_(False)

    def say(self) -> list[str]:
        """What the steps are not."""
        said = []
        if not self.first.has_images and any(x.tower == "vision" for x in self.model.layers):
            said.append("No image could be passed through the model: its vision tower has the bytes of formulas.")
        if self.settings.packed and not self.packed:
            said.append("The model takes no positions that restart: steps were of one sample each.")
        return said

    def probe(self, times: int, num_text: int, *, recompute: bool = False, backward: bool = True) -> Probe:
        model = self.model
        batch = self.batches.make(times, num_text, multiple=_ROW)
        blocks = [name for i, name in zip(self.numbers, self.names, strict=True) if model.layers[i].kind == "block"]
        rows: dict[int, tuple[int, int]] = {}
        with ExitStack() as stack:
            stack.enter_context(quietly())
            for number, name in zip(self.numbers, self.names, strict=True):
                if model.layers[number].tower in ("vision", "projector"):
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
        return Probe(trace=trace, numbers=self.numbers, work=self._work(rows, batch))

    def _work(self, rows: Mapping[int, tuple[int, int]], batch: Batch) -> dict[int, Terms]:
        """Of each layer: a windowed block's own pairs are in its windowed term, those of others in the squares."""
        layers = self.model.layers
        blocks = [i for i in rows if layers[i].tower == "vision" and layers[i].kind == "block"]
        patches = rows[(blocks or list(rows))[0]][0] if rows else 0
        squares = next((rows[i][1] for i in blocks if self._is_full(i)), patches**2)
        result = {}
        for number in self.numbers:
            terms = [0.0] * NUM_WORK_TERMS
            terms[0], terms[PATCHES], terms[TOKENS] = 1.0, float(patches), float(batch.num_tokens)
            terms[PATCHES_SQ] = float(squares)
            terms[PATCHES_WINDOWED] = float(rows[number][1] if number in blocks else squares)
            terms[TOKENS_SQ] = terms[TOKENS_SQ + 1] = float(batch.num_pairs)
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
    hidden = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    rows = hidden.shape[:-1].numel()
    ends = kwargs.get("cu_seqlens")
    if ends is None:
        return rows, rows * (hidden.shape[-2] if hidden.dim() > 1 else 1)
    return rows, int((ends.diff().long() ** 2).sum())


def _find_idle(model: ModelSpec, chosen: Sequence[int]) -> dict[str, str]:
    """Blocks that need not be real, each with the earlier one that stands for it; those that change their rows are."""
    first = {model.layers[i].alike: model.layers[i].name for i in reversed(chosen)}
    return {
        x.name: first[x.alike]
        for i, x in enumerate(model.layers)
        if x.kind == "block"
        and i not in chosen
        and x.alike in first
        and (x.hidden_size, x.rows_per_input) == (x.output_size, x.rows_out_per_input)
    }


def _compare_sizes(parts: Mapping[str, nn.Module], model: ModelSpec, numbers: Sequence[int]) -> None:
    seen: set[int] = set()
    for layer in (model.layers[i] for i in numbers):
        own = {id(p): p.numel() for p in parts[layer.name].parameters()}
        count = sum(own.values())
        fresh = sum(num for key, num in own.items() if key not in seen)  # a tied weight is an earlier layer's
        seen |= own.keys()
        if layer.num_params and layer.num_params not in (count, fresh):
            raise ConfigError(
                f"{layer.name} has {layer.num_params} parameters by its description, and Transformers "
                f"{transformers.__version__} builds it with {count}: give the config.json as the model ships it"
            )
