"""Any family of Transformers as a model of a few small layers: configurations shrunk by field name. Needs torch."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from trimtab.runtime.data.formats import model_classes

WIDTH = 64
"""Of language model, tower and all between them: where widths are alike, no projector's field can be wrong."""

SMALL: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("hidden_size", "d_model", "embed_dim", "out_hidden_size", "text_hidden_size", "projection_dim"),
            *("vision_output_dim", "projector_input_dim", "projector_output_dim", "projector_hidden_size"),
            *("block_dim", "vision_hidden_size", "embedding_dim", "output_dim", "proj_dim", "multimodal_hidden_size"),
            *("encoder_hidden_size", "qk_hidden_size", "hidden_dim", "n_embd", "projection_hidden_size", "output_size"),
            *("vision_embed_dim", "audio_embed_dim", "text_embed_dim", "connector_hidden_size", "output_proj_dims"),
            "word_embed_proj_dim",
        ),
        WIDTH,
    ),
    **dict.fromkeys(
        (
            *("intermediate_size", "mlp_dim", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
            *("alignment_intermediate_size", "intermediate_size_mlp", "shared_expert_intermediate_size"),
            *("dense_intermediate_size", "merger_intermediate_size", "adapter_hidden_dim"),
        ),
        96,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "num_heads", "attention_heads", "encoder_attention_heads", "n_head"),
            *("decoder_attention_heads", "swa_num_attention_heads"),
        ),
        4,
    ),
    "num_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "d_kv", "attention_head_dim"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 256),
    "hidden_size_per_layer_input": 16,
    "max_position_embeddings": 512,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_k", "top_k_experts", "moe_topk"), 2),
    "moe_intermediate_size": 24,
    "expert_intermediate_size": 24,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "image_size": 56,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "window_size": 112,
    "num_mel_bins": 16,
    "mm_tokens_per_image": 4,
    "latent_query_num": 4,
}
_GEMMA4 = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size": WIDTH,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
}
VISION = {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 16}
COUNTS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers")
MAX_LAYERS = 6


_HYBRID = {"text_config.layer_types": ["conv", "full_attention", "conv"], "text_config.num_hidden_layers": 3}
_EXPERTS = "text_config.moe_intermediate_size"

GIVEN: dict[str, dict[str, Any]] = {
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_unified": {"text_config": _GEMMA4},
    "diffusion_gemma": {"text_config": {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16,
        "per_layer_config": {1: {"head_dim": 32}}, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
    }},
    "dots3_note": {"text_config": {
        "hidden_size": WIDTH,
        "num_hidden_layers": 3, "layer_types": ["indexed_attention", "indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "num_attention_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 16,
        "per_layer_config": {2: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32}},
    }, "vision_config": {
        "hidden_size": WIDTH, "adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH, "num_attention_heads": 4,
        "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2,
        "num_local_experts": 4, "per_layer_config": {},
    }, "audio_config": {
        "hidden_size": WIDTH, "adapter_input_size": WIDTH, "adapter_out_dim": WIDTH, "num_attention_heads": 4,
    }},
    "fast_vlm": {"vision_config": {
        "model_type": "mobilenet_v1", "hidden_size": WIDTH, "depth_multiplier": WIDTH / 1024, "image_size": 64,
    }},
    "gemma3n": {"vision_config": {"model_args": {"channel_multiplier": 0.125}}},  # of timm
    "perception_lm": {"vision_config": {
        "model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336", "do_pooling": False,
        "model_args": {"embed_dim": WIDTH, "depth": 2, "num_heads": 4, "img_size": [56, 56]},
    }},
    "cohere_compass": {"text_config": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        for kind in ("full_attention", "sliding_attention")
    }}},
    "chameleon": {"vocabulary_map": {"<image>": 200, **{f"IMGIMG{chr(65 + x)}Z": 210 + x for x in range(8)}}},
    **{x: {"image_token_index": 200} for x in ("blip-2", "instructblip")},
    "instructblipvideo": {"video_token_index": 200},
    **{x: {"image_token_id": 200} for x in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni")},
    **{x: {"decoder_start_token_id": 0, "pad_token_id": 0} for x in ("udop", "vision-encoder-decoder")},
    "emu3": {"vocabulary_map": {
        "<image>": 200, "<|extra_200|>": 201, **{f"<|visual token {x:06}|>": 210 + x for x in range(8)},
    }},
}  # fmt: skip
"""What a family's configuration is made with: fields without which its class, or what it derives, is not whole."""

