"""Small configurations of families that are read without torch, and `describe` as on a machine without Transformers."""

from __future__ import annotations

import copy

from trimtab.models.describe import describe as describe_or_ask
from trimtab.models.describe import read_config
from trimtab.specs import ModelSpec


def describe(source: object, **options: object) -> ModelSpec:
    """As on a machine without Transformers: tests/torch/test_asked.py has the other half."""
    return describe_or_ask(source, ask=False, **options)


def qwen3(**changes: object) -> dict:
    vision = {
        "depth": 6,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [1, 3],
        "out_hidden_size": 64,
    }
    text = {
        "model_type": "qwen3_vl_text",
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 100,
        "attention_bias": False,
    }
    return {
        "model_type": "qwen3_vl",
        "vision_config": vision,
        "text_config": text,
        "tie_word_embeddings": False,
        "preprocess": {"min_pixels": 65536, "max_pixels": 16777216},
        **changes,
    }


def small_internvl(**text: object) -> dict:
    """Of 4 + 2 blocks; `text` changes fields of its language model, a Llama."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 448,
        "patch_size": 14,
        "norm_type": "layer_norm",
        "qkv_bias": True,
        "qk_normalization": False,
    }
    language = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "tie_word_embeddings": False,
        **text,
    }
    tiles = {"dynamic_image_size": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12, "use_thumbnail": True}
    config = {"model_type": "internvl_chat", "vision_config": vision, "llm_config": language, "downsample_ratio": 0.5}
    return {**config, **tiles}


def edit(data: dict, path: str, value: object) -> dict:
    """A copy with another value at a dotted path; `...` takes the field out."""
    result = copy.deepcopy(data)
    *parents, key = path.split(".")
    target = result
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if isinstance(target, list):
        target[int(key)] = value
    elif value is ...:
        del target[key]
    else:
        target[key] = value
    return result


QWEN3, INTERNVL, QWEN25 = qwen3(), read_config("InternVL-Chat-V1-5"), read_config("Qwen2.5-VL-7B")
"""Values that no field of a model's file expects, and `...`, which takes the field out."""
DAMAGE = [
    *(None, True, 0, -1, 1, 3, 7, 10**9, 2**31, 10**400, 1.5, 0.0, -2.5, 1e308, float("nan")),
    *("", "x", [], [1], [[1]], [[1, 1]], {}, {"a": 1}, ...),
]
