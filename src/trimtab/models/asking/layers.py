"""Units and what they did in a forward pass -> the layers of a model, in forward order."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from trimtab.models.asking.blocks import BlockShape, find_norm, is_matmul, read_block
from trimtab.models.asking.forward import Pass, Ran
from trimtab.models.asking.units import Unit, find_head
from trimtab.specs import (
    NUM_WORK_TERMS,
    WORK_TERMS,
    AttentionSpec,
    LayerKind,
    LayerSpec,
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
    """One unit in the passes."""

    ran: Ran
    base: int  # rows of its tower in that pass
    shorter: Ran | None  # in the shorter text


def describe_units(model: Any, units: list[Unit], passes: Passes) -> list[LayerSpec]:
    """A layer for every unit."""
    head, main = find_head(model), main_lists(units)
    windows = _windows(model, units, main)
    widths = {tower: _tower_width(units, main[tower], passes) for tower in main}
    first_block = {tower: next((i for i, x in enumerate(units) if x.list_path == main[tower]), 0) for tower in main}
    layers = []
    for i, unit in enumerate(units):
        seen = _seen(unit, passes)
        before = i < first_block.get(unit.tower, 0)
        kind = _kind(unit, head, before=before)
        width = widths.get(unit.tower, widths.get("language", 1))
        if kind == "block":
            layers.append(_block(unit, seen, width, windows.get(unit.path)))
        else:
            layers.append(_other(unit, kind, seen, width))
        if unit.tower in ("vision", "projector") and passes.image is not None and unit.path in passes.image.unread:
            layers[-1] = replace(layers[-1], unread=True)
    return layers


def main_lists(units: list[Unit]) -> dict[Tower, str | None]:
    """Of each tower the list that holds most blocks."""
    found: dict[Tower, str | None] = {}
    for tower in ("vision", "language", "audio"):
        counts = Counter(x.list_path for x in units if x.tower == tower and x.list_path is not None)
        found[tower] = counts.most_common(1)[0][0] if counts else None
    return found


# -- kinds ----------------------------------------------------------------------------------------------------------


def _kind(unit: Unit, head: Any, *, before: bool) -> LayerKind:
    module = unit.module
    if module is None:
        return "embed"
    if module is head:
        return "head"
    if find_norm(module) and not any(p.dim() > 1 for p in unit.parameters.values()):
        return "norm"
    if unit.list_path is not None and any(is_matmul(x) for x in module.modules()):
        return "projector" if unit.tower == "projector" and not _attends(module) else "block"
    if not any(is_matmul(x) for x in module.modules()) and not _bare_matrices(module):
        return "embed"
    if unit.tower == "language":
        return "block"
    if unit.tower != "projector" and before:
        return "embed"
    return "projector"


def _attends(module: Any) -> bool:
    return any("Attention" in type(x).__name__ for x in module.modules())


def _bare_matrices(module: Any) -> int:
    """Values of matrices that are parameters without a module of their own."""
    return sum(
        p.numel()
        for part in module.modules()
        if not is_matmul(part) and not isinstance(part, nn.Embedding)
        for name, p in part.named_parameters(recurse=False)
        if p.dim() == 2 and _BARE_MATRIX.search(name) and "Embedding" not in type(part).__name__
    )


# -- layers ---------------------------------------------------------------------------------------------------------


def _block(unit: Unit, seen: _Seen | None, width: int, window: int | None) -> LayerSpec:
    causal = unit.tower == "language" and bool(_is_causal(unit.module))
    shape = read_block(unit.module, causal=causal, window=window)
    plain = _is_plain(shape, seen)
    measured = None if plain else _measure(unit, shape, seen)
    ran = seen.ran if seen is not None else None
    hidden = (ran and ran.width_in) or width
    rows = ran.rows_in / seen.base if ran and seen and ran.rows_in else 1.0
    attention = shape.attention
    if attention is None and measured is not None and ran is not None and ran.attention is not None:
        seen_heads = ran.attention  # latent attention: keys and values of every head are cached
        attention = AttentionSpec(
            num_heads=seen_heads.num_heads,
            num_kv_heads=seen_heads.num_kv_heads,
            head_dim=seen_heads.head_dim,
            value_head_dim=seen_heads.value_head_dim,
            causal=causal,
            window=window,
        )
    if attention is not None and unit.tower != "language" and ran is not None and ran.pair_flops:
        attention = replace(attention, window=_seen_window(attention, ran))
    return LayerSpec(
        name=unit.path,
        tower=unit.tower,
        kind="block",
        hidden_size=hidden,
        output_size=(ran and ran.width_out) or hidden,
        num_params=unit.num_params,
        num_matmul_params=shape.num_matmul_params,
        rows_per_input=0.0 if unit.tower == "audio" else rows,
        rows_out_per_input=0.0 if unit.tower == "audio" else (ran.rows_out / seen.base if ran and seen else rows),
        attention=attention,
        mlp=shape.mlp,
        norm=shape.norm,
        num_norms=shape.num_norms,
        layer_scale=shape.layer_scale,
        measured=measured,
    )


def _seen_window(a: AttentionSpec, ran: Ran) -> int | None:
    """Rows that a query met on average, where they are fewer than the image's."""
    met = ran.pair_flops / (2.0 * a.num_heads * (a.head_dim + a.value_head_dim)) / ran.rows_in
    return None if met * ran.num_together >= 0.999 * ran.rows_in else round(met)