CHANGES: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "vision_config.hidden_size": 2048,
        "vision_config.vocab_offset": 256,
        "audio_config.vocab_offset": 512,
        "text_config.num_kv_shared_layers": 0,
    },
    "chameleon": {"vq_config.num_embeddings": 8},
    "emu3": {
        "vq_config.codebook_size": 8,
        "vq_config.num_res_blocks": 1,
        "vq_config.base_channels": 32,
        "vq_config.channel_multiplier": [1, 1, 2, 2],
    },
    "janus": {"vq_config.num_res_blocks": 1},
    "molmo2": {"adapter_config.vision_feature_layer": [-1, -2], "image_patch_id": 300},
    "glm5_next": {
        **{f"text_config.{x}": 0 for x in ("head_dim", "qk_rope_head_dim")},
        "text_config.qk_head_dim": 8,
        "text_config.index_kpool": 2,
        "text_config.linear_num_heads": 4,
        "text_config.linear_head_dim": 8,
    },
    "git": {"max_position_embeddings": 1024},
    "vision-encoder-decoder": {"decoder.max_position_embeddings": 1024},
    "mllama": {"vision_config.vision_output_dim": 3 * WIDTH},
    **{x: {"out_hidden_size": 4 * WIDTH} for x in ("muse_glimmer", "muse_spark")},
    "nemotron_h_omni": {"vision_config.patch_dim": 588},
    "pp_formulanet": {"vision_config.decoder_hidden_size": WIDTH},
    "unlimited_ocr": {"vision_config.sam_config.downsample_channels": [WIDTH, WIDTH]},
    "deepseek_ocr2": {
        "vision_config.sam_config.downsample_channels": [WIDTH, WIDTH],
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_hidden_layers": 2,
        "text_config.num_experts_per_tok": 2,
    },
    "ernie4_5_vl_moe": {"text_config.rope_parameters.mrope_section": [3, 3, 2]} | {_EXPERTS: [24, 24]},
    "florence2": {"vision_config.patch_size": [7, 3, 3, 3]},
    "granite4_vision": {
        "image_grid_pinpoints": [[112, 56], [56, 112]],
        "deepstack_layer_map": [(0, 0), (1, 1)],
        "downsample_rate": "1/2",
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "hunyuan_vl": {"text_config.head_dim": 16},
    "llama4": {"vision_config.intermediate_size": 256},
    "llava_next_video": {"image_grid_pinpoints": [[112, 56], [56, 112]]},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "lfm2_vl": _HYBRID,
    "llava_next": {"image_grid_pinpoints": [[112, 56], [56, 112]]},
    "llava_onevision": {"image_grid_pinpoints": [[112, 56], [56, 112]]},
    "minimax_m3_vl": {
        "merged_hidden_size": 4 * WIDTH,
        "text_config.layer_types": ["full_attention", "minimax_m3_sparse"],
        "text_config.index_n_heads": 2,
        "text_config.index_block_size": 4,
        "text_config.index_topk_blocks": 2,
    },
    "qwen4_exp": {
        "text_config.indexer_n_heads": 8,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": 16,
        "text_config.indexer_budget": 8,
        "text_config.indexer_compress_ratio": 4,
    },
    "step3p7": {"text_config.sliding_window": 4},
}
"""(path -> value) that the rules by field name do not reach."""


def make_shrunk(model_type: str, *, changes: Mapping[str, Any] | None = None, attention: str = "sdpa") -> nn.Module:
    """The family's `AutoModelForImageTextToText` in float32, evaluating; weights drawn so that attention is uneven.

    `changes` by path, as {"text_config.sliding_window": None, "image_token_id": 99}. Where a family has no code for
    `attention`, it is eager.
    """
    config = shrink(model_type, changes or {})
    torch.manual_seed(0)
    make = transformers.AutoModelForImageTextToText.from_config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = make(config, attn_implementation=attention, dtype=torch.float32)
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            model = make(config, attn_implementation="eager", dtype=torch.float32)
    return draw_weights(model)


