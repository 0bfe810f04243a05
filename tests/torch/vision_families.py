"""Tiny models of many families, with images for them: configurations shrunk by field name. Needs torch."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from trimtab.runtime.vision.families import GridFamily, find_family

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 512,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "block_dim": 64,
}
VISION = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
    "image_size": 56,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "projection_dim": 64,
    "window_size": 112,
}


@dataclass(frozen=True)
class Tiny:
    """What one family needs beyond the fields above."""

    vision: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)
    pixels: tuple[int, ...] | None = None  # shape of one patch (grids) or image (batches)
    more: dict[str, Tensor] = field(default_factory=dict)


SIDE = (56, 56)
LFM2_MASK = (torch.arange(16) < torch.tensor([[16], [8], [8]])).long()
TINY: dict[str, Tiny] = {
    "cohere2_vision": Tiny(vision={"image_size": 56}, outer={"alignment_intermediate_size": 64}, pixels=(3, 56, 56)),
    "ernie4_5_vl_moe": Tiny(
        text={
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
            "moe_intermediate_size": [24, 24],
        }
    ),
    "gemma3": Tiny(outer={"mm_tokens_per_image": 4}),
    "internvl": Tiny(vision={"image_size": SIDE, "patch_size": (14, 14)}),
    "llava_next": Tiny(outer={"image_grid_pinpoints": [[112, 56], [56, 112]]}, pixels=(3, 3, 56, 56),
                       more={"image_sizes": torch.tensor([[112, 56], [56, 112], [100, 40]])}),
    "llava_onevision": Tiny(outer={"image_grid_pinpoints": [[112, 56], [56, 112]]}, pixels=(3, 3, 56, 56),
                            more={"image_sizes": torch.tensor([[112, 56], [56, 112], [100, 40]])}),
    "mistral3": Tiny(more={"image_sizes": torch.tensor([[56, 56], [28, 56], [56, 28]])}),
    "paddleocr_vl": Tiny(pixels=(3, 14, 14)),
    "video_llama_3": Tiny(more={"image_merge_sizes": torch.tensor([2, 2, 2])}),
    "vipllava": Tiny(outer={"vision_feature_layers": [-2, -1]}),
    "lfm2_vl": Tiny(pixels=(16, 588), more={"spatial_shapes": torch.tensor([[4, 4], [2, 4], [4, 2]]),
                                           "pixel_attention_mask": LFM2_MASK}),
    "idefics2": Tiny(pixels=(2, 3, 56, 56)),
    "idefics3": Tiny(pixels=(2, 3, 56, 56)),
    "smolvlm": Tiny(pixels=(2, 3, 56, 56)),
}  # fmt: skip


NAMES = (
    *("cosmos3_edge", "cosmos3_omni", "ernie4_5_vl_moe", "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm5_next"),
    *("glm_ocr", "hyperclovax_vision_v2", "lfm3_vl", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "video_llama_3"),
    *("aya_vision", "cohere2_vision", "gemma3", "idefics2", "idefics3", "internvl", "lfm2_vl", "llava", "llava_next"),
    *("llava_onevision", "mistral3", "ovis2", "paligemma", "smolvlm", "vipllava"),
)
"""Those tried with clips and images of several sizes; `bench/columns/vision_dp.py` tries all."""


def make_model(family: str) -> nn.Module:
    """float64, two layers of every kind."""
    tiny = TINY.get(family, Tiny())
    config = AutoConfig.for_model(family)
    _shrink_parts(config, tiny)
    _assign(config, tiny.outer)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModel.from_config(config, attn_implementation="eager").double().eval()
    for parameter in model.parameters():
        if not parameter.any():  # some projectors start at zero, which would compare nothing
            nn.init.normal_(parameter, std=0.02)
    return model


def make_arguments(family: str, model: nn.Module, *, video: bool = False) -> dict[str, Tensor]:
    """Three images of different sizes for `get_image_features`, or a clip of four frames and one of two."""
    tiny, declaration = TINY.get(family, Tiny()), find_family(model.config)
    torch.manual_seed(1)
    if not isinstance(declaration, GridFamily):
        shape = tiny.pixels or (3, *SIDE)
        pixels = torch.randn(3, *shape).double()
        if family in ("idefics2", "idefics3", "smolvlm"):
            pixels[1, 1] = 0.0  # padding of a sample with one image
        return {"pixel_values": pixels, **tiny.more}
    side = declaration.block_side(model.config) or 2
    rows = [(4, 2, 2), (2, 2, 4)] if video else [(1, 2, 4), (1, 4, 4), (1, 1, 2)]
    grids = torch.tensor([[t, side * h, side * w] for t, h, w in rows])
    vision = getattr(model.config, "vision_config", model.config)
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    width = channels * (getattr(vision, "temporal_patch_size", 1) or 1) * vision.patch_size**2
    pixels = torch.randn(int(grids.prod(1).sum()), *(tiny.pixels or (width,))).double()
    if video:
        more = {name.replace("image", "video"): value[: len(rows)] for name, value in tiny.more.items()}
        return {"pixel_values_videos": pixels, "video_grid_thw": grids, **more}
    return {"pixel_values": pixels, "image_grid_thw": grids, **tiny.more}


def _shrink_parts(config: Any, tiny: Tiny) -> None:
    for name, part in list(vars(config).items()):
        if isinstance(part, transformers.PretrainedConfig):
            sees = "vis" in name or "encoder" in name
            _assign(part, {**VISION, **tiny.vision} if sees else {**TEXT, **tiny.text})
            for kinds in ("layer_types", "mlp_layer_types"):
                if kinds not in tiny.text and getattr(part, kinds, None):
                    setattr(part, kinds, list(getattr(part, kinds))[:2])
            _shrink_parts(part, tiny)


def _assign(config: Any, values: dict[str, Any]) -> None:
    """Fields the configuration has; those it derives or keeps by layer stay as they are."""
    for name, value in values.items():
        with contextlib.suppress(AttributeError, NotImplementedError):
            if getattr(config, name, None) is not None or name in ("rope_parameters", "layer_types"):
                setattr(config, name, value)
