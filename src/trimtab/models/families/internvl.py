"""InternVL: how images are cut into tiles; its layers are asked of Transformers.

Two families share the architecture: the remote code that OpenGVLab ships (`internvl_chat`, with its own module paths)
and Transformers' port (`internvl`). The remote code was read in OpenGVLab/InternVL, folder
internvl_chat/internvl/model (modeling_internvl_chat.py at 0328579).
"""

from __future__ import annotations

from trimtab.models.families.family import Family, PackFormat
from trimtab.models.images.reading import Fields, read_tile, require_resize
from trimtab.models.images.size import MAX_TILES
from trimtab.models.images.tiles import DynamicTiling, FixedImage
from trimtab.specs import ImageMarkup, ImageRule

REMOTE = "internvl_chat"
"""As first published, with code of its own."""


def _remote_tiles(s: Fields) -> ImageRule:
    """InternVL's remote code: all settings stand in config.json; its preprocessor_config.json is not read."""
    tile, grid = read_tile(s, "force_image_size" if s.given("force_image_size") else "vision_config.image_size")
    tokens = int(grid**2 * s.number("downsample_ratio") ** 2)
    rows = grid**2 + 1
    if not s.flag("dynamic_image_size"):
        s.raise_problems()
        return FixedImage(rows=rows, tokens=tokens)
    low = s.size("min_dynamic_patch", maximum=MAX_TILES)
    high = s.size("max_dynamic_patch", maximum=MAX_TILES)
    thumbnail = s.flag("use_thumbnail")
    s.raise_problems()
    return DynamicTiling(
        min_tiles=low,
        max_tiles=high,
        tile_size=tile,
        thumbnail=thumbnail,
        rows_per_tile=rows,
        tokens_per_tile=tokens,
    )


def _port_tiles(s: Fields) -> ImageRule:
    """Transformers' own InternVL.

    `crop_to_patches` in preprocessor_config.json is not read: InternVLProcessor switches it on for every call,
    whatever the file says (and published files say false).
    """
    require_resize(s)
    tile, grid = read_tile(s, "vision_config.image_size", "preprocessor_config.size")
    tokens = int(grid**2 * s.number("downsample_ratio") ** 2)
    names = ("image_seq_length", "preprocessor_config.image_seq_length")
    s.expect(tokens, "(image_size / patch_size x downsample_ratio)^2", *names)
    low = s.size("preprocessor_config.min_patches", maximum=MAX_TILES)
    high = s.size("preprocessor_config.max_patches", maximum=MAX_TILES)
    s.raise_problems()
    return DynamicTiling(
        min_tiles=low,
        max_tiles=high,
        tile_size=tile,
        thumbnail=True,
        rows_per_tile=grid**2 + 1,
        tokens_per_tile=tokens,
    )


_MARKUP = ImageMarkup(placeholder="<IMG_CONTEXT>", soft="<IMG_CONTEXT>", before="<img>", after="</img>")
"""What Transformers' processor writes, and the remote code's trainer for its `<image>`."""

FAMILIES = {
    "internvl": Family(
        image_rule=_port_tiles,
        markup=_MARKUP,
        pack=PackFormat(joined=("pixel_values",), counts="tiles", smallest="tile"),
    ),
    REMOTE: Family(image_rule=_remote_tiles, markup=_MARKUP, is_remote_code=True),
}
