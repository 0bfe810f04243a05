"""config.json and preprocessor_config.json -> image rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trimtab.errors import ConfigError, UnknownModelError
from trimtab.models.images.native import GlmSmartResize, MoonVit, SmartResize
from trimtab.models.images.settings import MAX_MERGE, MAX_PATCH, LackingFileError, Settings
from trimtab.models.images.size import MAX_TILES
from trimtab.models.images.tiles import AnyRes, DynamicTiling, FixedImage, PaddedTiles, PanAndScan, Slices
from trimtab.models.quote import quote
from trimtab.specs import ImageCounts, ImageRule

CLASS_TOKENS = MappingProxyType({"clip_vision_model": 1, "siglip_vision_model": 0})
"""Rows that a LLaVA vision tower adds to the patches of each tile, by its `model_type`."""


def image_rule(config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> ImageRule:
    """The rule of a model, from its config.json and, where that does not settle it, its preprocessor_config.json.

    A `preprocess` mapping inside `config` stands in for the second file; where both speak, the file wins. Nothing
    is filled from a class default: a setting given nowhere, or two that contradict each other, raise a `ConfigError`
    with all problems at once. Two switches follow the processor instead of the file, see `_internvl` and `_gemma3`.
    """
    model_type = config.get("model_type")
    build = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if build is None:
        raise UnknownModelError(
            f"no image rule for model_type {quote(model_type)}: known are {', '.join(FAMILIES)}: "
            "check `model_type` in config.json"
        )
    return build(Settings(config, preprocessor))


def image_rule_or_reason(config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> ImageRule:
    """`image_rule`, or an `UnsettledRule` where nothing is wrong but that preprocessor_config.json was not given."""
    try:
        return image_rule(config, preprocessor)
    except LackingFileError as error:
        return UnsettledRule(reason=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsettledRule:
    """Stands for the rule of a model whose files do not settle it, until an image has to be counted."""

    reason: str  # the message of the ConfigError that `image_rule` raised
    name: str = "unsettled"

    def count(self, width: int, height: int) -> ImageCounts:  # noqa: ARG002 - the protocol's arguments
        raise ConfigError(self.reason)


def _internvl_chat(s: Settings) -> ImageRule:
    """InternVL's remote code: all settings stand in config.json; its preprocessor_config.json is not read."""
    tile = s.first_int(("preprocess", "force_image_size"), ("config", "force_image_size"), ("vision", "image_size"))
    patch = s.first_int(("vision", "patch_size"))
    ratio = s.first_number(("preprocess", "downsample_ratio"), ("config", "downsample_ratio"))
    grid = s.grid(tile, patch)
    tokens = int(grid**2 * ratio**2)
    s.expect_int(tokens, "(tile / patch x downsample_ratio)^2", ("preprocess", "tokens_per_tile"))
    dynamic = s.value("preprocess", "rule") == "internvl_dynamic_tiling" or s.first_bool(
        ("config", "dynamic_image_size")
    )
    rows = grid**2 + 1
    if not dynamic:
        s.check()
        return FixedImage(rows=rows, tokens=tokens)
    low = s.first_tiles(("preprocess", "min_dynamic_patch"), ("config", "min_dynamic_patch"))
    high = s.first_tiles(("preprocess", "max_dynamic_patch"), ("config", "max_dynamic_patch"))
    thumbnail = s.first_bool(("preprocess", "use_thumbnail"), ("config", "use_thumbnail"))
    s.check()
    return DynamicTiling(
        min_tiles=low,
        max_tiles=high,
        tile_size=tile,
        thumbnail=thumbnail,
        rows_per_tile=rows,
        tokens_per_tile=tokens,
    )


