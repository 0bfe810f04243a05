"""Language towers: decoder blocks of the text models that sit inside vision-language models.

What each type's code fixes (which projections carry a bias, norms on queries and keys, how many norms a block has)
is read from Transformers 5.23, and for InternLM2 from its remote code; every size comes from the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trimtab.models.families.architecture import (
    Block,
    NormKind,
    Weights,
    linear,
    named_block,
    named_layer,
    norm,
    rotary_bytes,
    vector,
)
from trimtab.models.families.fields import Fields
from trimtab.specs import AttentionSpec, LayerSpec, MlpSpec

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextType:
    """What the code of one text `model_type` fixes; None: the configuration's `attention_bias` decides."""

    qkv_bias: bool | None
    output_bias: bool | None
    qk_norm: bool = False
    fused_qkv: bool = False  # one matrix makes queries, keys and values
    # "derived": hidden_size / heads and no field of its own; "given": a field that must be there; "either": hidden_size
    # / heads where the field is absent or null, by the type's code
    head_dim: Literal["derived", "given", "either"] = "either"
    mlp_bias: bool = False  # the type reads `mlp_bias`
    norm: NormKind = "rms_norm"
    norms_per_block: int = 2
    kv_heads_absent_means_all: bool = False  # for every type null means num_attention_heads, for these silence too
    # how the type's code decides which layers slide
    windows: Literal["none", "every_layer", "if_used", "from_max_window_layers", "layer_types"] = "none"
    experts: Literal["qwen3", "deepseek"] | None = None


TEXT_TYPES: dict[str, TextType] = {
    "llama": TextType(qkv_bias=None, output_bias=None, mlp_bias=True, kv_heads_absent_means_all=True),
    "mistral": TextType(qkv_bias=False, output_bias=False, windows="every_layer"),
    "phi3": TextType(
        qkv_bias=False, output_bias=False, fused_qkv=True, kv_heads_absent_means_all=True, windows="every_layer"
    ),
    "internlm2": TextType(
        qkv_bias=None, output_bias=None, fused_qkv=True, head_dim="derived", kv_heads_absent_means_all=True
    ),
    "qwen2": TextType(qkv_bias=True, output_bias=False, windows="from_max_window_layers"),
    "qwen2_vl_text": TextType(qkv_bias=True, output_bias=False, head_dim="derived", windows="from_max_window_layers"),
    "qwen2_5_vl_text": TextType(qkv_bias=True, output_bias=False, head_dim="derived", windows="from_max_window_layers"),
    "qwen3": TextType(
        qkv_bias=None, output_bias=None, qk_norm=True, head_dim="given", windows="from_max_window_layers"
    ),
    "qwen3_moe": TextType(qkv_bias=None, output_bias=None, qk_norm=True, windows="if_used", experts="qwen3"),
    "qwen3_vl_text": TextType(qkv_bias=None, output_bias=None, qk_norm=True, head_dim="given"),
    "qwen3_vl_moe_text": TextType(qkv_bias=None, output_bias=None, qk_norm=True, experts="qwen3"),
    "gemma3_text": TextType(
        qkv_bias=None,
        output_bias=None,
        qk_norm=True,
        head_dim="given",
        norm="rms_norm_fp32",
        norms_per_block=4,
        windows="layer_types",
    ),
    "glm4v_moe_text": TextType(qkv_bias=None, output_bias=False, experts="deepseek"),
}

# InternVL's remote code picks the language model by the class named in `architectures`
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "InternLM2ForCausalLM": "internlm2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTower:
    """Blocks in order, and the widths around them."""

    model_type: str
    hidden_size: int
    vocab_size: int
    blocks: tuple[Block, ...]
    norm: NormKind  # of the last norm, as in the blocks
    rotary_bytes: int  # of the rotary tables, one for each kind of layer


