"""Small models of every family: odd configurations, and inputs of one image to run them on. Needs torch."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace

import numpy as np
import torch
import transformers

from trimtab.models.asking.model import describe_fields
from trimtab.models.describe import image_rule
from trimtab.models.families import family_of
from trimtab.specs import ModelSpec

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 203,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
INTERNVIT = {**CLIP, "model_type": "internvl_vision"}
QWEN2_VIT = {
    "depth": 3,
    "embed_dim": 32,
    "hidden_size": 64,
    "mlp_ratio": 3,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN25_VIT = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 70,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1, 3],
    "out_hidden_size": 64,
}
QWEN3_VIT = {
    **{k: v for k, v in QWEN25_VIT.items() if k not in ("window_size", "fullatt_block_indexes")},
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [1, 2],
}
GLM_VIT = {
    **{k: v for k, v in QWEN25_VIT.items() if k not in ("window_size", "fullatt_block_indexes")},
    "image_size": 56,
}
MLLAMA_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "attention_heads": 4,
    "intermediate_size": 72,
    "vision_output_dim": 96,
    "image_size": 56,
    "patch_size": 14,
    "max_num_tiles": 2,
    "intermediate_layers_indices": [0, 2],
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM_EXPERTS = {"n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

ODD_CONFIGS = {
    "llava llama": ("llava", CLIP, {**TEXT, "model_type": "llama"}, {}),
    "llava llama, biases, tied, mha, own head_dim": (
        "llava",
        CLIP,
        {
            **TEXT,
            "model_type": "llama",
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 4,
            "head_dim": 8,
        },
        {"tie_word_embeddings": True, "multimodal_projector_bias": False},
    ),
    "llava mistral, window, three taps, siglip with head": (
        "llava",
        {**SIGLIP, "vision_use_head": True},
        {**TEXT, "model_type": "mistral", "sliding_window": 32, "head_dim": 24},
        {"vision_feature_layer": [-1, 0, 2], "vision_feature_select_strategy": "full"},
    ),
    "llava phi3": ("llava", CLIP, {**TEXT, "model_type": "phi3"}, {}),
    "llava_next": (
        "llava_next",
        CLIP,
        {**TEXT, "model_type": "llama"},
        {"image_grid_pinpoints": [[112, 56], [112, 112]]},
    ),
    "llava_onevision": (
        "llava_onevision",
        SIGLIP,
        {**TEXT, "model_type": "qwen2"},
        {"image_grid_pinpoints": [[112, 56], [112, 112]]},
    ),
    "llava_onevision tied, sliding, head": (
        "llava_onevision",
        {**SIGLIP, "vision_use_head": True},
        {**TEXT, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"tie_word_embeddings": True, "image_grid_pinpoints": [[56, 112]]},
    ),
    "internvl qwen2": (
        "internvl",
        {**INTERNVIT, "attention_bias": True},
        {**TEXT, "model_type": "qwen2"},
        {"tie_word_embeddings": False},
    ),
    "internvl qwen3, rms, qk norm, mask token, pooled by class token, tied": (
        "internvl",
        {
            **INTERNVIT,
            "norm_type": "rms_norm",
            "use_qk_norm": True,
            "use_mask_token": True,
            "use_mean_pooling": False,
            "use_absolute_position_embeddings": False,
        },
        {**TEXT, "model_type": "qwen3", "head_dim": 24, "attention_bias": True},
        {"tie_word_embeddings": True},
    ),
    "internvl llama": ("internvl", INTERNVIT, {**TEXT, "model_type": "llama"}, {"tie_word_embeddings": False}),
    "internvl phi3, two states back": (
        "internvl",
        INTERNVIT,
        {**TEXT, "model_type": "phi3"},
        {"tie_word_embeddings": True, "vision_feature_layer": -2},
    ),
    "llava qwen3": ("llava", CLIP, {**TEXT, "model_type": "qwen3", "head_dim": 24}, {}),
    "internvl qwen3_moe, some dense": (
        "internvl",
        INTERNVIT,
        {**TEXT, **EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [2], "decoder_sparse_step": 2},
        {"downsample_ratio": 0.25, "tie_word_embeddings": False},
    ),
    "qwen2_vl": ("qwen2_vl", QWEN2_VIT, TEXT, {}),
    "qwen2_vl tied, sliding": (
        "qwen2_vl",
        {**QWEN2_VIT, "spatial_merge_size": 3},
        {**TEXT, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        {"tie_word_embeddings": True},
    ),
    "qwen2_5_vl": ("qwen2_5_vl", QWEN25_VIT, TEXT, {}),
    "qwen2_5_vl tied, no full blocks": (
        "qwen2_5_vl",
        {**QWEN25_VIT, "fullatt_block_indexes": [], "window_size": 70},
        TEXT,
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl": ("qwen3_vl", QWEN3_VIT, {**TEXT, "head_dim": 24}, {}),
    "qwen3_vl tied, biased, taps out of order": (
        "qwen3_vl",
        {**QWEN3_VIT, "deepstack_visual_indexes": [3, 0, 1]},
        {**TEXT, "head_dim": 16, "attention_bias": True},
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl without taps": ("qwen3_vl", {**QWEN3_VIT, "deepstack_visual_indexes": []}, {**TEXT, "head_dim": 16}, {}),
    "qwen3_vl_moe": ("qwen3_vl_moe", QWEN3_VIT, {**TEXT, **EXPERTS}, {}),
    "qwen3_vl_moe some dense": (
        "qwen3_vl_moe",
        QWEN3_VIT,
        {**TEXT, **EXPERTS, "head_dim": 24, "mlp_only_layers": [0], "attention_bias": True},
        {"tie_word_embeddings": True},
    ),
    "gemma3": ("gemma3", SIGLIP, {**TEXT, "head_dim": 32, "sliding_window": 8}, {"mm_tokens_per_image": 4}),
    "glm4v_moe": ("glm4v_moe", GLM_VIT, {**TEXT, **GLM_EXPERTS, "head_dim": 24, "first_k_dense_replace": 1}, {}),
    "mllama": (
        "mllama",
        MLLAMA_VIT,
        {**TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "pad_token_id": 0},
        {},
    ),
}


def odd_config(case: str) -> transformers.PretrainedConfig:
    """The configuration of a case as it stands."""
    model_type, vision, text, outer = copy.deepcopy(ODD_CONFIGS[case])
    return transformers.AutoConfig.for_model(model_type, vision_config=vision, text_config=text, **outer)


def preprocessor_of(model_type: str, vision: dict) -> dict:
    """The few settings that the image rule needs and a configuration does not hold."""
    if model_type == "internvl":
        side = np.max(vision["image_size"]).item()  # a number, or one for each side
        return {"min_patches": 1, "max_patches": 12, "size": {"height": side, "width": side}}
    if model_type.startswith(("qwen", "glm")):
        settings = {"min_pixels": 3136, "max_pixels": 10**6, "patch_size": vision["patch_size"]}
        return {**settings, "merge_size": vision["spatial_merge_size"], "temporal_patch_size": 2}
    return {}


def as_saved(config) -> dict:
    """The whole config.json; without the token count that the class assumes for its own default image size."""
    written = json.loads(config.to_json_string(use_diff=False))
    written.pop("image_seq_length", None)
    return written


BARE = ("model.image_newline", "model.vision_model.class_embedding")
"""Layers that are parameters without a module of their own."""

IMAGE_TOKEN = 199


@dataclass(frozen=True)
class TinyModel:
    """A real model with weights, its description, and one forward's inputs."""

    model: torch.nn.Module
    spec: ModelSpec
    inputs: dict[str, torch.Tensor]
    num_patches: int
    num_tokens: int


