"""What is declared of each family: only what Transformers does not say of it, or a machine without torch has to know.

A family that follows Transformers' conventions needs no line at all. An odd one is a `Family` in `FAMILIES`. Layers are
asked of all. InternVL's remote code was read in OpenGVLab/InternVL, internvl_chat/internvl/model
(modeling_internvl_chat.py at 0328579).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from trimtab.errors import ConfigError, quote
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

MAX_SIZE = 2**30  # no width, count or vocabulary of a real model comes near; sums of squared patches fit 63 bits
MAX_PATCH = 4096  # pixels a side of a patch
MAX_MERGE = 64  # patches a side that become one token
MAX_GRID = 4096  # patches a side of a tile
MAX_PINPOINTS = 1024
OF_IMAGES = "preprocessor_config"
"""The section that holds the content of preprocessor_config.json, which is a file of its own."""

T = TypeVar("T")


class LackingFileError(ConfigError):
    """Nothing is wrong but that preprocessor_config.json was not given."""


class Fields:
    """A configuration, with the settings of its image processor in the section `OF_IMAGES`.

    A reading method takes the names that a field goes by, the usual one first; the first that is present is read, and
    a dotted name reads a field of a subsection. What cannot be read raises a `ConfigError` that names it.
    """

    def __init__(self, config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> None:
        settings = preprocessor or {}
        nested = settings.get("image_processor")  # Transformers 5 may nest it in processor_config.json
        self.values = {**config, OF_IMAGES: {**settings, **nested} if isinstance(nested, Mapping) else settings}
        self.has_file = preprocessor is not None

    def raw(self, name: str) -> Any:
        """The field as it stands, None where it is absent."""
        value: Any = self.values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def _read(self, names: Sequence[str], parse: Callable[[Any], T | None], needed: str, absent: T | None = None) -> T:
        """Return what `parse` makes of the field, None where it is not `needed`; `absent` is what silence means."""
        name = next((name for name in names if self.raw(name) is not None), None)
        if name is None:
            return self._refuse_silence(names[0]) if absent is None else absent
        parsed = parse(self.raw(name))
        if parsed is None:
            raise ConfigError(f"{name} is {quote(self.raw(name))}: {needed} is needed")
        return parsed

    def _refuse_silence(self, name: str) -> Any:
        section, _, own = name.partition(".")
        if section != OF_IMAGES:
            raise ConfigError(f"config.json lacks {name}: save AutoConfig.from_pretrained(MODEL).to_dict()")
        lacks = f"preprocessor_config.json lacks {own}, and no default is assumed"
        if self.has_file:
            raise ConfigError(f"{lacks}: add it to that file")
        raise LackingFileError(f"{lacks}: pass --set preprocessor=FILE, or put it next to config.json")

    def size(self, *names: str, maximum: int = MAX_SIZE) -> int:
        """Return a whole number of at least 1."""
        return self._read(names, lambda x: _whole(x, maximum), f"a whole number from 1 to {maximum}")

    def side(self, *names: str, maximum: int = MAX_SIZE) -> int:
        """Read a size that stands for both sides: [448, 448], {"height": 448, "width": 448}, {"shortest_edge": 448}."""
        needed = f"a whole number from 1 to {maximum}, or two equal ones,"
        return self._read(names, lambda x: _one_side(x, maximum), needed)

    def agreed(self, *names: str, maximum: int = MAX_SIZE) -> int:
        """The `side` that all names which are given agree on."""
        value = self.side(*names, maximum=maximum)
        given = [name for name in names if self.raw(name) is not None]
        self.expect(value, given[0], *given[1:])
        return value

    def expect(self, expected: int, source: str, *names: str) -> None:
        """Check that every name that is given holds this number, which `source` makes."""
        for name in names:
            value = self.raw(name)
            self.check(
                value is None or _one_side(value, MAX_SIZE) == expected,
                f"{name} is {quote(value)}, {source} makes it {expected}: take both files of one checkpoint",
            )

    def number(self, name: str) -> float:
        """Return a finite number above 0."""
        needed = f"a number above 0 and up to {MAX_SIZE}"
        return self._read([name], lambda x: float(x) if type(x) in (int, float) and 0 < x <= MAX_SIZE else None, needed)

    def flag(self, name: str, *, absent: bool | None = None) -> bool:
        """Read true or false; `absent` is the one documented meaning of a missing switch, where it has one."""
        return self._read([name], lambda x: x if isinstance(x, bool) else None, "true or false", absent)

    def text(self, name: str) -> str:
        """Return a name of any kind."""
        return self._read([name], lambda x: x if isinstance(x, str) and x else None, "a text")

    def word(self, name: str, choices: Sequence[str]) -> str:
        """Return one of `choices`."""
        needed = f"one of {', '.join(choices)}"
        return self._read([name], lambda x: x if isinstance(x, str) and x in choices else None, needed)

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        """Read a list of [height, width]."""

        def parse(value: Any) -> tuple[tuple[int, int], ...] | None:
            fits = isinstance(value, (list, tuple)) and 0 < len(value) <= MAX_PINPOINTS
            fits = fits and all(isinstance(x, (list, tuple)) and len(x) == 2 and all(map(_whole, x)) for x in value)
            return tuple((a, b) for a, b in value) if fits else None

        return self._read([name], parse, f"a list of at most {MAX_PINPOINTS} [height, width] pairs of whole numbers")

    def check(self, agrees: bool, contradiction: str) -> None:
        """Refuse two fields that cannot both be true; `contradiction` names both and says what to do."""
        if not agrees:
            raise ConfigError(contradiction)


# -- settings of several families -----------------------------------------------------------------------------------


def require_resize(s: Fields) -> None:
    s.check(
        s.raw("preprocessor_config.do_resize") is not False,
        "preprocessor_config.do_resize is false: images would reach the tower in sizes that no rule describes: set it "
        "to true",
    )


def patch_and_merge(s: Fields) -> tuple[int, int]:
    patch = s.agreed("vision_config.patch_size", "preprocessor_config.patch_size", maximum=MAX_PATCH)
    merge = s.agreed("vision_config.spatial_merge_size", "preprocessor_config.merge_size", maximum=MAX_MERGE)
    return patch, merge


def pixel_limits(s: Fields) -> tuple[int, int]:
    """Read min_pixels and max_pixels; at the file's top level they override `size`, as in the processor."""
    low = s.size(f"{OF_IMAGES}.min_pixels", f"{OF_IMAGES}.size.shortest_edge")
    return low, s.size(f"{OF_IMAGES}.max_pixels", f"{OF_IMAGES}.size.longest_edge")


