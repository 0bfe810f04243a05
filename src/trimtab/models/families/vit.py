"""Vision towers: the ViT variants that sit in front of language models.

A tower's rows are its patches, class token included; `rows` of a layer is a share of them.
"""

from __future__ import annotations

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
    vector,
)
from trimtab.models.families.fields import Fields
from trimtab.specs import AttentionSpec, LayerSpec, MlpSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTower:
    """Layers in forward order, and what a projector needs to know about them."""

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    grid: tuple[int, int]  # patches of one fixed-size image: (rows, columns)
    has_class_token: bool
    num_blocks: int
    first_block: int  # its position in `layers`

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]


def vit_block(
    hidden_size: int,
    num_heads: int,
    intermediate_size: int,
    *,
    norm_kind: NormKind,
    qkv_bias: bool = True,
    output_bias: bool = True,
    mlp_bias: bool = True,
    gated: bool = False,
    qk_norm: bool = False,
    layer_scale: bool = False,
    fused_qkv: bool = False,
    quick_gelu: bool = False,
) -> Block:
    """A pre-norm encoder block with full attention; `qk_norm` is an RMSNorm over all heads together."""
    H, F = hidden_size, intermediate_size
    weights = linear(H, 3 * H, bias=qkv_bias) + linear(H, H, bias=output_bias)
    weights += linear(H, (2 if gated else 1) * F, bias=mlp_bias) + linear(F, H, bias=mlp_bias)
    weights += norm(H, norm_kind) * 2
    if qk_norm:
        weights += vector(2 * H)
    if layer_scale:
        weights += vector(2 * H)
    head_dim = max(H // num_heads, 1)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        causal=False,
        qk_norm=qk_norm,
        fused_qkv=fused_qkv,
    )
    return Block(
        weights=weights,
        attention=attention,
        mlp=MlpSpec(intermediate_size=intermediate_size, gated=gated, quick_gelu=quick_gelu),
        norm=norm_kind,
        layer_scale=layer_scale,
    )


def windowed(block: Block, window: int) -> Block:
    return replace(block, attention=replace(block.attention, window=window))


def check_heads(fields: Fields, hidden: str, hidden_size: int, heads: str, num_heads: int) -> None:
    fields.check(
        hidden_size % num_heads == 0,
        f"{fields.name(hidden)} {hidden_size} is not divisible by {fields.name(heads)} {num_heads}: correct one",
    )


def read_channels(fields: Fields) -> int:
    """Colour channels; the processors convert to RGB, so silence means 3."""
    return fields.optional_size("num_channels", "in_channels", "in_chans") or 3


def reads_quick_gelu(fields: Fields, *, absent: bool) -> bool:
    """Whether `hidden_act` is CLIP's approximation; every other activation is one operation, whatever its name."""
    return fields.text("hidden_act", absent="quick_gelu" if absent else "gelu") == "quick_gelu"


