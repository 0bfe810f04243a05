"""What one layer keeps between forward and backward, tensor by tensor, and the memory traffic of its small kernels.

The tensors are those PyTorch's autograd keeps for the modules of Transformers 5 (or for fused kernels of the same
arithmetic), found by reading which operands each operation's backward needs; a storage counts once, whatever views it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trimtab.costs.formula.adapters import Adapted, adapt_layer, quantised_params
from trimtab.costs.formula.flops import MeasuredTerms, has_expert_biases, layer_matmuls, local_heads, measured_terms
from trimtab.costs.formula.settings import CostSettings
from trimtab.specs import AttentionSpec, LayerSpec, MlpSpec

_LOOP_KERNELS = 9  # of one expert: rows found and gathered, three products, gate, weights, results added; arithmetic
_ROUTING_KERNELS = 12  # router's softmax and choice, counts and places of the rows of each expert, both permutations


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One tensor kept for backward, in bytes for each row on this device."""

    name: str
    row_bytes: float = 0.0
    pair_bytes: float = 0.0  # for each (query row, key row) pair: only unfused attention
    for_weights: bool = False  # needed only for the gradient of a weight, so not kept where the weight is frozen
    entered: tuple[str, ...] = ()  # products that it is the input of: adapters next to these need it too


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Kernels that only move memory, in bytes read and written for each row on this device, forward."""

    name: str
    row_bytes: float = 0.0
    pair_bytes: float = 0.0
    num_kernels: int = 1


def uses_dense_pairs(layer: LayerSpec, settings: CostSettings) -> bool:
    """Return whether the language model's attention computes every pair of its rows, masked ones too.

    Eager attention always does; SDPA does as soon as it is handed a mask (packing, sliding window), for then it
    cannot use its causal kernel.
    """
    a = layer.attention
    if a is None or layer.tower != "language":
        return False
    return settings.attention == "eager" or (settings.attention == "sdpa" and (settings.packed or a.window is not None))


def _measured(layer: LayerSpec, settings: CostSettings) -> MeasuredTerms:
    """Return what was measured of the layer, as one of its devices has it."""
    share, flash = settings.row_share(layer.tower), settings.attention == "flash"
    return measured_terms(layer, settings.dims.tp, share, flash=flash)


def kept_by_layer(layer: LayerSpec, settings: CostSettings) -> tuple[Kept, ...]:
    """Return every tensor that the layer keeps when nothing is recomputed.

    Not counted: rotary tables, masks and indices shared by all layers; dropout masks; random-number state; where SDPA
    follows a partial rotary embedding (GLM, Phi-3) the copy of its result, w H d; the fp32 input of GLM's router.
    """
    w = settings.item_bytes
    # work that was counted; else what each operation needs for its backward
    if layer.measured is not None:  # counted in 16 bits
        terms = _measured(layer, settings)
        wide = w / 2
        return (Kept(name="measured", row_bytes=wide * terms.row_bytes, pair_bytes=wide * terms.pair_bytes),)
    if layer.kind == "block":
        return tuple(_kept_by_block(layer, settings))
    # projector: its norm, its input, and both sides of each activation
    if layer.kind == "projector":
        first, *others = layer_matmuls(layer, settings.dims.tp)
        kept = _kept_by_norm(layer, layer.hidden_size, settings) if layer.norm is not None else []
        kept.append(Kept(name="projector input", row_bytes=w * first.in_width, for_weights=True, entered=(first.name,)))
        for product in others:
            kept.append(Kept(name="activation input", row_bytes=w * product.in_width))
            kept.append(
                Kept(
                    name="activation output", row_bytes=w * product.in_width, for_weights=True, entered=(product.name,)
                )
            )
        return tuple(kept)
    # head: its input, and what the loss keeps for each vocabulary entry
    if layer.kind == "head":
        (product,) = layer_matmuls(layer, settings.dims.tp)
        width = layer.hidden_size / settings.row_share(layer.tower)
        kept = [Kept(name="head input", row_bytes=w * width, for_weights=True)]
        if not settings.fused_kernels:  # the model's output object holds them; Megatron-Core's loss frees them
            kept.append(Kept(name="logits", row_bytes=w * product.out_width))
        return (*kept, Kept(name="log-softmax", row_bytes=4 * product.out_width))
    if layer.kind == "norm":
        return tuple(_kept_by_norm(layer, layer.hidden_size, settings, share=settings.row_share(layer.tower)))
    # embeddings: what is looked up or multiplied
    if layer.tower == "vision":  # patch embedding: the pixels
        return tuple(
            Kept(name="pixels", row_bytes=w * p.in_width, for_weights=True, entered=(p.name,))
            for p in layer_matmuls(layer, settings.dims.tp)
        )
    return (Kept(name="token ids", row_bytes=8, for_weights=True),)


def kept_when(layer: LayerSpec, settings: CostSettings, *, weights: bool) -> tuple[Kept, ...]:
    """Return `kept_by_layer` of a layer whose own weights are trained or frozen, with what its adapters keep.

    An adapter keeps its input, for A, and A's result, for B. Its input is that of its layer, kept once for all that it
    enters; where the adapters are fp32 and the model is not, each casts a copy of its own, which autocast keeps in the
    model's dtype (PEFT's layers of 16 bits; those of bitsandbytes cast nothing under autocast) and which stays fp32
    without autocast.
    """
    adapters, w = adapt_layer(layer, settings.lora, settings.dims.tp), adapter_item_bytes(settings)
    own = casts_inputs(settings)
    entered = {name for x in adapters for name in x.products or _likely(layer, x) if not own}
    kept = [k for k in kept_by_layer(layer, settings) if weights or not k.for_weights or entered & {*k.entered}]
    kept += [Kept(name="adapter middle", row_bytes=float(w * x.rank)) for x in adapters]
    alone = [x for x in adapters if own or not (x.products or _likely(layer, x) or layer.measured)]
    kept += [Kept(name="adapter input", row_bytes=float(w * x.in_width)) for x in alone]
    return tuple(kept)


def casts_inputs(settings: CostSettings) -> bool:
    """Return whether each adapter holds its input in a copy of its own."""
    lora = settings.lora
    return lora is not None and settings.adapters_in != "same" and lora.bits == 16 and settings.item_bytes < 4


def adapter_item_bytes(settings: CostSettings) -> int:
    """Return bytes of a value as adapters multiply it: the model's under autocast, 4 where their products are fp32."""
    return 4 if casts_inputs(settings) and settings.adapters_in == "fp32_products" else settings.item_bytes