def read_tile(s: Fields, *sides: str) -> tuple[int, int]:
    """Return the side of a square tile in pixels, on which all of `sides` agree, and in patches."""
    tile, patch = s.agreed(*sides), s.side("vision_config.patch_size", maximum=MAX_PATCH)
    s.check(
        1 <= tile // patch <= MAX_GRID,
        f"vision_config.patch_size {patch} does not fit a tile of {tile} pixels: correct image_size or patch_size",
    )
    return tile, tile // patch


def read_pinpoints(s: Fields) -> tuple[tuple[int, int], ...]:
    """Read image_grid_pinpoints as (height, width), equal wherever they are given."""
    names = [f"{prefix}image_grid_pinpoints" for prefix in (f"{OF_IMAGES}.", "")]
    given = [name for name in names if s.raw(name) is not None] or names[1:]
    found = [s.pairs(name) for name in given]
    s.check(len(set(found)) == 1, f"{' and '.join(given)} differ: take both files of one checkpoint")
    return found[0]


# -- kinds of values -------------------------------------------------------------------------------------------------


def _whole(value: object, maximum: int = MAX_SIZE) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= maximum else None


def _one_side(value: object, maximum: int) -> int | None:
    if isinstance(value, Mapping):
        value = [value[key] for key in ("height", "width", "shortest_edge") if value.get(key) is not None]
    if isinstance(value, (list, tuple)) and value and all(side == value[0] for side in value):
        value = value[0]
    return _whole(value, maximum)


# -- families ---------------------------------------------------------------------------------------------------------


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
    text_row: bool = True  # False: the model takes no text positions next to the axes; masks are given explicitly
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
    """Read the rule of InternVL's remote code from config.json; its preprocessor_config.json is not read."""
    tile, grid = read_tile(s, "vision_config.image_size" if s.raw("force_image_size") is None else "force_image_size")
    tokens = int(grid**2 * s.number("downsample_ratio") ** 2)
    if not s.flag("dynamic_image_size"):
        return FixedImage(rows=grid**2 + 1, tokens=tokens)
    return DynamicTiling(
        min_tiles=s.size("min_dynamic_patch", maximum=MAX_TILES),
        max_tiles=s.size("max_dynamic_patch", maximum=MAX_TILES),
        tile_size=tile,
        thumbnail=s.flag("use_thumbnail"),
        rows_per_tile=grid**2 + 1,
        tokens_per_tile=tokens,
    )


