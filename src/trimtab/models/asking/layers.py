"""Units and what they did in a forward pass -> the layers of a model, in forward order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from trimtab.models.asking.blocks import BlockShape, entering_width, find_norm, is_matmul, read_block
from trimtab.models.asking.forward import Pass, RanUnit
from trimtab.models.asking.units import Unit, find_head
from trimtab.specs import (
    NUM_WORK_TERMS,
    WORK_TERMS,
    AttentionSpec,
    CacheSpec,
    LayerKind,
    LayerSpec,
    Linear,
    MeasuredWork,
    Tower,
)

_BARE_MATRIX = re.compile(r"weight|proj|kernel")
SLACK = 1e-3  # counts are whole numbers; convolutions at the edge of an image are not


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Text of two lengths, and one image; None where no call of ours ran."""

    short: Pass | None
    long: Pass | None
    num_short: int
    num_long: int
    image: Pass | None
    num_patches: int  # rows of the vision tower's blocks in `image`
    short_cached: Pass | None = None  # the texts again, with a cache
    long_cached: Pass | None = None


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """One unit in the passes; nothing ran where none reached it."""

    ran: RanUnit = field(default_factory=RanUnit)
    base: int = 1  # rows of its tower in that pass
    shorter: RanUnit | None = None  # in the shorter text


def describe_units(model: Any, units: list[Unit], passes: Passes) -> list[LayerSpec]:
    """Return a layer for every unit."""
    head, windows = find_head(model), _windows(model, units)
    firsts = {tower: first_block(units, tower) for tower in main_lists(units)}
    starts = {tower: units.index(block) for tower, block in firsts.items() if block is not None}
    widths = {tower: _width_of(block, passes) for tower, block in firsts.items()}
    layers = []
    for i, unit in enumerate(units):
        seen = _seen(unit, passes)
        kind = _kind(unit, head, before=i < starts.get(unit.tower, 0))
        width = widths.get(unit.tower, widths["language"])
        if kind == "block":
            layer = _block(unit, seen, width, windows.get(unit.path))
        else:
            layer = _other(unit, kind, seen, width)
        layer = replace(layer, linears=read_linears(unit.module))
        if unit.tower == "audio":  # samples hold none
            layer = replace(layer, rows_per_input=0.0, rows_out_per_input=0.0)
        if unit.tower in ("vision", "projector") and passes.image is not None and unit.path in passes.image.unread:
            rows_out = 1.0 if layer.kind == "norm" else layer.rows_out_per_input  # the tower's rows pass it by
            layer = replace(layer, unread=True, rows_out_per_input=rows_out)
        layers.append(layer)
    return layers


def read_linears(module: Any) -> tuple[Linear, ...]:
    """Return those of a unit's modules that PEFT takes for linear layers; none where it has no module."""
    found = {name: x for name, x in (module.named_modules() if module else ()) if isinstance(x, nn.Linear)}
    return tuple(
        Linear(name=name, in_width=int(x.weight.shape[1]), out_width=int(x.weight.shape[0]))
        for name, x in found.items()
    )


def main_lists(units: list[Unit]) -> dict[Tower, str | None]:
    """Return the list of each tower that holds most blocks."""
    found: dict[Tower, str | None] = {}
    for tower in ("vision", "language", "audio"):
        counts = Counter(x.list_path for x in units if x.tower == tower and x.list_path is not None)
        found[tower] = counts.most_common(1)[0][0] if counts else None
    return found


def first_block(units: list[Unit], tower: Tower) -> Unit | None:
    """The first element of the tower's main list; None without one."""
    path = main_lists(units)[tower]
    return None if path is None else next(x for x in units if x.list_path == path)


# -- kinds ----------------------------------------------------------------------------------------------------------


def _kind(unit: Unit, head: Any, *, before: bool) -> LayerKind:
    module = unit.module
    if module is None:
        return "embed"
    if module is head:
        return "head"
    if find_norm(module) and not any(p.dim() > 1 for p in unit.parameters.values()):
        return "norm"
    attends = any("Attention" in type(x).__name__ for x in module.modules())
    if unit.list_path is not None and any(is_matmul(x) for x in module.modules()):
        return "projector" if unit.tower == "projector" and not attends else "block"
    if not any(is_matmul(x) for x in module.modules()) and not _bare_matrices(module):
        return "embed"
    if unit.tower == "language":
        return "block"
    if unit.tower != "projector" and before:
        return "embed"
    return "projector"


