"""Rules that keep an image's own resolution: one rectangle of patches, sides rounded to a factor.

Symbols: p patch size in pixels, m patches merged per side into one LLM token, f = p m the factor both sides end on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.errors import ConfigError
from trimtab.models.images.size import MAX_PIXELS, check_size, refuse
from trimtab.specs import ImageCounts

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
            raise ConfigError(
                f"window_size {self.window_size} holds not one merged patch of "
                f"{self.patch_size * self.merge_size} pixels: correct vision_config in config.json"
            )

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            raise _too_long(width, height)
        f = self.patch_size * self.merge_size
        h, w = round(height / f) * f, round(width / f) * f
        if h * w > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            h = max(f, math.floor(height / beta / f) * f)
            w = max(f, math.floor(width / beta / f) * f)
        elif h * w < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            h, w = math.ceil(height * beta / f) * f, math.ceil(width * beta / f) * f
        return _one_rectangle(h // f, w // f, self.merge_size, self.window_side)

    @property
    def window_side(self) -> int | None:
        """Merged patches a side of a window, rounded down in two steps as Transformers does."""
        return None if self.window_size is None else self.window_size // self.merge_size // self.patch_size


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
    """Counts of rows x columns merged patches that attend to each other, or within windows of window^2 of them.

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
        raise ConfigError(
            f"cannot keep an image between {min_pixels} and {max_pixels} pixels: the first must be positive and not "
            f"above the second, which is at most {MAX_PIXELS}: change min_pixels or max_pixels"
        )


def _too_long(width: int, height: int) -> Exception:
    return refuse(
        width, height, f"one side is more than {MAX_ASPECT_RATIO} times the other, which smart_resize forbids"
    )
