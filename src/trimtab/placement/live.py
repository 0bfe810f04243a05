"""Bytes that are live while a layer of a served model runs, by the modules of Transformers 5 without gradients.

A tensor counts from the operation that makes it to the end of the last frame that names it. Symbols: w bytes of a
value, h hidden size, f intermediate size, q the queries' width (heads times their width), R rows of a layer, B
sequences, T tokens of a prompt with its images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.costs.formula.flops import layer_matmuls, measured_terms
from trimtab.errors import PartitionError
from trimtab.models.families import family_of
from trimtab.placement.machine import RequestBatch, Workload
from trimtab.specs import AttentionSpec, FloatArray, LayerSpec, MlpSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A workload on a model: what the formulas of single layers share."""

    workload: Workload
    rows: RequestBatch
    item_bytes: int
    pixel_values: float  # of all images
    mask_bytes: float  # of one mask: boolean, or numbers to add for eager attention
    copies_pixels: bool  # tiles of several images are joined in front of the tower
    masked_windows: frozenset[int | None]  # attention windows whose layers are handed a mask instead of a flag
    crossed_rows: float = 0.0  # of all images, that cross-attention layers read; 0 without such layers
    crossed_width: int = 0

    @staticmethod
    def of(model: ModelSpec, workload: Workload, rows: RequestBatch) -> Serving:
        family = family_of(model.family)
        windows = {x.attention.window for x in model.layers if x.tower == "language" and x.attention is not None}
        padded = workload.batch > 1 if workload.padded is None else workload.padded
        everywhere = (
            workload.attention == "eager"
            or padded
            or (family.pack is not None and family.pack.sees == "images" and rows.patches > 0)
        )
        masked = {x for x in windows if everywhere or (x is not None and x < rows.prompt_tokens)}
        patch = next((x for x in model.layers if x.tower == "vision" and x.num_matmul_params), None)
        volume = 0.0 if patch is None else patch.rows_per_input * patch.num_matmul_params / patch.output_size
        crosses = any(x.attention is not None and x.attention.cross for x in model.layers)
        if crosses and workload.attention == "flash":
            raise PartitionError("flash attention takes no masks of cross-attention: choose sdpa or eager")
        projector = next((x for x in model.layers if x.tower == "projector"), None) if crosses else None
        return Serving(
            workload=workload,
            rows=rows,
            item_bytes=workload.item_bytes,
            pixel_values=rows.patches * volume,
            mask_bytes=(workload.item_bytes if workload.attention == "eager" else 1) * _prompt_pairs(rows),
            copies_pixels=family.joins_tiles,
            masked_windows=frozenset(masked if workload.attention != "flash" else ()),
            crossed_rows=0.0 if projector is None else rows.patches * projector.rows_out_per_input,
            crossed_width=0 if projector is None else projector.output_size,
        )

    @property
    def masks_bytes(self) -> float:
        """Return what is made once, in front of the first block: all masks, and the image rows of cross-attention."""
        crossed = self.item_bytes * self.crossed_rows * (self.crossed_width + self.rows.prompt_tokens)
        return len(self.masked_windows) * self.mask_bytes + crossed


def held_bytes(layer: LayerSpec, serving: Serving) -> float:
    """Return the tensors that outer frames keep until the prefill is over."""
    w, rows = serving.item_bytes, serving.rows
    if layer.tower == "vision" and layer.kind == "embed" and layer.num_matmul_params:
        return 4.0 * serving.pixel_values  # fp32, as processors make them
    if layer.tower == "projector" and layer.kind == "projector":
        if serving.crossed_rows:  # the tower's result stays named; what becomes of it counts with the decoder
            return w * serving.crossed_rows * layer.hidden_size
        return float(w * rows.patches * layer.rows_out_per_input * layer.output_size)
    if layer.tower == "language" and layer.kind == "embed":
        return float(w * rows.tokens * layer.output_size)
    return 0.0


