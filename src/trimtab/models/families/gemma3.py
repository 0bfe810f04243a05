"""Gemma 3: images of one size, cut only where pan and scan is asked for; its layers are asked of Transformers."""

from __future__ import annotations

from trimtab.models.families.family import Family, PackFormat
from trimtab.models.images.settings import Settings
from trimtab.models.images.tiles import FixedImage, PanAndScan
from trimtab.models.quote import quote
from trimtab.specs import ImageMarkup, ImageRule


def _crops(s: Settings) -> ImageRule:
    """Gemma 3, with pan and scan only where `do_pan_and_scan` is true.

    It is a switch of each call (published files hold null, Gemma3Processor passes false), so absent means off; a
    file that sets it asks for the crops, and must then give their three figures.
    """
    s.require_resize()
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
