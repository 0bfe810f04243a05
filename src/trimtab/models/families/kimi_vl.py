"""Kimi-VL: MoonViT of any image size, a 2 x 2 merger, a DeepSeek-V3 decoder; remote code, its own module paths."""

from __future__ import annotations

from trimtab.models.families.architecture import (
    Architecture,
    linear,
    named_block,
    named_layer,
    norm,
    vector,
    whole_tower,
)
from trimtab.models.families.family import Family
from trimtab.models.families.fields import Fields
from trimtab.models.families.text import read_text, read_tied, text_layers, text_type, tied_pair
from trimtab.models.families.vit import check_heads, read_channels, vit_block
from trimtab.models.images.native import MoonVit
from trimtab.models.images.settings import MAX_MERGE, MAX_PATCH, Settings
from trimtab.specs import ImageRule


def describe_kimi_vl(config: Fields) -> Architecture:
    """MoonViT has biases everywhere and LayerNorms (vLLM and SGLang port the same modules: moonvit.py, kimi_vl.py)."""
    vision, language = config.section("vision_config"), config.section("text_config")
    H, F = vision.size("hidden_size"), vision.size("intermediate_size")
    heads, depth = vision.size("num_attention_heads"), vision.layers("num_hidden_layers")
    check_heads(vision, "hidden_size", H, "num_attention_heads", heads)
    height, width = vision.pair("patch_size")
    merge_height, merge_width = vision.pair("merge_kernel_size")
    positions = vision.size("init_pos_emb_height") * vision.size("init_pos_emb_width")
    text = read_text(language, text_type(language, ("deepseek_v3",)))

    embed = linear(read_channels(vision) * height * width, H, bias=True) + vector(positions * H)
    layers = [named_layer("vision_tower.patch_embed", "vision", "embed", embed, hidden_size=H)]
    block = vit_block(H, heads, F, norm_kind="layer_norm", fused_qkv=True)
    layers += [named_block(f"vision_tower.encoder.blocks.{i}", "vision", block, H) for i in range(depth)]
    name = "vision_tower.encoder.final_layernorm"
    layers.append(named_layer(name, "vision", "norm", norm(H, "layer_norm"), hidden_size=H, norm="layer_norm"))
    merged = merge_height * merge_width
    M = H * merged
    weights = norm(H, "layer_norm") + linear(M, M, bias=True) + linear(M, text.hidden_size, bias=True)
    layers.append(
        named_layer(
            "multi_modal_projector",
            "projector",
            "projector",
            weights,
            hidden_size=M,
            output_size=text.hidden_size,
            rows=1 / merged,
            norm="layer_norm",
        )
    )
    tied = read_tied(config, language, either=False)
    layers += text_layers(text, "language_model.model", "language_model.lm_head", tied=tied)
    return Architecture(
        layers=tuple(layers),
        vocab_size=text.vocab_size,
        tied=tied_pair(layers, tied=tied),
        joined_cuts=whole_tower(layers),
        notes=(
            "Kimi-VL is described after public copies of its remote code; the total is not checked against it, and the "
            "router's correction bias (one number an expert) is counted as a buffer.",
        ),
    )


def _moonvit(s: Settings) -> ImageRule:
    """Kimi-VL's remote code; only the padding variant, which its checkpoints use."""
    patch = s.agreed_int(("file", "patch_size"), ("preprocess", "patch"), ("vision", "patch_size"), maximum=MAX_PATCH)
    merge = s.agreed_int(
        ("file", "merge_kernel_size"), ("preprocess", "merge"), ("vision", "merge_kernel_size"), maximum=MAX_MERGE
    )
    limit = s.first_int(("file", "in_token_limit"), ("preprocess", "in_token_limit"))
    pads = s.value("preprocess", "rule") == "moonvit_native" or s.first_bool(("file", "pad_input"))
    if not pads and s.value("file", "pad_input") is False:
        s.problem(
            "reads `pad_input` in preprocessor_config.json",
            "without padding an image can keep an odd side, which the projector cannot merge",
            "set it to true, as published checkpoints do",
        )
    s.check()
    return MoonVit(patch_size=patch, merge_size=merge, max_patches=limit)


FAMILIES = {"kimi_vl": Family(describe=describe_kimi_vl, image_rule=_moonvit, is_remote_code=True)}
