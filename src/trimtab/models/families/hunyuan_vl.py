"""HunYuan-VL: positions of four axes, and no row of text positions beside them that could restart."""

from __future__ import annotations

from trimtab.models.families.family import Family, PackFormat

FAMILIES = {
    "hunyuan_vl": Family(pack=PackFormat(joined=("pixel_values", "image_grid_thw"), mrope=True, text_row=False)),
}
