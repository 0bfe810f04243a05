"""Image rules: the patches and tokens of an image from nothing but its size in pixels.

Symbols: p patch size in pixels, m patches merged per side into one LLM token, f = p m the factor both sides end on.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from trimtab.errors import ConfigError, ImageError, quote
from trimtab.specs import ImageCounts, ImageRule

MAX_PIXELS = 2**30  # of one image after its processor
MAX_TILES = 4096  # of one image; no published model goes beyond 40
MAX_SIDE = 2**31 - 1  # the largest side a PNG header can name; no image format of ours goes beyond


def check_size(width: int, height: int) -> None:
    """Refuse what no image can be; `bool` and NumPy scalars are not plain integers and are refused as well."""
    if type(width) is int and type(height) is int and 0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE:
        return
    raise ImageError(f"an image of {width!r} x {height!r} pixels: sides are 1 to {MAX_SIDE}: leave it out")


def refuse(width: int, height: int, what_is_true: str) -> ImageError:
    """The error for a size that the official processor raises on as well."""
    return ImageError(f"an image of {width} x {height} pixels: {what_is_true}: crop it, or leave the sample out")


# -- one rectangle of patches: an image's own resolution, sides rounded to a factor -----------------------------------


MAX_ASPECT_RATIO = 200  # smart_resize of Transformers raises beyond it


@dataclass(frozen=True, slots=True, kw_only=True)
class SmartResize:
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

    Both sides are rounded (half to even) to multiples of f; if the area then leaves [min_pixels, max_pixels], the
    original sides are scaled by beta = sqrt(area / limit) and rounded down (too large) or up (too small).
    patches = h w / p^2, tokens = patches / m^2. Transformers' version; that of `qwen_vl_utils` first lifts each side
    to f and so differs on slivers (2000 x 10: 28 x 1988 there, 28 x 812 here).
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    window_size: int | None = None  # pixels a side of the ViT's attention windows (Qwen2.5-VL); None: no windows
    name: str = "qwen_smart_resize"

    def __post_init__(self) -> None:
        _check_pixel_limits(self.min_pixels, self.max_pixels)
        if self.window_size is not None and self.window_size < self.patch_size * self.merge_size:
            raise ConfigError(f"window_size {self.window_size} holds no merged patch: correct vision_config")

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            raise _too_long(width, height)
        f = self.patch_size * self.merge_size
        rounded = round(height / f) * f, round(width / f) * f
        h, w = _within(height, width, rounded, f, (self.min_pixels, self.max_pixels))
        return _one_rectangle(h // f, w // f, self.merge_size, self.window_side)

    @property
    def window_side(self) -> int | None:
        """Return the merged patches a side of a window, rounded down in two steps as Transformers does."""
        return None if self.window_size is None else self.window_size // self.merge_size // self.patch_size


def _within(height: int, width: int, rounded: tuple[int, int], f: int, limits: tuple[float, float]) -> tuple[int, int]:
    """Return height and width as `rounded`, or scaled into the limits where their area leaves them."""
    fewest, most = limits
    h, w = rounded
    if h * w > most:
        beta = math.sqrt((height * width) / most)
        h, w = max(f, math.floor(height / beta / f) * f), max(f, math.floor(width / beta / f) * f)
    elif h * w < fewest:
        beta = math.sqrt(fewest / (height * width))
        h, w = math.ceil(height * beta / f) * f, math.ceil(width * beta / f) * f
    return h, w


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSize:
    """The size that a content part asks for its own image: `fetch_image` of qwen_vl_utils 0.0.14.

    It resizes before the processor does: to the stated sides, else into the stated limits, by default 4 to 16,384
    tokens. A side never falls below f = p m (there it may fall to 0, and the image is refused).
    """

    min_pixels: float | None = None
    max_pixels: float | None = None
    resized_height: float | None = None
    resized_width: float | None = None

    def of(self, width: int, height: int, rule: ImageRule) -> tuple[int, int]:
        """Return width and height of what the processor is given; `ImageError` where they cannot be had."""
        if not isinstance(rule, SmartResize):
            asked = ", ".join(f.name for f in fields(self) if getattr(self, f.name) is not None)
            raise ImageError(f"a content part asks for its own size ({asked}), which only Qwen's images have: drop it")
        f = rule.patch_size * rule.merge_size
        fewest, most = 4.0 * f * f, 16384.0 * f * f
        if self.resized_height is not None and self.resized_width is not None:
            height, width = int(self.resized_height), int(self.resized_width)
        else:
            fewest = fewest if self.min_pixels is None else self.min_pixels
            most = most if self.max_pixels is None else self.max_pixels
        if fewest > most:
            raise ImageError(f"a content part asks for {fewest:g} to {most:g} pixels: give min_pixels <= max_pixels")
        check_size(width, height)
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            raise _too_long(width, height)
        rounded = max(f, round(height / f) * f), max(f, round(width / f) * f)
        h, w = _within(height, width, rounded, f, (fewest, most))
        return w, h


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmSmartResize:
    """GLM-4.1V, GLM-4.5V and GLM-4.6V.

    As `SmartResize`, but a side below f is first scaled up to f (with the other, rounded down), the limits count
    pixels of `temporal_patch_size` copies of the image, and the ratio of 200 is asked after the first scaling.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    name: str = "glm_smart_resize"

    def __post_init__(self) -> None:
        _check_pixel_limits(self.min_pixels, self.max_pixels)

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        f, t = self.patch_size * self.merge_size, self.temporal_patch_size
        H, W = height, width
        if min(H, W) < f:
            scale = max(f / H, f / W)
            H, W = int(H * scale), int(W * scale)
        if max(H, W) / min(H, W) > MAX_ASPECT_RATIO:
            raise _too_long(width, height)
        h, w = round(H / f) * f, round(W / f) * f
        if t * h * w > self.max_pixels:
            beta = math.sqrt((t * H * W) / self.max_pixels)
            h, w = max(f, math.floor(H / beta / f) * f), max(f, math.floor(W / beta / f) * f)
        elif t * h * w < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (t * H * W))
            h, w = math.ceil(H * beta / f) * f, math.ceil(W * beta / f) * f
        return _one_rectangle(h // f, w // f, self.merge_size, None)


def _one_rectangle(rows: int, columns: int, merge_size: int, window: int | None) -> ImageCounts:
    """Return counts of rows x columns merged patches that attend to each other, or within windows of window^2 of them.

    Windows tile the rectangle from its top left corner; those that stick out keep only the patches inside, so with
    a = q window + r rows the sum over windows of (rows in it)^2 is the product of q window^2 + r^2 for either side.
    """
    tokens = rows * columns
    patches = tokens * merge_size * merge_size
    patches_sq = windowed = patches * patches
    if window is not None:
        windowed = windowed_squares(rows, columns, merge_size, window)
    return ImageCounts(patches=patches, tokens=tokens, tiles=1, patches_sq=patches_sq, patches_windowed=windowed)


def windowed_squares(rows: int, columns: int, merge_size: int, window: int) -> int:
    """Sum over windows of patches squared, of rows x columns merged patches; a worked sum is in `_one_rectangle`."""
    return merge_size**4 * _sum_of_squares(rows, window) * _sum_of_squares(columns, window)


def _sum_of_squares(length: int, window: int) -> int:
    whole, rest = divmod(length, window)
    return whole * window * window + rest * rest


def _check_pixel_limits(min_pixels: int, max_pixels: int) -> None:
    if not 0 < min_pixels <= max_pixels <= MAX_PIXELS:
        raise ConfigError(f"{min_pixels} to {max_pixels} pixels: give 0 < min_pixels <= max_pixels <= {MAX_PIXELS}")


def _too_long(width: int, height: int) -> Exception:
    return refuse(
        width, height, f"one side is more than {MAX_ASPECT_RATIO} times the other, which smart_resize forbids"
    )


# -- tiles of one size, each a separate input of the vision tower -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedImage:
    """Every image becomes one square of one size: LLaVA-1.5, Gemma 3 without pan and scan, tiling switched off."""

    rows: int  # of the vision tower, class token included
    tokens: int
    name: str = "fixed"

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        return _equal_tiles(1, self.rows, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedTiles:
    """Mllama: an image is cut into some of its tiles and the others are blank, so every image costs the same.

    The tower attends over all tiles of an image at once. In the text an image is its one placeholder.
    """

    tiles: int
    rows_per_tile: int  # class token and padding included
    name: str = "mllama_tiles"

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        rows = self.tiles * self.rows_per_tile
        pairs = rows * rows
        return ImageCounts(patches=rows, tokens=1, tiles=self.tiles, patches_sq=pairs, patches_windowed=pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicTiling:
    """InternVL: the grid of i x j tiles whose aspect ratio is nearest, plus a thumbnail where there is more than one.

    Grids hold min_tiles <= i j <= max_tiles and are tried in order of i j; on an equal distance |W/H - i/j| the
    larger grid wins while W H > tile^2 i j / 2. The remote code of `internvl_chat` and GotOcr2's `crop_to_patches`,
    which serves Transformers' `internvl`, are this one rule: they list grids of equal i j in different order, which
    can change the grid but never the number of tiles.
    """

    min_tiles: int
    max_tiles: int  # without the thumbnail
    tile_size: int
    thumbnail: bool
    rows_per_tile: int
    tokens_per_tile: int
    name: str = "internvl_dynamic_tiling"
    _ratios: tuple[float, ...] = field(init=False, repr=False, compare=False)  # distinct i / j, ascending
    _areas: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)  # per ratio the i j, ascending
    _counts: tuple[ImageCounts, ...] = field(init=False, repr=False, compare=False)  # by i j

    def __post_init__(self) -> None:
        if not 0 < self.min_tiles <= self.max_tiles <= MAX_TILES:
            raise ConfigError(
                f"no image has {self.min_tiles} to {self.max_tiles} tiles: give 0 < min <= max <= {MAX_TILES}"
            )
        areas: dict[float, list[int]] = defaultdict(list)  # per ratio i j grows with i
        for i in range(1, self.max_tiles + 1):
            for j in range(-(-self.min_tiles // i), self.max_tiles // i + 1):
                areas[i / j].append(i * j)
        object.__setattr__(self, "_ratios", tuple(sorted(areas)))
        object.__setattr__(self, "_areas", tuple(tuple(areas[ratio]) for ratio in sorted(areas)))
        tiles = [n + (self.thumbnail and n > 1) for n in range(self.max_tiles + 1)]
        counts = tuple(_equal_tiles(n, self.rows_per_tile, n * self.tokens_per_tile) for n in tiles)
        object.__setattr__(self, "_counts", counts)

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        ratio = width / height
        right = bisect_left(self._ratios, ratio)
        # only the two neighbours of `ratio` can be nearest: distinct i / j lie further apart than an ulp of any ratio
        if right == 0:
            tied = self._areas[0]
        elif right == len(self._ratios):
            tied = self._areas[-1]
        else:
            below, above = abs(ratio - self._ratios[right - 1]), abs(ratio - self._ratios[right])
            if below == above:
                tied = tuple(sorted(self._areas[right - 1] + self._areas[right]))
            else:
                tied = self._areas[right - 1 if below < above else right]
        best = tied[0]
        for n in tied[1:]:
            if width * height > 0.5 * self.tile_size * self.tile_size * n:
                best = n
        return self._counts[best]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyRes:
    """LLaVA-NeXT, and LLaVA-OneVision's anyres_max_N: padded tiles of a chosen canvas, plus the image as one tile.

    The canvas (pinpoint) is the one that keeps most of the image's pixels, then the least area, then the first
    listed. The tower sees all tiles; the LLM sees the base tile, the canvas without its padding and one newline per
    row of it. With N, a canvas above 1.21 N tiles' worth of features is shrunk to N before the newlines.
    """

    tile_size: int
    pinpoints: tuple[tuple[int, int], ...]  # (height, width) in pixels, multiples of tile_size
    grid_size: int  # patches a side of a tile
    rows_per_tile: int  # grid_size^2 and the class token
    max_feature_tiles: int | None = None  # N; None: LLaVA-NeXT
    lone_images_only: bool = False  # OneVision: an image that is not alone in its sample is not tiled
    name: str = "llava_anyres"
    _canvases: tuple[tuple[int, int, int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        t = self.tile_size
        bad = [[h, w] for h, w in self.pinpoints if min(h, w) < 1 or h % t or w % t or (h // t) * (w // t) > MAX_TILES]
        if bad or not self.pinpoints:
            raise ConfigError(
                f"image_grid_pinpoints {bad[:3] or '[]'}: give multiples of {t} pixels, at most {MAX_TILES} tiles"
            )
        canvases = [
            (h, w, self.grid_size * (h // self.tile_size), self.grid_size * (w // self.tile_size))
            for h, w in sorted(self.pinpoints, key=lambda p: p[0] * p[1])  # stable: first listed first
        ]
        object.__setattr__(self, "_canvases", tuple(canvases))

    def in_sample(self, num_images: int) -> AnyRes | FixedImage:
        """Return the rule in company: in LLaVA-OneVision an image is one tile then, its tokens and one newline."""
        if num_images > 1 and self.lone_images_only:
            return FixedImage(rows=self.rows_per_tile, tokens=self.grid_size**2 + 1, name=self.name)
        return self

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        rows, columns = self._choose_canvas(width, height)
        num_tiles = rows * columns // (self.grid_size * self.grid_size) + 1

        if width / height > columns / rows:
            kept = int(round(height * (columns / width), 7))
            rows -= (rows - kept) // 2 * 2
        else:
            kept = int(round(width * (rows / height), 7))
            columns -= (columns - kept) // 2 * 2
        if self.max_feature_tiles is not None:
            shrink = math.sqrt(rows * columns / (self.max_feature_tiles * self.grid_size**2))
            if shrink > 1.1:
                rows, columns = int(rows // shrink), int(columns // shrink)
        base = self.grid_size * self.grid_size
        return _equal_tiles(num_tiles, self.rows_per_tile, base + rows * columns + rows)

    def _choose_canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of patches of the best canvas.

        Canvases come by ascending area, so the first that keeps the most pixels is the best. What a canvas keeps
        never falls as its scale grows, so a scale not above the best one need not be looked at.
        """
        best, best_scale, most = (0, 0), 0.0, -1
        area = width * height
        for canvas_height, canvas_width, rows, columns in self._canvases:
            x, y = canvas_width / width, canvas_height / height
            scale = x if x < y else y
            if scale > best_scale:
                best_scale = scale
                kept = min(int(width * scale) * int(height * scale), area)
                if kept > most:
                    best, most = (rows, columns), kept
                    if kept == area:
                        break
        return best


@dataclass(frozen=True, slots=True, kw_only=True)
class PanAndScan:
    """Gemma 3 with `do_pan_and_scan`: long images add 2 to max_num_crops crops along their long side.

    Not counted: the sentence of plain text that Gemma3Processor writes around the crops.
    """

    rows_per_crop: int
    tokens_per_crop: int
    min_crop_size: int
    max_num_crops: int
    min_ratio: float
    name: str = "gemma3_pan_and_scan"

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        n = 1 + self._num_crops(max(width, height), min(width, height))
        return _equal_tiles(n, self.rows_per_crop, n * self.tokens_per_crop)

    def _num_crops(self, long: int, short: int) -> int:
        if long / short < self.min_ratio:
            return 0
        n = min(math.floor(long / self.min_crop_size), math.floor(long / short + 0.5))
        n = min(self.max_num_crops, max(2, n))
        return 0 if min(math.ceil(long / n), short) < self.min_crop_size else n


def _equal_tiles(num_tiles: int, rows: int, tokens: int) -> ImageCounts:
    squares = num_tiles * rows * rows
    return ImageCounts(
        patches=num_tiles * rows, tokens=tokens, tiles=num_tiles, patches_sq=squares, patches_windowed=squares
    )


# -- no rule ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsettledRule:
    """The rule of a model whose files do not settle it, until an image has to be counted."""

    reason: str  # the message of the ConfigError that is raised then
    name: str = "unsettled"

    def count(self, width: int, height: int) -> ImageCounts:  # noqa: ARG002 - the protocol's arguments
        raise ConfigError(self.reason)


# -- a user's own limits; a rule in company, and as text --------------------------------------------------------------


def with_limits(rule: ImageRule, *, max_pixels: int | None = None, max_tiles: int | None = None) -> ImageRule:
    """The same rule under a tighter (or looser) limit of the user's.

    `max_pixels` is that of the processor (for GLM: pixels of all temporal copies); `max_tiles` leaves the thumbnail
    or overview out of count. Where the rule's least size exceeds the new limit, the least size gives way.
    """
    for what, value in (("max_pixels", max_pixels), ("max_tiles", max_tiles)):
        if value is not None and type(value) is not int:
            raise ConfigError(f"{what} is {quote(value)}: give a whole number")
    if isinstance(rule, UnsettledRule) and (max_pixels is not None or max_tiles is not None):
        raise ConfigError(rule.reason)
    if max_pixels is not None:
        if not isinstance(rule, SmartResize | GlmSmartResize):
            raise _no_such_limit(rule, "max_pixels", max_pixels, "it belongs to smart_resize rules")
        rule = replace(rule, max_pixels=max_pixels, min_pixels=min(rule.min_pixels, max_pixels))
    if max_tiles is not None:
        if not isinstance(rule, DynamicTiling):
            raise _no_such_limit(rule, "max_tiles", max_tiles, "it belongs to InternVL's tiles")
        rule = replace(rule, max_tiles=max_tiles, min_tiles=min(rule.min_tiles, max_tiles))
    return rule


def rule_in_sample(rule: ImageRule, num_images: int) -> ImageRule:
    """The rule for each image of a sample that holds `num_images`.

    Only LLaVA-OneVision's rule tells samples apart, see `AnyRes.in_sample`.
    """
    if not hasattr(rule, "in_sample"):  # isinstance of a protocol takes 0.1 ms, a third of sizing lengths
        return rule
    own: ImageRule = rule.in_sample(num_images)
    return own


def _no_such_limit(rule: ImageRule, what: str, value: int, whose: str) -> ConfigError:
    return ConfigError(f"cannot set {what} {value} on image rule {rule.name}: {whose}: leave {what} out")


# -- a rule as text ---------------------------------------------------------------------------------------------------


_MOST_SHOWN = 60  # characters of a setting in a message


def write_rule(rule: ImageRule) -> str:
    """Return kind and settings as JSON; equal rules give equal text."""
    settings: dict[str, Any] = (
        {f.name: getattr(rule, f.name) for f in fields(rule) if f.compare} if is_dataclass(rule) else {}
    )
    return json.dumps({"name": rule.name, **settings, "kind": type(rule).__name__}, sort_keys=True, default=repr)


def tell_apart(saved: str, own: str) -> tuple[str, str]:
    """Return what two unequal rules, as `write_rule` wrote them, say otherwise: settings, or the rules' names."""
    try:
        first, second = json.loads(saved), json.loads(own)
    except ValueError:
        return "an earlier version of trimtab", "this one"
    if first["kind"] != second["kind"]:
        return f"the rule {first['name']}", f"the rule {second['name']}"
    unlike = [name for name in first if first[name] != second[name]]
    said = [", ".join(f"{name} {rule[name]}"[:_MOST_SHOWN] for name in unlike) for rule in (first, second)]
    return said[0], said[1]
