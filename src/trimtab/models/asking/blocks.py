"""A block's own modules -> attention and feed-forward as the cost formulas know them, where it is a plain block."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from trimtab.models.description import attention_weights, mlp_weights
from trimtab.specs import AttentionSpec, MlpSpec

_QUERY = ("q_proj", "query", "q", "wq", "to_q", "query_proj", "q_linear")
_KEY = ("k_proj", "key", "k", "wk", "to_k", "key_proj", "k_linear")
_VALUE = ("v_proj", "value", "v", "wv", "to_v", "value_proj", "v_linear")
_FUSED = ("qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "c_attn", "in_proj_qkv")
_OUTPUT = (
    *("o_proj", "out_proj", "dense", "proj", "wo", "projection_layer", "projection", "o", "output", "c_proj"),
    "to_out",
)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "num_attn_heads", "attention_heads")
_DOWN, _UP = re.compile(r"down|w2|fc2|linear_2"), re.compile(r"up|gate|w1|fc1|linear_1")
_SIDE_NORM = re.compile(r"(^|\.)(q|k|query|key)_?(layer)?norm")
NormKind = Literal["layer_norm", "rms_norm", "rms_norm_fp32"]


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What a block's modules say of themselves."""

    attention: AttentionSpec | None
    mlp: MlpSpec | None
    norm: NormKind | None
    num_norms: int
    layer_scale: bool
    num_matmul_params: int  # of an expert block only those of the experts that run
    num_all_experts: int  # the same if every expert ran; equal without experts
    explained: int  # those of `num_matmul_params` that attention and mlp account for
    num_attentions: int


@dataclass(frozen=True, kw_only=True)
class _Experts:
    num: int
    per_token: int
    width: int
    gated: bool
    num_params: int  # matrices of all of them
    router_params: int
    parts: frozenset[int]  # modules that belong to it, by id


def read_block(module: Any, *, causal: bool, window: int | None) -> BlockShape:
    """Read attention and feed-forward of a block by the shapes of its matrices; None where they are others."""
    parts = list(module.named_modules())
    found = [x for name, part in parts if (x := _read_attention(part, _around(module, name), causal, window))]
    experts = _find_experts(module)
    linears = [x for x in module.modules() if is_matmul(x) and not (experts and id(x) in experts.parts)]
    num_matmul = sum(x.weight.numel() for x in linears)
    first = found[0] if found else None
    attention = None if first is None else first.spec
    hidden = entering_width(module) if first is None else first.hidden_size
    explained = 0 if attention is None else attention_weights(attention, hidden)
    rest = [x for x in linears if first is None or id(x) not in first.parts]
    mlp = _read_mlp(module, rest, hidden)
    num_all = num_matmul + (experts.num_params + experts.router_params if experts else 0)
    if experts:
        active = experts.num_params * experts.per_token // experts.num
        num_matmul += active + experts.router_params
        shared = mlp.intermediate_size if mlp is not None and mlp.gated == experts.gated else 0
        mlp = MlpSpec(
            intermediate_size=experts.width,
            gated=experts.gated,
            num_experts=experts.num,
            experts_per_token=experts.per_token,
            shared_intermediate_size=shared,
        )
    norm, num_norms = _read_norms(module, hidden)
    return BlockShape(
        attention=attention,
        mlp=mlp,
        norm=norm,
        num_norms=num_norms,
        layer_scale=any(re.search(r"lambda_|layer_scale|gamma|\bls\d", x) for x, _ in module.named_parameters()),
        num_matmul_params=num_matmul,
        num_all_experts=num_all,
        explained=explained + (0 if mlp is None else mlp_weights(mlp, hidden)),
        num_attentions=len(found),
    )


