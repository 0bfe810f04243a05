"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: how images are resized, and the windows of 2.5."""

from __future__ import annotations

from functools import partial

from trimtab.models.families.family import Family
from trimtab.models.images.native import SmartResize
from trimtab.models.images.reading import Fields, patch_and_merge, pixel_limits, require_resize
from trimtab.specs import ImageMarkup, ImageRule


def _smart_resize(s: Fields, *, windows: bool = False) -> ImageRule:
    require_resize(s)
    patch, merge = patch_and_merge(s)
    low, high = pixel_limits(s)
    window = s.size("vision_config.window_size") if windows else None
    s.raise_problems()
    return SmartResize(patch_size=patch, merge_size=merge, min_pixels=low, max_pixels=high, window_size=window)


_MARKUP = ImageMarkup(
    placeholder="<|image_pad|>", soft="<|image_pad|>", written="<|vision_start|><|image_pad|><|vision_end|>"
)
"""What Transformers' processors write, and (`written`) Qwen's own trainer."""

_windowed = partial(_smart_resize, windows=True)

FAMILIES = {
    "qwen2_vl": Family(image_rule=_smart_resize, markup=_MARKUP),
    "qwen2_5_vl": Family(image_rule=_windowed, markup=_MARKUP),
    "qwen3_vl": Family(image_rule=_smart_resize, markup=_MARKUP),
    "qwen3_vl_moe": Family(image_rule=_smart_resize, markup=_MARKUP),
}
