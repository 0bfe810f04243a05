"""The demo's image files: charts, pages, photographs, screenshots and icons, plain enough to be drawn in seconds.

A reader of images is tested by sizes, formats and modes, and by text and values that stand where a question asks for
them. All randomness comes from the picture's seed. Pillow works in C without the interpreter lock, so that threads draw
side by side.
"""

# ruff: noqa: S311 - pictures guard no secret

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trimtab.demo import words
from trimtab.demo.recipe import Kind, Picture

Font: TypeAlias = "ImageFont.FreeTypeFont | ImageFont.ImageFont"
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

PAPER, INK, GREY, PANEL, BLUE, ORANGE, GREEN, RED, NIGHT = range(9)
"""Entries of the palette that everything but pages and photographs is drawn with."""
_PALETTE = (
    *((255, 255, 255), (38, 43, 51), (118, 125, 135), (226, 230, 238)),
    *((46, 94, 170), (224, 122, 47), (61, 143, 106), (196, 69, 80), (24, 26, 32)),
)
_LETTER_WIDTH = 0.55  # of a letter's height, on average


def encode(picture: Picture) -> bytes:
    """The image's file: JPEG for photographs, else PNG with a palette or, of a page, grey levels."""
    image = _PAINTERS[picture.kind](picture, Random(picture.seed))
    buffer = io.BytesIO()
    if picture.file.endswith(".jpg"):
        exif = Image.Exif()
        if picture.turned:
            exif[0x0112] = 6  # the Orientation tag, EXIF 2.32 section 4.6.4
        image.save(buffer, "JPEG", quality=78, exif=exif)
    else:
        image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


@lru_cache(maxsize=256)
def _font_of(size: int) -> Font:
    """Pillow's built-in typeface: no font file of the machine changes a picture."""
    font: Font = ImageFont.load_default(size=size)
    return font


def _colored(picture: Picture, background: int) -> Image.Image:
    image = Image.new("P", (picture.width, picture.height), background)
    image.putpalette([level for color in _PALETTE for level in color])
    return image