def _likely(layer: LayerSpec, adapter: Adapted) -> tuple[str, ...]:
    """Return what may enter a linear layer that no product stands for: the block's inputs, where it is as wide."""
    return ("q", "gate") if layer.kind == "block" and adapter.in_width == layer.hidden_size else ()


def selective_bytes(layer: LayerSpec, settings: CostSettings) -> float:
    """Return bytes for each row under the tier "selective": input, result of every matrix product, attention's result.

    What torch's selective activation checkpointing holds with a policy that saves `mm`, `addmm` and the fused
    attention: norms, rotary, activation and gate are computed again from them, which costs memory traffic and no FLOPs.
    Results of row-parallel products are kept after their reduction, so no collective runs twice. Unfused (eager)
    attention is recomputed whole: its scores would be quadratic.
    """
    w, share = settings.item_bytes, settings.row_share(layer.tower)
    # the layer's input and every product's result
    total = w * layer.hidden_size / share
    for product in layer_matmuls(layer, settings.dims):
        busiest = settings.busiest_experts if product.name.startswith("expert ") else 1.0
        total += w * product.out_width * product.visits * busiest / (share if product.reduced else 1)
    total += w * sum(
        factor.out_width for x in adapt_layer(layer, settings.lora, settings.dims.tp) for factor in x.factors
    )
    # rows that other devices sent cannot be asked for again
    if layer.mlp is not None and layer.mlp.num_experts is not None and settings.dims.ep > 1:
        total += w * layer.hidden_size * settings.visits(layer.mlp)  # rows of other devices
    if layer.attention is not None and settings.attention != "eager":
        total += attention_result_bytes(layer.attention, settings)
    return total


