"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: how images are cut; their layers are asked of Transformers."""

from __future__ import annotations

import re
from types import MappingProxyType

from trimtab.models.families.family import Family, PackFormat
from trimtab.models.images.settings import Settings
from trimtab.models.images.tiles import AnyRes, FixedImage
from trimtab.models.quote import quote
from trimtab.specs import ImageMarkup, ImageRule

CLASS_TOKENS = MappingProxyType({"clip_vision_model": 1, "siglip_vision_model": 0})
"""Rows that a vision tower adds to the patches of each tile, by its `model_type`."""


def _one_tile(s: Settings) -> ImageRule:
    tile, grid, class_tokens = _clip_tile(s)
    rows = grid * grid + class_tokens
    tokens = rows - (_feature_strategy(s, class_tokens) == "default")
    s.expect_int(
        tokens,
        f"a tile of {tile} pixels with {rows} rows",
        ("preprocess", "tokens_per_image"),
        ("config", "image_seq_length"),
    )
    s.check()
    return FixedImage(rows=rows, tokens=tokens)


def _next_tiles(s: Settings) -> ImageRule:
    return _anyres(s, max_feature_tiles=None, lone_images_only=False, name="llava_anyres")


def _onevision_tiles(s: Settings) -> ImageRule:
    rule = s.first_text(("preprocess", "rule"), ("config", "vision_aspect_ratio"))
    match = re.fullmatch(r"(?:llava_)?anyres_max_([1-9][0-9]{0,3})", rule)
    if rule and match is None:
        s.problem(
            "reads `vision_aspect_ratio` in config.json",
            f"{quote(rule)} is not of the form anyres_max_N with N up to 9999",
            "correct it, for released checkpoints to anyres_max_9",
        )
    limit = int(match.group(1)) if match else None
    return _anyres(s, max_feature_tiles=limit, lone_images_only=True, name=f"llava_anyres_max_{limit}")


def _anyres(s: Settings, *, max_feature_tiles: int | None, lone_images_only: bool, name: str) -> ImageRule:
    tile, grid, class_tokens = _clip_tile(s)
    strategy = _feature_strategy(s, class_tokens)
    if (strategy == "default") != (class_tokens == 1):
        s.problem(
            f"reads `vision_feature_select_strategy` = {quote(strategy)} in config.json",
            f"a tower with {class_tokens} class tokens would not leave a square of features per tile",
            'use "default" with CLIP and "full" with SigLIP',
        )
    s.expect_int(grid * grid, "(tile / patch)^2", ("preprocess", "base_tokens"))
    pinpoints = s.pinpoints()
    s.check()
    return AnyRes(
        tile_size=tile,
        pinpoints=pinpoints,
        grid_size=grid,
        rows_per_tile=grid * grid + class_tokens,
        max_feature_tiles=max_feature_tiles,
        lone_images_only=lone_images_only,
        name=name,
    )


def _clip_tile(s: Settings) -> tuple[int, int, int]:
    """Side of a tile in pixels and in patches, and class tokens, of a CLIP or SigLIP tower."""
    s.require_resize()
    tile = s.agreed_int(("vision", "image_size"), ("file", "crop_size"), ("file", "size"))
    s.expect_int(tile, "`image_size` of vision_config", ("preprocess", "tile"), ("preprocess", "image_size"))
    patch = s.first_int(("vision", "patch_size"))
    tower = s.first_text(("vision", "model_type"))
    if tower and tower not in CLASS_TOKENS:
        s.problem(
            f"reads `model_type` = {quote(tower)} in vision_config",
            f"only towers {' and '.join(CLASS_TOKENS)} are described",
            "plan with one of those",
        )
    return tile, s.grid(tile, patch), CLASS_TOKENS.get(tower, 0)


def _feature_strategy(s: Settings, class_tokens: int) -> str:
    """ "default" drops the first row of each tile, "full" keeps all."""
    if s.value("preprocess", "rule") is not None and s.value("config", "vision_feature_select_strategy") is None:
        return "default" if class_tokens else "full"  # a zoo entry states the tokens that remain; they are checked
    strategy = s.first_text(("config", "vision_feature_select_strategy"))
    if strategy not in ("", "default", "full"):
        s.problem(
            "reads `vision_feature_select_strategy` in config.json",
            f"{quote(strategy)} is neither default nor full",
            "correct it in that file",
        )
    return strategy


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
        pack=PackFormat(joined=(*_SIZED, "batch_num_images"), counts="sizes", smallest="fewest tiles"),
        joins_tiles=True,
    ),
}