def _bare_matrices(module: Any) -> int:
    """Count the values of matrices that are parameters without a module of their own."""
    return sum(
        p.numel()
        for part in module.modules()
        if not is_matmul(part) and not isinstance(part, nn.Embedding)
        for name, p in part.named_parameters(recurse=False)
        if p.dim() == 2 and _BARE_MATRIX.search(name) and "Embedding" not in type(part).__name__
    )


# -- layers ---------------------------------------------------------------------------------------------------------


def _block(unit: Unit, seen: _Seen, width: int, window: int | None) -> LayerSpec:
    causal = unit.tower == "language" and bool(_is_causal(unit.module))
    shape, ran = read_block(unit.module, causal=causal, window=window), seen.ran
    measured = None if _is_plain(shape, seen) else _measure(unit, shape, seen)
    hidden = ran.width_in or width
    rows = ran.rows_in / seen.base if ran.rows_in else 1.0
    attention = shape.attention
    if attention is None and measured is not None and ran.attention is not None:
        # latent attention: keys and values of every head are cached
        attention = replace(ran.attention, causal=causal, window=window)
    if attention is not None and unit.tower != "language" and ran.pair_flops:
        attention = replace(attention, window=_seen_window(attention, ran))
    return LayerSpec(
        name=unit.path,
        tower=unit.tower,
        kind="block",
        hidden_size=hidden,
        output_size=ran.width_out or hidden,
        num_params=unit.num_params,
        num_matmul_params=shape.num_matmul_params,
        rows_per_input=rows,
        rows_out_per_input=ran.rows_out / seen.base if ran.rows_in else rows,
        attention=attention,
        mlp=shape.mlp,
        norm=shape.norm,
        num_norms=shape.num_norms,
        layer_scale=shape.layer_scale,
        measured=measured,
    )


def _flops_per_pair(a: AttentionSpec) -> float:
    return 2.0 * a.num_heads * (a.head_dim + a.value_head_dim)


def _seen_window(a: AttentionSpec, ran: RanUnit) -> int | None:
    """Return the rows that a query met on average, where they are fewer than the image's."""
    met = ran.pair_flops / _flops_per_pair(a) / ran.rows_in
    return None if met * ran.num_together >= 0.999 * ran.rows_in else round(met)


def _other(unit: Unit, kind: LayerKind, seen: _Seen, width: int) -> LayerSpec:
    module, ran = unit.module, seen.ran
    matmuls = [] if module is None else [x for x in module.modules() if is_matmul(x)]
    num_matmul = sum(x.weight.numel() for x in matmuls) + (0 if module is None else _bare_matrices(module))
    entering = int(matmuls[0].weight[0].numel()) if matmuls else width
    leaving = int(matmuls[-1].weight.shape[0]) if matmuls else width
    if module is None or (kind == "embed" and unit.tower == "language"):
        leaving = entering = _last_width(unit, width)
    elif kind == "norm":
        leaving = entering = next(iter(unit.parameters.values())).numel()
    elif kind == "embed":
        leaving = ran.width_out or leaving
    elif not matmuls:  # a bare matrix
        entering, leaving = ran.width_in or entering, ran.width_out or leaving
    if kind == "embed" and unit.tower != "language":
        entering = leaving
    if kind == "head":
        entering, leaving = int(module.weight.shape[1]), int(module.weight.shape[0])
    rows_out = ran.rows_out / seen.base if ran.rows_out else 1.0
    rows = ran.weight_flops / 2 / num_matmul / seen.base if num_matmul and ran.weight_flops else rows_out
    if (kind == "embed" and not num_matmul) or (kind in ("head", "embed") and unit.tower == "language"):
        rows = rows_out = 1.0
    norm = next((x for x in map(find_norm, module.modules()) if x), None) if module is not None else None
    return LayerSpec(
        name=unit.path,
        tower="projector" if kind == "projector" and unit.tower == "vision" else unit.tower,
        kind=kind,
        hidden_size=entering,
        output_size=leaving,
        num_params=unit.num_params,
        num_matmul_params=num_matmul,
        rows_per_input=rows,
        rows_out_per_input=rows_out,
        norm=norm if kind in ("norm", "projector") else None,
        bare=module is None,
    )


def _last_width(unit: Unit, width: int) -> int:
    largest = max(unit.parameters.values(), key=lambda x: x.numel())
    return int(largest.shape[-1]) if largest.dim() else width


