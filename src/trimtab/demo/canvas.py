"""What the painters share: colors, the typeface, and text that keeps to its width."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from PIL import ImageFont

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
Color = tuple[int, int, int]
Font: TypeAlias = "ImageFont.FreeTypeFont | ImageFont.ImageFont"

SERIES: tuple[Color, ...] = ((46, 94, 170), (224, 122, 47), (61, 143, 106), (196, 69, 80), (129, 98, 171))
INK, GREY, RULE = (38, 43, 51), (118, 125, 135), (222, 226, 231)


@lru_cache(maxsize=256)
def font_of(size: int) -> Font:
    """Pillow's built-in typeface: no font file of the machine changes a picture."""
    font: Font = ImageFont.load_default(size=size)
    return font


def mix(a: Color, b: Color, share: float) -> Color:
    return (
        round(a[0] + (b[0] - a[0]) * share),
        round(a[1] + (b[1] - a[1]) * share),
        round(a[2] + (b[2] - a[2]) * share),
    )


@lru_cache(maxsize=50_000)
def _width(word: str, size: int) -> float:
    return float(font_of(size).getlength(word))


def clip(text: list[str], size: int, width: float) -> list[str]:
    """As many first words as fit into `width` pixels, set one blank apart; at least one."""
    used = 0.0
    for i, word in enumerate(text):
        used += _width(word, size)
        if used > width:
            return text[: max(1, i)]
        used += _width(" ", size)
    return text
