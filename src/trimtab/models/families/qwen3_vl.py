"""Qwen3-VL, dense and with experts: learned positions, and DeepStack: ViT features enter early LLM layers."""

from __future__ import annotations

from trimtab.models.families.architecture import Architecture, named_block, named_layer, vector
from trimtab.models.families.family import Family
from trimtab.models.families.fields import Fields
from trimtab.models.families.qwen2_vl import (
    MARKUP,
    check_width,
    read_merger,
    read_patch_embed,
    smart_resize,
    text_section,
)
from trimtab.models.families.text import read_text, read_tied, text_layers, tied_pair
from trimtab.models.families.vit import check_heads, vit_block


def describe_qwen3_vl(config: Fields) -> Architecture:
    return _describe(config, "qwen3_vl_text")


def describe_qwen3_vl_moe(config: Fields) -> Architecture:
    return _describe(config, "qwen3_vl_moe_text")


def _describe(config: Fields, text_model_type: str) -> Architecture:
    vision, language = config.section("vision_config"), text_section(config, text_model_type)
    H, F = vision.size("hidden_size"), vision.size("intermediate_size")
    heads, depth = vision.size("num_heads"), vision.layers("depth")
    check_heads(vision, "hidden_size", H, "num_heads", heads)
    out, merge = vision.size("out_hidden_size"), vision.size("spatial_merge_size")
    positions = vision.size("num_position_embeddings")
    taps = vision.indices("deepstack_visual_indexes")
    vision.check(
        all(i < depth for i in taps),
        f"{vision.name('deepstack_visual_indexes')} {list(taps)} names a block outside {vision.name('depth')} {depth}: "
        "correct one of them",
    )
    text = read_text(language, text_model_type)
    check_width(vision, "out_hidden_size", out, language, text.hidden_size)

    layers = [read_patch_embed(vision, H, heads, bias=True)]
    layers.append(named_layer("model.visual.pos_embed", "vision", "embed", vector(positions * H), hidden_size=H))
    block = vit_block(H, heads, F, norm_kind="layer_norm", fused_qkv=True)
    first_tapped = None
    for i in range(depth):
        layers.append(named_block(f"model.visual.blocks.{i}", "vision", block, H))
        if i in taps:
            name = f"model.visual.deepstack_merger_list.{taps.index(i)}"
            layers.append(read_merger(name, H, out, merge, norm_kind="layer_norm", norm_after_merge=True))
            first_tapped = first_tapped or len(layers)
    layers.append(read_merger("model.visual.merger", H, out, merge, norm_kind="layer_norm"))
    first_block = len(layers) + 1  # behind the embedding
    tied = read_tied(config, language, either=False)
    layers += text_layers(text, "model.language_model", "lm_head", tied=tied)

    cuts, reason = frozenset[int](), None
    if first_tapped is not None:
        # the features of tap k are added behind LLM block k: a cut behind the last of them is free again
        num_fed = min(len(taps), len(text.blocks))
        cuts = frozenset(range(first_tapped, first_block + num_fed))
        reason = (
            f"DeepStack: features of ViT blocks {', '.join(map(str, sorted(taps)))} are added behind LLM layers 0 to "
            f"{num_fed - 1}, and a cut in between would have to carry them"
        )
    return Architecture(
        layers=tuple(layers),
        vocab_size=text.vocab_size,
        tied=tied_pair(layers, tied=tied),
        forbidden_cuts=cuts,
        forbidden_cut_reason=reason,
        joined_cuts=frozenset(),  # where a model serves, the features move to the layers that read them
    )


FAMILIES = {
    "qwen3_vl": Family(describe=describe_qwen3_vl, image_rule=smart_resize, markup=MARKUP),
    "qwen3_vl_moe": Family(describe=describe_qwen3_vl_moe, image_rule=smart_resize, markup=MARKUP),
}
