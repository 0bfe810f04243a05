"""GLM-4.5V: a ViT of any image size, a strided convolution and a gated merger, a decoder with experts."""

from __future__ import annotations

from trimtab.models.families.architecture import Architecture, linear, named_block, named_layer, norm, vector
from trimtab.models.families.family import Family
from trimtab.models.families.fields import Fields
from trimtab.models.families.qwen2_vl import check_width, read_patch_embed, text_section
from trimtab.models.families.text import read_text, read_tied, text_layers, tied_pair
from trimtab.models.families.vit import check_heads, read_grid, vit_block
from trimtab.models.images.native import GlmSmartResize
from trimtab.models.images.settings import Settings
from trimtab.specs import ImageRule


def describe_glm4v_moe(config: Fields) -> Architecture:
    vision, language = config.section("vision_config"), text_section(config, "glm4v_moe_text")
    H, out = vision.size("hidden_size"), vision.size("out_hidden_size")
    heads, depth = vision.size("num_heads"), vision.layers("depth")
    check_heads(vision, "hidden_size", H, "num_heads", heads)
    merger_width = vision.size("intermediate_size")  # of the merger; the blocks' MLP is out_hidden_size wide
    merge = vision.size("spatial_merge_size")
    bias = vision.flag("attention_bias", absent=False)  # GLM-4.5V has none; silence means so
    grid = read_grid(vision, vision.pair("image_size"), vision.pair("patch_size"))
    text = read_text(language, "glm4v_moe_text")
    check_width(vision, "out_hidden_size", out, language, text.hidden_size)

    layers = [read_patch_embed(vision, H, heads, bias=True)]
    rms = norm(H, "rms_norm")
    layers.append(
        named_layer("model.visual.post_conv_layernorm", "vision", "norm", rms, hidden_size=H, norm="rms_norm")
    )
    positions = vector(grid[0] * grid[1] * H)
    layers.append(named_layer("model.visual.embeddings", "vision", "embed", positions, hidden_size=H))
    block = vit_block(
        H,
        heads,
        out,
        norm_kind="rms_norm",
        qkv_bias=bias,
        output_bias=False,
        mlp_bias=False,
        gated=True,
        fused_qkv=True,
    )
    layers += [named_block(f"model.visual.blocks.{i}", "vision", block, H) for i in range(depth)]
    layers.append(named_layer("model.visual.post_layernorm", "vision", "norm", rms, hidden_size=H, norm="rms_norm"))
    M, rows = H * merge * merge, 1 / merge**2
    layers.append(
        named_layer(
            "model.visual.downsample",
            "projector",
            "projector",
            linear(M, out, bias=True),
            hidden_size=M,
            output_size=out,
            rows=rows,
        )
    )
    merger = linear(out, out, bias=False) + norm(out, "layer_norm") + linear(out, 3 * merger_width, bias=False)
    layers.append(
        named_layer(
            "model.visual.merger", "projector", "projector", merger, hidden_size=out, rows=rows, norm="layer_norm"
        )
    )
    tied = read_tied(config, language, either=True)
    layers += text_layers(text, "model.language_model", "lm_head", tied=tied)
    return Architecture(layers=tuple(layers), vocab_size=text.vocab_size, tied=tied_pair(layers, tied=tied))


def _smart_resize(s: Settings) -> ImageRule:
    s.require_resize()
    patch, merge = s.patch_and_merge()
    low, high = s.pixel_limits()
    temporal = s.agreed_int(("file", "temporal_patch_size"), ("vision", "temporal_patch_size"))
    s.check()
    return GlmSmartResize(
        patch_size=patch, merge_size=merge, temporal_patch_size=temporal, min_pixels=low, max_pixels=high
    )


FAMILIES = {
    "glm4v": Family(image_rule=_smart_resize),
    "glm46v": Family(image_rule=_smart_resize),
    "glm4v_moe": Family(describe=describe_glm4v_moe, image_rule=_smart_resize),
}