def _internvl(s: Settings) -> ImageRule:
    """Transformers' own InternVL.

    `crop_to_patches` in preprocessor_config.json is not read: InternVLProcessor switches it on for every call,
    whatever the file says (and published files say false).
    """
    _require_resize(s)
    tile = s.agreed_int(("vision", "image_size"), ("file", "size"))
    patch = s.first_int(("vision", "patch_size"))
    ratio = s.first_number(("config", "downsample_ratio"))
    grid = s.grid(tile, patch)
    tokens = int(grid**2 * ratio**2)
    s.expect_int(
        tokens,
        "(image_size / patch_size x downsample_ratio)^2",
        ("config", "image_seq_length"),
        ("file", "image_seq_length"),
    )
    low, high = s.first_tiles(("file", "min_patches")), s.first_tiles(("file", "max_patches"))
    s.check()
    return DynamicTiling(
        min_tiles=low,
        max_tiles=high,
        tile_size=tile,
        thumbnail=True,
        rows_per_tile=grid**2 + 1,
        tokens_per_tile=tokens,
    )


def _qwen(s: Settings) -> ImageRule:
    _require_resize(s)
    patch, merge = _patch_and_merge(s)
    low, high = _pixel_limits(s)
    window = s.first_int(("vision", "window_size")) if s.model_type == "qwen2_5_vl" else None
    s.check()
    return SmartResize(patch_size=patch, merge_size=merge, min_pixels=low, max_pixels=high, window_size=window)


def _glm(s: Settings) -> ImageRule:
    _require_resize(s)
    patch, merge = _patch_and_merge(s)
    low, high = _pixel_limits(s)
    temporal = s.agreed_int(("file", "temporal_patch_size"), ("vision", "temporal_patch_size"))
    s.check()
    return GlmSmartResize(
        patch_size=patch, merge_size=merge, temporal_patch_size=temporal, min_pixels=low, max_pixels=high
    )


def _kimi_vl(s: Settings) -> ImageRule:
    """Kimi-VL's remote code; only the padding variant, which its checkpoints use."""
    patch = s.agreed_int(("file", "patch_size"), ("preprocess", "patch"), ("vision", "patch_size"), maximum=MAX_PATCH)
    merge = s.agreed_int(
        ("file", "merge_kernel_size"), ("preprocess", "merge"), ("vision", "merge_kernel_size"), maximum=MAX_MERGE
    )
    limit = s.first_int(("file", "in_token_limit"), ("preprocess", "in_token_limit"))
    pads = s.value("preprocess", "rule") == "moonvit_native" or s.first_bool(("file", "pad_input"))
    if not pads and s.value("file", "pad_input") is False:
        s.problem(
            "reads `pad_input` in preprocessor_config.json",
            "without padding an image can keep an odd side, which the projector cannot merge",
            "set it to true, as published checkpoints do",
        )
    s.check()
    return MoonVit(patch_size=patch, merge_size=merge, max_patches=limit)


def _minicpmv(s: Settings) -> ImageRule:
    if s.value("file", "slice_mode") is False:
        s.problem(
            "reads `slice_mode` = false in preprocessor_config.json",
            "images would reach the tower unresized, which no rule describes",
            "set it to true",
        )
    slices = s.first_tiles(
        ("file", "max_slice_nums"), ("preprocess", "max_slice_nums"), ("config", "slice_config.max_slice_nums")
    )
    resolution = s.first_int(
        ("file", "scale_resolution"), ("preprocess", "scale_resolution"), ("config", "slice_config.scale_resolution")
    )
    patch = s.agreed_int(("file", "patch_size"), ("preprocess", "patch_size"), ("vision", "patch_size"))
    s.grid(resolution, patch)
    tokens = s.agreed_int(("file", "image_feature_size"), ("preprocess", "query_num"), ("config", "query_num"))
    s.check()
    return Slices(max_slices=slices, resolution=resolution, patch_size=patch, tokens_per_slice=tokens)


def _llava(s: Settings) -> ImageRule:
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


def _llava_next(s: Settings) -> ImageRule:
    return _anyres(s, max_feature_tiles=None, lone_images_only=False, name="llava_anyres")


def _llava_onevision(s: Settings) -> ImageRule:
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


