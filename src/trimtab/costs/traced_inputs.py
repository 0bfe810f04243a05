"""A batch of about a given size for a real model of Transformers: pixels, ids, positions, labels.

Needs torch and Transformers (tested with 5.23), loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trimtab.errors import UnknownModelError
from trimtab.specs import ModelSpec

GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe")
"""Images of any size as one row of patches with their grids; text positions of three axes."""
TILE_FAMILIES = ("internvl", "llava", "gemma3")
"""A batch of equal tiles."""
PINNED_FAMILIES = ("llava_next", "llava_onevision")
"""Images cut into the tiles of one of the configuration's grid points, with a thumbnail."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What the model is called with, and its sizes."""

    inputs: dict[str, Any]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageUnit:
    """The smallest images that a model takes, which all batches are multiples of."""

    patches: int  # about
    items: int  # entries of the first dimension of their pixels
    tokens: int  # image tokens they become, newlines included


def check_family(model: ModelSpec) -> None:
    known = (*GRID_FAMILIES, *TILE_FAMILIES, *PINNED_FAMILIES)
    if model.family not in known:
        raise UnknownModelError(
            f"layers of model_type {model.family!r} were to be traced, and Transformers has no code of its own for it: "
            f"give the configuration of one of {', '.join(known)}, or take the bytes of formulas"
        )


def find_unit(module: Any, model: ModelSpec, dtype: torch.dtype) -> ImageUnit:
    """64 patches, or one image of tiles; the model itself says how many tokens that makes."""
    config = module.config
    if model.family in GRID_FAMILIES:
        patches = 64
    else:
        (height, width), (patch_height, patch_width) = (_pair(x) for x in _tile_sizes(config.vision_config))
        tiles = 1 if model.family in TILE_FAMILIES else _pinned_tiles(config)
        patches = tiles * (height // patch_height) * (width // patch_width)
    images = _make_images(config, model.family, patches, dtype)
    with torch.no_grad():
        found = module.model.get_image_features(**images)
    rows = getattr(found, "pooler_output", found)
    tokens = sum(x.shape[:-1].numel() for x in tree_leaves(rows) if isinstance(x, Tensor))
    return ImageUnit(patches=patches, items=images["pixel_values"].shape[0], tokens=tokens)


def make_batch(
    module: Any, model: ModelSpec, unit: ImageUnit, *, size: int, num_text: int, packed: bool, dtype: torch.dtype
) -> Batch:
    """One sample of images of about `size` patches (at least the smallest) and `num_text` other tokens.

    `packed`: one token more, a sample of its own, so that there are masks where the attention needs them.
    """
    config = module.config
    images = _make_images(config, model.family, size, dtype)
    num_image, rest = divmod(images["pixel_values"].shape[0] * unit.tokens, unit.items)
    assert rest == 0, "images are no multiple of the smallest"
    image_token = getattr(config, "image_token_id", None)
    if image_token is None:
        image_token = config.image_token_index
    word = next(i for i in range(model.vocab_size) if i != image_token)
    ids = torch.tensor([[word] * (num_text // 2) + [image_token] * num_image + [word] * (num_text - num_text // 2)])
    lengths = [ids.shape[1]]
    if packed:
        ids, lengths = torch.cat([ids, torch.tensor([[word]])], dim=1), [*lengths, 1]
    is_image = (ids == image_token).long()
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone(), "use_cache": False, **images}
    inputs["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    if model.family in GRID_FAMILIES:
        inputs["mm_token_type_ids"] = is_image
        inputs["position_ids"] = inputs["position_ids"].expand(4, 1, -1)
    if model.family == "gemma3":
        inputs["token_type_ids"] = is_image
    return Batch(inputs=inputs, num_tokens=ids.shape[1])


def _make_images(config: Any, family: str, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Keyword arguments of `get_image_features`."""
    vision = config.vision_config
    if family in GRID_FAMILIES:
        merge, width = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        rows, columns = _grid(size, merge)
        return {
            "pixel_values": torch.zeros(rows * columns, width, dtype=dtype),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }
    (height, width), (patch_height, patch_width) = (_pair(x) for x in _tile_sizes(vision))
    tile_rows = (height // patch_height) * (width // patch_width)
    tile = (getattr(vision, "num_channels", 3), height, width)
    if family in TILE_FAMILIES:
        return {"pixel_values": torch.zeros(max(1, round(size / tile_rows)), *tile, dtype=dtype)}
    tiles = _pinned_tiles(config)
    count = max(1, round(size / tile_rows / tiles))
    return {
        "pixel_values": torch.zeros(count, tiles, *tile, dtype=dtype),
        "image_sizes": torch.tensor([_smallest_point(config)] * count),
    }


def _tile_sizes(vision: Any) -> tuple[Any, Any]:
    return vision.image_size, vision.patch_size


def _smallest_point(config: Any) -> Sequence[int]:
    point: Sequence[int] = min(config.image_grid_pinpoints, key=lambda point: (point[0] * point[1], point))
    return point


def _pinned_tiles(config: Any) -> int:
    """Tiles of the smallest grid point, and the thumbnail."""
    height, width = _pair(config.vision_config.image_size)
    point = _smallest_point(config)
    return (point[0] // height) * (point[1] // width) + 1


def _grid(rows: int, merge: int) -> tuple[int, int]:
    """Height and width of about `rows` patches, near to square, whole groups of merge x merge."""
    height = merge * max(1, round(rows**0.5 / merge))
    return height, merge * max(1, round(rows / height / merge))


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
