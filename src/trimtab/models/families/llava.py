"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: how images are cut; their layers are asked of Transformers."""

from __future__ import annotations

import re
from types import MappingProxyType

from trimtab.errors import quote
from trimtab.models.families.family import Family, PackFormat
from trimtab.models.images.reading import Fields, read_pinpoints, read_tile, require_resize
from trimtab.models.images.tiles import AnyRes, FixedImage
from trimtab.specs import ImageMarkup, ImageRule

CLASS_TOKENS = MappingProxyType({"clip_vision_model": 1, "siglip_vision_model": 0})
"""Rows that a vision tower adds to the patches of each tile, by its `model_type`."""


def _one_tile(s: Fields) -> ImageRule:
    tile, grid, class_tokens = _clip_tile(s)
    rows = grid * grid + class_tokens
    tokens = rows - (_feature_strategy(s) == "default")
    whence = f"a tile of {tile} pixels with {rows} rows"
    s.expect(tokens, whence, "image_seq_length")
    s.raise_problems()
    return FixedImage(rows=rows, tokens=tokens)


def _next_tiles(s: Fields) -> ImageRule:
    return _anyres(s, max_feature_tiles=None, lone_images_only=False, name="llava_anyres")


def _onevision_tiles(s: Fields) -> ImageRule:
    rule = s.text("vision_aspect_ratio")
    match = re.fullmatch(r"anyres_max_([1-9][0-9]{0,3})", rule)
    s.check(
        match is not None,
        f"vision_aspect_ratio is {quote(rule)}, and not of the form anyres_max_N with N up to 9999: correct it, for "
        "released checkpoints to anyres_max_9",
    )
    limit = int(match.group(1)) if match else None
    return _anyres(s, max_feature_tiles=limit, lone_images_only=True, name=f"llava_anyres_max_{limit}")


def _anyres(s: Fields, *, max_feature_tiles: int | None, lone_images_only: bool, name: str) -> ImageRule:
    tile, grid, class_tokens = _clip_tile(s)
    strategy = _feature_strategy(s)
    s.check(
        (strategy == "default") == (class_tokens == 1),
        f"vision_feature_select_strategy is {strategy}, but a tower with {class_tokens} class tokens would not leave a "
        'square of features per tile: use "default" with CLIP and "full" with SigLIP',
    )
    pinpoints = read_pinpoints(s)
    s.raise_problems()
    return AnyRes(
        tile_size=tile,
        pinpoints=pinpoints,
        grid_size=grid,
        rows_per_tile=grid * grid + class_tokens,
        max_feature_tiles=max_feature_tiles,
        lone_images_only=lone_images_only,
        name=name,
    )


def _clip_tile(s: Fields) -> tuple[int, int, int]:
    """Side of a tile in pixels and in patches, and class tokens, of a CLIP or SigLIP tower."""
    require_resize(s)
    sides = ("vision_config.image_size", "preprocessor_config.crop_size", "preprocessor_config.size")
    tile, grid = read_tile(s, *sides)
    return tile, grid, CLASS_TOKENS[s.word("vision_config.model_type", choices=tuple(CLASS_TOKENS))]


def _feature_strategy(s: Fields) -> str:
    """ "default" drops the first row of each tile, "full" keeps all."""
    return s.word("vision_feature_select_strategy", choices=("default", "full"))


_MARKUP = ImageMarkup(placeholder="<image>", soft="<image>")
_SIZED = ("pixel_values", "image_sizes")

FAMILIES = {
    "llava": Family(
        image_rule=_one_tile,
        markup=_MARKUP,
        pack=PackFormat(joined=("pixel_values",), counts="tiles", smallest="tile"),
    ),
    "llava_next": Family(
        image_rule=_next_tiles,
        markup=_MARKUP,
        pack=PackFormat(joined=_SIZED, counts="sizes", smallest="fewest tiles"),
        joins_tiles=True,
    ),
    "llava_onevision": Family(
        image_rule=_onevision_tiles,
        markup=_MARKUP,
        pack=PackFormat(
            joined=(*_SIZED, "batch_num_images", "pixel_values_videos"), counts="sizes", smallest="fewest tiles"
        ),
        joins_tiles=True,
    ),
}
