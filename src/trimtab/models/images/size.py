"""What every rule asks of an image's size before it counts."""

from __future__ import annotations

from trimtab.errors import ImageError

MAX_PIXELS = 2**30  # of one image after its processor
MAX_TILES = 4096  # of one image; no published model goes beyond 40
MAX_SIDE = 2**31 - 1  # the largest side a PNG header can name; no image format of ours goes beyond


def check_size(width: int, height: int) -> None:
    """Refuse what no image can be; `bool` and NumPy scalars are not plain integers and are refused as well."""
    if type(width) is int and type(height) is int and 0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE:
        return
    raise ImageError(
        f"cannot count an image of {width!r} x {height!r} pixels: both sides are whole numbers "
        f"from 1 to {MAX_SIDE}: check the file's header, or leave the sample out"
    )


def refuse(width: int, height: int, what_is_true: str) -> ImageError:
    """The error for a size that the official processor raises on as well."""
    return ImageError(
        f"cannot count an image of {width} x {height} pixels: {what_is_true}: crop the image, or leave the sample out"
    )