def is_matmul(module: Any) -> bool:
    """Return whether it is a linear layer, a convolution or a router with a bare matrix; no table of embeddings."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() < 2 or isinstance(module, nn.Embedding):
        return False
    return "Norm" not in type(module).__name__ and "Embedding" not in type(module).__name__


def entering_width(module: Any) -> int:
    """Return the width of the rows that its first matrix multiplies; 1 without one."""
    first = next((x for x in module.modules() if is_matmul(x)), None)
    return 1 if first is None else int(first.weight[0].numel())


def find_norm(module: Any) -> NormKind | None:
    """Return how a norm computes, by its class."""
    name = type(module).__name__
    if isinstance(module, nn.LayerNorm) or ("LayerNorm" in name and hasattr(module, "bias")):
        return "layer_norm"
    if "Norm" not in name:
        return None
    return "rms_norm_fp32" if "Gemma" in name else "rms_norm"


# -- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Attention:
    spec: AttentionSpec
    parts: frozenset[int]  # matrices it accounts for, by id
    hidden_size: int  # of the rows that enter


def _around(module: Any, name: str) -> Any:
    """The module that holds the one of that path: BERT keeps attention's output next to q, k and v."""
    return module.get_submodule(name.rpartition(".")[0])


def _read_attention(part: Any, around: Any, causal: bool, window: int | None) -> _Attention | None:
    output = _child(part, _OUTPUT)
    fused = _child(part, _FUSED)
    query, key, value = (_child(part, names) for names in (_QUERY, _KEY, _VALUE))
    heads = next((x for name in _HEADS if isinstance(x := _attribute(part, name), int) and x > 0), None)
    if heads is None:
        return None
    if fused is not None and output is not None:
        width = output.weight.shape[1]
        rest = fused.weight.shape[0] - width
        head_dim, other = divmod(width, heads)
        if other or head_dim == 0 or rest <= 0 or rest % (2 * head_dim):
            return None
        used, hidden, kv_heads, value_dim = (fused, output), fused.weight.shape[1], rest // 2 // head_dim, head_dim
    elif query is not None and key is not None:
        head_dim = getattr(part, "head_dim", None) or query.weight.shape[0] // heads
        if not isinstance(head_dim, int) or head_dim == 0 or key.weight.shape[0] % head_dim:
            return None
        kv_heads = key.weight.shape[0] // head_dim
        value_dim = head_dim if value is None else value.weight.shape[0] // kv_heads
        hidden, leaving = query.weight.shape[1], heads * value_dim
        if output is None:
            others = (x for x in around.modules() if is_matmul(x) and x not in (query, key, value))
            output = next((x for x in others if tuple(x.weight.shape) == (hidden, leaving)), None)
        if output is None or output.weight.shape[1] != leaving:
            return None
        used = tuple(x for x in (query, key, value, output) if x is not None)
    else:
        return None
    crosses = bool(re.search(r"[Cc]ross", type(part).__name__)) and key is not None
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_dim,
        causal=causal and not crosses,
        window=window,
        qk_norm=any(_SIDE_NORM.search(x) for x, _ in part.named_parameters()),
        fused_qkv=fused is not None,
        cross=crosses,
    )
    return _Attention(spec=spec, parts=frozenset(id(x) for x in used), hidden_size=int(hidden))