def _write_text(image: Image.Image, rng: Random, box: Box, size: int, ink: int) -> None:
    """Lines of sentences from the top of the box to its bottom; what is drawn once is copied below."""
    left, top, right, bottom = map(int, box)
    draw, step = ImageDraw.Draw(image), int(1.5 * size)
    lines = textwrap.wrap(words.paragraph(rng, 120), max(8, int((right - left) / (size * _LETTER_WIDTH))))
    for number, line in enumerate(lines[: max(1, (bottom - top) // step)]):
        draw.text((left, top + step * number), line, fill=ink, font=_font_of(size))
    height = step * len(lines)
    for y in range(top + height, bottom, height):
        image.paste(image.crop((left, top, right, top + min(height, bottom - y))), (left, y))


def _paint_chart(picture: Picture, rng: Random) -> Image.Image:
    """A label, a bar or a line's point, and a value for each entry; `rows` from top to bottom, else left to right."""
    W, H = picture.width, picture.height
    image = _colored(picture, PAPER)
    draw = ImageDraw.Draw(image)
    size = max(8, min(W, H) // 26)
    font, color = _font_of(size), rng.choice((BLUE, ORANGE, GREEN, RED))
    draw.text((size, size // 2), picture.title, fill=INK, font=font)
    count, highest = len(picture.values), max(picture.values)
    left, top, right, bottom = 2.0 * size, 3.0 * size, W - 2.0 * size, H - 3.0 * size
    points = []
    for i, (name, value) in enumerate(zip(picture.labels, picture.values, strict=True)):
        if picture.style == "rows":
            y, step = top + (bottom - top) * i / count, (bottom - top) / count
            draw.rectangle((6 * size, y, 6 * size + (right - 9 * size) * value / highest, y + 0.7 * step), fill=color)
            draw.text((size // 2, y), name, fill=INK, font=font)
            draw.text((right - 2 * size, y), str(value), fill=GREY, font=font)
            continue
        x, step = left + (right - left) * i / count, (right - left) / count
        y = bottom - (bottom - top) * value / highest
        points.append((x + 0.35 * step, y))
        if picture.style == "bars":
            draw.rectangle((x, y, x + 0.7 * step, bottom), fill=color)
        draw.text((x, bottom + 0.5 * size), name, fill=INK, font=font)
        draw.text((x, y - 1.2 * size), str(value), fill=GREY, font=font)
    draw.text((size, H - 1.4 * size), f"Source: {words.title(rng)}", fill=GREY, font=font)
    if picture.style == "lines":
        draw.line(points, fill=color, width=max(2, size // 5))
    return image


def _paint_page(picture: Picture, rng: Random) -> Image.Image:
    """A title, the entries of a form, and one or two columns of text, in grey levels."""
    W, H = picture.width, picture.height
    image = Image.new("L", (W, H), 252)
    draw = ImageDraw.Draw(image)
    margin, size = W // 10, max(7, W // 52)
    draw.text((margin, margin), picture.title, fill=20, font=_font_of(2 * size))
    top = margin + 4.0 * size
    for name, value in zip(picture.labels, picture.values, strict=True):
        draw.text((margin, top), f"{name}: {value}", fill=40, font=_font_of(size))
        top += 1.9 * size
    columns = 2 if picture.style == "columns" else 1
    width = (W - 2 * margin) / columns
    for column in range(columns):
        left = margin + column * width
        _write_text(image, rng, (left, top, left + width - size, H - margin), size, 40)
    return image


def _paint_photo(picture: Picture, rng: Random) -> Image.Image:
    """Clouds in one tint (a coarse random grid, enlarged smoothly) behind ridges, the nearest the darkest."""
    W, H = picture.width, picture.height
    drawn = np.random.default_rng(rng.getrandbits(31))
    tint = drawn.uniform(0.5, 1.0, 3)
    grid = drawn.integers(120, 256, (12, 16, 1)) * tint
    image = Image.fromarray(grid.astype(np.uint8)).resize((W, H), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for number in range(3):
        outline = [(W * k / 12, H * (0.5 + 0.15 * number + rng.uniform(0, 0.15))) for k in range(13)]
        red, green, blue = (int(level * (110 - 45 * number)) for level in tint)
        draw.polygon([(0, H), *outline, (W, H)], fill=(red, green, blue))
    return image


def _paint_screenshot(picture: Picture, rng: Random) -> Image.Image:
    """A bar with a title, and panels of text: one that fills an editor's screen, a grid of them elsewhere."""
    W, H = picture.width, picture.height
    dark = picture.style == "editor"
    image = _colored(picture, NIGHT if dark else PANEL)
    draw = ImageDraw.Draw(image)
    size = max(9, min(W, H) // 34)
    draw.rectangle((0, 0, W, 2 * size), fill=GREY)
    draw.text((size, size // 3), picture.title, fill=PAPER, font=_font_of(size))
    columns, rows = (1, 1) if dark else (2, 3) if picture.style == "dashboard" else (1, 4)
    for i in range(columns * rows):
        width, height = W / columns, (H - 2 * size) / rows
        x, y = width * (i % columns), 2 * size + height * (i // columns)
        panel = (x + size, y + size, x + width - size, y + height - size)
        if not dark and panel[0] < panel[2] and panel[1] < panel[3]:
            draw.rectangle(panel, fill=PAPER)
        _write_text(image, rng, (x + 2 * size, y + 1.5 * size, *panel[2:]), size, PAPER if dark else INK)
    return image


def _paint_icon(picture: Picture, rng: Random) -> Image.Image:
    """A tile with a letter."""
    W, H = picture.width, picture.height
    image = _colored(picture, PAPER)
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((1, 1, W - 2, H - 2), min(W, H) // 5, fill=rng.choice((BLUE, ORANGE, GREEN, RED)))
    size = max(6, min(W, H) // 2)
    draw.text((W / 2, H / 2), picture.title[0], fill=PAPER, font=_font_of(size), anchor="mm")
    return image


_PAINTERS: dict[Kind, Callable[[Picture, Random], Image.Image]] = {
    "chart": _paint_chart,
    "page": _paint_page,
    "photo": _paint_photo,
    "screenshot": _paint_screenshot,
    "icon": _paint_icon,
}