def layer_traffic(layer: LayerSpec, settings: CostSettings) -> tuple[Traffic, ...]:
    """Return elementwise kernels of the forward pass; backward moves about twice as much.

    PyTorch runs each operation of an unfused norm, rotary embedding or gate as one kernel that reads its operands
    and writes its result. Not counted: dropout, layout copies of attention's inputs.
    """
    w, h, share = settings.item_bytes, layer.hidden_size, settings.row_share(layer.tower)
    if layer.measured is not None:  # what is kept was written once and read once, by ten kernels or so: an estimate
        terms = _measured(layer, settings)
        return (
            Traffic(name="measured", row_bytes=w * terms.row_bytes, pair_bytes=w * terms.pair_bytes, num_kernels=10),
        )
    if layer.kind == "head":
        (product,) = layer_matmuls(layer, settings.dims.tp)
        # cast to fp32, then log-softmax reads and writes it
        return (Traffic(name="loss", row_bytes=(w + 4 + 8) * product.out_width, num_kernels=4),)
    if layer.kind == "embed":
        return (Traffic(name="embedding", row_bytes=2 * w * layer.output_size, num_kernels=2),)
    if layer.kind == "norm":
        return (_norm_traffic(layer, h / share, settings),)
    if layer.kind == "projector":
        _, *others = layer_matmuls(layer, settings.dims.tp)
        moved = [Traffic(name="activation", row_bytes=2 * w * p.in_width) for p in others]
        return (*([_norm_traffic(layer, h, settings)] if layer.norm is not None else []), *moved)
    return tuple(_block_traffic(layer, settings))


def adapter_traffic(layer: LayerSpec, settings: CostSettings) -> tuple[Traffic, ...]:
    """Return the traffic of adapters, forward: B's result is scaled and added to the layer's (5 values moved).

    Where inputs are cast (`casts_inputs`): to fp32 and back. bitsandbytes' layers copy their result before.
    """
    # casts to fp32 and back where adapters are fp32; bitsandbytes copies its result
    adapters, w = adapt_layer(layer, settings.lora, settings.dims.tp), settings.item_bytes
    casts, copies = casts_inputs(settings), quantised_params(layer, settings.lora, 1) > 0
    return tuple(
        Traffic(
            name="adapter",
            row_bytes=(5 + 2 * copies) * w * x.out_width + (8 + 2 * w) * casts * x.in_width,
            num_kernels=2 + copies + 2 * casts,
        )
        for x in adapters
    )


def _kept_by_block(layer: LayerSpec, settings: CostSettings) -> list[Kept]:
    w, h, share = settings.item_bytes, layer.hidden_size, settings.row_share(layer.tower)
    entering = settings.input_bytes * h / share
    kept: list[Kept] = []
    # in the order of the forward: norms, attention, layer scales, MLP
    for _ in range(layer.num_norms if layer.norm is not None else 0):
        kept += _kept_by_norm(layer, h, settings, share=share)
    if layer.attention is not None:
        kept.append(Kept(name="qkv input", row_bytes=entering, for_weights=True, entered=("q", "k", "v")))
        kept += _kept_by_attention(layer, layer.attention, settings)
    if layer.layer_scale:
        kept += [Kept(name="scaled half", row_bytes=w * h / share, for_weights=True)] * 2
    if layer.mlp is not None:
        entered = ("gate", "up", "shared gate", "shared up")
        kept.append(Kept(name="mlp input", row_bytes=entering, for_weights=True, entered=entered))
        kept += _kept_by_mlp(layer, layer.mlp, settings)
    return kept


def _kept_by_norm(layer: LayerSpec, width: float, settings: CostSettings, *, share: int = 1) -> list[Kept]:
    """Return what a norm over `width` values keeps, without its result (which the product after it keeps).

    LayerNorm and fused norms keep their input and fp32 statistics. RMSNorm in PyTorch operations keeps the fp32 copy
    (squared, and scaled by the rsqrt) and the normed values that the weight multiplies.
    """
    w = settings.item_bytes
    if layer.norm == "layer_norm" or settings.fused_kernels:
        return [Kept(name="norm input", row_bytes=(w * width + (8 if layer.norm == "layer_norm" else 4)) / share)]
    scaled = 4 if layer.norm == "rms_norm_fp32" else w
    return [
        Kept(name="norm input, fp32", row_bytes=(4 * width + 4) / share),
        Kept(name="normed, before weight", row_bytes=scaled * width / share, for_weights=True),
    ]