def _is_causal(module: Any) -> bool:
    said = [x.is_causal for x in module.modules() if isinstance(getattr(x, "is_causal", None), bool)]
    return said[0] if said else True


# -- work -----------------------------------------------------------------------------------------------------------


def _seen(unit: Unit, passes: Passes) -> _Seen:
    if unit.tower == "language":
        if passes.long is not None and unit.path in passes.long.ran:
            shorter = passes.short.ran.get(unit.path) if passes.short is not None else None
            return _Seen(ran=passes.long.ran[unit.path], base=passes.num_long, shorter=shorter)
    elif passes.image is not None and unit.path in passes.image.ran and passes.num_patches:
        return _Seen(ran=passes.image.ran[unit.path], base=passes.num_patches)
    return _Seen()


def _is_plain(shape: BlockShape, seen: _Seen) -> bool:
    """Return whether the formulas' products and pairs ran; without a pass, whether every weight is explained.

    What attention and MLP leave unexplained is one matrix more that each row meets: gates, routers, side inputs.
    """
    a, ran, rest = shape.attention, seen.ran, shape.num_matmul_params - shape.explained
    if shape.num_attentions > 1:
        return False
    if a is not None and a.cross and not ran.rows_in:
        return True
    if (a is None and shape.mlp is None) or rest < 0:
        return False
    if not ran.rows_in:
        return rest == 0
    if a is not None and a.cross:
        return True
    # some code multiplies zeros by the experts that no token chose; trainers do not
    if not any(
        abs(ran.weight_flops - 2.0 * weights * ran.rows_in) <= SLACK * ran.weight_flops
        for weights in (shape.num_matmul_params, shape.num_all_experts)
    ):
        return False
    if a is None:
        return ran.pair_flops == ran.other_flops == 0
    pairs = (ran.pair_flops + ran.other_flops) / _flops_per_pair(a)
    most = float(ran.rows_in) ** 2
    return 0 < pairs <= most * (1 + SLACK) and (ran.pair_flops == 0 or ran.other_flops == 0)


def _measure(unit: Unit, shape: BlockShape, seen: _Seen) -> MeasuredWork:
    """Fit lines and parabolas through what ran: rows in their own term, pairs of fused attention in that of squares."""
    if unit.tower == "audio":
        return MeasuredWork(forward_flops=(0.0,) * NUM_WORK_TERMS, kept_bytes=(0.0,) * NUM_WORK_TERMS)
    a, ran, T = shape.attention, seen.ran, float(seen.base)
    if not ran.rows_in or (a is not None and a.cross) or shape.num_attentions > 1:
        return MeasuredWork()
    squares = f"{_term(unit)}_{'windowed' if a is not None and a.window is not None else 'sq'}"
    if seen.shorter is None:
        per_pair = 0.0 if ran.attention is None else _flops_per_pair(ran.attention)
        row_flops, pair_flops = ran.weight_flops / T, per_pair + ran.other_flops / T**2
        row_bytes, pair_bytes = ran.kept_bytes / T, 0.0
    else:
        short, S = seen.shorter, T / 2  # `read_model` reads texts of T and T / 2 words
        share = 0.5 if unit.tower == "language" and _is_causal(unit.module) else 1.0
        line, curve = _parabola(short.other_flops, ran.other_flops, S, T)
        row_flops, pair_flops = ran.weight_flops / T + line, share * ran.pair_flops / T**2 + curve
        row_bytes, pair_bytes = _parabola(short.kept_bytes, ran.kept_bytes, S, T)
    return MeasuredWork(
        forward_flops=_terms({_term(unit): row_flops, squares: pair_flops}),
        kept_bytes=_terms({_term(unit): row_bytes, squares: pair_bytes}),
    )


def _parabola(at_short: float, at_long: float, S: float, T: float) -> tuple[float, float]:
    """Return (a, b) of a x + b x^2 through both points; without the square where that would be negative."""
    b = (at_long / T - at_short / S) / (T - S)
    if b * T * T < SLACK * at_long:
        return at_long / T, 0.0
    return at_long / T - b * T, b


def _term(unit: Unit) -> str:
    return "tokens" if unit.tower == "language" else "patches"


def _terms(values: dict[str, float]) -> tuple[float, ...]:
    return tuple(float(values.get(name, 0.0)) for name in WORK_TERMS)


# -- what the configuration knows -----------------------------------------------------------------------------------