def _port_tiles(s: Fields) -> ImageRule:
    """Read the rule of Transformers' own InternVL.

    `crop_to_patches` in preprocessor_config.json is not read: InternVLProcessor switches it on for every call,
    whatever the file says (and published files say false).
    """
    require_resize(s)
    tile, grid = read_tile(s, "vision_config.image_size", "preprocessor_config.size")
    tokens = int(grid**2 * s.number("downsample_ratio") ** 2)
    names = ("image_seq_length", "preprocessor_config.image_seq_length")
    s.expect(tokens, "(image_size / patch_size x downsample_ratio)^2", *names)
    return DynamicTiling(
        min_tiles=s.size("preprocessor_config.min_patches", maximum=MAX_TILES),
        max_tiles=s.size("preprocessor_config.max_patches", maximum=MAX_TILES),
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
    window = s.size("vision_config.window_size") if windows else None
    low, high = pixel_limits(s)
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
    temporal = s.agreed("preprocessor_config.temporal_patch_size", "vision_config.temporal_patch_size")
    low, high = pixel_limits(s)
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
    s.expect(tokens, f"a tile of {tile} pixels with {rows} rows", "image_seq_length")
    return FixedImage(rows=rows, tokens=tokens)


def _onevision_tiles(s: Fields) -> ImageRule:
    rule = s.text("vision_aspect_ratio")
    match = re.fullmatch(r"anyres_max_([1-9][0-9]{0,3})", rule)
    if match is None:
        raise ConfigError(f"vision_aspect_ratio is {quote(rule)}, not anyres_max_N, N up to 9999: give anyres_max_9")
    return _anyres(s, max_feature_tiles=int(match.group(1)))


def _anyres(s: Fields, *, max_feature_tiles: int | None = None) -> ImageRule:
    """Read LLaVA-NeXT's rule; with `max_feature_tiles` LLaVA-OneVision's, which tiles lone images only."""
    tile, grid, class_tokens = _clip_tile(s)
    strategy = _feature_strategy(s)
    s.check(
        (strategy == "default") == (class_tokens == 1),
        f"vision_feature_select_strategy {strategy} leaves no square: CLIP has default, SigLIP full",
    )
    return AnyRes(
        tile_size=tile,
        pinpoints=read_pinpoints(s),
        grid_size=grid,
        rows_per_tile=grid * grid + class_tokens,
        max_feature_tiles=max_feature_tiles,
        lone_images_only=max_feature_tiles is not None,
        name="llava_anyres" if max_feature_tiles is None else f"llava_anyres_max_{max_feature_tiles}",
    )


def _clip_tile(s: Fields) -> tuple[int, int, int]:
    """Return the side of a tile in pixels and in patches, and class tokens, of a CLIP or SigLIP tower."""
    require_resize(s)
    sides = ("vision_config.image_size", "preprocessor_config.crop_size", "preprocessor_config.size")
    tile, grid = read_tile(s, *sides)
    return tile, grid, CLASS_TOKENS[s.word("vision_config.model_type", tuple(CLASS_TOKENS))]


def _feature_strategy(s: Fields) -> str:
    """Read the strategy: "default" drops the first row of each tile, "full" keeps all."""
    return s.word("vision_feature_select_strategy", ("default", "full"))


_LLAVA_MARKUP = ImageMarkup(placeholder="<image>", soft="<image>")
_SIZED = ("pixel_values", "image_sizes")


# -- Gemma 3: one size, cut only where pan and scan is asked for ------------------------------------------------------


def _crops(s: Fields) -> ImageRule:
    """Read the rule of Gemma 3, with pan and scan only where `do_pan_and_scan` is true.

    It is a switch of each call (published files hold null, Gemma3Processor passes false), so absent means off; a
    file that sets it asks for the crops, and must then give their three figures.
    """
    require_resize(s)
    _, grid = read_tile(s, "vision_config.image_size", "preprocessor_config.size")
    tokens = s.agreed("mm_tokens_per_image", "preprocessor_config.image_seq_length")
    name = "preprocessor_config.pan_and_scan"
    if not s.flag("preprocessor_config.do_pan_and_scan", absent=False):
        return FixedImage(rows=grid**2, tokens=tokens, name="gemma3")
    return PanAndScan(
        rows_per_crop=grid**2,
        tokens_per_crop=tokens,
        min_crop_size=s.size(f"{name}_min_crop_size"),
        max_num_crops=s.size(f"{name}_max_num_crops", maximum=MAX_TILES),
        min_ratio=s.number(f"{name}_min_ratio_to_activate"),
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
    """Read Llama 3.2 Vision's rule: the tower has positions for `max_num_tiles` tiles; images are padded to as many."""
    require_resize(s)
    _, grid = read_tile(s, "vision_config.image_size", "preprocessor_config.size")
    tiles = s.agreed("vision_config.max_num_tiles", "preprocessor_config.max_image_tiles", maximum=MAX_TILES)
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
        image_rule=_one_tile, markup=_LLAVA_MARKUP, pack=PackFormat(joined=("pixel_values",), smallest="tile")
    ),
    "llava_next": Family(
        image_rule=_anyres,
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
