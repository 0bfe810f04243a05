"""InternVL as OpenGVLab first published it (`internvl_chat`), by Transformers' own classes.

The folders of InternVL2, 2.5 and 3 hold code of their own, which is never run: the same architecture is Transformers'
`InternVLForConditionalGeneration`, under other names. Here stand those names, and the fields of `config.json`, as
the conversion script says that made the `-hf` folders (transformers/models/internvl/convert_internvl_weights_to_hf.py
at 015d3b2). Renaming and splitting are left to Transformers (`core_model_loading`), which does it for its own old
checkpoints. InternLM2 is Llama under other names, with one matrix for queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, WeightRenaming, rename_source_key

from trimtab.ask import UNASKED
from trimtab.errors import ConfigError, quote
from trimtab.files import read_small
from trimtab.models.families import REMOTE
from trimtab.specs import LayerSpec
from trimtab.typed_json import parse_json

IMAGE_ROW = "<IMG_CONTEXT>"  # stands in a text for one row of image features


class InternVLChatConfig(transformers.InternVLConfig):  # type: ignore[misc] # Transformers' types are not read
    """Transformers' configuration of a folder whose weights carry OpenGVLab's names."""

    model_type = REMOTE  # Transformers finds the names below by it
    # next to its fields: `published`, those of the folder's config.json


# the first that fits is taken, in either direction
_MODULES = {
    r"^vision_model\.encoder\.layers": "model.vision_tower.encoder.layer",
    r"^vision_model": "model.vision_tower",
    r"^mlp1": "model.multi_modal_projector",
    r"^language_model\.lm_head": "lm_head",
    r"^language_model\.model": "model.language_model",
}
_INTERNLM2_MODULES = {
    r"^language_model\.output": "lm_head",
    r"^language_model\.model\.tok_embeddings": "model.language_model.embed_tokens",
}
_LEAVES = {
    r"embeddings\.class_embedding": "embeddings.cls_token",
    r"embeddings\.position_embedding": "embeddings.position_embeddings",
    r"embeddings\.patch_embedding": "embeddings.patch_embeddings.projection",
    r"\.attn\.proj": ".attention.projection_layer",
    r"\.attn": ".attention",
    r"\.norm1": ".layernorm_before",
    r"\.norm2": ".layernorm_after",
    r"\.ls1": ".lambda_1",
    r"\.ls2": ".lambda_2",
    r"projector\.0": "projector.layer_norm",
    r"projector\.1": "projector.linear_1",
    r"projector\.3": "projector.linear_2",
    # InternLM2's
    r"\.attention\.wo": ".self_attn.o_proj",
    r"\.feed_forward\.w1": ".mlp.gate_proj",
    r"\.feed_forward\.w2": ".mlp.down_proj",
    r"\.feed_forward\.w3": ".mlp.up_proj",
    r"\.attention_norm": ".input_layernorm",
    r"\.ffn_norm": ".post_attention_layernorm",
}


class _SplitGroups(ConversionOps):  # type: ignore[misc] # Transformers' types are not read
    """InternLM2's one matrix: for each key-value head the queries that share it, its key, its value."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], target_patterns: Sequence[str], config: Any, **_: Any
    ) -> dict[str, torch.Tensor]:
        (found,) = input_dict.values()
        fused = found[0] if isinstance(found, list) else found
        text = config.get_text_config()
        head_dim = text.hidden_size // text.num_attention_heads
        groups = fused.unflatten(0, (text.num_key_value_heads, -1, head_dim))  # key-value head, part, row of a head
        parts = groups.split([groups.shape[1] - 2, 1, 1], dim=1)
        return {name: part.flatten(0, 2).contiguous() for name, part in zip(target_patterns, parts, strict=True)}


def _renamings(names: Mapping[str, str]) -> list[WeightRenaming]:
    return [WeightRenaming(published, own) for published, own in names.items()]


_VISION_QKV, _TEXT_QKV = ([f"{module}.{x}_proj" for x in "qkv"] for module in ("attention", "self_attn"))
_CONVERSIONS = [
    *_renamings(_INTERNLM2_MODULES | _MODULES | _LEAVES),
    WeightConverter("attention.qkv", _VISION_QKV, [Chunk(dim=0)]),
    WeightConverter("attention.wqkv", _TEXT_QKV, [_SplitGroups()]),
]
register_checkpoint_conversion_mapping(REMOTE, _CONVERSIONS, overwrite=True)


def published_name(module: str, config: Any) -> str:
    """The name in OpenGVLab's code of a tower, a layer or a projector; in models of other families its own."""
    if not isinstance(config, InternVLChatConfig):
        return module
    names = _INTERNLM2_MODULES | _MODULES if _text_type(config.published) == "internlm2" else _MODULES
    return str(rename_source_key(module, [x.reverse_transform() for x in _renamings(names)], [])[0])


