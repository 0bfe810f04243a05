"""Images of a request: from a data URL to pixels, judged by their header before anything is decoded."""

from __future__ import annotations

import base64
import io
import re
import warnings

from PIL import Image, ImageOps
from starlette.exceptions import HTTPException

from trimtab.samples.headers import image_size

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+(;[a-z]+=[a-z0-9.-]+)*;base64,", re.IGNORECASE)
_MAX_RATIO = 200  # as Qwen-VL's processors have it; CLIP's would make 336 x 34 million pixels of 1 x 100,000
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow opens no other


def open_picture(url: str, *, max_pixels: int) -> Image.Image:
    """RGB pixels of the first frame, turned as EXIF says: what Transformers' own `load_image` makes of the image.

    Refuses everything that would have to be fetched, and images too large or too thin.
    """
    start = _DATA_URL.match(url)
    if start is None:
        raise HTTPException(
            400,
            "an image must come as a data URL (data:image/png;base64,...): nothing is fetched from the network and no "
            "file is opened",
        )
    try:
        content = base64.b64decode(url[start.end() :], validate=True)
        width, height = image_size(content, max_pixels=max(max_pixels, 1))
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise ValueError(f"{width} x {height} pixels are more than {_MAX_RATIO} times as long as wide")
        with warnings.catch_warnings(), Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            warnings.simplefilter("ignore")  # of palettes with transparency, once for every stranger's image
            if image.size != (width, height):
                raise ValueError(f"{image.width} x {image.height} pixels behind a header of another size")
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # format readers raise whatever struct, zlib or indexing raises
        reason = f"an image cannot be used ({error}): send another, as {', '.join(_FORMATS)}"
        raise HTTPException(400, reason) from None
