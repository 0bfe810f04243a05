"""Calls that a model's towers take: text of any length for the decoder, one image in Transformers' conventions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trimtab.models.asking.blocks import is_matmul
from trimtab.models.asking.units import Unit


def text_calls(model: Any, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Keyword arguments under which the whole model, or its decoder, may read `num_tokens` words."""
    special = {getattr(model.config, name, None) for name in ("image_token_id", "image_token_index")}
    word = next(i for i in range(5, 200) if i not in special)
    ids = torch.full((1, num_tokens), word)
    yield {"input_ids": ids, "use_cache": False}
    yield {"input_ids": ids}
    yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    yield {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids), "use_cache": False}
    yield {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}


def image_calls(model: Any, units: list[Unit], encode: Any, *, side: int = 16) -> Iterator[dict[str, Any]]:
    """Keyword arguments of `get_image_features`, or of a tower, for one image; native towers get `side` x `side`."""
    vision = vision_config(model.config)
    names = set(inspect.signature(encode).parameters)
    patch = first_int(vision, "patch_size", "spatial_patch_size", "encoder_patch_size") or 14
    merge = first_int(vision, "spatial_merge_size", "merge_size", "merge_kernel_size") or 2
    channels = first_int(vision, "in_channels", "num_channels", "in_chans") or 3
    frames = first_int(vision, "temporal_patch_size") or 1
    size = first_int(vision, "image_size") or first_int(model.config, "image_size") or side * patch
    high = wide = side * merge // 2 * 2
    grid = torch.tensor([[1, high, wide]])
    rows = high * wide
    flat = torch.ones(rows, _patch_values(units) or channels * frames * patch * patch, dtype=torch.bfloat16)
    for name in ("image_grid_thw", "grid_thw", "image_grid_hw", "grid_thws"):
        if name in names:
            which = grid[:, 1:] if name.endswith("hw") and "t" not in name[-3:] else grid
            yield {"pixel_values": flat, name: which}
            yield {"pixel_values": flat, name: which, "image_merge_sizes": torch.tensor([merge])}
            yield {"pixel_values": flat[:, : channels * patch * patch], name: which}
            if flat.shape[1] == frames * channels * patch * patch:
                yield {"pixel_values": flat.view(rows, frames * channels, patch, patch)[:, :channels], name: which}
    shapes = torch.tensor([[high, wide]])
    for name in ("spatial_shapes", "target_sizes", "tgt_sizes"):
        if name in names:
            patches = flat[:, : channels * patch * patch][None]
            mask = torch.ones(1, rows, dtype=torch.long)
            yield {"pixel_values": patches, name: shapes, "pixel_attention_mask": mask}
            yield {"pixel_values": torch.ones(1, channels, patch, rows * patch, dtype=torch.bfloat16), name: shapes}
    yield from _pixels(model, names, channels, size)
    if "image_position_ids" in names or "pixel_position_ids" in names:
        name = "image_position_ids" if "image_position_ids" in names else "pixel_position_ids"
        where = torch.stack(torch.meshgrid(torch.arange(wide), torch.arange(high), indexing="xy"), -1).reshape(1, -1, 2)
        yield {"pixel_values": flat[:, : channels * patch * patch][None], name: where}


def _pixels(model: Any, names: set[str], channels: int, size: int) -> Iterator[dict[str, Any]]:
    """Pixels as one tile, as tiles of one image, or as images of one sample."""
    first = next((x for x in ("pixel_values", "images", "flattened_patches") if x in names), "pixel_values")
    tile = (channels, size, size)
    extra: dict[str, Tensor] = {}
    if "image_sizes" in names:
        extra["image_sizes"] = torch.tensor([[size, size]])
    points = getattr(model.config, "image_grid_pinpoints", None)
    if points:
        least = min(points, key=lambda x: (x[0] * x[1], x))
        tiles = max(1, (least[0] // size) * (least[1] // size)) + 1
        yield {first: torch.ones(1, tiles, *tile, dtype=torch.bfloat16), "image_sizes": torch.tensor([list(least)])}
    shapes: tuple[tuple[int, ...], ...] = ((1, *tile), (1, 1, *tile), (1, 2, *tile), (2, *tile), (1, 1, 1, *tile))
    for shape in shapes:
        yield {first: torch.ones(*shape, dtype=torch.bfloat16), **extra}
    if "num_local_patches" in names or "num_local_crops" in names:
        name = "num_local_patches" if "num_local_patches" in names else "num_local_crops"
        yield {first: torch.ones(1, *tile, dtype=torch.bfloat16), name: torch.zeros(1, dtype=torch.long)}


def _patch_values(units: list[Unit]) -> int | None:
    """Numbers of one patch, as the first matrix of the vision tower takes them."""
    modules = (x for unit in units if unit.tower == "vision" and unit.module is not None for x in unit.module.modules())
    first = next((x for x in modules if is_matmul(x)), None)
    return None if first is None else int(first.weight[0].numel())


def vision_config(config: Any) -> Any:
    for name in ("vision_config", "vision_encoder_config", "perception_config", "encoder"):
        found = getattr(config, name, None)
        if found is not None and not isinstance(found, dict):
            return found
    return config


def first_int(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, dict):
            value = value.get("height")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
