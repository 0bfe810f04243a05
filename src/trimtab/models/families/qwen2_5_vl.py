"""Qwen2.5-VL: Qwen2-VL with windows in most ViT blocks, RMSNorm and a gated MLP."""

from __future__ import annotations

from functools import partial

from trimtab.models.families.architecture import Architecture, named_block
from trimtab.models.families.family import Family
from trimtab.models.families.fields import Fields
from trimtab.models.families.qwen2_vl import (
    MARKUP,
    check_merger,
    check_width,
    read_merger,
    read_patch_embed,
    smart_resize,
    text_section,
)
from trimtab.models.families.text import read_text, read_tied, text_layers, tied_pair
from trimtab.models.families.vit import check_heads, vit_block, windowed


def describe_qwen2_5_vl(config: Fields) -> Architecture:
    vision, language = config.section("vision_config"), text_section(config, "qwen2_5_vl_text")
    H, F = vision.size("hidden_size"), vision.size("intermediate_size")
    heads, depth = vision.size("num_heads"), vision.layers("depth")
    check_heads(vision, "hidden_size", H, "num_heads", heads)
    out, merge = vision.size("out_hidden_size"), vision.size("spatial_merge_size")
    full_at = vision.indices("fullatt_block_indexes")
    vision.check(
        all(i < depth for i in full_at),
        f"{vision.name('fullatt_block_indexes')} {list(full_at)} names a block outside {vision.name('depth')} {depth}: "
        "correct one of them",
    )
    window = _window_rows(vision, merge)
    text = read_text(language, "qwen2_5_vl_text")
    check_width(vision, "out_hidden_size", out, language, text.hidden_size)
    check_merger(config, [H * merge * merge, H * merge * merge, text.hidden_size])
    layers = [read_patch_embed(vision, H, heads, bias=False)]
    full = vit_block(H, heads, F, norm_kind="rms_norm", gated=True, fused_qkv=True)
    local = windowed(full, window)
    layers += [
        named_block(f"model.visual.blocks.{i}", "vision", full if i in full_at else local, H) for i in range(depth)
    ]
    layers.append(read_merger("model.visual.merger", H, out, merge, norm_kind="rms_norm"))
    tied = read_tied(config, language, either=True)
    layers += text_layers(text, "model.language_model", "lm_head", tied=tied)
    return Architecture(layers=tuple(layers), vocab_size=text.vocab_size, tied=tied_pair(layers, tied=tied))


def _window_rows(vision: Fields, merge: int) -> int:
    """Patches of one window: window_size pixels a side, rounded down to whole merged patches."""
    pixels, patch = vision.size("window_size"), vision.pair("patch_size")[0]
    side = pixels // merge // patch
    vision.check(
        side >= 1,
        f"{vision.name('window_size')} {pixels} holds no merged patch of {vision.name('patch_size')} {patch} x "
        f"{vision.name('spatial_merge_size')} {merge}: correct one of them",
    )
    return max((side * merge) ** 2, 1)


FAMILIES = {
    "qwen2_5_vl": Family(describe=describe_qwen2_5_vl, image_rule=partial(smart_resize, windows=True), markup=MARKUP)
}
