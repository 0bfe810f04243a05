"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a ViT of any image size, a merger of neighbouring patches, a Qwen decoder.

2.5 has windows in most ViT blocks, RMSNorm and a gated MLP; 3 has learned positions, and DeepStack: features of some
ViT blocks enter early decoder layers. 3 comes with experts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trimtab.models.families.architecture import (
    Architecture,
    NormKind,
    linear,
    named_layer,
    norm,
    numbered,
    rotary_bytes,
    vector,
)
from trimtab.models.families.family import Family
from trimtab.models.families.text import read_text, read_tied, text_layers, tied_pair
from trimtab.models.families.vit import read_channels, read_vit_block
from trimtab.models.fields import Fields
from trimtab.models.images.native import SmartResize
from trimtab.models.images.settings import patch_and_merge, pixel_limits, require_resize
from trimtab.specs import ImageMarkup, ImageRule, LayerSpec


def _describe_qwen2_vl(config: Fields) -> Architecture:
    vision = config.section("vision_config")
    block = read_vit_block(
        vision,
        width="embed_dim",
        intermediate_size=max(int(vision.size("embed_dim") * vision.number("mlp_ratio")), 1),
        norm_kind="layer_norm",
        fused_qkv=True,
        # as in every published one; of other activations the name does not matter: each is one operation
        quick_gelu=vision.text("hidden_act", absent="quick_gelu") == "quick_gelu",
    )
    blocks = [block] * vision.layers("depth")
    return _assemble(config, vision, blocks, out="hidden_size", text_model_type="qwen2_vl_text")


def _describe_qwen2_5_vl(config: Fields) -> Architecture:
    vision = config.section("vision_config")
    full = read_vit_block(vision, norm_kind="rms_norm", gated=True, fused_qkv=True)
    assert full.attention is not None
    local = replace(full, attention=replace(full.attention, window=_window_rows(vision)))
    depth = vision.layers("depth")
    full_at = _read_blocks(vision, "fullatt_block_indexes", depth)
    blocks = [full if i in full_at else local for i in range(depth)]
    return _assemble(config, vision, blocks, norm_kind="rms_norm", text_model_type="qwen2_5_vl_text")


def _describe_qwen3_vl(config: Fields, *, text_model_type: str = "qwen3_vl_text") -> Architecture:
    vision = config.section("vision_config")
    block, depth = read_vit_block(vision, norm_kind="layer_norm", fused_qkv=True), vision.layers("depth")
    return _assemble(
        config,
        vision,
        [block] * depth,
        positions=vision.size("num_position_embeddings"),
        taps=_read_blocks(vision, "deepstack_visual_indexes", depth),
        text_model_type=text_model_type,
    )


def _assemble(
    config: Fields,
    vision: Fields,
    blocks: Sequence[LayerSpec],
    *,
    text_model_type: str,
    out: str = "out_hidden_size",
    norm_kind: NormKind = "layer_norm",
    positions: int | None = None,
    taps: Sequence[int] = (),
) -> Architecture:
    """All layers; `positions` are learned, and with them patches have a bias; DeepStack reads the blocks `taps`."""
    H = blocks[0].hidden_size
    language = _text_section(config, text_model_type)
    text = read_text(language, text_model_type)
    width, merge = vision.size(out), vision.size("spatial_merge_size")
    vision.check(
        width == text.hidden_size,
        f"{vision.name(out)} {width} is not {language.name('hidden_size')} {text.hidden_size}: image features must be "
        "as wide as the language model, correct one of them",
    )
    layers = [_patch_embed(vision, H, bias=positions is not None)]
    if positions is not None:
        layers.append(named_layer("model.visual.pos_embed", "vision", "embed", vector(positions * H), hidden_size=H))
    first_tapped = None
    for i, block in enumerate(numbered("model.visual.blocks", blocks)):
        layers.append(block)
        if i in taps:
            name = f"model.visual.deepstack_merger_list.{taps.index(i)}"
            layers.append(_merger(name, H, width, merge, "layer_norm", norm_after_merge=True))
            first_tapped = first_tapped or len(layers)
    layers.append(_merger("model.visual.merger", H, width, merge, norm_kind))
    first_block = len(layers) + 1  # after the embedding
    tied = read_tied(config, language, either=positions is None)
    layers += text_layers(text, "model.language_model", "lm_head", tied=tied)

    cuts, reason = frozenset[int](), None
    if first_tapped is not None:
        # the features of tap k are added after LLM block k: a cut after the last of them is free again
        num_fed = min(len(taps), len(text.blocks))
        cuts = frozenset(range(first_tapped, first_block + num_fed))
        reason = (
            f"DeepStack: features of ViT blocks {', '.join(map(str, sorted(taps)))} are added after LLM layers 0 to "
            f"{num_fed - 1}, and a cut in between would have to carry them"
        )
    return Architecture(
        layers=tuple(layers),
        vocab_size=text.vocab_size,
        tied=tied_pair(layers, tied=tied),
        forbidden_cuts=cuts,
        forbidden_cut_reason=reason,
        joined_cuts=None if positions is None else frozenset(),  # serving, features move to the layers that read them
    )


