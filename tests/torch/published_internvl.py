"""A tiny InternVL saved as OpenGVLab published it: their names of weights and fields of config.json.

The inverse of what transformers/models/internvl/convert_internvl_weights_to_hf.py does (at 015d3b2), written from it
alone. Needs torch.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_VISION = [
    ("vision_tower", "vision_model"),
    (r"encoder\.layer\.", "encoder.layers."),
    ("cls_token", "class_embedding"),
    ("position_embeddings", "position_embedding"),
    (r"patch_embeddings\.projection", "patch_embedding"),
    (r"lambda_(\d)", r"ls\1"),
    (r"attention\.projection_layer", "attn.proj"),
    ("attention", "attn"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
]
_INTERNLM2 = [
    ("embed_tokens", "tok_embeddings"),
    (r"self_attn\.o_proj", "attention.wo"),
    ("self_attn", "attention"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.down_proj", "feed_forward.w2"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
]
_PROJECTOR = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}


def _published(name: str, internlm2: bool) -> str:
    name = name.removeprefix("model.")
    if name.startswith("multi_modal_projector."):
        _, layer, kind = name.split(".")
        return f"mlp1.{_PROJECTOR[layer]}.{kind}"
    if name.startswith("vision_tower."):
        rules = _VISION
    else:
        name = re.sub(r"^language_model\.", "language_model.model.", name)
        name = re.sub(r"^lm_head", "language_model.output" if internlm2 else "language_model.lm_head", name)
        rules = _INTERNLM2 if internlm2 else []
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Of each key-value head: the rows of its queries, of its key, of its value."""
    heads = zip(*(x.chunk(num_kv_heads) for x in (q, k, v)), strict=True)
    return torch.cat([part for head in heads for part in head])


def published_weights(model: Any, *, internlm2: bool) -> dict[str, torch.Tensor]:
    """Every tensor of Transformers' model under its published name."""
    found: dict[str, torch.Tensor] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        vision = ".vision_tower." in name
        fused = (vision or internlm2) and re.search(r"\.[qkv]_proj\.", name)
        if not fused:
            found[_published(name, internlm2)] = tensor.contiguous()
        elif ".q_proj." in name:
            parts = [state[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            whole = torch.cat(parts) if vision else _fused(*parts, model.config.text_config.num_key_value_heads)
            own = "qkv" if vision else "wqkv"
            found[_published(name.replace("q_proj", own), internlm2)] = whole
    return found


def published_config(model: Any, *, internlm2: bool) -> dict[str, Any]:
    """config.json as the folder's own code writes it, with what points to that code."""
    vision, text = model.config.vision_config, model.config.text_config
    towers = {
        name: getattr(vision, name)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "norm_type")
    }
    own = text.to_dict()
    own |= {"model_type": "internlm2", "bias": False} if internlm2 else {}
    own |= {"attn_implementation": "flash_attention_2", "torch_dtype": "bfloat16", "use_bfloat16": True}
    own["auto_map"] = {"AutoConfig": "configuration_internlm2.InternLM2Config"} if internlm2 else {}
    return {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "vision_config": {
            **towers,
            "model_type": "intern_vit_6b",
            "image_size": vision.image_size[0],
            "patch_size": vision.patch_size[0],
            "qk_normalization": vision.use_qk_norm,
            "qkv_bias": vision.attention_bias,
            "drop_path_rate": 0.1,
            "use_flash_attn": True,
            "torch_dtype": "bfloat16",
        },
        "llm_config": own,
        "downsample_ratio": model.config.downsample_ratio,
        "dynamic_image_size": True,
        "force_image_size": vision.image_size[0],
        "max_dynamic_patch": 4,
        "min_dynamic_patch": 1,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "torch_dtype": "float32",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
    }


def publish(model: Any, folder: Path, *, internlm2: bool = False) -> Path:
    """`model` in `folder`, whose tokenizer says by an added token what images stand for."""
    folder.mkdir(exist_ok=True)
    save_file(published_weights(model, internlm2=internlm2), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published_config(model, internlm2=internlm2)))
    if not (folder / "tokenizer_config.json").exists():
        added = {str(model.config.image_token_id): {"content": "<IMG_CONTEXT>", "special": True}}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder
