"""Qwen2-VL: a ViT of any image size, a 2 x 2 merger, a Qwen2 decoder."""

from __future__ import annotations

from trimtab.models.families.architecture import (
    Architecture,
    NormKind,
    Weights,
    linear,
    named_block,
    named_layer,
    norm,
    rotary_bytes,
)
from trimtab.models.families.family import Family
from trimtab.models.families.fields import Fields
from trimtab.models.families.text import read_text, read_tied, text_layers, tied_pair
from trimtab.models.families.vit import check_heads, read_channels, reads_quick_gelu, vit_block
from trimtab.models.images.native import SmartResize
from trimtab.models.images.settings import Settings
from trimtab.models.quote import quote
from trimtab.specs import ImageMarkup, ImageRule, LayerSpec


def describe_qwen2_vl(config: Fields) -> Architecture:
    vision, language = config.section("vision_config"), text_section(config, "qwen2_vl_text")
    E, heads, depth = vision.size("embed_dim"), vision.size("num_heads"), vision.layers("depth")
    ratio = vision.number("mlp_ratio")
    check_heads(vision, "embed_dim", E, "num_heads", heads)
    text = read_text(language, "qwen2_vl_text")
    out = vision.size("hidden_size")  # of the merger's output; the ViT itself is embed_dim wide
    check_width(vision, "hidden_size", out, language, text.hidden_size)
    merge = vision.size("spatial_merge_size")
    check_merger(config, [E * merge * merge, E * merge * merge, text.hidden_size])
    layers = [read_patch_embed(vision, E, heads, bias=False)]
    quick_gelu = reads_quick_gelu(vision, absent=True)
    block = vit_block(E, heads, max(int(E * ratio), 1), norm_kind="layer_norm", fused_qkv=True, quick_gelu=quick_gelu)
    layers += [named_block(f"model.visual.blocks.{i}", "vision", block, E) for i in range(depth)]
    layers.append(read_merger("model.visual.merger", E, out, merge, norm_kind="layer_norm"))
    tied = read_tied(config, language, either=True)
    layers += text_layers(text, "model.language_model", "lm_head", tied=tied)
    return Architecture(layers=tuple(layers), vocab_size=text.vocab_size, tied=tied_pair(layers, tied=tied))


# -- shared by the Qwen-VL families ---------------------------------------------------------------------------------


def text_section(config: Fields, model_type: str) -> Fields:
    """`text_config`, or the configuration itself: files saved before it existed are flat."""
    if not config.has_key("text_config") and config.given("hidden_size"):
        return config
    language = config.section("text_config")
    if language.given("model_type"):
        language.word("model_type", choices=(model_type,))
    return language


def read_patch_embed(vision: Fields, hidden_size: int, num_heads: int, *, bias: bool) -> LayerSpec:
    """A convolution over `temporal_patch_size` frames, an image repeated to fill them; the rotary table beside it."""
    height, width = vision.pair("patch_size")
    volume = read_channels(vision) * vision.size("temporal_patch_size") * height * width
    return named_layer(
        "model.visual.patch_embed",
        "vision",
        "embed",
        linear(volume, hidden_size, bias=bias),
        hidden_size=hidden_size,
        extra_bytes=rotary_bytes(hidden_size // num_heads // 2),  # rows and columns have a half each
        beside=("model.visual.rotary_pos_emb",),
    )


def read_merger(
    name: str, hidden_size: int, out: int, merge: int, *, norm_kind: NormKind, norm_after_merge: bool = False
) -> LayerSpec:
    """merge x merge neighbouring patches side by side, then two linear layers: one row out for merge^2 in."""
    M = hidden_size * merge * merge
    weights: Weights = norm(M if norm_after_merge else hidden_size, norm_kind)
    weights += linear(M, M, bias=True) + linear(M, out, bias=True)
    return named_layer(
        name, "projector", "projector", weights, hidden_size=M, output_size=out, rows=1 / merge**2, norm=norm_kind
    )


def check_width(vision: Fields, key: str, out: int, language: Fields, hidden_size: int) -> None:
    vision.check(
        out == hidden_size,
        f"{vision.name(key)} {out} is not {language.name('hidden_size')} {hidden_size}: image features must be as wide "
        "as the language model, correct one of them",
    )


def check_merger(config: Fields, widths: list[int]) -> None:
    """Where a description spells out its merger ("projector.merger"), it must be the one that follows."""
    written = config.raw("projector.merger")
    if isinstance(written, (list, tuple)):
        config.check(
            list(written) == widths,
            f"projector.merger is {quote(list(written))}, but vision_config and text_config make it {widths}: correct "
            "one",
        )


# -- images and their text, shared by the Qwen-VL families ----------------------------------------------------------


def smart_resize(s: Settings, *, windows: bool = False) -> ImageRule:
    s.require_resize()
    patch, merge = s.patch_and_merge()
    low, high = s.pixel_limits()
    window = s.first_int(("vision", "window_size")) if windows else None
    s.check()
    return SmartResize(patch_size=patch, merge_size=merge, min_pixels=low, max_pixels=high, window_size=window)


MARKUP = ImageMarkup(
    placeholder="<|image_pad|>", soft="<|image_pad|>", written="<|vision_start|><|image_pad|><|vision_end|>"
)
"""What Transformers' processors write, and (`written`) Qwen's own trainer."""

FAMILIES = {"qwen2_vl": Family(describe=describe_qwen2_vl, image_rule=smart_resize, markup=MARKUP)}