def prefill_bytes(layer: LayerSpec, serving: Serving) -> float:
    """Return the most bytes live at once while `layer` runs over the whole batch, its input among them."""
    w, rows, h = serving.item_bytes, serving.rows, layer.hidden_size
    if layer.tower == "language":
        R = float(rows.tokens)
        if layer.kind == "block":
            return _block_peak(layer, serving, R) + serving.masks_bytes
        if layer.kind == "norm":  # meets the last block's input too, which the loop around the blocks still names
            return R * (2 * w * h + _norm_peak(layer, w)) + serving.masks_bytes
        if layer.kind == "head":  # only the last token of each sequence; then a copy in fp32 to choose from
            return rows.sequences * layer.output_size * (w + 4.0)
        if serving.crossed_rows:  # the mask of cross-attention: repeated as int64, inverted in fp32, cast, filled
            made = max(12 + (w if w < 4 else 0), 9 + 2 * w)
            return serving.crossed_rows * (w * serving.crossed_width + rows.prompt_tokens * made)
        return R * w * layer.output_size  # a copy that image features are put into, next to the rows looked up
    if not rows.patches or layer.tower == "audio":
        return 0.0
    R = rows.patches * layer.rows_per_input
    joined = 4.0 * serving.pixel_values if serving.copies_pixels else 0.0
    cast = joined + (w * serving.pixel_values if w < 4 else 0.0)  # in the tower's dtype, until the tower is through
    if layer.kind == "block":
        kept = cast if _turns(layer) or layer.layer_scale else joined  # CLIP's and SigLIP's embeddings cast themselves
        return kept + _block_peak(layer, serving, R)
    if layer.kind == "norm":
        return joined + R * (2 * w * h + _norm_peak(layer, w))
    if layer.kind == "projector" and serving.crossed_rows:
        return 0.0  # its input is held; the tower's last moments next to it: `stacked_bytes`
    if layer.kind == "projector":
        widths = [p.out_width for p in layer_matmuls(layer, 1)]
        inner = widths[0] if len(widths) > 1 else layer.output_size
        # the ViT's result, its shuffled or normed copy; first product and its activation
        return cast + R * w * (2 * h + max(2 * inner, inner + layer.output_size))
    return cast + w * rows.patches * layer.rows_out_per_input * 2 * layer.output_size  # rows, rows with positions


def decode_bytes(layer: LayerSpec, serving: Serving) -> float:
    """Return the most bytes live at once for one new token: the cache grows by copying, keys before values."""
    w, B = serving.item_bytes, serving.rows.sequences
    if layer.kind == "head":
        return B * layer.output_size * (w + 4.0)
    if layer.kind != "block" or layer.attention is None:
        return 0.0
    a = layer.attention
    if a.cross:  # nothing grows, but the cached heads are repeated for the queries that share them
        shared = a.num_heads * (a.head_dim + a.value_head_dim) if a.num_kv_heads != a.num_heads else 0
        return w * serving.crossed_rows * shared
    context = serving.rows.context if a.window is None else min(serving.rows.context, a.window)
    live = w * B * context * a.num_kv_heads * float(max(a.head_dim, a.value_head_dim))
    if serving.workload.attention == "eager":
        repeated = w * a.num_heads * (a.head_dim + a.value_head_dim) if a.num_kv_heads != a.num_heads else 0
        live += B * context * (repeated + a.num_heads * (2.0 * w + (4 if w < 4 else 0)))
    return live


def _norm_peak(layer: LayerSpec, w: int) -> float:
    """Count bytes a row next to the norm's input: LayerNorm's result, or two fp32 copies of RMSNorm."""
    return w * layer.hidden_size if layer.norm == "layer_norm" else 8.0 * layer.hidden_size


def _block_peak(layer: LayerSpec, serving: Serving, R: float) -> float:
    """The largest of a block's phases: norm, attention, feed-forward.

    Live all through: the block's input, which the loop around the blocks names; from the attention's end on also the
    residual stream, and where a learned vector scales the attention's result that result too.
    """
    w, h = serving.item_bytes, layer.hidden_size
    stream = (3 if layer.layer_scale else 2) * w * h
    phases = [R * (stream + _norm_peak(layer, w))] if layer.norm is not None else []
    if layer.attention is not None:
        phases.append(R * 2 * w * h + _attention_peak(layer, layer.attention, serving, R))  # input and its normed copy
    if layer.measured is not None and layer.measured.forward_flops:  # what training would keep: an upper bound
        phases.append(R * (stream + w / 2 * measured_terms(layer).row_bytes))
    if layer.mlp is not None:
        phases.append(R * (stream + w * h) + _mlp_peak(layer, layer.mlp, w, R))
    return max(phases, default=0.0) + R * _table_bytes(layer, w)


def _turns(layer: LayerSpec) -> bool:
    """Return whether q and k turn by position in fp32, as in towers that fuse q, k and v (Qwen-VL's)."""
    return layer.tower == "vision" and layer.attention is not None and layer.attention.fused_qkv


def _table_bytes(layer: LayerSpec, w: int) -> float:
    """Return cosines and sines of each row."""
    if layer.attention is None or not (layer.tower == "language" or _turns(layer)):
        return 0.0
    return 2.0 * layer.attention.head_dim * (4 if layer.tower == "vision" else w)


