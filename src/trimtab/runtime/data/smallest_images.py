"""The smallest image that a family can be given: its LLM tokens, and what its processor would give. Black pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimtab.models.asking.inputs import vision_config
from trimtab.models.describe import image_rule
from trimtab.models.families import Smallest
from trimtab.specs import ImageCounts

SmallestImage = tuple[int, dict[str, Tensor]]
"""LLM tokens, and tensors by key."""


def has_blocks(config: Any) -> bool:
    """Whether the vision configuration says what a block of patches that leaves one token looks like."""
    fields = ("spatial_merge_size", "in_channels", "temporal_patch_size", "patch_size")
    vision = vision_config(config)
    whole_frames = getattr(vision, "temporal_merge_size", 1) == 1
    return whole_frames and all(isinstance(getattr(vision, x, None), int) for x in fields)


def smallest_image(kind: Smallest | Callable[[Any], SmallestImage], config: Any) -> SmallestImage:
    """Of a kind known here, or as a function of your own makes it."""
    if callable(kind):
        return kind(config)
    return {"block": _one_block, "tile": _one_tile, "fewest tiles": _fewest_tiles}[kind](config)


def _one_block(config: Any) -> SmallestImage:
    """Patches of all images in one tensor, beside a grid: the block that leaves one token."""
    vision = vision_config(config)
    merge = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return 1, {"pixel_values": torch.zeros(merge**2, width), "image_grid_thw": torch.tensor([[1, merge, merge]])}


def _one_tile(config: Any) -> SmallestImage:
    """Tiles of one size, each with the same number of tokens."""
    return tile_tokens(config), {"pixel_values": torch.zeros(1, *_tile_shape(config))}


def _fewest_tiles(config: Any) -> SmallestImage:
    """(images, tiles, C, H, W): the tile grid of the configuration that leaves the fewest tokens."""
    choices = {(h, w): _count(config, w, h) for h, w in config.image_grid_pinpoints}
    size = min(choices, key=lambda choice: (choices[choice].tokens, choice))
    pixels = torch.zeros(1, choices[size].tiles, *_tile_shape(config))
    return choices[size].tokens, {"pixel_values": pixels, "image_sizes": torch.tensor([size])}


def tile_tokens(config: Any) -> int:
    """LLM tokens of one tile where every tile has the same number: internvl, llava, gemma3."""
    if hasattr(config, "mm_tokens_per_image"):
        return int(config.mm_tokens_per_image)
    if hasattr(config, "downsample_ratio"):
        vision = config.vision_config
        (height, width), (patch_h, patch_w) = _pair(vision.image_size), _pair(vision.patch_size)
        return int((height // patch_h) * (width // patch_w) * config.downsample_ratio**2)
    side = config.vision_config.image_size
    return _count(config, side, side).tokens


def _tile_shape(config: Any) -> tuple[int, int, int]:
    vision = config.vision_config
    return getattr(vision, "num_channels", 3), *_pair(vision.image_size)


def _count(config: Any, width: int, height: int) -> ImageCounts:
    written = json.loads(config.to_json_string(use_diff=False))
    written.pop("image_seq_length", None)  # the class's own default, whatever the sizes of this model
    return image_rule(written).count(width, height)


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
