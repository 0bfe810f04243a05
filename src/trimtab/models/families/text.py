"""Language towers: decoder blocks of the text models that sit inside vision-language models.

What each type's code fixes (which projections carry a bias, norms on queries and keys) is read from Transformers 5.23,
and for InternLM2 from its remote code; every size comes from the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trimtab.models.families.architecture import Weights, linear, named_layer, norm, numbered, rotary_bytes, vector
from trimtab.models.fields import Fields
from trimtab.specs import AttentionSpec, LayerSpec, MlpSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TextType:
    """What the code of one text `model_type` fixes; None: the configuration's `attention_bias` decides."""

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    fused_qkv: bool = False  # one matrix makes queries, keys and values
    # "derived": hidden_size / heads and no field of its own; "given": a field that must be there; "either": hidden_size
    # / heads where the field is absent or null, by the type's code
    head_dim: Literal["derived", "given", "either"] = "either"
    mlp_bias: bool = False  # the type reads `mlp_bias`
    kv_heads_absent_means_all: bool = False  # for every type null means num_attention_heads, for these silence too
    slides: bool = False  # every layer, within `sliding_window`, whose silence is null
    has_experts: bool = False


_QWEN2_VL = TextType(qkv_bias=True, output_bias=False, head_dim="derived")

TEXT_TYPES: dict[str, TextType] = {
    "llama": TextType(mlp_bias=True, kv_heads_absent_means_all=True),
    "phi3": TextType(qkv_bias=False, output_bias=False, fused_qkv=True, kv_heads_absent_means_all=True, slides=True),
    "internlm2": TextType(fused_qkv=True, head_dim="derived", kv_heads_absent_means_all=True),
    "qwen2": TextType(qkv_bias=True, output_bias=False),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": TextType(qk_norm=True, head_dim="given"),
    "qwen3_moe": TextType(qk_norm=True, has_experts=True),
    "qwen3_vl_text": TextType(qk_norm=True, head_dim="given"),
    "qwen3_vl_moe_text": TextType(qk_norm=True, has_experts=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTower:
    """Blocks in order, without names, and what stands around them."""

    model_type: str
    hidden_size: int
    vocab_size: int
    blocks: tuple[LayerSpec, ...]
    rotary_bytes: int  # of the rotary table


def read_text(fields: Fields, model_type: str) -> TextTower:
    """The language tower of one text section (or of a flat configuration)."""
    kind = TEXT_TYPES[model_type]
    H, num_layers = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    vocab_size = fields.size("vocab_size")
    attention, attention_weights = _grouped_attention(fields, H, model_type)
    if kind.has_experts:
        dense_at, dense, sparse = _read_experts(fields, H, num_layers)
    else:
        bias = fields.flag("mlp_bias", absent=False) if kind.mlp_bias else False  # older than the switch: none
        dense_at, dense = frozenset(range(num_layers)), _dense_mlp(fields, H, bias=bias)
        sparse = dense
    blocks = []
    for i in range(num_layers):
        mlp, weights = dense if i in dense_at else sparse
        blocks.append(
            named_layer(
                "",
                "language",
                "block",
                attention_weights + weights + norm(H, "rms_norm") * 2,
                hidden_size=H,
                attention=attention,
                mlp=mlp,
                norm="rms_norm",
            )
        )
    return TextTower(
        model_type=model_type,
        hidden_size=H,
        vocab_size=vocab_size,
        blocks=tuple(blocks),
        rotary_bytes=rotary_bytes(_rotated(fields, attention.head_dim)),
    )


def _rotated(fields: Fields, head_dim: int) -> int:
    """Dimensions of a head that are turned by position."""
    share = fields.raw("rope_parameters.partial_rotary_factor") or fields.raw("partial_rotary_factor") or 1.0
    return int(head_dim * share) if isinstance(share, (int, float)) and 0 < share <= 1 else head_dim


def _grouped_attention(fields: Fields, hidden_size: int, model_type: str) -> tuple[AttentionSpec, Weights]:
    """Separate or fused q, k, v: the count is the same."""
    kind, H = TEXT_TYPES[model_type], hidden_size
    heads = fields.size("num_attention_heads")
    silent = kind.kv_heads_absent_means_all or fields.has_key("num_key_value_heads")
    kv_heads = heads if silent and not fields.given("num_key_value_heads") else fields.size("num_key_value_heads")
    head_dim = _head_dim(fields, kind, H, heads)
    fields.check(
        heads % kv_heads == 0,
        f"{fields.name('num_attention_heads')} {heads} is not a multiple of "
        f"{fields.name('num_key_value_heads')} {kv_heads}: queries cannot share keys evenly, correct one of them",
    )
    if model_type == "internlm2":  # its files have always written the switch
        qkv_bias = fields.flag("bias", "attention_bias")
    else:  # absent in files older than the switch, when no such type had biases
        qkv_bias = fields.flag("attention_bias", absent=bool(kind.qkv_bias))
        fields.check(
            kind.qkv_bias in (None, qkv_bias),
            f"{fields.name('attention_bias')} is {qkv_bias}, but {fields.name('model_type')} {model_type} always has "
            f"it {kind.qkv_bias}: correct one of them",
        )
    weights = linear(H, (heads + 2 * kv_heads) * head_dim, bias=qkv_bias)
    weights += linear(heads * head_dim, H, bias=qkv_bias if kind.output_bias is None else kind.output_bias)
    if kind.qk_norm:
        weights += vector(2 * head_dim)  # one RMSNorm over a head's queries, one over its keys, shared by all heads
    if fields.flag("use_sliding_window", absent=False):  # silence is older than the switch, when no such model slid
        name = fields.name("use_sliding_window")
        fields.problems.foreign.append(f"{name} is true: decoders whose layers see all of their text are described")
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        causal=True,
        window=fields.optional_size("sliding_window") if kind.slides else None,
        qk_norm=kind.qk_norm,
        fused_qkv=kind.fused_qkv,
    )
    return spec, weights


def _head_dim(fields: Fields, kind: TextType, hidden_size: int, heads: int) -> int:
    if kind.head_dim == "given":
        return fields.size("head_dim")
    written = fields.optional_size("head_dim")
    if written is not None and kind.head_dim == "either":
        return written
    fields.check(
        hidden_size % heads == 0,
        f"{fields.name('hidden_size')} {hidden_size} is not divisible by {fields.name('num_attention_heads')} {heads}"
        + (": correct one of them" if kind.head_dim == "derived" else ": give head_dim or correct one of them"),
    )
    derived = max(hidden_size // heads, 1)
    fields.check(
        written is None or written == derived,
        f"{fields.name('head_dim')} is {written}, but this type's code takes hidden_size / num_attention_heads = "
        f"{derived}: correct one of them",
    )
    return derived


def _read_experts(
    fields: Fields, H: int, num_layers: int
) -> tuple[frozenset[int], tuple[MlpSpec, Weights], tuple[MlpSpec, Weights]]:
    """Which layers are dense, what a dense layer holds, what an expert layer holds."""
    num_experts = fields.size("num_experts", "num_local_experts")
    per_token, expert_size = fields.size("num_experts_per_tok"), fields.size("moe_intermediate_size")
    fields.check(
        per_token <= num_experts,
        f"{fields.name('num_experts_per_tok')} {per_token} is more than the {num_experts} experts that "
        f"{fields.name('num_experts')} gives: correct one",
    )
    # both switches are absent where every layer has experts
    step = fields.optional_size("decoder_sparse_step") or 1
    dense_only = fields.indices("mlp_only_layers") if fields.given("mlp_only_layers") else ()
    dense_at = frozenset(i for i in range(num_layers) if i in dense_only or (i + 1) % step)
    dense = _dense_mlp(fields, H, bias=False) if dense_at else None
    router = linear(H, num_experts, bias=False)
    expert = linear(H, 3 * expert_size, bias=False)  # gate, up and down
    active = (expert * per_token + router).num_matmul_params
    sparse = (
        MlpSpec(intermediate_size=expert_size, gated=True, num_experts=num_experts, experts_per_token=per_token),
        Weights((expert * num_experts + router).num_params, active),
    )
    return dense_at, dense or sparse, sparse


def _dense_mlp(fields: Fields, hidden_size: int, *, bias: bool) -> tuple[MlpSpec, Weights]:
    """gate, up and down."""
    H, F = hidden_size, fields.size("intermediate_size")
    weights = linear(H, 2 * F, bias=bias) + linear(F, H, bias=bias)
    return MlpSpec(intermediate_size=F, gated=True), weights


# -- naming ---------------------------------------------------------------------------------------------------------


def text_layers(text: TextTower, model: str, head: str, *, tied: bool, embed: str = "embed_tokens") -> list[LayerSpec]:
    """Embedding, blocks, last norm and vocabulary head under the module `model`; a tied head owns no parameters."""
    H, V = text.hidden_size, text.vocab_size
    layers = [named_layer(f"{model}.{embed}", "language", "embed", vector(V * H), hidden_size=H)]
    layers += numbered(f"{model}.layers", text.blocks)
    if text.model_type != "internlm2":  # whose remote code keeps the tables inside the blocks
        layers[1] = replace(layers[1], beside=(f"{model}.rotary_emb",), extra_bytes=text.rotary_bytes)
    last = norm(H, "rms_norm")
    layers.append(named_layer(f"{model}.norm", "language", "norm", last, hidden_size=H, norm="rms_norm"))
    head_weights = Weights(0 if tied else H * V, H * V)
    layers.append(named_layer(head, "language", "head", head_weights, hidden_size=H, output_size=V))
    return layers


def tied_pair(layers: Sequence[LayerSpec], *, tied: bool) -> tuple[tuple[str, str], ...]:
    """(embedding, head), where they share one weight."""
    if not tied:
        return ()
    owner = next(x.name for x in layers if x.tower == "language" and x.kind == "embed")
    return ((owner, layers[-1].name),)


def read_tied(config: Fields, text: Fields, *, either: bool) -> bool:
    """Whether the head shares the embedding's weight.

    The outer `tie_word_embeddings` decides where it is given; files saved before Transformers 5 keep it in the text
    section, and some families (`either`) still tie when only that one says so. With neither it is an error.
    """
    if config.given("tie_word_embeddings"):
        outer, inner = config.flag("tie_word_embeddings"), text.flag("tie_word_embeddings", absent=False)
        return outer or (either and inner)
    if text.given("tie_word_embeddings"):
        return text.flag("tie_word_embeddings")
    return config.flag("tie_word_embeddings")