def text_type(fields: Fields, allowed: Sequence[str]) -> str:
    """The section's `model_type`; where it is absent, the one that `architectures` names."""
    architectures = fields.raw("architectures")
    first = architectures[0] if isinstance(architectures, (list, tuple)) and architectures else None
    named = ARCHITECTURES.get(first) if isinstance(first, str) else None
    if named is not None and named in allowed and not fields.given("model_type"):
        return named
    kind = fields.word("model_type", choices=allowed)
    fields.check(
        named is None or named == kind,
        f"{fields.name('architectures')} names {first}, but {fields.name('model_type')} is {kind}: correct one of them",
    )
    return kind


def read_text(fields: Fields, model_type: str) -> TextTower:
    """The language tower of one text section (or of a flat configuration)."""
    kind = TEXT_TYPES[model_type]
    H = fields.size("hidden_size")
    num_layers = fields.layers("num_hidden_layers")
    vocab_size = fields.size("vocab_size")
    attention, attention_weights = _grouped_attention(fields, H, model_type)
    mlp_bias = fields.flag("mlp_bias", absent=False) if kind.mlp_bias else False  # older than the switch: none
    dense_at, dense, sparse = _feed_forward(fields, kind, H, num_layers, mlp_bias=mlp_bias)
    norms = norm(H, kind.norm) * kind.norms_per_block
    blocks = []
    windows = _windows(fields, kind, num_layers)
    for i, window in enumerate(windows):
        mlp, weights = dense if i in dense_at else sparse
        corrected = kind.experts == "deepseek" and mlp.num_experts is not None  # a buffer beside the router
        blocks.append(
            Block(
                weights=attention_weights + weights + norms,
                attention=attention if window is None else replace(attention, window=window),
                mlp=mlp,
                norm=kind.norm,
                num_norms=kind.norms_per_block,
                extra_bytes=4 * (mlp.num_experts or 0) if corrected else 0,
            )
        )
    num_tables = len({window is None for window in windows}) if kind.windows == "layer_types" else 1
    return TextTower(
        model_type=model_type,
        hidden_size=H,
        vocab_size=vocab_size,
        blocks=tuple(blocks),
        norm=kind.norm,
        rotary_bytes=num_tables * rotary_bytes(_rotated(fields, attention.head_dim)),
    )


def _rotated(fields: Fields, head_dim: int) -> int:
    """Dimensions of a head that are turned by position."""
    share = fields.raw("rope_parameters.partial_rotary_factor") or fields.raw("partial_rotary_factor") or 1.0
    return int(head_dim * share) if isinstance(share, (int, float)) and 0 < share <= 1 else head_dim


def _grouped_attention(fields: Fields, hidden_size: int, model_type: str) -> tuple[AttentionSpec, Weights]:
    """Separate or fused q, k, v: the count is the same."""
    kind, H = TEXT_TYPES[model_type], hidden_size
    heads = fields.size("num_attention_heads")
    kv_heads = heads
    if fields.given("num_key_value_heads") or not (
        kind.kv_heads_absent_means_all or fields.has_key("num_key_value_heads")
    ):
        kv_heads = fields.size("num_key_value_heads")
    head_dim = _head_dim(fields, kind, H, heads)
    fields.check(
        heads % kv_heads == 0,
        f"{fields.name('num_attention_heads')} {heads} is not a multiple of "
        f"{fields.name('num_key_value_heads')} {kv_heads}: queries cannot share keys evenly, correct one of them",
    )
    bias_names = ("bias", "attention_bias") if model_type == "internlm2" else ("attention_bias",)
    if kind.qkv_bias is None:
        # absent in files older than the switch, when no such type had biases; GLM and InternLM2 have always written it
        always_written = model_type in ("glm4v_moe_text", "internlm2")
        qkv_bias = fields.flag(*bias_names, absent=None if always_written else False)
    else:
        qkv_bias = kind.qkv_bias
        written = fields.flag(*bias_names, absent=qkv_bias)
        fields.check(
            written == qkv_bias,
            f"{fields.name('attention_bias')} is {written}, but {fields.name('model_type')} {model_type} always has it "
            f"{qkv_bias}: correct one of them",
        )
    written_norm = fields.flag("qk_norm", absent=kind.qk_norm)
    fields.check(
        written_norm == kind.qk_norm,
        f"{fields.name('qk_norm')} is {written_norm}, but {fields.name('model_type')} {model_type} always has it "
        f"{kind.qk_norm}: correct one of them",
    )
    output_bias = qkv_bias if kind.output_bias is None else kind.output_bias
    weights = linear(H, (heads + 2 * kv_heads) * head_dim, bias=qkv_bias)
    weights += linear(heads * head_dim, H, bias=output_bias)
    if kind.qk_norm:
        weights += vector(2 * head_dim)  # one RMSNorm over a head's queries, one over its keys, shared by all heads
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        causal=True,
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


