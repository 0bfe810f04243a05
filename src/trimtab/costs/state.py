"""Bytes a layer's parameters, gradients and optimizer state take on one device."""

from __future__ import annotations

from math import ceil

from trimtab.costs.flops import layer_matmuls
from trimtab.costs.settings import ITEM_BYTES, OPTIMIZER_BYTES, CostSettings
from trimtab.specs import DeviceSpec, LayerSpec


def local_params(layer: LayerSpec, tp: int) -> float:
    """Parameters of `layer` on one of `tp` devices.

    Weights of matrix products are divided as in `layer_matmuls` (padded heads and copied key/value heads included),
    the token embedding by rows of the vocabulary. Norms, biases, positions and class tokens count whole on each
    device (biases of column-parallel products are divided in truth: below 0.1 % of a block).
    A tied head owns none here; `tied_copy_params` says what a copy on another stage takes.
    """
    if layer.num_params == 0:
        return 0.0
    if layer.kind == "embed" and layer.tower == "language":
        vocab = layer.num_params / layer.output_size
        return float(ceil(vocab / tp) * layer.output_size)
    whole, local = _weights(layer, 1), _weights(layer, tp)
    return float(local + (layer.num_params - whole))


def tied_copy_params(layer: LayerSpec, tp: int) -> float:
    """Parameters of the copy of the embedding that a tied head on another pipeline stage holds."""
    return float(sum(p.in_width * p.out_width for p in layer_matmuls(layer, tp)))


def bytes_per_param(settings: CostSettings, *, trainable: bool) -> float:
    """Bytes for each parameter of the device's share, by ZeRO stage over the dp ranks.

    Mixed precision (bf16, fp16): weight 2 + gradient (fp32 4, as Megatron-Core accumulates; or 2) + fp32 master 4
    + optimizer state (AdamW 8): 18 unsharded, 6 + 12/dp under ZeRO-1, 2 + 16/dp under ZeRO-2, 18/dp under ZeRO-3.
    fp32 needs no master copy. Frozen: the weight alone. Runs of Qwen2-VL-7B logged at ZeRO-0 show 18.03-18.14.
    Not counted: communication buckets, allocator rounding.
    """
    weight = float(settings.item_bytes)
    if not trainable:
        return weight / settings.dims.dp if settings.zero_stage == 3 else weight
    grad = float(ITEM_BYTES[settings.grad_dtype])
    master = 4.0 if settings.item_bytes < 4 else 0.0
    parts = ((weight, 3), (grad, 2), (master + OPTIMIZER_BYTES[settings.optimizer], 1))
    return sum(part / (settings.dims.dp if settings.zero_stage >= stage else 1) for part, stage in parts)


def step_seconds(params: float, device: DeviceSpec, settings: CostSettings) -> float:
    """Seconds once a step for `params` trained parameters of one device: gradient exchange, then the optimizer.

    A ring of N ranks moves (N - 1)/N of the bytes for a reduce-scatter and as many for an all-gather. ZeRO 0 does both
    with gradients; ZeRO 1 and 2 reduce-scatter gradients and gather the updated weights; ZeRO 3 does both within the
    micro-batches, where it is priced. The optimizer is bound by memory: it reads and writes moments and master copy
    of the rank's share, reads the gradient and writes the weight. Nothing overlaps. Not counted: gradient norm.
    """
    dp, weight, grad = settings.dims.dp, ITEM_BYTES[settings.dtype], ITEM_BYTES[settings.grad_dtype]
    exchanged = {0: 2 * grad, 1: grad + weight, 2: grad + weight, 3: 0}[settings.zero_stage]
    link = (settings.dp_bytes_per_s or device.link_bytes_per_s) * settings.efficiency.link
    master = 4.0 if weight < 4 else 0.0
    touched = 2 * (master + OPTIMIZER_BYTES[settings.optimizer]) + grad + weight
    share = params / (dp if settings.zero_stage >= 1 else 1)
    exchange_s = (dp - 1) / dp * params * exchanged / link
    return exchange_s + share * touched / (device.memory_bytes_per_s * settings.efficiency.memory)


def _weights(layer: LayerSpec, tp: int) -> float:
    m = layer.mlp
    experts = m.num_experts if m is not None else None
    return sum(
        p.in_width * p.out_width * (experts if experts and p.name.startswith("expert ") else 1)
        for p in layer_matmuls(layer, tp)
    )