def _kept_by_attention(layer: LayerSpec, a: AttentionSpec, settings: CostSettings) -> list[Kept]:
    w, heads = settings.item_bytes, local_heads(a, settings.dims.tp)
    q, k, v = heads.query * a.head_dim, heads.kv * a.head_dim, heads.kv * a.value_head_dim
    result = heads.query * a.value_head_dim
    kept: list[Kept] = []
    # norms of q and k
    if a.qk_norm:
        per_head = layer.tower == "language"  # InternViT norms all heads together
        for width, count in ((q, heads.query), (k, heads.kv)):
            num = count if per_head else 1
            kept += _kept_by_norm(_with_rms_norm(layer), width / num, settings) * num
    # q, k and v: apart, as one tensor that v views, or copied to every query head
    repeats = settings.attention == "eager" or uses_dense_pairs(layer, settings)
    if repeats and heads.kv != heads.query:  # a mask, or unfused attention, needs k and v copied to every query head
        k, v = q, heads.query * a.value_head_dim
        kept += [Kept(name="q", row_bytes=w * q), Kept(name="k, v repeated", row_bytes=w * (k + v))]
    elif a.fused_qkv:
        kept += [Kept(name="q, k", row_bytes=w * (q + k)), Kept(name="qkv that v views", row_bytes=w * (q + k + v))]
    else:
        kept.append(Kept(name="q, k, v", row_bytes=w * (q + k + v)))
    # scores, or the result of fused attention
    if settings.attention == "eager":
        # softmax in fp32, then cast to the dtype of the values; one kernel keeps no copy, nor does InternViT upcast
        upcast = 4 if w < 4 and not layer.layer_scale and not settings.fused_kernels else 0
        kept.append(Kept(name="scores", pair_bytes=heads.query * (upcast + w)))
        kept.append(Kept(name="attention result", row_bytes=w * result, for_weights=True, entered=("o",)))
    else:
        kept.append(Kept(name="attention result, logsumexp", row_bytes=attention_result_bytes(a, settings)))
        if uses_dense_pairs(layer, settings):  # Transformers' masks are boolean, and SDPA casts them in every layer
            kept.append(Kept(name="mask", pair_bytes=w))
        if _joins_segments(layer, settings):
            kept.append(Kept(name="joined segments", row_bytes=w * result, for_weights=True, entered=("o",)))
    return kept


def _kept_by_mlp(layer: LayerSpec, m: MlpSpec, settings: CostSettings) -> list[Kept]:
    w, kept = settings.item_bytes, []
    if m.num_experts is None:
        return _kept_by_activation("mlp", m, m.intermediate_size / settings.dims.tp, settings)
    # routed rows count once for each expert that they visit on this device
    visits, k = settings.visits(m), m.experts_per_token or 1
    kept.append(Kept(name="router", row_bytes=4 * m.num_experts + 16 * k))  # softmax; indices and weights
    entering = settings.input_bytes * layer.hidden_size * visits
    kept.append(Kept(name="expert input", row_bytes=entering, for_weights=True))
    kept += _kept_by_activation("expert", m, visits * m.intermediate_size / settings.dims.expert_tp, settings)
    kept.append(Kept(name="expert result", row_bytes=w * layer.hidden_size * visits))  # weighed by the router
    if m.shared_intermediate_size:
        kept += _kept_by_activation("shared", m, m.shared_intermediate_size / settings.dims.tp, settings)
    return kept


def _kept_by_activation(name: str, m: MlpSpec, width: float, settings: CostSettings) -> list[Kept]:
    """Return what activation and gate over `width` values keep, and the input of the product after them."""
    bytes_ = settings.item_bytes * width
    kept = [Kept(name=f"{name} activation input", row_bytes=bytes_)]
    if m.gated:
        kept.append(Kept(name=f"{name} up", row_bytes=bytes_))
    if (m.gated or m.quick_gelu) and not settings.fused_kernels:
        kept.append(Kept(name=f"{name} {'sigmoid' if m.quick_gelu else 'activation output'}", row_bytes=bytes_))
    kept.append(
        Kept(
            name=f"{name} down input",
            row_bytes=settings.input_bytes * width,
            for_weights=True,
            entered=("down" if name == "mlp" else f"{name} down",),
        )
    )
    return kept


