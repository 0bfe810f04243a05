"""The demo's image files: charts, pages, photographs, screenshots and icons, plain enough to be drawn in seconds.

A reader of images is tested by sizes, formats and modes, and by text and values that stand where a question asks for
them. All randomness comes from the picture's seed. Pillow works in C without the interpreter lock, so that threads draw
side by side.
"""

# ruff: noqa: S311 - pictures guard no secret

from __future__ import annotations

import io
import textwrap
import zlib
from functools import lru_cache
from random import Random
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trimtab.demo import words
from trimtab.demo.recipe import Picture

Font: TypeAlias = "ImageFont.FreeTypeFont | ImageFont.ImageFont"

PAPER, INK, GREY, *COLORS = range(7)
_PALETTE = (
    (255, 255, 255),
    (38, 43, 51),
    (118, 125, 135),
    (46, 94, 170),
    (224, 122, 47),
    (61, 143, 106),
    (196, 69, 80),
)
_GREYS = tuple((299 * red + 587 * green + 114 * blue) // 1000 for red, green, blue in _PALETTE)  # ITU-R BT.601
_LETTER_WIDTH = 0.55  # of a letter's height, on average


def encode(picture: Picture) -> bytes:
    """The image's file: JPEG for photographs, PNG with grey levels for pages, with a palette for all others."""
    rng, buffer = Random(picture.seed), io.BytesIO()
    if picture.kind == "photo":
        exif = Image.Exif()
        if picture.turned:
            exif[0x0112] = 6  # the Orientation tag, EXIF 2.32 section 4.6.4
        _paint_photo(picture, rng).save(buffer, "JPEG", quality=78, exif=exif)
        return buffer.getvalue()
    size = (picture.width, picture.height)
    if picture.kind == "page":
        image = Image.new("L", size, _GREYS[PAPER])
    else:
        image = Image.new("P", size, PAPER)
        image.putpalette([level for color in _PALETTE for level in color])
    _paint_text(image, picture, rng)
    image.save(buffer, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return buffer.getvalue()


@lru_cache(maxsize=256)
def _font_of(size: int) -> Font:
    """Pillow's built-in typeface: no font file of the machine changes a picture."""
    font: Font = ImageFont.load_default(size=size)
    return font


def _paint_text(image: Image.Image, picture: Picture, rng: Random) -> None:
    """A heading; a row for each label with its value, on a chart with a bar as long; elsewhere text to the bottom."""
    W, H = image.size
    shades = _GREYS if image.mode == "L" else range(len(_PALETTE))
    draw, size, color = ImageDraw.Draw(image), max(8, min(W, H) // 40), shades[rng.choice(COLORS)]
    draw.fontmode = "1"  # letters without soft edges
    draw.rectangle((0, 0, W, 2 * size), fill=color)
    draw.text((size, size // 3), picture.title, fill=shades[PAPER], font=_font_of(size))
    # 1. Rows: a chart's fill the picture, a page's stand close together.
    top, step = 3 * size, 2 * size
    if picture.kind == "chart":
        step = max(1, (H - top) // len(picture.labels))
    for name, value in zip(picture.labels, picture.values, strict=True):
        if picture.kind == "chart":
            length = (W - 16 * size) * value // max(picture.values)
            draw.rectangle((10 * size, top, 10 * size + max(1, length), top + step // 2), fill=color)
        draw.text((size, top), f"{name}: {value}", fill=shades[INK], font=_font_of(size))
        top += step
    if picture.kind == "chart":
        return
    # 2. Text: lines are drawn once and copied below.
    lines = textwrap.wrap(words.paragraph(rng, 50), max(8, int((W - 2 * size) / (size * _LETTER_WIDTH))))
    for number, line in enumerate(lines):
        draw.text((size, top + step * number), line, fill=shades[GREY], font=_font_of(size))
    height = step * len(lines)
    for y in range(top + height, H, height):
        image.paste(image.crop((0, top, W, top + min(height, H - y))), (0, y))


def _paint_photo(picture: Picture, rng: Random) -> Image.Image:
    """Clouds in one tint: a coarse random grid, enlarged smoothly, the last four times by whole pixels for speed."""
    drawn = np.random.default_rng(rng.getrandbits(31))
    grid = drawn.integers(60, 256, (12, 16, 1)) * drawn.uniform(0.5, 1.0, 3)
    small = (max(16, picture.width // 4), max(12, picture.height // 4))
    clouds = Image.fromarray(grid.astype(np.uint8)).resize(small, Image.Resampling.BICUBIC)
    return clouds.resize((picture.width, picture.height), Image.Resampling.NEAREST)