def read_grid(fields: Fields, image: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    """Patches of an image of the tower's own size."""
    grid = (image[0] // patch[0], image[1] // patch[1])
    fields.check(
        min(grid) >= 1,
        f"{fields.name('image_size')} {list(image)} holds no patch of {fields.name('patch_size')} {list(patch)}: "
        "correct one of them",
    )
    return max(grid[0], 1), max(grid[1], 1)


# -- CLIP and SigLIP ------------------------------------------------------------------------------------------------


def read_clip(
    fields: Fields,
    prefix: str,
    *,
    kind: Literal["clip_vision_model", "siglip_vision_model"],
) -> VisionTower:
    """CLIP (class token, norm before the blocks) or SigLIP (no class token, biased patches, attention-pooling head).

    Which layers nothing reads depends on the model around the tower: see `mark_unread`.
    """
    is_clip = kind == "clip_vision_model"
    H, F = fields.size("hidden_size"), fields.size("intermediate_size")
    heads, depth = fields.size("num_attention_heads"), fields.layers("num_hidden_layers")
    image, patch = fields.pair("image_size"), fields.pair("patch_size")
    channels = read_channels(fields)
    check_heads(fields, "hidden_size", H, "num_attention_heads", heads)
    has_pooling_head = not is_clip and fields.flag("vision_use_head")
    grid = read_grid(fields, image, patch)
    N = grid[0] * grid[1]
    rows = N + 1 if is_clip else N
    embed = linear(channels * patch[0] * patch[1], H, bias=not is_clip) + vector(rows * H)
    if is_clip:
        embed += vector(H)
    name, positions = f"{prefix}.embeddings", 8 * rows  # their numbers are a buffer of int64
    layers = [
        named_layer(name, "vision", "embed", embed, hidden_size=H, rows=N / rows, rows_out=1.0, extra_bytes=positions)
    ]
    layer_norm = norm(H, "layer_norm")
    if is_clip:  # Transformers spells it without the e
        name = f"{prefix}.pre_layrnorm"
        layers.append(named_layer(name, "vision", "norm", layer_norm, hidden_size=H, norm="layer_norm"))
    first_block = len(layers)
    block = vit_block(H, heads, F, norm_kind="layer_norm", quick_gelu=reads_quick_gelu(fields, absent=is_clip))
    layers += [named_block(f"{prefix}.encoder.layers.{i}", "vision", block, H) for i in range(depth)]
    layers.append(
        named_layer(
            f"{prefix}.post_layernorm",
            "vision",
            "norm",
            layer_norm,
            hidden_size=H,
            rows=1 / rows if is_clip else 1.0,  # CLIP norms the class token alone
            rows_out=1.0,
            norm="layer_norm",
        )
    )
    if has_pooling_head:
        layers.append(_pooling_head(f"{prefix}.head", H, F))
    return VisionTower(
        layers=tuple(layers),
        hidden_size=H,
        grid=grid,
        has_class_token=is_clip,
        num_blocks=depth,
        first_block=first_block,
    )


def _pooling_head(name: str, H: int, F: int) -> LayerSpec:
    """A block whose one query row is learned: keys and values see every patch, the rest one row an image."""
    weights = vector(H) + linear(H, 3 * H, bias=True) + linear(H, H, bias=True) + norm(H, "layer_norm")
    weights += linear(H, F, bias=True) + linear(F, H, bias=True)
    return named_layer(
        name,
        "vision",
        "block",
        Weights(weights.num_params, 2 * H * H),
        hidden_size=H,
        rows_out=1.0,  # what goes on is the rows that came in
        norm="layer_norm",
    )


def mark_unread(tower: VisionTower, num_read_blocks: int, *, reads_norm: bool) -> tuple[LayerSpec, ...]:
    """The tower's layers, `unread` where nothing takes their result.

    Those are the blocks behind the last one that is read, the norm behind the blocks unless `reads_norm`, and a
    pooling head, which no vision-language model reads. Transformers computes them all the same.
    """
    end, norm_at = tower.first_block + num_read_blocks, tower.first_block + tower.num_blocks
    return tuple(
        replace(layer, unread=True) if i >= end and not (reads_norm and i == norm_at) else layer
        for i, layer in enumerate(tower.layers)
    )


# -- taps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """Which hidden states of a tower the projector reads: what was given, and the blocks they come from."""

    num_features: int
    num_read_blocks: int  # blocks that run before the last of the states is there
    forbidden_cuts: frozenset[int]
    reason: str | None
    notes: tuple[str, ...]


def read_taps(
    config: Fields, tower: VisionTower, *, absent: int, name: str = "vision_feature_layer", silent: bool = False
) -> Taps:
    """Hidden state 0 enters the first block, state k leaves block k - 1; negative numbers count from the end.

    `absent` is what the published models of the family use; that it was not given is noted unless `silent`.
    """
    depth = tower.num_blocks
    written = config.raw(name)
    notes: list[str] = []
    if written is None:
        written = absent
        if not silent:
            notes.append(f"{name} is not given: {absent}, as in the published models of this family, is used.")
    several = isinstance(written, (list, tuple))
    states = list(written) if isinstance(written, (list, tuple)) else [written]
    unsettled = Taps(num_features=1, num_read_blocks=depth, forbidden_cuts=frozenset(), reason=None, notes=())
    well_formed = 1 <= len(states) <= depth + 1 and all(isinstance(x, int) and not isinstance(x, bool) for x in states)
    if not well_formed:
        config.problems.wrong.append(f"{name} is {str(written)[:60]!r}: a whole number or a list of them is needed")
        return unsettled
    numbers = [int(str(x)) for x in states]
    inside = all(-depth - 1 <= x <= depth for x in numbers)
    config.check(
        inside,
        f"{name} {written} lies outside the {depth + 1} hidden states of vision_config.num_hidden_layers {depth}: "
        "correct one of them",
    )
    if not inside:
        return unsettled
    after = [x if x >= 0 else depth + 1 + x for x in numbers]  # blocks that run before the state is there
    last = max(after)
    if last < depth:
        unread = f"block {last}" if last == depth - 1 else f"blocks {last} to {depth - 1}"
        notes.append(
            f"{name} {written} reads the state before the end of the tower: Transformers computes the "
            f"last {depth - last} of its blocks ({unread}), but nothing reads them and no gradient reaches them: they "
            "cost forward time alone."
        )
    cuts: frozenset[int] = frozenset()
    reason = None
    if several and len(set(after)) > 1:
        first = tower.first_block + min(after)
        cuts = frozenset(range(first + 1, len(tower.layers) + 1))
        reason = (
            f"{name} {numbers}: the projector joins several hidden states, and a cut behind the "
            "first of them would have to carry all of them"
        )
    return Taps(num_features=len(numbers), num_read_blocks=last, forbidden_cuts=cuts, reason=reason, notes=tuple(notes))