def _text_section(config: Fields, model_type: str) -> Fields:
    """`text_config`, or the configuration itself: files saved before it existed are flat."""
    if not config.has_key("text_config") and config.given("hidden_size"):
        return config
    language = config.section("text_config")
    if language.given("model_type"):
        language.word("model_type", choices=(model_type,))
    return language


def _read_blocks(vision: Fields, name: str, depth: int) -> tuple[int, ...]:
    """Numbers of blocks of the ViT."""
    numbers = vision.indices(name)
    vision.check(
        all(i < depth for i in numbers),
        f"{vision.name(name)} {list(numbers)} names a block outside {vision.name('depth')} {depth}: correct one of "
        "them",
    )
    return numbers


def _patch_embed(vision: Fields, hidden_size: int, *, bias: bool) -> LayerSpec:
    """A convolution over `temporal_patch_size` frames, an image repeated to fill them; the rotary table beside it."""
    height, width = vision.pair("patch_size")
    volume = read_channels(vision) * vision.size("temporal_patch_size") * height * width
    return named_layer(
        "model.visual.patch_embed",
        "vision",
        "embed",
        linear(volume, hidden_size, bias=bias),
        hidden_size=hidden_size,
        extra_bytes=rotary_bytes(hidden_size // vision.size("num_heads") // 2),  # rows and columns have a half each
        beside=("model.visual.rotary_pos_emb",),
    )


def _merger(
    name: str, hidden_size: int, out: int, merge: int, norm_kind: NormKind, *, norm_after_merge: bool = False
) -> LayerSpec:
    """merge x merge neighbouring patches side by side, then two linear layers: one row out for merge^2 in."""
    M = hidden_size * merge * merge
    weights = norm(M if norm_after_merge else hidden_size, norm_kind)
    weights += linear(M, M, bias=True) + linear(M, out, bias=True)
    return named_layer(
        name,
        "projector",
        "projector",
        weights,
        hidden_size=M,
        output_size=out,
        rows_per_input=1 / merge**2,
        norm=norm_kind,
    )


def _window_rows(vision: Fields) -> int:
    """Patches of one window: window_size pixels a side, rounded down to whole merged patches."""
    merge = vision.size("spatial_merge_size")
    pixels, patch = vision.size("window_size"), vision.pair("patch_size")[0]
    side = pixels // merge // patch
    vision.check(
        side >= 1,
        f"{vision.name('window_size')} {pixels} holds no merged patch of {vision.name('patch_size')} {patch} x "
        f"{vision.name('spatial_merge_size')} {merge}: correct one of them",
    )
    return max((side * merge) ** 2, 1)


def _smart_resize(s: Fields, *, windows: bool = False) -> ImageRule:
    require_resize(s)
    patch, merge = patch_and_merge(s)
    low, high = pixel_limits(s)
    window = s.size("vision_config.window_size") if windows else None
    s.raise_problems()
    return SmartResize(patch_size=patch, merge_size=merge, min_pixels=low, max_pixels=high, window_size=window)


_MARKUP = ImageMarkup(
    placeholder="<|image_pad|>", soft="<|image_pad|>", written="<|vision_start|><|image_pad|><|vision_end|>"
)
"""What Transformers' processors write, and (`written`) Qwen's own trainer."""

_describe_experts = partial(_describe_qwen3_vl, text_model_type="qwen3_vl_moe_text")
_windowed = partial(_smart_resize, windows=True)

FAMILIES = {
    "qwen2_vl": Family(describe=_describe_qwen2_vl, image_rule=_smart_resize, markup=_MARKUP),
    "qwen2_5_vl": Family(describe=_describe_qwen2_5_vl, image_rule=_windowed, markup=_MARKUP),
    "qwen3_vl": Family(describe=_describe_qwen3_vl, image_rule=_smart_resize, markup=_MARKUP),
    "qwen3_vl_moe": Family(describe=_describe_experts, image_rule=_smart_resize, markup=_MARKUP),
}
