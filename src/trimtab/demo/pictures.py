"""Image files that look like what vision-language data is made of: charts, pages, photographs, screenshots, icons.

Every painter takes a `Picture` and returns a Pillow image of exactly its size; all randomness comes from its seed.
Pillow and numpy do the work in C and let go of the interpreter lock, so that threads draw side by side.
"""

from __future__ import annotations

import io
from collections.abc import Callable

from PIL import Image

from trimtab.demo.charts import paint_chart
from trimtab.demo.pages import paint_page
from trimtab.demo.photos import paint_photo
from trimtab.demo.recipe import Kind, Picture
from trimtab.demo.screens import paint_icon, paint_screenshot

_PAINTERS: dict[Kind, Callable[[Picture], Image.Image]] = {
    "chart": paint_chart,
    "page": paint_page,
    "photo": paint_photo,
    "screenshot": paint_screenshot,
    "icon": paint_icon,
}


def encode(picture: Picture) -> bytes:
    """The image's file: JPEG for photographs, else PNG with a palette or grey levels."""
    image = _PAINTERS[picture.kind](picture)
    assert image.size == (picture.width, picture.height), (picture.file, image.size)
    buffer = io.BytesIO()
    if picture.file.endswith(".jpg"):
        exif = Image.Exif()
        if picture.turned:
            exif[0x0112] = 6  # the Orientation tag, EXIF 2.32 section 4.6.4
        image.save(buffer, "JPEG", quality=78, exif=exif)
    else:
        if image.mode == "RGB":
            image = image.quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
