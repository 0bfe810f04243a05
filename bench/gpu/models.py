"""Published models as Transformers builds them: the configuration that ships with a description, and the description.

InternVL's is of remote code there; its fields are written in the words of Transformers' own class.
"""

from __future__ import annotations

import copy
from typing import Any

from trimtab.models.describe import describe
from trimtab.models.shipped import read_shipped
from trimtab.specs import ModelSpec

_TILES = {"min_patches": 1, "max_patches": 12, "size": {"height": 448, "width": 448}}


def published(name: str) -> tuple[dict[str, Any], ModelSpec]:
    """Configuration and description of a shipped model."""
    config = copy.deepcopy(dict(read_shipped(name)["config"]))
    if config["model_type"] != "internvl_chat":
        return config, describe(name)
    config = internvl_config(config)
    return config, describe(copy.deepcopy(config), preprocessor=_TILES, name=name)


def internvl_config(chat: dict[str, Any]) -> dict[str, Any]:
    """The `internvl` of Transformers with the sizes of an `internvl_chat`."""
    vision = chat["vision_config"]
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "norm_type")
    sides = {name: [vision[name]] * 2 for name in ("image_size", "patch_size")}
    return {
        "model_type": "internvl",
        "downsample_ratio": chat["projector"]["pixel_shuffle"],
        "image_token_id": 9,
        "tie_word_embeddings": chat["text_config"]["tie_word_embeddings"],
        "text_config": {k: v for k, v in chat["text_config"].items() if k != "qk_norm"},  # Qwen 3 has it always
        "vision_config": {
            "model_type": "internvl_vision",
            "use_qk_norm": vision["qk_normalization"],
            "attention_bias": vision["qkv_bias"],
            **{name: vision[name] for name in same},
            **sides,
        },
    }