def draw_weights(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.12)
            elif not parameter.any() and "A_log" not in name:
                parameter.normal_(std=0.05)
    return model.eval()


def shrink(model_type: str, changes: Mapping[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(GIVEN.get(model_type, {})))
    _shrink_part(config, sees=False, ids={})
    if hasattr(model_classes(config)[0], "get_rope_index") and model_type not in GIVEN:
        _shrink_mrope(config.get_text_config())
    for path, value in {**CHANGES.get(model_type, {}), **changes}.items():
        *parts, name = path.split(".")
        holder = config
        for part in parts:
            holder = holder[part] if isinstance(holder, dict) else getattr(holder, part)
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)
    return config


def _shrink_part(config: Any, *, sees: bool, ids: dict[int, int]) -> None:
    """`ids`: small ones for those of special tokens, one for all parts that name the same."""
    rotated = vars(config).get("head_dim") and vars(config)["head_dim"] == vars(config).get("qk_rope_head_dim")
    num = next((getattr(config, name) for name in COUNTS if isinstance(getattr(config, name, None), int)), None)
    if num is not None and not vars(config).get("per_layer_config"):
        _cut_layers(config, num)
    for name, value in {**SMALL, **(VISION if sees else {})}.items():
        try:
            own = getattr(config, name, None)
        except Exception:  # fields that differ by layer have no value of their own
            continue
        if own is None or isinstance(own, bool):
            continue
        if isinstance(own, (list, tuple)) and all(isinstance(x, int) for x in own):
            value = type(own)([value] * len(own))
        elif not isinstance(own, int):
            continue
        with contextlib.suppress(AttributeError, NotImplementedError):
            setattr(config, name, value)
    if rotated:  # latent attention: the rotated part alone is called a head
        config.head_dim = SMALL["qk_rope_head_dim"]
    with contextlib.suppress(Exception):  # those that differ by layer are given small
        if getattr(config, "kv_lora_rank", None):  # latent attention has as many keys as queries
            config.num_key_value_heads = 4
    for name in list(vars(config)):
        value = vars(config)[name]
        if name.endswith(("token_id", "token_index")) and isinstance(value, int) and value > 255:
            setattr(config, name, ids.setdefault(value, 128 + len(ids)))
        if isinstance(value, transformers.PretrainedConfig):
            seen = sees or any(word in name for word in ("vis", "image", "video", "encoder"))
            _shrink_part(value, sees=seen, ids=ids)


def _cut_layers(config: Any, num: int) -> None:
    """One layer of each kind, in order, and at least two; lists with an entry for each layer are cut alike."""
    by_layer = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == num and num > 1
    }
    kinds: dict[str, int] = {}
    for layer in range(num):
        kinds.setdefault(repr([value[layer] for value in by_layer.values()]), layer)
    kept = sorted(kinds.values())[:MAX_LAYERS]
    kept = sorted({*kept, *[layer for layer in range(num) if layer not in kept][: max(0, 2 - len(kept))]})
    for name, value in by_layer.items():
        setattr(config, name, type(value)(value[layer] for layer in kept))
    for name in COUNTS:
        if getattr(config, name, None) == num:
            setattr(config, name, len(kept))
    for name, value in list(vars(config).items()):
        if name in by_layer or not name.endswith(("indexes", "indices", "_layers", "layer_ids")):
            continue
        if isinstance(value, (list, tuple)) and value and all(isinstance(x, int) for x in value):
            setattr(config, name, type(value)(range(min(len(value), len(kept)))))


def _shrink_mrope(text: Any) -> None:
    """M-RoPE sections add up to half of the rotated part of a head of 16."""
    rope = dict(getattr(text, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4})
    rotated = rope.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None)) or 1.0
    half = int(8 * rotated)
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    text.rope_parameters = rope
