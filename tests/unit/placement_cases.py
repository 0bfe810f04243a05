"""Small models of several families for placement tests."""

from __future__ import annotations

import copy
from dataclasses import replace

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


def sliding(*, window: int = 64, num_layers: int = 6) -> ModelSpec:
    """Every third decoder layer sees the whole text."""
    model = small_model(num_layers=num_layers)
    blocks = model.indices("language", "block")
    layers = [
        replace(x, attention=replace(x.attention, window=window)) if i in blocks and (i - blocks[0]) % 3 < 2 else x
        for i, x in enumerate(model.layers)
    ]
    return replace(model, layers=tuple(layers))
