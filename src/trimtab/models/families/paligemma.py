"""PaliGemma: tokens of image and question see one another, so that packs need masks of their own."""

from __future__ import annotations

from trimtab.models.families.family import Family, PackFormat

FAMILIES = {"paligemma": Family(pack=PackFormat(joined=("pixel_values",), sees="prefix"))}