def _gemma3(s: Settings) -> ImageRule:
    """Gemma 3, with pan and scan only where `do_pan_and_scan` is true.

    It is a switch of each call (published files hold null, Gemma3Processor passes false), so absent means off; a
    file that sets it asks for the crops, and must then give their three figures.
    """
    _require_resize(s)
    tile = s.agreed_int(("vision", "image_size"), ("file", "size"), ("preprocess", "image_size"))
    patch = s.first_int(("vision", "patch_size"))
    tokens = s.agreed_int(
        ("config", "mm_tokens_per_image"), ("file", "image_seq_length"), ("preprocess", "mm_tokens_per_image")
    )
    rows = s.grid(tile, patch) ** 2
    crops = s.value("file", "do_pan_and_scan")
    if crops is None:
        crops = s.value("preprocess", "pan_and_scan.default")
    if crops is not None and not isinstance(crops, bool):
        s.problem("reads `do_pan_and_scan`", f"{quote(crops)} is not true or false", "correct it in that file")
    if crops is not True:
        s.check()
        return FixedImage(rows=rows, tokens=tokens, name="gemma3")
    least = s.first_int(("file", "pan_and_scan_min_crop_size"), ("preprocess", "pan_and_scan.min_crop_size"))
    most = s.first_tiles(("file", "pan_and_scan_max_num_crops"), ("preprocess", "pan_and_scan.max_num_crops"))
    ratio = s.first_number(
        ("file", "pan_and_scan_min_ratio_to_activate"), ("preprocess", "pan_and_scan.min_ratio_to_activate")
    )
    s.check()
    return PanAndScan(
        rows_per_crop=rows, tokens_per_crop=tokens, min_crop_size=least, max_num_crops=most, min_ratio=ratio
    )


def _mllama(s: Settings) -> ImageRule:
    """Llama 3.2 Vision: the tower learns positions for `max_num_tiles` tiles, and the processor pads to as many."""
    _require_resize(s)
    tile = s.agreed_int(("vision", "image_size"), ("file", "size"))
    patch = s.first_int(("vision", "patch_size"))
    tiles = s.agreed_int(("vision", "max_num_tiles"), ("file", "max_image_tiles"), maximum=MAX_TILES)
    rows = s.grid(tile, patch) ** 2 + 1
    s.check()
    return PaddedTiles(tiles=tiles, rows_per_tile=-(-rows // 8) * 8)  # the tower pads each tile to a multiple of 8


def _patch_and_merge(s: Settings) -> tuple[int, int]:
    patch = s.agreed_int(("file", "patch_size"), ("vision", "patch_size"), maximum=MAX_PATCH)
    merge = s.agreed_int(("file", "merge_size"), ("vision", "spatial_merge_size"), maximum=MAX_MERGE)
    s.expect_int(patch * merge, "patch_size x merge_size", ("preprocess", "factor"))
    return patch, merge


def _pixel_limits(s: Settings) -> tuple[int, int]:
    """min_pixels and max_pixels; at the file's top level they override `size`, as in the processor."""
    low = s.first_int(("file", "min_pixels"), ("file", "size.shortest_edge"), ("preprocess", "min_pixels"))
    high = s.first_int(("file", "max_pixels"), ("file", "size.longest_edge"), ("preprocess", "max_pixels"))
    return low, high


def _clip_tile(s: Settings) -> tuple[int, int, int]:
    """Side of a tile in pixels and in patches, and class tokens, of a CLIP or SigLIP tower."""
    _require_resize(s)
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


def _require_resize(s: Settings) -> None:
    if s.value("file", "do_resize") is False:
        s.problem(
            "reads `do_resize` = false in preprocessor_config.json",
            "images would reach the tower in sizes that no rule describes",
            "set it to true",
        )


FAMILIES: Mapping[str, Callable[[Settings], ImageRule]] = MappingProxyType(
    {
        "internvl_chat": _internvl_chat,
        "internvl": _internvl,
        "qwen2_vl": _qwen,
        "qwen2_5_vl": _qwen,
        "qwen3_vl": _qwen,
        "qwen3_vl_moe": _qwen,
        "llava": _llava,
        "llava_next": _llava_next,
        "llava_onevision": _llava_onevision,
        "gemma3": _gemma3,
        "glm4v": _glm,
        "glm4v_moe": _glm,
        "glm46v": _glm,
        "kimi_vl": _kimi_vl,
        "minicpmv": _minicpmv,
        "mllama": _mllama,
    }
)
"""Family of a `model_type`; a new one is a line here and a function above."""
