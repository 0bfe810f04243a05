"""How the processors of Transformers 5.23 hand each family's images over, and what a pack of them must look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trimtab.errors import UnknownModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFormat:
    """One family's keys of a processed sample, beside `input_ids` and labels."""

    joined: tuple[str, ...]  # concatenated along their first dimension, in sample order
    tiles_padded: bool = False  # pixel_values are (images, tiles, C, H, W): padded to the pack's most tiles
    mrope: bool = False  # positions have three axes, and the rows (text, temporal, height, width) in a pack
    image_attention: bool = False  # image tokens see their whole image, under masks that must be given explicitly


_QWEN = PackFormat(
    joined=("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    mrope=True,
)
_TILES = PackFormat(joined=("pixel_values",))

PACK_FORMATS: dict[str, PackFormat] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "internvl": _TILES,
    "llava": _TILES,
    "llava_next": PackFormat(joined=("pixel_values", "image_sizes"), tiles_padded=True),
    "llava_onevision": PackFormat(joined=("pixel_values", "image_sizes", "batch_num_images"), tiles_padded=True),
    "gemma3": PackFormat(joined=("pixel_values",), image_attention=True),
}

TOKEN_TYPE_KEYS = ("mm_token_type_ids", "token_type_ids")
"""What processors call 0 text, 1 image, 2 video per token; the second is Gemma's name."""


def pack_format(config: Any) -> PackFormat:
    """The format of a Transformers configuration's family."""
    family = PACK_FORMATS.get(config.model_type)
    if family is None:
        raise UnknownModelError(
            f"packs for model_type {config.model_type!r} were asked for, but its image format is not known: "
            f"use one of {', '.join(PACK_FORMATS)}"
        )
    return family
