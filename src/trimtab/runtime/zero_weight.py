"""Samples that weigh nothing: for empty slots, and for packs that would leave the vision tower idle."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from trimtab.models.images.build import image_rule
from trimtab.runtime.formats import pack_format
from trimtab.runtime.loss import IGNORED
from trimtab.specs import ImageCounts

TEXT_TOKEN = 0
"""Any id of the vocabulary does: nothing reads what it predicts."""


def filler_sample(config: Any, *, with_image: bool) -> dict[str, Any]:
    """A processed sample of zero loss weight: one token of text, with the smallest image of the family before it.

    That image is 1 token for the Qwen families, 256 for most InternVL and Gemma 3, 576 for LLaVA-1.5. Black pixels.
    """
    num_image_tokens, image = _smallest_image(config) if with_image else (0, {})
    ids = torch.tensor([config.image_token_id] * num_image_tokens + [TEXT_TOKEN])
    return {"input_ids": ids, "labels": torch.full_like(ids, IGNORED), "loss_weight": 0.0, **image}


def num_tile_tokens(config: Any) -> int:
    """LLM tokens of one tile where every tile has the same number: internvl, llava, gemma3."""
    if config.model_type == "gemma3":
        return int(config.mm_tokens_per_image)
    if config.model_type == "internvl":
        vision = config.vision_config
        (height, width), (patch_h, patch_w) = _pair(vision.image_size), _pair(vision.patch_size)
        return int((height // patch_h) * (width // patch_w) * config.downsample_ratio**2)
    side = config.vision_config.image_size
    return _count(config, side, side).tokens


def _smallest_image(config: Any) -> tuple[int, dict[str, Tensor]]:
    """Its LLM tokens, and the keys the family's processor would give."""
    vision = config.vision_config
    if pack_format(config).mrope:
        merge = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return 1, {"pixel_values": torch.zeros(merge**2, width), "image_grid_thw": torch.tensor([[1, merge, merge]])}
    height, width = _pair(vision.image_size)
    channels = getattr(vision, "num_channels", 3)
    if not pack_format(config).tiles_padded:
        return num_tile_tokens(config), {"pixel_values": torch.zeros(1, channels, height, width)}
    choices = {(h, w): _count(config, w, h) for h, w in config.image_grid_pinpoints}
    size = min(choices, key=lambda choice: (choices[choice].tokens, choice))
    pixels = torch.zeros(1, choices[size].tiles, channels, height, width)
    return choices[size].tokens, {"pixel_values": pixels, "image_sizes": torch.tensor([size])}


def _count(config: Any, width: int, height: int) -> ImageCounts:
    written = json.loads(config.to_json_string(use_diff=False))
    written.pop("image_seq_length", None)  # the class's own default, whatever the sizes of this model
    return image_rule(written).count(width, height)


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
