"""What is declared of each family: only what Transformers does not say of it, or a machine without torch has to know.

A family that follows Transformers' conventions needs no line at all. An odd one is a `Family` in `FAMILIES`. Layers are
asked of all. InternVL's remote code was read in OpenGVLab/InternVL, internvl_chat/internvl/model
(modeling_internvl_chat.py at 0328579).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from trimtab.errors import quote
from trimtab.models.images.reading import (
    Fields,
    patch_and_merge,
    pixel_limits,
    read_pinpoints,
    read_tile,
    require_resize,
)
from trimtab.models.images.rules import (
    MAX_TILES,
    AnyRes,
    DynamicTiling,
    FixedImage,
    GlmSmartResize,
    PaddedTiles,
    PanAndScan,
    SmartResize,
)
from trimtab.specs import ImageMarkup, ImageRule

Smallest = Literal["block", "tile", "fewest tiles"]
"""One block of a grid of patches, one tile of fixed size, or the tile grid that leaves the fewest tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFormat:
    """Give this as `PackedCollator(config, family=...)` where what Transformers says of your model is not enough.

    Example: a family of tiles, of fixed size, whose image tokens see their whole image.

    >>> from trimtab.models import PackFormat
    >>> PackFormat(joined=("pixel_values",), sees="images").mrope
    False
    """

    joined: tuple[str, ...]  # keys concatenated along dimension 0, in sample order; further dimensions padded with 0
    mrope: bool = False  # positions have several axes, and the rows (text, temporal, height, width) in a pack
    text_row: bool = True  # False: the model takes no row of text positions beside the axes; masks are given explicitly
    sees: Literal["images", "prefix"] | None = None  # tokens that see their whole block, under masks given explicitly
    stateful: bool = False  # layers carry a state along the row: seq_idx and lengths say where samples start
    types_key: str | None = None  # argument of the forward that says which tokens are images
    # for packs without images: a kind known here, or config -> (LLM tokens, tensors by key); None: no filler image
    smallest: Smallest | Callable[[Any], tuple[int, dict[str, Any]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All that is declared of one `model_type`; what is left out is asked of Transformers, or not needed.

    Use it to declare what is odd about a family of your own, as an entry of `trimtab.models.FAMILIES`: docs/models.md.
    """

    image_rule: Callable[[Fields], ImageRule] | None = None  # counts of images without torch; None: asked
    markup: ImageMarkup | None = None  # how its processor writes an image, without torch; None: asked
    pack: PackFormat | None = None  # None: asked of the model's classes
    is_remote_code: bool = False  # Transformers has no class of its own for it
    joins_tiles: bool = False  # generating, tiles of several images are joined in front of the tower
    stacks_states: bool = False  # its tower hands on the states of all its blocks, which live until its end


# -- InternVL: tiles; the remote code that OpenGVLab ships (`internvl_chat`) and Transformers' port (`internvl`) ------


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


_INTERNVL_MARKUP = ImageMarkup(placeholder="<IMG_CONTEXT>", soft="<IMG_CONTEXT>", before="<img>", after="</img>")
"""What Transformers' processor writes, and the remote code's trainer for its `<image>`."""


# -- Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one rectangle of patches; windows in 2.5 --------------------------------------


def _smart_resize(s: Fields, *, windows: bool = False) -> ImageRule:
    require_resize(s)
    patch, merge = patch_and_merge(s)
    low, high = pixel_limits(s)
    window = s.size("vision_config.window_size") if windows else None
    s.raise_problems()
    return SmartResize(patch_size=patch, merge_size=merge, min_pixels=low, max_pixels=high, window_size=window)


_QWEN_MARKUP = ImageMarkup(
    placeholder="<|image_pad|>", soft="<|image_pad|>", written="<|vision_start|><|image_pad|><|vision_end|>"
)
"""What Transformers' processors write, and (`written`) Qwen's own trainer."""

_windowed = partial(_smart_resize, windows=True)


# -- GLM-4.1V, 4.5V and 4.6V ------------------------------------------------------------------------------------------


def _glm_smart_resize(s: Fields) -> ImageRule:
    require_resize(s)
    patch, merge = patch_and_merge(s)
    low, high = pixel_limits(s)
    temporal = s.agreed("preprocessor_config.temporal_patch_size", "vision_config.temporal_patch_size")
    s.raise_problems()
    return GlmSmartResize(
        patch_size=patch, merge_size=merge, temporal_patch_size=temporal, min_pixels=low, max_pixels=high
    )


# -- LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision ------------------------------------------------------------------------


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


_LLAVA_MARKUP = ImageMarkup(placeholder="<image>", soft="<image>")
_SIZED = ("pixel_values", "image_sizes")


# -- Gemma 3: one size, cut only where pan and scan is asked for ------------------------------------------------------


def _crops(s: Fields) -> ImageRule:
    """Gemma 3, with pan and scan only where `do_pan_and_scan` is true.

    It is a switch of each call (published files hold null, Gemma3Processor passes false), so absent means off; a
    file that sets it asks for the crops, and must then give their three figures.
    """
    require_resize(s)
    _, grid = read_tile(s, "vision_config.image_size", "preprocessor_config.size")
    tokens = s.agreed("mm_tokens_per_image", "preprocessor_config.image_seq_length")
    name = "preprocessor_config.pan_and_scan"
    if not s.flag("preprocessor_config.do_pan_and_scan", absent=False):
        s.raise_problems()
        return FixedImage(rows=grid**2, tokens=tokens, name="gemma3")
    least = s.size(f"{name}_min_crop_size")
    most = s.size(f"{name}_max_num_crops", maximum=MAX_TILES)
    ratio = s.number(f"{name}_min_ratio_to_activate")
    s.raise_problems()
    return PanAndScan(
        rows_per_crop=grid**2, tokens_per_crop=tokens, min_crop_size=least, max_num_crops=most, min_ratio=ratio
    )


_GEMMA3_MARKUP = ImageMarkup(
    placeholder="<start_of_image>",
    soft="<image_soft_token>",
    before="\n\n<start_of_image>",
    after="<end_of_image>\n\n",
    crops=("Here is the original image ", " and here are some crops to help you see better "),
)
_GEMMA3_PACK = PackFormat(joined=("pixel_values",), sees="images", smallest="tile")


# -- Mllama (Llama 3.2 Vision): as many tiles of every image ----------------------------------------------------------


def _padded_tiles(s: Fields) -> ImageRule:
    """Llama 3.2 Vision: the tower learns positions for `max_num_tiles` tiles, and the processor pads to as many."""
    require_resize(s)
    _, grid = read_tile(s, "vision_config.image_size", "preprocessor_config.size")
    tiles = s.agreed("vision_config.max_num_tiles", "preprocessor_config.max_image_tiles", maximum=MAX_TILES)
    s.raise_problems()
    rows = grid**2 + 1
    return PaddedTiles(tiles=tiles, rows_per_tile=-(-rows // 8) * 8)  # the tower pads each tile to a multiple of 8


# -- all of them -------------------------------------------------------------------------------------------------------

FAMILIES: dict[str, Family] = {
    "internvl": Family(
        image_rule=_port_tiles,
        markup=_INTERNVL_MARKUP,
        pack=PackFormat(joined=("pixel_values",), smallest="tile"),
    ),
    REMOTE: Family(image_rule=_remote_tiles, markup=_INTERNVL_MARKUP, is_remote_code=True),
    "qwen2_vl": Family(image_rule=_smart_resize, markup=_QWEN_MARKUP),
    "qwen2_5_vl": Family(image_rule=_windowed, markup=_QWEN_MARKUP),
    "qwen3_vl": Family(image_rule=_smart_resize, markup=_QWEN_MARKUP),
    "qwen3_vl_moe": Family(image_rule=_smart_resize, markup=_QWEN_MARKUP),
    "glm4v": Family(image_rule=_glm_smart_resize),
    "glm46v": Family(image_rule=_glm_smart_resize),
    "glm4v_moe": Family(image_rule=_glm_smart_resize),
    "llava": Family(
        image_rule=_one_tile,
        markup=_LLAVA_MARKUP,
        pack=PackFormat(joined=("pixel_values",), smallest="tile"),
    ),
    "llava_next": Family(
        image_rule=_next_tiles,
        markup=_LLAVA_MARKUP,
        pack=PackFormat(joined=_SIZED, smallest="fewest tiles"),
        joins_tiles=True,
    ),
    "llava_onevision": Family(
        image_rule=_onevision_tiles,
        markup=_LLAVA_MARKUP,
        pack=PackFormat(joined=(*_SIZED, "batch_num_images", "pixel_values_videos"), smallest="fewest tiles"),
        joins_tiles=True,
    ),
    "gemma3": Family(image_rule=_crops, markup=_GEMMA3_MARKUP, pack=_GEMMA3_PACK),
    "shieldgemma2": Family(pack=_GEMMA3_PACK),
    "mllama": Family(image_rule=_padded_tiles, stacks_states=True),
    # positions of four axes, and no row of text positions that could restart
    "hunyuan_vl": Family(pack=PackFormat(joined=("pixel_values", "image_grid_thw"), mrope=True, text_row=False)),
    # tokens of image and question see one another, so that packs need masks of their own
    "paligemma": Family(pack=PackFormat(joined=("pixel_values",), sees="prefix")),
}
"""What is declared of each `model_type`; put yours in before the first use, as docs/models.md shows."""

MARKUPS = {name: family.markup for name, family in FAMILIES.items() if family.markup is not None}
"""How the processors of Transformers 5.23 write an image (`replace_image_token` of each)."""

_ASKED = Family()


def family_of(model_type: object) -> Family:
    """Return what is declared of it; nothing, where all is asked."""
    return FAMILIES.get(model_type, _ASKED) if isinstance(model_type, str) else _ASKED
