"""Images of a request: from a data URL to pixels, judged by their header before anything is decoded."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.errors import ImageError
from trimtab.samples.headers import image_size
from trimtab.serve.problems import RequestError

if TYPE_CHECKING:
    from PIL import Image

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+(;[a-z]+=[a-z0-9.-]+)*;base64,", re.IGNORECASE)
_MAX_RATIO = 200  # as Qwen-VL's processors have it; CLIP's would make 336 x 34 million pixels of 1 x 100,000
_ANY = 2**62  # pixels; what a request may hold is judged here
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # those whose size trimtab reads itself; Pillow opens no other


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An encoded image whose header has been read; the size is the one before EXIF turns it."""

    content: bytes
    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


def read_data_url(url: str, *, param: str, max_pixels: int) -> Picture:
    """The image of a base64 data URL; refuses everything that would have to be fetched, and images too large."""
    start = _DATA_URL.match(url)
    if start is None:
        raise RequestError(
            400,
            "an image must come as a data URL (data:image/png;base64,...): nothing is fetched from the network and no "
            "file is opened",
            param=param,
            code="invalid_image_url",
        )
    try:
        content = base64.b64decode(url[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(400, f"the image is not base64 ({error}): encode it again", param=param) from None
    if not _known_format(content):
        raise RequestError(400, f"the image is none of {', '.join(_FORMATS)}: convert it to one of them", param=param)
    try:
        width, height = image_size(content, max_pixels=_ANY)
    except ImageError as error:
        raise RequestError(400, f"the image cannot be used: {error}", param=param) from None
    if width * height > max_pixels:
        raise RequestError(
            400,
            f"an image of {width} x {height} pixels is more than the {max_pixels:,} pixels left to this request: "
            "shrink it",
            param=param,
        )
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise RequestError(
            400,
            f"an image of {width} x {height} pixels is more than {_MAX_RATIO} times as long as wide: processors that "
            "enlarge its short side would make it huge; cut it up",
            param=param,
        )
    return Picture(content=content, width=width, height=height)


def decode_picture(picture: Picture) -> Image.Image:
    """RGB pixels of the first frame, turned as EXIF says: what Transformers' own `load_image` makes of the image."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(picture.content), formats=_FORMATS) as image:
            warnings.simplefilter("ignore")  # of palettes with transparency, once for every stranger's image
            if image.size != (picture.width, picture.height):
                raise ValueError(f"{image.width} x {image.height} pixels behind a header of another size")
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # its format readers raise whatever struct, zlib or indexing raises
        raise RequestError(400, f"an image cannot be decoded ({error}): send another") from None


def _known_format(content: bytes) -> bool:
    if content.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"GIF87a", b"GIF89a", b"BM")):
        return True
    return content.startswith(b"RIFF") and content[8:12] == b"WEBP"
