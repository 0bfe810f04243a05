"""Small models of several families for placement tests."""

from __future__ import annotations

import copy

from trimtab.models.describe import describe
from trimtab.specs import ModelSpec

QWEN25 = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 70,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 64,
    },
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 203,
    },
}
SETTINGS = {"min_pixels": 3136, "max_pixels": 10**6, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


def small_model(*, tied: bool = False, num_layers: int = 2, depth: int = 2, vocab_size: int = 203) -> ModelSpec:
    config = copy.deepcopy(QWEN25)
    config["tie_word_embeddings"] = tied
    config["text_config"] |= {"num_hidden_layers": num_layers, "vocab_size": vocab_size}
    config["vision_config"] |= {"depth": depth, "fullatt_block_indexes": [depth - 1]}
    return describe(config, preprocessor=SETTINGS, name="small")


def gemma(*, window: int = 64, num_layers: int = 6) -> ModelSpec:
    config = {
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 72,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 203,
            "sliding_window": window,
            "sliding_window_pattern": 3,
        },
    }
    settings = {"size": {"height": 56, "width": 56}, "do_pan_and_scan": False, "image_seq_length": 4}
    return describe(config, preprocessor=settings, name="small gemma")