def attention_result_bytes(a: AttentionSpec, settings: CostSettings) -> float:
    """Return result and fp32 logsumexp of fused attention."""
    query = local_heads(a, settings.dims.tp).query
    return query * (settings.item_bytes * a.value_head_dim + 4.0)


def _joins_segments(layer: LayerSpec, settings: CostSettings) -> bool:
    """Return whether SDPA runs per image and joins results, as in towers that pack images into one row (Qwen-VL's)."""
    a = layer.attention
    return a is not None and a.fused_qkv and layer.tower == "vision" and settings.attention == "sdpa"


def _with_rms_norm(layer: LayerSpec) -> LayerSpec:
    """The layer as its q and k norms see it: RMSNorms in every family, of the layer's own kind if it has one."""
    return replace(layer, norm="rms_norm") if layer.norm in ("layer_norm", None) else layer


def _norm_traffic(layer: LayerSpec, width: float, settings: CostSettings) -> Traffic:
    w = settings.item_bytes
    if layer.norm == "layer_norm" or settings.fused_kernels:
        return Traffic(name="norm", row_bytes=2 * w * width)
    # cast, square, mean, scale, cast, weight (Gemma: scale, weight, cast)
    last = (8 + 4 + w) if layer.norm == "rms_norm_fp32" else (4 + w + 2 * w)
    return Traffic(name="norm", row_bytes=((w + 4) + 8 + 4 + 8 + last) * width, num_kernels=6)


def _block_traffic(layer: LayerSpec, settings: CostSettings) -> list[Traffic]:
    w, share, fused = settings.item_bytes, settings.row_share(layer.tower), settings.fused_kernels
    # residuals and norms, rows shared over tp under sequence parallelism
    h = layer.hidden_size / share
    moved = [Traffic(name="residual", row_bytes=2 * 3 * w * h, num_kernels=2)]
    if layer.norm is not None:
        moved += [_norm_traffic(layer, h, settings)] * layer.num_norms
    if layer.layer_scale:
        moved.append(Traffic(name="layer scale", row_bytes=2 * 2 * w * h, num_kernels=2))
    if (a := layer.attention) is not None:
        heads = local_heads(a, settings.dims.tp)
        rotated = (heads.query + heads.kv) * a.head_dim
        if a.qk_norm:
            moved.append(_norm_traffic(_with_rms_norm(layer), rotated, settings))
        # rotary positions of q and k
        if layer.tower == "language" or a.fused_qkv:  # towers with separate q, k, v add positions to their patches
            # two products, rotate (negate half, join), add; towers of the Qwen-VL kind do it in fp32
            unfused = 9 * w if layer.tower == "language" else 36 + 2 * (w + 4)
            steps = 2 * w if fused else unfused
            moved.append(Traffic(name="rotary", row_bytes=steps * rotated, num_kernels=2 if fused else 10))
        if _joins_segments(layer, settings):
            moved.append(Traffic(name="join segments", row_bytes=2 * w * heads.query * a.value_head_dim))
        if settings.attention == "eager":
            # scores written; scaled; masked; softmax to fp32; cast; read. Megatron-Core scales, masks and norms at once
            steps = 4 * w if fused else 6 * w + (w + 4) + (4 + w)
            moved.append(Traffic(name="scores", pair_bytes=heads.query * steps, num_kernels=2 if fused else 5))
    # 8-bit copies, then activation and gate, then what experts move
    if settings.in_8_bits:
        moved.append(_casts(layer, settings))
    if (m := layer.mlp) is not None:
        routed = 0 if settings.expert_products == "fused" and m.num_experts else m.intermediate_size
        width = routed * (m.experts_per_token or 1) + m.shared_intermediate_size
        per_value = _activation_bytes(m, w, fused=fused)
        moved.append(Traffic(name="activation", row_bytes=per_value * width / settings.dims.tp, num_kernels=2))
        if m.num_experts is not None:
            moved.append(_permutation(layer, m, settings))
        if has_expert_biases(layer):
            moved.append(_biased_experts(layer, m, settings))
    return moved


