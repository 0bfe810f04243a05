"""Bytes and FLOPs of a model's real layers, counted in steps on weights that take no memory.

Kernels that need a GPU have stand-ins, which allocate and keep what the real ones do; adapters compute as PEFT's do.
Needs torch and Transformers, loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.measured.timed_model import ROW, KindModel, count_pairs, refusing
from trimtab.costs.measured.traced_fit import PATCHES, KindCounts, Probe, TracedProfile, fit_counts, traced_profile
from trimtab.costs.measured.traced_step import trace_step
from trimtab.costs.profile import group_layers, is_unpriced, price_model
from trimtab.models.asking.inputs import quietly
from trimtab.specs import NUM_WORK_TERMS, DeviceSpec, MeasuredWork, ModelSpec, ParallelDims

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
    rows: tuple[int, ...] | None = None,
    **choices: Any,
) -> TracedProfile:
    """The profile of `model` (described from `config`) with bytes counted on its layers as Transformers builds them.

    Use it where a model's layers are not those that the formulas know; docs/memory.md shows it.

    At tp 1; one layer of each kind is real, the others hand their rows on; nothing takes the memory of weights.
    `choices` are fields of `CostSettings` other than dims; attention is "sdpa" unless they say so. With `packed`, SDPA
    and eager attention are handed masks. `rows`: of the steps that give transients; few are enough for narrow layers.
    Seconds are the formulas'. Raises `UnknownModelError` where Transformers has no such model or takes no step.
    """
    settings = CostSettings(dims=ParallelDims(), **{"attention": "sdpa", **choices})
    numbers = group_layers(model, settings.frozen_towers, settings.lora)
    groups = {numbers.index(group): group for group in set(numbers)}  # by the first layer of each
    traced = KindModel(config, model, settings, sorted(groups))
    # small steps give what is kept, exactly
    kept = [_probe(traced, times, words) for times, words in _SMALL]
    # large ones give transients, which are maxima of sums
    unit = max(1.0, kept[0].work[traced.numbers[0]][PATCHES])
    large = rows or (_LARGE_EAGER if settings.attention == "eager" else _LARGE)
    recomputed = [_probe(traced, max(1, round(size / unit)), size, recompute=True) for size in large]
    # say what the steps were
    warnings = traced.say()
    if settings.attention == "eager":
        warnings.append("Eager attention keeps all pairs: bytes grow with the square of the rows; use sdpa or flash.")
    how = f"{settings.dtype}, {settings.attention} attention"
    if settings.fused_kernels:
        how += ", fused norms and gates"
    if traced.packed and settings.attention != "flash":
        how += ", several samples to a row, so with masks"
    # coefficients of each kind; layers without a formula get their work from them
    kinds = fit_counts(model, settings, groups, kept, recomputed)
    warnings += _list_misfits(model, kinds)
    idle = set(groups.values()) - {x.group for x in kinds} if traced.has_images else set()
    analytic = price_model(price_layers(model, kinds, numbers, idle=idle), device, settings)
    return traced_profile(analytic, model, settings, kinds, how=how, warnings=warnings)


def _list_misfits(model: ModelSpec, kinds: Sequence[KindCounts]) -> list[str]:
    """Name layers whose counts are no sums of rows and pairs, in a sentence."""
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
    """Return `model` with the work that was counted of layers that no formula knows; `groups`: the kind of each layer.

    `idle`: kinds that steps with images never ran (decoders of images): they have no work. An audio tower's has.
    """
    counted = {kind.group: MeasuredWork(forward_flops=kind.forward_flops, kept_bytes=kind.kept_bytes) for kind in kinds}
    none = (0.0,) * NUM_WORK_TERMS
    layers = []
    for layer, group in zip(model.layers, groups, strict=True):
        work = counted.get(group)
        # what no image reaches has no work
        if work is None and group in idle and layer.tower != "audio":
            work = MeasuredWork(forward_flops=none, kept_bytes=none)
        if is_unpriced(layer) and work is not None:
            crosses = layer.attention is not None and layer.attention.cross  # its pairs have no term
            layer = replace(layer, measured=work, attention=None if crosses else layer.attention)
        layers.append(layer)
    return replace(model, layers=tuple(layers))


def _probe(kinds: KindModel, times: int, num_text: int, *, recompute: bool = False) -> Probe:
    """Trace one step on `times` the smallest images and `num_text` words; every block recomputed, or none."""
    layers = kinds.model.layers
    batch = kinds.batches.make(times, num_text, multiple=ROW)
    blocks = [name for i, name in zip(kinds.numbers, kinds.names, strict=True) if layers[i].kind == "block"]
    pairs: dict[int, tuple[int, int]] = {}
    with ExitStack() as stack:
        stack.enter_context(quietly())
        stack.enter_context(refusing(kinds.model))
        # note how many rows and pairs each layer of the tower sees
        for number, name in zip(kinds.numbers, kinds.names, strict=True):
            if layers[number].tower in ("vision", "projector"):
                part = kinds.module.get_submodule(name)
                stack.callback(part.register_forward_pre_hook(_note_pairs(pairs, number), with_kwargs=True).remove)
        # the first micro-batch aside, gradients of earlier ones are there
        trace = trace_step(
            kinds.module,
            kinds.names,
            batch.inputs,
            recomputed=blocks if recompute else (),
            rng_state_bytes=16,
            accumulate=True,
        )
    return Probe(trace=trace, numbers=kinds.numbers, work=kinds.work(pairs, batch))


def _note_pairs(pairs: dict[int, tuple[int, int]], number: int) -> Callable[..., None]:
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pairs[number] = count_pairs(args, kwargs)

    return note
