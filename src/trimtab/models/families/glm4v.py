"""GLM-4.1V, 4.5V and 4.6V: how images are resized; their layers are asked of Transformers."""

from __future__ import annotations

from trimtab.models.families.family import Family
from trimtab.models.images.native import GlmSmartResize
from trimtab.models.images.reading import Fields, patch_and_merge, pixel_limits, require_resize
from trimtab.specs import ImageRule


def _smart_resize(s: Fields) -> ImageRule:
    require_resize(s)
    patch, merge = patch_and_merge(s)
    low, high = pixel_limits(s)
    temporal = s.agreed("preprocessor_config.temporal_patch_size", "vision_config.temporal_patch_size")
    s.raise_problems()
    return GlmSmartResize(
        patch_size=patch, merge_size=merge, temporal_patch_size=temporal, min_pixels=low, max_pixels=high
    )


FAMILIES = {
    "glm4v": Family(image_rule=_smart_resize),
    "glm46v": Family(image_rule=_smart_resize),
    "glm4v_moe": Family(image_rule=_smart_resize),
}
