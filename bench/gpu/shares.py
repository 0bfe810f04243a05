"""What one of several tensor-parallel ranks has of a layer: its slices of the weights, as Megatron-LM cuts them.

Products into heads and into the MLP's width keep their first columns, those out of them their first rows, the head its
first words. The rank is handed whole rows and computes what a rank computes between two collectives. Of heads it has
`local_heads`: as many as the formulas count, padding included.
"""

from math import ceil

import torch
from torch import Tensor, nn

from trimtab.costs.formula.flops import Heads, find_tp_problems, local_heads
from trimtab.specs import LayerSpec

_QUERIES, _KEYS = {"q_proj"}, {"k_proj", "v_proj"}
_WIDTH_OUT = {"gate_proj", "up_proj", "fc1", "linear_fc1"}
_WIDTH_IN = {"down_proj", "fc2", "linear_fc2"}
_HEADS_IN = {"o_proj", "proj", "projection_layer"}


def can_share(layer: LayerSpec, tp: int) -> bool:
    """Whether `tp` ranks can share the layer: blocks and heads alone are shared here."""
    return tp == 1 or (layer.kind in ("block", "head") and not find_tp_problems(layer, tp))


def cut_to_share(module: nn.Module, layer: LayerSpec, tp: int) -> None:
    """Leaves in `module`, in place, what the first of `tp` ranks has of it."""
    if tp == 1:
        return
    if layer.kind == "head":
        assert isinstance(module, nn.Linear)
        _keep(module, 0, torch.arange(ceil(module.out_features / tp)))
        return
    assert layer.attention is not None
    assert layer.mlp is not None
    heads, width = local_heads(layer.attention, tp), layer.mlp.intermediate_size // tp
    for path, part in list(module.named_modules()):
        name = path.rpartition(".")[2]
        if isinstance(part, nn.Linear):
            _cut_linear(part, name, heads, layer.attention.head_dim, width)
        elif name in ("q_norm", "k_norm") and _is_wide(part, layer.attention.head_dim):  # over all heads
            part.weight = _sliced(part.weight, 0, torch.arange(heads.query * layer.attention.head_dim))
        elif name == "experts":
            part.gate_up_proj = _sliced(part.gate_up_proj, 1, _both_halves(layer.mlp.intermediate_size, width))
            part.down_proj = _sliced(part.down_proj, 2, torch.arange(width))
        _count_heads(part, heads, layer.attention.head_dim)


def _cut_linear(part: nn.Linear, name: str, heads: Heads, head_dim: int, width: int) -> None:
    if name == "qkv":  # queries, keys and values one after the other, each of all heads
        own, each = torch.arange(heads.query * head_dim), part.out_features // 3
        _keep(part, 0, torch.cat([own, each + own, 2 * each + own]))
    elif name in _QUERIES:
        _keep(part, 0, torch.arange(heads.query * head_dim))
    elif name in _KEYS:
        _keep(part, 0, torch.arange(heads.kv * head_dim))
    elif name in _HEADS_IN:
        _keep(part, 1, torch.arange(heads.query * head_dim))
    elif name in _WIDTH_OUT:
        _keep(part, 0, torch.arange(width))
    elif name in _WIDTH_IN:
        _keep(part, 1, torch.arange(width))
    else:
        assert name == "gate", f"nobody said how ranks share {name}"  # a router: whole on each


def _count_heads(part: nn.Module, heads: Heads, head_dim: int) -> None:
    """Attention of Transformers keeps its numbers of heads, and of columns, as attributes."""
    if hasattr(part, "num_key_value_groups"):
        part.num_key_value_groups = heads.query // heads.kv
    if hasattr(part, "num_heads"):
        part.num_heads = heads.query
        if hasattr(part, "embed_dim"):
            part.embed_dim = heads.query * head_dim


def _is_wide(norm: nn.Module, head_dim: int) -> bool:
    return any(weight.numel() > head_dim for weight in norm.parameters())


def _both_halves(whole: int, width: int) -> Tensor:
    """Gate and up projection lie one behind the other."""
    own = torch.arange(width)
    return torch.cat([own, whole + own])


def _keep(part: nn.Linear, axis: int, chosen: Tensor) -> None:
    part.weight = _sliced(part.weight, axis, chosen)
    if axis == 0:
        part.out_features = len(chosen)
        if part.bias is not None:
            part.bias = _sliced(part.bias, 0, chosen)
    else:
        part.in_features = len(chosen)


def _sliced(weight: nn.Parameter, axis: int, chosen: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().index_select(axis, chosen.to(weight.device)).contiguous())