def _windows(model: Any, units: list[Unit]) -> dict[str, int]:
    """Return the rows that a query of a windowed block sees: sliding ones of the decoder, by its `layer_types`."""
    text = model.config.get_text_config(decoder=True)
    kinds, found = getattr(text, "layer_types", None) or [], {}
    sizes = {
        "sliding_attention": getattr(text, "sliding_window", None),
        "chunked_attention": getattr(text, "attention_chunk_size", None),
    }
    path = main_lists(units)["language"]
    blocks = [x for x in units if x.list_path is not None and x.list_path == path]
    everywhere = None if getattr(text, "use_sliding_window", True) is False else sizes["sliding_attention"]
    for i, unit in enumerate(blocks):
        own = [x.sliding_window for x in unit.module.modules() if isinstance(getattr(x, "sliding_window", None), int)]
        size = sizes.get(kinds[i]) if len(kinds) == len(blocks) else (own[0] if own else everywhere)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            found[unit.path] = size
    return found


def _width_of(block: Unit | None, passes: Passes) -> int:
    """Return the width of the rows that enter a tower's blocks."""
    if block is None:
        return 1
    ran = _seen(block, passes).ran
    return ran.width_in or entering_width(block.module)


# -- what serving holds with 16 bits a parameter: caches, buffers, parameters in fp32 ---------------------------------


def extra_bytes(model: Any) -> dict[str, int]:
    """Return bytes of every buffer of `model`, and of each parameter wider than the rest what it takes past 16 bits."""
    wide = {
        name: x.numel() * (x.element_size() - 2)
        for name, x in model.named_parameters()
        if x.dtype != model.dtype and x.element_size() > 2
    }
    return wide | {name: x.numel() * x.element_size() for name, x in model.named_buffers()}


def seen_cache(layer: LayerSpec, passes: Passes) -> CacheSpec | None:
    """Return what this layer's cache grew by over both texts, in 16 bits; None where heads and window say the same."""
    if passes.short_cached is None or passes.long_cached is None or layer.tower != "language":
        return None
    S, T = passes.num_short, passes.num_long
    ran = [x.ran.get(layer.name) for x in (passes.short_cached, passes.long_cached)]
    short, long = (0.0 if x is None else x.cache_bytes for x in ran)
    a = layer.attention
    heads = 0 if a is None or a.cross else 2 * a.num_kv_heads * (a.head_dim + a.value_head_dim)
    window = T if a is None or a.window is None else a.window
    if all(abs(seen - heads * min(n, window)) <= heads for seen, n in ((short, S), (long, T))):
        return None  # a sliding cache keeps one token less than its window, for the next one
    if a is not None and (a.cross or (a.window is not None and a.window < T)):
        return None
    per_token = max((long - short) / (T - S), 0.0)
    return CacheSpec(values_per_token=per_token / 2, bytes_per_sequence=max(long - per_token * T, 0.0))


def with_extras(layers: Sequence[LayerSpec], extra: Mapping[str, int]) -> list[LayerSpec]:
    """Give `layers` those bytes; what is in none goes with the first layer around it, of a decoder the first block."""
    names = {x.name for x in layers}
    sizes = dict.fromkeys(names, 0)
    companions: dict[str, list[str]] = {}
    for name, size in extra.items():
        own = next((x for x in _around(name) if x in names), None)
        if own is None:
            owner = name.rpartition(".")[0]
            key = name if any(x.startswith(f"{owner}.") for x in names) else owner
            own = _host(layers, key)
            companions.setdefault(own, [])
            companions[own] += [] if key in companions[own] else [key]
        sizes[own] += size
    return [replace(x, extra_bytes=sizes[x.name], companions=tuple(companions.get(x.name, ()))) for x in layers]


def _around(name: str) -> list[str]:
    """The module or tensor itself, then the modules around it, inside out."""
    parts = name.split(".")
    return [".".join(parts[:stop]) for stop in range(len(parts), 0, -1)]


def _host(layers: Sequence[LayerSpec], name: str) -> str:
    for around in [*_around(name)[1:], ""]:
        inside = [x for x in layers if not around or x.name.startswith(f"{around}.")]
        if inside:
            blocks = [x for x in inside if x.kind == "block" and re.search(r"\.\d+$", x.name)]
            return (blocks[0] if blocks and inside[0].tower == "language" else inside[0]).name
    raise AssertionError("a model without layers")
