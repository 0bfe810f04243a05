"""Bytes a layer's parameters, gradients and optimizer state take on one device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from math import ceil

from trimtab.costs.formula.adapters import adapt_layer, quantised_params
from trimtab.costs.formula.curves import Efficiency
from trimtab.costs.formula.flops import layer_matmuls, num_expert_params, num_visited_params
from trimtab.costs.formula.settings import ITEM_BYTES, OPTIMIZER_BYTES, CostSettings
from trimtab.lora import NF4_BYTES
from trimtab.specs import DeviceSpec, LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Parameters of a layer on one device, and with whom it shares their gradients and state."""

    params: float  # of the model
    trained: float  # of the model, or of adapters next to frozen ones
    stored_bytes: float  # weights as they lie in memory, adapters too: what ZeRO-3 gathers
    trained_bytes: float  # the part of them that is trained
    replicas: int  # devices that hold the same parameters
    bytes_per_s: float  # to the next of them

    def away_s(self, e: Efficiency) -> float:
        """Return the seconds for each byte of the share that a ring of its replicas gathers or scatters."""
        return (self.replicas - 1) / self.replicas / (self.bytes_per_s * e.link)


def shares_of(layer: LayerSpec, device: DeviceSpec, settings: CostSettings, *, trainable: bool) -> tuple[Share, ...]:
    """Return dense weights, then routed experts where their copies are elsewhere (`ParallelDims.expert_replicas`).

    Under LoRA the adapters are trained, whatever `trainable`, which lie next to dense weights; those are stored in 4
    bits where they are quantised.
    """
    dims, params = settings.dims, local_params(layer, settings.dims.tp)
    # a tied head on another stage holds a copy of the embedding
    if layer.kind == "head" and params == 0.0 and dims.pp > 1:
        params = tied_copy_params(layer, dims.tp)
    link = settings.dp_bytes_per_s or device.link_bytes_per_s
    experts = num_expert_params(layer)
    # one share where experts are divided as dense layers are, else theirs apart
    if experts == 0 or not dims.is_folded:
        return (_share(layer, params, settings, trainable, replicas=dims.replicas, link=link),)
    return (
        _share(layer, params - experts / dims.tp, settings, trainable, replicas=dims.replicas, link=link),
        _plain_share(
            experts / (dims.ep * dims.expert_tp),
            settings,
            trainable and settings.lora is None,
            replicas=dims.expert_replicas,
            link=settings.expert_dp_bytes_per_s or device.link_bytes_per_s,
        ),
    )


def _share(
    layer: LayerSpec, params: float, settings: CostSettings, trainable: bool, *, replicas: int, link: float
) -> Share:
    if settings.lora is None:
        return _plain_share(params, settings, trainable, replicas=replicas, link=link)
    # adapters are trained; what lies under them is frozen, in 16 bits or in 4
    adapters = sum(x.num_params for x in adapt_layer(layer, settings.lora, settings.dims.tp))
    quantised = min(params, quantised_params(layer, settings.lora, settings.dims.tp))
    frozen_bytes = (params - quantised) * settings.item_bytes + quantised * NF4_BYTES
    trained_bytes = adapters * adapter_settings(settings).item_bytes
    return Share(
        params=params,
        trained=adapters,
        stored_bytes=frozen_bytes + trained_bytes,
        trained_bytes=trained_bytes,
        replicas=replicas,
        bytes_per_s=link,
    )


def _plain_share(params: float, settings: CostSettings, trainable: bool, *, replicas: int, link: float) -> Share:
    stored = params * settings.item_bytes
    return Share(
        params=params,
        trained=params if trainable else 0.0,
        stored_bytes=stored,
        trained_bytes=stored if trainable else 0.0,
        replicas=replicas,
        bytes_per_s=link,
    )