def make_config(case: str, *, vision: dict | None = None, text: dict | None = None):
    """The configuration of a case; `vision` and `text` replace some of its fields."""
    model_type, own_vision, own_text, outer = copy.deepcopy(ODD_CONFIGS[case])
    vision, text = {**own_vision, **(vision or {})}, {**own_text, **(text or {})}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    if model_type in ("qwen2_vl", "qwen2_5_vl", "glm4v_moe"):  # rotary thirds for heads this narrow
        sections = [2, 2, 2] if model_type == "glm4v_moe" else [2, 3, 3]
        text.setdefault("rope_parameters", {**rope, "mrope_section": sections})
    if model_type == "mllama":
        text["rope_parameters"] = rope
    token = {"image_token_index": IMAGE_TOKEN} if model_type.startswith("llava") else {"image_token_id": IMAGE_TOKEN}
    return transformers.AutoConfig.for_model(model_type, vision_config=vision, text_config=text, **{**outer, **token})


def describe_here(config, *, preprocessor: dict | None = None, name: str | None = None) -> ModelSpec:
    """As `describe`, but Transformers is asked in this process: a child takes seconds to start."""
    written, family = as_saved(config), family_of(config.model_type)
    spec = describe_fields(written)
    rule = spec.image_rule if family.image_rule is None else image_rule(written, preprocessor)
    return replace(spec, name=name or spec.name, image_rule=rule)