def _child(part: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        child = part._modules.get(name)
        if child is not None and is_matmul(child):
            return child
    return None


def _attribute(part: Any, name: str) -> Any:
    """Return the attribute of the module, or else of its configuration; None where it differs by layer."""
    value = getattr(part, name, None)
    if value is not None:
        return value
    try:
        return getattr(getattr(part, "config", None), name, None)
    except Exception:  # the library's own class for this, which older versions lack
        return None


# -- feed-forward ---------------------------------------------------------------------------------------------------


def _read_mlp(module: Any, linears: list[Any], hidden: int) -> MlpSpec | None:
    """The largest group of matrices that makes a feed-forward part: of one submodule, or else of the whole block."""
    free = {id(x) for x in linears}
    groups = [[x for x in part.children() if id(x) in free] for part in module.modules()]
    quick = any("QuickGELU" in type(x).__name__ for x in module.modules())
    found = [x for x in (_match_mlp(group, hidden, quick=quick) for group in [*groups, linears]) if x is not None]
    return max(found, key=lambda x: x.intermediate_size, default=None)


def _match_mlp(linears: list[Any], hidden: int, *, quick: bool) -> MlpSpec | None:
    """Return two or three matrices between `hidden` and one other width; gates of one column are left to the rest."""
    shapes = [(int(x.weight.shape[1]), int(x.weight.shape[0])) for x in linears if x.weight.dim() == 2]
    shapes = [x for x in shapes if x[1] > 1]
    up = [leaving for entering, leaving in shapes if entering == hidden]
    down = [entering for entering, leaving in shapes if leaving == hidden]
    if len(shapes) == 2 and len(up) == len(down) == 1 and up[0] in (down[0], 2 * down[0]):
        gated = up[0] == 2 * down[0]
        return MlpSpec(intermediate_size=down[0], gated=gated, quick_gelu=quick)
    if len(shapes) == 3 and len(up) == 2 and up[0] == up[1] and down == [up[0]]:
        return MlpSpec(intermediate_size=down[0], gated=True, quick_gelu=quick)
    return None


def _find_experts(module: Any) -> _Experts | None:
    """Find experts as matrices of three dimensions with a router next to them; the innermost module that holds two."""
    for part in reversed(list(module.modules())):
        convolutions = {id(x.weight) for x in part.modules() if isinstance(x, (nn.Conv1d, nn.ConvTranspose1d))}
        stacked = {
            x: p for x, p in part.named_parameters() if p.dim() == 3 and p.shape[0] > 1 and id(p) not in convolutions
        }
        if len(stacked) < 2 or len({p.shape[0] for p in stacked.values()}) != 1:
            continue
        num, width = next(iter(stacked.values())).shape[0], _expert_width(stacked)
        per_token = _experts_per_token(module)
        if width is None or per_token is None or not 0 < per_token <= num:
            return None
        inside = {id(x) for x in part.modules()}
        routers = [x for x in module.modules() if is_matmul(x) and x.weight.shape[0] == num and id(x) not in inside][:1]
        down = next(p for x, p in stacked.items() if _DOWN.search(x))
        return _Experts(
            num=num,
            per_token=per_token,
            width=width,
            gated=sum(p.numel() for p in stacked.values()) == 3 * down.numel(),
            num_params=sum(p.numel() for p in stacked.values()),
            router_params=sum(x.weight.numel() for x in routers),
            parts=frozenset(inside | {id(x) for x in routers}),
        )
    return None


def _expert_width(stacked: dict[str, Any]) -> int | None:
    """Return the dimension of the down matrix [experts, a, b] that is no hidden width."""
    down = next((p for x, p in stacked.items() if _DOWN.search(x)), None)
    up = next((p for x, p in stacked.items() if _UP.search(x)), None)
    if down is None or up is None:
        return None
    for width, hidden in (tuple(down.shape[1:]), tuple(down.shape[:0:-1])):
        if sorted(up.shape[1:]) == sorted((hidden, 2 * width)):
            return int(width)
    return next((int(x) for x in down.shape[1:] if x != max(down.shape[1:])), None)


def _experts_per_token(module: Any) -> int | None:
    for part in module.modules():
        for name in ("top_k", "num_experts_per_tok", "moe_top_k", "num_selected_experts", "moe_topk", "moe_k"):
            value = _attribute(part, name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


# -- norms ----------------------------------------------------------------------------------------------------------


def _read_norms(module: Any, hidden: int) -> tuple[NormKind | None, int]:
    kinds = [
        kind
        for name, x in module.named_modules()
        if not _SIDE_NORM.search(name)
        and (kind := find_norm(x))
        and isinstance(w := getattr(x, "weight", None), nn.Parameter)
        and w.numel() == hidden
    ]
    return (kinds[0], len(kinds)) if kinds else (None, 0)
