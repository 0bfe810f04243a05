"""What devices that share the experts of a layer, or the tokens of a pack, send one another; bytes of one device.

Context parallelism is the ring of Megatron-Core and Transformer Engine: each document is padded to a multiple of 2 cp
tokens and cut into as many chunks, rank r holds the r-th from the front and the r-th from the back, so that all ranks
have equal shares of rows and of causal pairs. Keys and values go round. Expert parallelism is a dispatch of the rows
to their experts and a combine of the results.
"""

from __future__ import annotations

from trimtab.costs.formula.flops import local_heads
from trimtab.costs.formula.settings import CostSettings
from trimtab.specs import DeviceSpec, LayerSpec, ParallelDims


def document_multiple(dims: ParallelDims) -> int:
    """Tokens of each document are padded to a multiple of this, so that ranks of cp share them evenly."""
    return 2 * dims.cp if dims.cp > 1 else 1


def find_cp_problems(layer: LayerSpec, cp: int) -> list[str]:
    """Why `cp` devices cannot share this layer's tokens, in sentences."""
    if cp == 1 or layer.tower != "language" or layer.measured is None:
        return []
    return [f"cp {cp} cannot share {layer.name}: its work was measured whole, no formula divides it: use cp 1"]


def ring_bytes(layer: LayerSpec, settings: CostSettings) -> float:
    """Sent for each row of this device in forward: keys and values of its rows, cp - 1 times.

    Backward sends them once more, and their gradients: twice that. An all-gather of keys and values moves as much.
    """
    if layer.attention is None or layer.tower != "language":
        return 0.0
    a, dims = layer.attention, settings.dims
    kv_bytes = settings.item_bytes * local_heads(a, dims.tp).kv * (a.head_dim + a.value_head_dim)
    return (dims.cp - 1) * kv_bytes


def all_to_all_s(layer: LayerSpec, device: DeviceSpec, settings: CostSettings) -> float:
    """Seconds of dispatch and combine for each row in forward, and as many in backward.

    A row is sent to each of its k experts from the one tensor-parallel device that holds it (sequence parallel); what
    stays in the node takes the device's link, what leaves it the device's own share of the node's ports, both at once,
    and the slower decides. DeepEP and HybridEP send a row once to each node that has some of its experts, to the device
    of the sender's place there, and from it once to each device that has some (deepseek-ai/DeepEP, README).
    """
    m, dims = layer.mlp, settings.dims
    if m is None or m.num_experts is None or dims.ep == 1:
        return 0.0
    # how many copies of a row stay in the node, and how many leave it
    here = min(dims.ep, settings.ep_in_node or dims.ep)  # devices of a node, among those that share experts
    k, nodes = m.experts_per_token or 1, dims.ep / here
    inside, outside = k * (here - 1) / dims.ep, k * (dims.ep - here) / dims.ep
    if settings.dispatcher == "deepep":
        inside = settings.reached(m, dims.ep) * (here - 1) / here
        outside = settings.reached(m, nodes) * (nodes - 1) / nodes
    # both ways at once: the slower decides
    ports = settings.ep_bytes_per_s or device.link_bytes_per_s
    row = 2.0 * layer.hidden_size * settings.item_bytes / dims.tp * settings.busiest_experts
    return row * max(inside / device.link_bytes_per_s, outside / ports) / settings.efficiency_on(device).link


def expert_tp_bytes(layer: LayerSpec, settings: CostSettings) -> float:
    """Sent for each row among the etp devices of an expert, forward: dispatched rows gathered, results scattered.

    0 where experts are divided as the dense layers are: their results are summed with `Matmul.reduced`.
    """
    m, dims = layer.mlp, settings.dims
    if m is None or m.num_experts is None or not dims.is_folded:
        return 0.0
    row = (m.experts_per_token or 1) * layer.hidden_size * settings.item_bytes / dims.tp
    return 2.0 * row * (dims.expert_tp - 1)
