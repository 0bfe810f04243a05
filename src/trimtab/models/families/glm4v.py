"""GLM-4.1V, 4.5V and 4.6V: how images are resized; their layers are asked of Transformers."""

from __future__ import annotations

from trimtab.models.families.family import Family
from trimtab.models.images.native import GlmSmartResize
from trimtab.models.images.settings import Settings
from trimtab.specs import ImageRule


def _smart_resize(s: Settings) -> ImageRule:
    s.require_resize()
    patch, merge = s.patch_and_merge()
    low, high = s.pixel_limits()
    temporal = s.agreed_int(("file", "temporal_patch_size"), ("vision", "temporal_patch_size"))
    s.check()
    return GlmSmartResize(
        patch_size=patch, merge_size=merge, temporal_patch_size=temporal, min_pixels=low, max_pixels=high
    )


FAMILIES = {
    "glm4v": Family(image_rule=_smart_resize),
    "glm46v": Family(image_rule=_smart_resize),
    "glm4v_moe": Family(image_rule=_smart_resize),
}