def _feed_forward(
    fields: Fields, kind: TextType, hidden_size: int, num_layers: int, *, mlp_bias: bool
) -> tuple[frozenset[int], tuple[MlpSpec, Weights], tuple[MlpSpec, Weights]]:
    """Which layers are dense, what a dense layer holds, what an expert layer holds."""
    H = hidden_size
    if kind.experts is None:
        dense = _dense_mlp(H, fields.size("intermediate_size"), bias=mlp_bias)
        return frozenset(range(num_layers)), dense, dense
    per_token = fields.size("num_experts_per_tok")
    expert_size = fields.size("moe_intermediate_size")
    shared = 0
    if kind.experts == "deepseek":
        num_experts = fields.size("n_routed_experts")
        shared = fields.size("n_shared_experts", minimum=0) * expert_size
        first_sparse = fields.size("first_k_dense_replace", minimum=0)
        fields.check(
            first_sparse <= num_layers,
            f"{fields.name('first_k_dense_replace')} {first_sparse} is more than "
            f"{fields.name('num_hidden_layers')} {num_layers}: correct one of them",
        )
        dense_at = frozenset(range(min(first_sparse, num_layers)))
    else:
        num_experts = fields.size("num_experts", "num_local_experts")
        # both switches are absent where every layer has experts
        step = fields.optional_size("decoder_sparse_step") or 1
        dense_only = fields.indices("mlp_only_layers") if fields.given("mlp_only_layers") else ()
        dense_at = frozenset(i for i in range(num_layers) if i in dense_only or (i + 1) % step)
    fields.check(
        per_token <= num_experts,
        f"{fields.name('num_experts_per_tok')} {per_token} is more than the {num_experts} experts that "
        f"{fields.name('n_routed_experts' if kind.experts == 'deepseek' else 'num_experts')} gives: correct one",
    )
    dense_size = fields.size("intermediate_size") if dense_at else 1
    router = linear(H, num_experts, bias=False)
    expert = linear(H, 3 * expert_size, bias=False)  # gate, up and down
    inactive = expert.num_matmul_params * max(num_experts - per_token, 0)
    all_experts = expert * num_experts + linear(H, 3 * shared, bias=False) + router
    sparse = MlpSpec(
        intermediate_size=expert_size,
        gated=True,
        num_experts=num_experts,
        experts_per_token=per_token,
        shared_intermediate_size=shared,
    )
    sparse_weights = Weights(all_experts.num_params, all_experts.num_matmul_params - inactive)
    return dense_at, _dense_mlp(H, dense_size, bias=False), (sparse, sparse_weights)


def _dense_mlp(hidden_size: int, intermediate_size: int, *, bias: bool) -> tuple[MlpSpec, Weights]:
    """gate, up and down."""
    weights = linear(hidden_size, 2 * intermediate_size, bias=bias) + linear(intermediate_size, hidden_size, bias=bias)
    return MlpSpec(intermediate_size=intermediate_size, gated=True), weights