def as_published(layer: LayerSpec, config: InternVLChatConfig) -> LayerSpec:
    """The layer under its published name; InternLM2 has one matrix for q, k and v, and its tables in the blocks."""
    layer = replace(
        layer,
        name=published_name(layer.name, config),
        companions=tuple(published_name(name, config) for name in layer.companions),
        linears=None,
    )
    if layer.attention is None or layer.tower != "language" or _text_type(config.published) != "internlm2":
        return layer
    return replace(layer, attention=replace(layer.attention, fused_qkv=True), companions=(), extra_bytes=0)


# -- config.json -------------------------------------------------------------------------------------------------------


def chat_config(fields: Mapping[str, Any]) -> InternVLChatConfig:
    """Make Transformers' configuration of a published config.json; `ConfigError` without a class of the text model."""
    for switch in ("use_backbone_lora", "use_llm_lora"):
        if fields.get(switch):
            raise ConfigError(f"{switch} is {quote(fields[switch])}: merge the adapters and set it to 0")
    text_type = _text_type(fields)
    own_type = "llama" if text_type == "internlm2" else text_type
    if own_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"llm_config.model_type {quote(text_type)} has no class: take InternLM2, Llama, Phi3 or Qwen")
    text = transformers.CONFIG_MAPPING[own_type](**_asked(_text_fields(fields)))
    # defaults are those of the folder's own code, where they differ from Transformers'
    vision = {"qk_normalization": True, "qkv_bias": False, "norm_type": "rms_norm", **_asked(fields["vision_config"])}
    ratio = fields.get("downsample_ratio", 0.5)
    renamed = {"qk_normalization": "use_qk_norm", "qkv_bias": "attention_bias"}
    known = transformers.InternVLVisionConfig().to_dict()
    config = InternVLChatConfig(
        vision_config={k: v for k, v in ((renamed.get(k, k), v) for k, v in vision.items()) if k in known},
        text_config=text,
        image_seq_length=int((tile_size(fields) // vision["patch_size"]) ** 2 * ratio**2),
        downsample_ratio=ratio,
        vision_feature_layer=fields.get("select_layer", -1),
        tie_word_embeddings=text.tie_word_embeddings,
        dtype=fields.get("dtype") or fields.get("torch_dtype"),
    )
    config.published = dict(fields)
    return config


def published_fields(config: InternVLChatConfig) -> dict[str, Any]:
    """Return every field of the configuration as OpenGVLab's config.json names it."""
    own = {"use_qk_norm": "qk_normalization", "attention_bias": "qkv_bias"}
    return {
        "vision_config": {own.get(k, k): v for k, v in config.vision_config.to_dict().items()},
        "llm_config": {**config.text_config.to_dict(), "model_type": _text_type(config.published)},
        "downsample_ratio": config.downsample_ratio,
        "select_layer": config.vision_feature_layer,
        "force_image_size": tile_size(config.published),
    }


def read_chat_config(folder: Path, fields: Mapping[str, Any]) -> InternVLChatConfig:
    """The same for running what `folder` holds; the tokenizer's files say which token images stand for.

    `ConfigError` where Transformers' classes would compute something else than the folder's own code: an adapter that
    was not merged, quantised weights, the transposed pixel shuffle of the first InternVL ("v1").
    """
    if fields.get("quantization_config"):
        raise ConfigError(f"{folder} is quantised under its own code's names: use the folder that it was made from")
    if fields.get("ps_version", "v1") != "v2":
        raise ConfigError(f"ps_version {quote(fields.get('ps_version', 'v1'))} is not v2: use InternVL 1.5 or newer")
    config = chat_config(fields)
    config.image_token_id = _image_token_id(folder)
    return config


def forget_published_names(model: Any) -> None:
    """Make it Transformers' own InternVL from here on: for who asks its `model_type`, and for `save_pretrained`."""
    if isinstance(model.config, InternVLChatConfig):
        model.config.__class__ = transformers.InternVLConfig
        del model.config.published
        model._weight_conversions = []


def _asked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what names code, kernels or number formats: the loader gets those."""
    return {key: value for key, value in fields.items() if key != "model_type" and not UNASKED.fullmatch(key)}


def _text_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return dict(fields.get("llm_config") or fields.get("text_config") or {})


def _text_type(fields: Mapping[str, Any]) -> str:
    return str(_text_fields(fields).get("model_type"))


def tile_size(fields: Mapping[str, Any]) -> int:
    """Count the pixels of a tile's side."""
    return int(fields.get("force_image_size") or fields["vision_config"]["image_size"])


def _image_token_id(folder: Path) -> int:
    """The id of the token that images stand for, from the tokenizer's own files."""
    for name, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
        try:
            tokens = parse_json(read_small(folder / name))[key]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        rows = tokens.items() if isinstance(tokens, dict) else ((x.get("id"), x) for x in tokens)
        found = [int(number) for number, token in rows if token.get("content") == IMAGE_ROW]
        if found:
            return found[0]
    try:
        return int(parse_json(read_small(folder / "added_tokens.json"))[IMAGE_ROW])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"no tokenizer in {folder} names {IMAGE_ROW}: add tokenizer_config.json") from None