def _other(unit: Unit, kind: LayerKind, seen: _Seen | None, width: int) -> LayerSpec:
    module, ran = unit.module, seen.ran if seen is not None else None
    matmuls = [] if module is None else [x for x in module.modules() if is_matmul(x)]
    num_matmul = sum(x.weight.numel() for x in matmuls) + (0 if module is None else _bare_matrices(module))
    entering = int(matmuls[0].weight[0].numel()) if matmuls else width
    leaving = int(matmuls[-1].weight.shape[0]) if matmuls else width
    if module is None or (kind == "embed" and unit.tower == "language"):
        leaving = entering = _last_width(unit, width)
    elif kind == "norm":
        leaving = entering = next(iter(unit.parameters.values())).numel()
    elif ran is not None and kind == "embed":
        leaving = ran.width_out or leaving
    elif ran is not None and not matmuls:  # a bare matrix
        entering, leaving = ran.width_in or entering, ran.width_out or leaving
    if kind == "embed" and unit.tower != "language":
        entering = leaving
    if kind == "head":
        entering, leaving = int(module.weight.shape[1]), int(module.weight.shape[0])
    base = seen.base if seen is not None else 1
    rows, rows_out = 1.0, 1.0
    if ran is not None:
        rows_out = ran.rows_out / base if ran.rows_out else 1.0
        rows = ran.weight_flops / 2 / num_matmul / base if num_matmul and ran.weight_flops else rows_out
    if kind == "embed" and not num_matmul:
        rows = rows_out = 1.0
    if kind in ("head", "embed") and unit.tower == "language":
        rows = rows_out = 1.0
    norm = next((x for x in map(find_norm, module.modules()) if x), None) if module is not None else None
    idle = unit.tower == "audio"
    return LayerSpec(
        name=unit.path,
        tower="projector" if kind == "projector" and unit.tower == "vision" else unit.tower,
        kind=kind,
        hidden_size=entering,
        output_size=leaving,
        num_params=unit.num_params,
        num_matmul_params=num_matmul,
        rows_per_input=0.0 if idle else rows,
        rows_out_per_input=0.0 if idle else rows_out,
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


def _seen(unit: Unit, passes: Passes) -> _Seen | None:
    if unit.tower == "language":
        if passes.long is not None and unit.path in passes.long.ran:
            shorter = passes.short.ran.get(unit.path) if passes.short is not None else None
            return _Seen(ran=passes.long.ran[unit.path], base=passes.num_long, shorter=shorter)
        return None
    if passes.image is not None and unit.path in passes.image.ran and passes.num_patches:
        return _Seen(ran=passes.image.ran[unit.path], base=passes.num_patches, shorter=None)
    return None


def _is_plain(shape: BlockShape, seen: _Seen | None) -> bool:
    """Whether the formulas' products and pairs are those that ran; without a pass, whether every weight is explained.

    What attention and MLP leave unexplained is one matrix more that each row meets: gates, routers, side inputs.
    """
    a, rest = shape.attention, shape.num_matmul_params - shape.explained
    if shape.num_attentions > 1 or (a is not None and a.cross and seen is None):
        return a is not None and a.cross and shape.num_attentions == 1
    if (shape.attention is None and shape.mlp is None) or rest < 0:
        return False
    if seen is None or not seen.ran.rows_in:
        return rest == 0
    ran = seen.ran
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
    per_pair = 2.0 * a.num_heads * (a.head_dim + a.value_head_dim)
    pairs = (ran.pair_flops + ran.other_flops) / per_pair
    most = float(ran.rows_in) ** 2
    return 0 < pairs <= most * (1 + SLACK) and (ran.pair_flops == 0 or ran.other_flops == 0)


def _measure(unit: Unit, shape: BlockShape, seen: _Seen | None) -> MeasuredWork:
    """Lines and parabolas through what ran: rows in their own term, pairs of fused attention in that of squares."""
    if unit.tower == "audio":
        return MeasuredWork(forward_flops=(0.0,) * NUM_WORK_TERMS, kept_bytes=(0.0,) * NUM_WORK_TERMS)
    a = shape.attention
    if seen is None or not seen.ran.rows_in or (a is not None and a.cross) or shape.num_attentions > 1:
        return MeasuredWork()
    ran, T = seen.ran, float(seen.base)
    squares = f"{_term(unit)}_{'windowed' if a is not None and a.window is not None else 'sq'}"
    if seen.shorter is None:
        heads = ran.attention
        per_pair = 0.0 if heads is None else 2.0 * heads.num_heads * (heads.head_dim + heads.value_head_dim)
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
    """(a, b) of a x + b x^2 through both points; without the square where that would be negative."""
    b = (at_long / T - at_short / S) / (T - S)
    if b * T * T < SLACK * at_long:
        return at_long / T, 0.0
    return at_long / T - b * T, b


def _term(unit: Unit) -> str:
    return "tokens" if unit.tower == "language" else "patches"


def _terms(values: dict[str, float]) -> tuple[float, ...]:
    return tuple(float(values.get(name, 0.0)) for name in WORK_TERMS)


# -- what the configuration knows -----------------------------------------------------------------------------------


def _windows(model: Any, units: list[Unit], main: dict[Tower, str | None]) -> dict[str, int]:
    """Rows that a query of a windowed block sees: sliding ones of the decoder, by its `layer_types`."""
    text = model.config.get_text_config(decoder=True)
    kinds, found = getattr(text, "layer_types", None) or [], {}
    sizes = {
        "sliding_attention": getattr(text, "sliding_window", None),
        "chunked_attention": getattr(text, "attention_chunk_size", None),
    }
    blocks = [x for x in units if x.list_path is not None and x.list_path == main["language"]]
    everywhere = None if getattr(text, "use_sliding_window", True) is False else sizes["sliding_attention"]
    for i, unit in enumerate(blocks):
        own = [x.sliding_window for x in unit.module.modules() if isinstance(getattr(x, "sliding_window", None), int)]
        size = sizes.get(kinds[i]) if len(kinds) == len(blocks) else (own[0] if own else everywhere)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            found[unit.path] = size
    return found


def _tower_width(units: list[Unit], list_path: str | None, passes: Passes) -> int:
    block = next((x for x in units if x.list_path == list_path and list_path is not None), None)
    if block is None:
        return 1
    seen = _seen(block, passes)
    if seen is not None and seen.ran.width_in:
        return seen.ran.width_in
    matmul = next((x for x in block.module.modules() if is_matmul(x)), None)
    return int(matmul.weight[0].numel()) if matmul is not None else 1
