"""Models put together as InternVL puts them: EVA-CLIP-8B and InternLM2-20B are a tower, its projector and an LLM.

OmniBal's Table 9 trains towers and language models that were never published together. A tower is read 448 px tiles of
patch 14, four patches become one row, and two linear layers lead to the language model, as in InternVL-Chat-1.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# blocks, width, heads, MLP width; layer scale, RMSNorm, biases of q, k and v.
# EVA-CLIP-1B: baaivision/EVA clip/model_configs/EVA_CLIP_g_14.json at d333114 (MLP width 4.3637 x 1408 = 6144).
# EVA-CLIP-4B: timm/models/eva.py, eva02_enormous_patch14_clip_224. EVA-CLIP-8B and 18B: arXiv 2402.04252, whose table
# of models gives 1.0, 4.4, 7.5 and 17.5 B parameters; the test holds all four to that. 18B has RMSNorm and no biases of
# q, k and v (section 2). InternVL-6B, as the paper calls InternViT-6B: the shipped InternVL-Chat-V1-5.
TOWERS = MappingProxyType(
    {
        "InternVL-6B": (45, 3200, 25, 12800, True, True, False),
        "EVA-CLIP-1B": (40, 1408, 16, 6144, False, False, True),
        "EVA-CLIP-4B": (64, 1792, 16, 15360, False, False, True),
        "EVA-CLIP-8B": (32, 4096, 32, 20480, False, False, True),
        "EVA-CLIP-18B": (48, 5120, 40, 25600, False, True, False),
    }
)
# model_type; blocks, width, heads, key/value heads, MLP width, vocabulary: the config.json of the hub's repositories
# internlm/internlm2-*, Qwen/Qwen1.5-*, meta-llama/Meta-Llama-3-*, 01-ai/Yi-*; no head is tied.
LANGUAGE = MappingProxyType(
    {
        "InternLM2-1.8B": ("internlm2", 24, 2048, 16, 8, 8192, 92544),
        "InternLM2-7B": ("internlm2", 32, 4096, 32, 8, 14336, 92544),
        "InternLM2-20B": ("internlm2", 48, 6144, 48, 8, 16384, 92553),
        "Qwen1.5-1.8B": ("qwen2", 24, 2048, 16, 16, 5504, 151936),
        "Qwen1.5-4B": ("qwen2", 40, 2560, 20, 20, 6912, 151936),
        "Qwen1.5-7B": ("qwen2", 32, 4096, 32, 32, 11008, 151936),
        "Qwen1.5-14B": ("qwen2", 40, 5120, 40, 40, 13696, 152064),
        "Qwen1.5-32B": ("qwen2", 64, 5120, 40, 8, 27392, 152064),
        "Qwen1.5-72B": ("qwen2", 80, 8192, 64, 64, 24576, 152064),
        "Qwen1.5-110B": ("qwen2", 80, 8192, 64, 8, 49152, 152064),
        "Llama3-8B": ("llama", 32, 4096, 32, 8, 14336, 128256),
        "Llama3-70B": ("llama", 80, 8192, 64, 8, 28672, 128256),
        "Yi-6B": ("llama", 32, 4096, 32, 4, 11008, 64000),
        "Yi-9B": ("llama", 48, 4096, 32, 4, 11008, 64000),
        "Yi-34B": ("llama", 60, 7168, 56, 8, 20480, 64000),
    }
)


def composed_config(vision: str, language: str) -> Mapping[str, Any]:
    """What InternVL's code would read for one of `TOWERS` and one of `LANGUAGE`; `describe` takes it."""
    depth, width, heads, mlp, scaled, is_rms, qkv_bias = TOWERS[vision]
    kind, num_blocks, hidden, query_heads, kv_heads, intermediate, vocabulary = LANGUAGE[language]
    return {
        "model_type": "internvl_chat",
        "_name_or_path": f"{vision} + {language}",
        "vision_config": {
            "hidden_size": width,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "intermediate_size": mlp,
            "image_size": 448,
            "patch_size": 14,
            "norm_type": "rms_norm" if is_rms else "layer_norm",
            "qkv_bias": qkv_bias,
            "qk_normalization": vision == "InternVL-6B",
            "layer_scale": scaled,
        },
        "text_config": {
            "model_type": kind,
            "hidden_size": hidden,
            "num_hidden_layers": num_blocks,
            "num_attention_heads": query_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // query_heads,
            "intermediate_size": intermediate,
            "vocab_size": vocabulary,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": kind == "qwen2",
            "mlp_bias": False,
        },
        "force_image_size": 448,
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 12,
        "use_thumbnail": True,
    }