def _biased_experts(layer: LayerSpec, m: MlpSpec, settings: CostSettings) -> Traffic:
    """Return what Megatron-Core runs unfused for biases and a clamped gate of experts (0.16, moe/experts.py).

    Gate and up are clamped (both read and written) and joined again: 8 values for each of an expert's columns. Biases
    after the last product are weighed by the router, added expert by expert, and joined: 6 for each of its width.
    """
    each = 8.0 * m.intermediate_size / settings.dims.expert_tp + 6.0 * layer.hidden_size
    return Traffic(name="expert biases", row_bytes=settings.item_bytes * settings.visits(m) * each, num_kernels=5)


def _permutation(layer: LayerSpec, m: MlpSpec, settings: CostSettings) -> Traffic:
    """Count rows copied to where their experts read them, results weighed and added where the rows came from.

    Rows that came from several devices, for several experts, are sorted by expert and their results sorted back. Sent
    once to a device, a row is copied there for each of its experts, and nowhere else. Where the MLP is fused, rows
    arrive in the order of the experts, and only their results are weighed and added.
    """
    row, visits = settings.item_bytes * layer.hidden_size, settings.visits(m)
    copies = 4 * visits
    if settings.dims.ep > 1 and settings.dispatcher == "deepep":
        copies = 2 * visits * (1 + settings.reached(m, settings.dims.ep) / (m.experts_per_token or 1))
    elif settings.dims.ep > 1 and m.num_experts != settings.dims.ep:
        copies = 8 * visits
    if settings.expert_products == "fused":
        copies /= 2
    return Traffic(name="permutation", row_bytes=copies * row, num_kernels=_ROUTING_KERNELS)


def _casts(layer: LayerSpec, settings: CostSettings) -> Traffic:
    """Return the traffic of 8-bit copies: bf16 read, a copy for the product and one for its weights' gradient.

    Fused norms and gates write theirs in place of the bf16 result, which leaves attention's own (with MXFP8 none does:
    its blocks differ between the two copies); a fused MLP of experts writes the copies of what its gate gives. Not
    counted: copies of weights, once a step where they are kept.
    """
    products = layer_matmuls(layer, settings.dims)
    if settings.expert_products == "fused":
        products = tuple(p for p in products if p.name != "expert down")
    inputs = {p.name.split()[-1]: p.in_width * p.visits for p in products}
    fused = settings.fused_kernels and settings.dtype == "fp8"
    own = {name: width for name, width in inputs.items() if name in ({"o"} if fused else {"q", "o", "up", "down"})}
    return Traffic(name="casts", row_bytes=4.0 * sum(own.values()), num_kernels=len(own))


def _activation_bytes(m: MlpSpec, w: int, *, fused: bool) -> float:
    if m.gated:
        return 3 * w if fused else 5 * w  # activate, multiply
    return 7 * w if m.quick_gelu and not fused else 2 * w


def expert_launches(layer: LayerSpec, settings: CostSettings) -> float:
    """Return the kernels that one forward launches for each expert of this device apart.

    A loop over experts, as Transformers before 5 has it: nine operations an expert, its choice of rows among them. Else
    two products (gate and up are one), as Transformer Engine's grouped linear layer hands them to cuBLAS one by one; a
    copy in 8 bits before each; two kernels for a bias (`_biased_experts`). Host and device take turns there: every
    layer waits for the numbers of its experts' rows, so that nothing is launched ahead. A fused MLP reads these numbers
    on the device.
    """
    m = layer.mlp
    if m is None or m.num_experts is None or settings.expert_products == "fused":
        return 0.0
    each = 2 + 2 * settings.in_8_bits + 2 * has_expert_biases(layer)
    if settings.expert_products == "loop":
        each = _LOOP_KERNELS
    return each * m.num_experts / settings.dims.ep


def count_kernels(traffic: tuple[Traffic, ...], layer: LayerSpec) -> int:
    """Count the kernels that one forward launches, its products aside."""
    return sum(t.num_kernels for t in traffic) + (layer.attention is not None)