def _attention_peak(layer: LayerSpec, a: AttentionSpec, serving: Serving, R: float) -> float:
    """Count what stands next to the block's input and its normed copy."""
    if a.cross:
        return _cross_attention_peak(layer, a, serving, R)
    w, kernel = serving.item_bytes, serving.workload.attention
    q, k, v = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.value_head_dim
    o = a.num_heads * a.value_head_dim
    phases: list[float] = []
    if a.qk_norm:
        phases += [R * (w * q + 8.0 * q), R * (w * (q + k) + 8.0 * k)]
    made = w * (q + k + v)
    masked = False
    if _turns(layer):  # q and k cast; turned q; k times cosine, half turned, that times sine
        phases.append(R * (made + 4.0 * (2 * q + 4 * k)))
        made += w * (q + k)
    elif layer.tower == "language":
        phases.append(R * (made + w * max(3 * q, q + 3 * k)))
        masked = a.window in serving.masked_windows
        made = w * q  # keys and values are the cache's own
    repeated = w * (q + o) if a.num_kv_heads != a.num_heads and (kernel == "eager" or masked) else 0.0
    if kernel == "eager":  # scores; softmax in fp32; cast back
        scores = 2.0 * w + (4 if w < 4 else 0)
        phases.append(R * (made + repeated) + _pairs_at_once(layer, serving.rows) * a.num_heads * scores)
    else:
        bias = w * _prompt_pairs(serving.rows) if masked else 0.0  # SDPA makes a bias of a boolean mask
        joined = w * o if _turns(layer) and kernel == "sdpa" else 0.0  # images one by one, then joined
        phases.append(R * (made + repeated + w * o + joined) + bias)
    phases.append(R * w * (o + layer.hidden_size))
    return max(phases)


def _cross_attention_peak(layer: LayerSpec, a: AttentionSpec, serving: Serving, R: float) -> float:
    """The same with keys and values of `crossed_rows`: k normed in fp32, or both next to their cached copies."""
    w, C = serving.item_bytes, serving.crossed_rows
    q, k, v = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.value_head_dim
    o = a.num_heads * a.value_head_dim
    phases = [R * (w * q + 8.0 * q), R * w * q + C * max(8.0 * k, w * (k + v)), R * w * (o + layer.hidden_size)]
    repeated = C * w * (q + o) if a.num_kv_heads != a.num_heads else 0.0
    if serving.workload.attention == "eager":
        pairs = serving.rows.prompt_tokens * C * a.num_heads
        phases.append(R * w * q + repeated + pairs * (2.0 * w + (4 if w < 4 else 0)))
    else:
        phases.append(R * w * (q + o) + repeated)
    return max(phases)


def stacked_bytes(model: ModelSpec, serving: Serving) -> FloatArray:
    """Return what a tower that hands on the states of all its blocks adds to the peak of each of its layers.

    Mllama's keeps the result of every block until its end, where those that are read are stacked; the patches as they
    were embedded; and a mask over the tiles, as numbers to add.
    """
    added = np.zeros(len(model.layers))
    vision = model.indices("vision")
    if not family_of(model.family).stacks_states or not serving.rows.patches:
        return added
    patch = next(x for x in model.layers if x.tower == "vision" and x.num_matmul_params)
    w, rows, h = serving.item_bytes, serving.rows, patch.output_size
    state = float(w * rows.patches * h)
    always = w * rows.patches_sq + state * patch.rows_out_per_input
    projector = model.layers[vision[-1] + 1]
    result = w * serving.crossed_rows * projector.hidden_size  # among the held bytes, but no block runs next to it
    num_states = 0
    for i in vision:
        layer = model.layers[i]
        if layer.kind == "block":
            added[i] = always + num_states * state - result
            num_states += 1
        elif num_states or layer.kind == "norm":
            # two more masks while the first is made; after the first encoder its last state is the norm's input
            added[i] = always + max(num_states - 1, 0) * state + (0 if num_states else 2 * w * rows.patches_sq)
    stacked = w * rows.patches * (projector.hidden_size - h)
    added[vision[-1] + 1] = max(always + num_states * state + stacked, w * serving.crossed_rows * projector.output_size)
    return added


def _pairs_at_once(layer: LayerSpec, rows: RequestBatch) -> float:
    if layer.tower == "language":
        return _prompt_pairs(rows)
    # towers that pack images into one row compute them one by one, the others all tiles at once
    return float(rows.largest_patches_sq if _turns(layer) else rows.patches_sq)


def _prompt_pairs(rows: RequestBatch) -> float:
    return rows.sequences * float(rows.prompt_tokens) ** 2


def _mlp_peak(layer: LayerSpec, m: MlpSpec, w: int, R: float) -> float:
    """Count what stands next to the input of the block, the residual stream and the normed rows."""
    h, f = layer.hidden_size, m.intermediate_size
    if m.num_experts is None:
        fused_gate = layer.attention is not None and layer.attention.fused_qkv and layer.tower == "language"
        return R * w * max(_dense_width(m, f, h), 4 * f if fused_gate and m.gated else 0)
    # gathered rows stay; gate and up, activation, product; or result, weighed and put back in order. Routers of the
    # DeepSeek kind, which have experts that every token visits, weigh in fp32
    weighed = 4 if m.shared_intermediate_size else w
    routed = (m.experts_per_token or 1) * (w * h + max(4 * w * f, w * h + 2 * weighed * h))
    shared = w * (h + _dense_width(m, m.shared_intermediate_size, h)) if m.shared_intermediate_size else 0
    return R * max(routed, shared)


def _dense_width(m: MlpSpec, f: int, h: int) -> int:
    """Count activation, up and their product; or input and result of the activation; then product and result."""
    return max(3 * f if m.gated or m.quick_gelu else 2 * f, f + h)