def local_params(layer: LayerSpec, tp: int) -> float:
    """Count parameters of `layer` on one of `tp` devices, experts divided among them too (`shares_of` knows others).

    Weights of matrix products are divided as in `layer_matmuls` (padded heads and copied key/value heads included),
    and with them the biases of column-parallel products; the token embedding by rows of the vocabulary. Norms, biases
    of row-parallel products, positions and class tokens are whole on each device. Exact for the ranks of published
    Megatron-Core runs at tp 1 and 2. A tied head owns none here; `tied_copy_params` says what a copy takes.
    """
    if layer.num_params == 0:
        return 0.0
    if layer.measured is not None:
        weights = layer.num_matmul_params - num_visited_params(layer) + num_expert_params(layer)
        divided = weights if layer.kind == "block" else 0
        return layer.num_params - divided + divided / tp
    if layer.kind == "embed" and layer.tower == "language":
        vocab = layer.num_params / layer.output_size
        return float(ceil(vocab / tp) * layer.output_size)
    whole, local = _weights(layer, 1), _weights(layer, tp)
    shared = _column_biases(layer, 1) - _column_biases(layer, tp) if tp > 1 else 0.0
    return float(local + (layer.num_params - whole) - shared)


def tied_copy_params(layer: LayerSpec, tp: int) -> float:
    """Return the parameters of the copy of the embedding that a tied head on another pipeline stage holds."""
    return float(sum(p.in_width * p.out_width for p in layer_matmuls(layer, tp)))


def bytes_per_param(settings: CostSettings, *, trainable: bool, replicas: int | None = None) -> float:
    """Return bytes per parameter of the device's share, by ZeRO stage over the devices that hold it; None: dp x cp.

    Mixed precision (bf16, fp16): weight 2 + gradient (fp32 4, as Megatron-Core accumulates; or 2) + fp32 master 4
    + optimizer state (AdamW 8): 18 unsharded, 6 + 12/dp under ZeRO-1, 2 + 16/dp under ZeRO-2, 18/dp under ZeRO-3.
    fp32 needs no master copy. Frozen: only the weight. Runs of Qwen2-VL-7B logged at ZeRO-0 show 18.03-18.14.
    Not counted: communication buckets, allocator rounding.
    """
    weight, replicas = float(settings.item_bytes), replicas or settings.dims.replicas
    if not trainable:
        return weight / replicas if settings.zero_stage == 3 else weight
    grad = float(ITEM_BYTES[settings.grad_dtype])
    master = 4.0 if settings.item_bytes < 4 else 0.0
    parts = ((weight, 3), (grad, 2), (master + OPTIMIZER_BYTES[settings.optimizer], 1))
    return sum(part / (replicas if settings.zero_stage >= stage else 1) for part, stage in parts)


def adapter_settings(settings: CostSettings) -> CostSettings:
    """Return the settings of what is trained: fp32 for adapters whose weights are, else `settings`."""
    if settings.lora is None or settings.adapters_in == "same":
        return settings
    return replace(settings, dtype="fp32", grad_dtype="fp32")


def state_bytes(share: Share, settings: CostSettings) -> float:
    """Return bytes of the share's weights, with gradients and optimizer state of those that are trained."""
    frozen = (share.stored_bytes - share.trained_bytes) / (share.replicas if settings.zero_stage == 3 else 1)
    per_param = bytes_per_param(adapter_settings(settings), trainable=True, replicas=share.replicas)
    return frozen + share.trained * per_param


def added_bytes(settings: CostSettings) -> float:
    """Return the bytes moved for each parameter when a micro-batch's gradient is added to what earlier ones left.

    The sum is read and written. Fused kernels (Megatron-Core with Transformer Engine) add in the product that makes the
    gradient, which so writes none of its own; else that is read once more. ZeRO 2 and 3 keep a rank's share of the sum,
    and move as much to send the rest.
    """
    own = settings.item_bytes
    return 2.0 * ITEM_BYTES[settings.grad_dtype] + (-own if settings.fused_kernels else own)


