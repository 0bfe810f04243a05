"""Gemma 3: images of one size, cut only where pan and scan is asked for; its layers are asked of Transformers."""

from __future__ import annotations

from trimtab.models.families.family import Family, PackFormat
from trimtab.models.images.reading import Fields, read_tile, require_resize
from trimtab.models.images.size import MAX_TILES
from trimtab.models.images.tiles import FixedImage, PanAndScan
from trimtab.specs import ImageMarkup, ImageRule


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


_MARKUP = ImageMarkup(
    placeholder="<start_of_image>",
    soft="<image_soft_token>",
    before="\n\n<start_of_image>",
    after="<end_of_image>\n\n",
    crops=("Here is the original image ", " and here are some crops to help you see better "),
)
_PACK = PackFormat(joined=("pixel_values",), sees="images", counts="tiles", smallest="tile")

FAMILIES = {
    "gemma3": Family(image_rule=_crops, markup=_MARKUP, pack=_PACK),
    "shieldgemma2": Family(pack=_PACK),
}