def make_tiny_model(case: str) -> TinyModel:
    model_type, vision, _, _ = ODD_CONFIGS[case]
    config = make_config(case)
    spec = describe_here(config, preprocessor=preprocessor_of(model_type, vision))
    model = transformers.AutoModelForImageTextToText.from_config(config)
    inputs, patches, tokens = _inputs(model_type, vision, spec)
    return TinyModel(model, spec, inputs, patches, tokens)


def _inputs(model_type: str, vision: dict, spec: ModelSpec) -> tuple[dict, int, int]:
    """One 56 x 56 image (or 8 x 4 patches) and some text: inputs, ViT rows, LLM rows."""
    if model_type.startswith(("qwen", "glm")):
        grid, merge = (8, 4) if vision["spatial_merge_size"] == 2 else (9, 6), vision["spatial_merge_size"]
        patches, tokens = grid[0] * grid[1], grid[0] * grid[1] // merge**2
        images = {
            "pixel_values": torch.randn(patches, 3 * 2 * 14 * 14),
            "image_grid_thw": torch.tensor([[1, *grid]]),
            "mm_token_type_ids": torch.tensor([[0] * 5 + [1] * tokens + [0] * 3]),
        }
    elif model_type == "mllama":
        patches, tokens = vision["max_num_tiles"] * 24, 1  # 16 patches and the class token, padded
        images = mllama_images(vision, 1, 1, num_tokens=tokens + 8)
    else:
        tiles = {"llava_next": 3, "llava_onevision": 3}.get(
            model_type, 1
        )  # a 112 x 56 image: two tiles and a thumbnail
        rows = 16 + (spec.layers[0].rows_per_input < 1)
        patches = rows * tiles
        tokens = {"internvl": 4, "gemma3": 4, "llava": 16}.get(model_type, 16 + 8 * (4 + 1))
        images = {"pixel_values": torch.randn(tiles, 3, 56, 56)}
        if tiles > 1:
            images = {"pixel_values": images["pixel_values"][None], "image_sizes": torch.tensor([[112, 56]])}
    ids = torch.tensor([[3] * 5 + [IMAGE_TOKEN] * tokens + [4] * 3])
    if model_type == "gemma3":
        images["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return {**images, "input_ids": ids}, patches, tokens + 8


def mllama_images(vision: dict, num_sequences: int, num_images: int, *, num_tokens: int) -> dict[str, torch.Tensor]:
    """Images of each sequence that fill all their tiles and are seen by every token."""
    B, M, tiles, side = num_sequences, num_images, vision["max_num_tiles"], vision["image_size"]
    return {
        "pixel_values": torch.randn(B, M, tiles, 3, side, side),
        "aspect_ratio_ids": torch.full((B, M), 2),
        "aspect_ratio_mask": torch.ones(B, M, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(B, num_tokens, M, tiles, dtype=torch.long),
    }