def scattered_bytes(settings: CostSettings) -> int:
    """Return bytes of each parameter's gradient that go to other ranks after every micro-batch: under ZeRO 2 and 3."""
    return {2: ITEM_BYTES[settings.grad_dtype], 3: settings.item_bytes}.get(settings.zero_stage, 0)


def step_seconds(share: Share, device: DeviceSpec, settings: CostSettings) -> float:
    """Return the seconds once a step for the share's trained parameters: gradient exchange, then the optimizer.

    A ring of N ranks moves (N - 1)/N of the bytes for a reduce-scatter and as many for an all-gather. ZeRO 0 does both
    with gradients; ZeRO 1 reduce-scatters gradients and gathers the updated weights; ZeRO 2 sends gradients after every
    micro-batch, for it holds none whole, and ZeRO 3 weights as well: these are priced there. The optimizer is bound by
    memory: it reads and writes moments and master copy of the rank's share, reads the gradient and writes the weight.
    Nothing overlaps. Not counted: gradient norm.
    """
    N, weight, grad = share.replicas, ITEM_BYTES[settings.dtype], ITEM_BYTES[settings.grad_dtype]
    exchanged = {0: 2 * grad, 1: grad + weight, 2: weight, 3: 0}[settings.zero_stage]
    e = settings.efficiency_on(device)
    link = share.bytes_per_s * e.link
    master = 4.0 if weight < 4 else 0.0
    touched = 2 * (master + OPTIMIZER_BYTES[settings.optimizer]) + grad + weight
    own = share.trained / (N if settings.zero_stage >= 1 else 1)
    exchange_s = (N - 1) / N * share.trained * exchanged / link
    return exchange_s + own * touched / (device.memory_bytes_per_s * e.memory)


def _column_biases(layer: LayerSpec, tp: int) -> float:
    """Count biases of column-parallel products on one of `tp` devices, as far as the number of parameters settles them.

    A layer does not say which products have biases: what its weights and norms leave of its parameters does, if only
    one choice among q, k, v / attention's output / MLP in / MLP out adds up to it. Where none or several do: 0, so
    that they count whole on each device.
    """
    # what weights leave of the parameters: biases and norms
    whole = {p.name: p for p in layer_matmuls(layer, 1)}
    local = {p.name: p for p in layer_matmuls(layer, tp)}
    rest = layer.num_params - _weights(layer, 1)
    if layer.kind == "projector" and len(whole) > 1:
        first, *_ = whole
        return local[first].out_width if rest >= sum(p.out_width for p in whole.values()) else 0.0
    if layer.kind != "block" or (layer.mlp is not None and layer.mlp.num_experts is not None):
        return 0.0
    rest -= _norm_params(layer)
    # try every choice of products that may have biases; one that adds up alone is the truth
    groups = [[n for n in names if n in whole] for names in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))]
    found: set[tuple[str, ...]] = set()
    for chosen in itertools.product((False, True), repeat=len(groups)):
        names = [n for group, biased in zip(groups, chosen, strict=True) if biased for n in group]
        if sum(whole[n].out_width for n in names) == rest:
            found.add(tuple(n for n in names if not whole[n].reduced))
    return float(sum(local[n].out_width for n in found.pop())) if len(found) == 1 else 0.0


def _norm_params(layer: LayerSpec) -> float:
    """Return the parameters of a block's norms, q and k norms and layer scales."""
    h, a = layer.hidden_size, layer.attention
    params = 0 if layer.norm is None else layer.num_norms * h * (2 if layer.norm == "layer_norm" else 1)
    if a is not None and a.qk_norm:  # over each head in language models, over all heads together in InternViT
        params += 2 * (a.head_dim if layer.tower == "language" else a.num_heads * a.head_dim)
    return params + (2 * h if layer.layer_scale else 0)


def _weights(layer: LayerSpec, tp: int) -> float:
    m = layer.mlp
    experts = m.num_experts if m is not None else None
    return sum(
        p.in_width * p.out_width * (experts if experts and p.name.startswith("expert ") else 1)
        for p in layer_matmuls(layer, tp)
    )