def _windows(fields: Fields, kind: TextType, num_layers: int) -> tuple[int | None, ...]:
    """Tokens that a query of each layer sees at most."""
    full: tuple[int | None, ...] = (None,) * num_layers
    if kind.windows == "none":
        return full
    if kind.windows == "every_layer":
        # Mistral 7B 0.1 slides and 0.2 does not: its file has to say which; Phi-3's silence is its null
        return (_sliding_window(fields, required=not kind.kv_heads_absent_means_all),) * num_layers
    if kind.windows == "if_used":
        used = fields.flag("use_sliding_window", absent=False)
        return (_sliding_window(fields, required=True),) * num_layers if used else full
    if kind.windows == "from_max_window_layers":
        # silence is older than the switch, when no such model slid
        if not fields.flag("use_sliding_window", absent=False):
            return full
        if not fields.given("layer_types"):
            first = fields.size("max_window_layers", minimum=0)
            window = _sliding_window(fields, required=True)
            return tuple(window if i >= first else None for i in range(num_layers))
    if fields.given("layer_types") or not fields.given("sliding_window_pattern", "_sliding_window_pattern"):
        types = fields.words("layer_types", choices=(FULL, SLIDING))
        fields.check(
            len(types) == num_layers,
            f"{fields.name('layer_types')} names {len(types)} layers, but {fields.name('num_hidden_layers')} is "
            f"{num_layers}: correct one of them",
        )
        slides = [x == SLIDING for x in types]
    else:  # every pattern-th layer is full
        pattern = fields.size("sliding_window_pattern", "_sliding_window_pattern")
        slides = [(i + 1) % pattern != 0 for i in range(num_layers)]
    window = _sliding_window(fields, required=any(slides))
    # a list of another length was noted above; `full` keeps the count right until the error is raised
    return tuple(window if x else None for x in slides) if len(slides) == num_layers else full


def _sliding_window(fields: Fields, *, required: bool) -> int | None:
    """null means no window; where a window is at stake silence is not an answer."""
    if required and not fields.has_key("sliding_window"):
        return fields.size("sliding_window")
    return fields.optional_size("sliding_window")


# -- naming ---------------------------------------------------------------------------------------------------------


def text_layers(text: TextTower, model: str, head: str, *, tied: bool, embed: str = "embed_tokens") -> list[LayerSpec]:
    """Embedding, blocks, last norm and vocabulary head under the module `model`; a tied head owns no parameters."""
    H, V = text.hidden_size, text.vocab_size
    scale = 2 if text.model_type == "gemma3_text" else 0  # a buffer of the embedding
    layers = [named_layer(f"{model}.{embed}", "language", "embed", vector(V * H), hidden_size=H, extra_bytes=scale)]
    layers += [named_block(f"{model}.layers.{i}", "language", b, H) for i, b in enumerate(text.blocks)]
    if text.model_type != "internlm2":  # whose remote code keeps the tables inside the blocks
        size = layers[1].extra_bytes + text.rotary_bytes
        layers[1] = replace(layers[1], beside=(f"{model}.rotary_emb",), extra_bytes=size)
    layers.append(named_layer(f"{model}.norm", "language", "norm", norm(H, text.norm), hidden_size=H, norm=text.norm))
    head_weights = Weights(0 if tied else H * V, H * V)
    layers.append(named_layer(head, "language", "head", head_weights, hidden_size=H, output_size=V))
    return layers


def tied_pair(layers: Sequence[LayerSpec], *, tied: bool) -> tuple[tuple[str, str], ...]:
    """(embedding, head), where they share one weight."""
    if not tied:
        return ()
    owner = next(x.name for x in layers if x.tower == "language" and x.kind == "embed")
    return ((owner, layers[-1].name),)


def read_tied(config: Fields, text: Fields, *, either: bool, absent: bool | None = None) -> bool:
    """Whether the head shares the embedding's weight.

    The outer `tie_word_embeddings` decides where it is given; files saved before Transformers 5 keep it in the text
    section, and some families (`either`) still tie when only that one says so. With neither: `absent`, or an error.
    """
    if config.given("tie_word_embeddings"):
        outer, inner = config.flag("tie_word_embeddings"), text.flag("tie_word_embeddings", absent=False)
        return outer or (either and inner)
    if text.given("tie_word_embeddings"):
        return text.flag("tie_word_embeddings")
    return config.flag("tie_word_embeddings", absent=absent)
