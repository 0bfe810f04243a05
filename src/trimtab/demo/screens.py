"""Screenshots of an editor, a dashboard and a chat, and application icons."""

# ruff: noqa: S311 - pictures guard no secret

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from trimtab.demo import words
from trimtab.demo.canvas import SERIES, Box, Color, clip, font_of, mix
from trimtab.demo.recipe import Picture


@dataclass(frozen=True, slots=True)
class _Theme:
    back: Color
    panel: Color
    raised: Color
    ink: Color
    faint: Color
    accent: Color


_LIGHT = _Theme((226, 230, 238), (255, 255, 255), (240, 243, 248), (36, 41, 47), (124, 133, 144), (46, 110, 214))
_DARK = _Theme((24, 26, 32), (32, 35, 43), (44, 48, 58), (220, 224, 232), (134, 142, 156), (98, 166, 244))


def paint_screenshot(picture: Picture) -> Image.Image:
    W, H = picture.width, picture.height
    rng = Random(picture.seed)
    theme = _DARK if picture.style == "editor" or rng.random() < 0.25 else _LIGHT
    image = Image.new("RGB", (W, H), theme.back)
    draw = ImageDraw.Draw(image)
    unit = max(9, min(W, H) // (34 if W >= H else 24))
    bar = unit * 2.4
    draw.rectangle((0, 0, W, bar), fill=theme.raised)
    for i, color in enumerate(((236, 106, 94), (244, 191, 79), (97, 197, 84))):
        x = unit * (1.2 + 1.5 * i)
        draw.ellipse((x, bar / 2 - unit * 0.4, x + unit * 0.8, bar / 2 + unit * 0.4), fill=color)
    draw.text((unit * 6.5, bar / 2 - unit * 0.6), picture.title, fill=theme.ink, font=font_of(unit))
    paint = {"editor": _editor, "dashboard": _dashboard, "chat": _chat}[picture.style]
    paint(draw, rng, theme, (0.0, bar, float(W), float(H)), unit)
    return image


def _sidebar(draw: ImageDraw.ImageDraw, rng: Random, theme: _Theme, box: Box, unit: int) -> None:
    left, top, right, bottom = box
    draw.rectangle(box, fill=theme.raised)
    y, chosen = top + unit, rng.randint(0, 4)
    for i in range(40):
        if y > bottom - unit * 2:
            break
        if i == chosen:
            draw.rounded_rectangle(
                (left + unit * 0.5, y - unit * 0.4, right - unit * 0.5, y + unit * 1.4), unit // 2, fill=theme.accent
            )
        ink = theme.panel if i == chosen else theme.faint
        draw.rounded_rectangle((left + unit, y, left + unit * 1.9, y + unit * 0.9), unit // 4, fill=ink)
        draw.text((left + unit * 2.6, y - unit * 0.05), words.label(rng), fill=ink, font=font_of(unit))
        y += unit * 2.1


def _editor(draw: ImageDraw.ImageDraw, rng: Random, theme: _Theme, box: Box, unit: int) -> None:
    left, top, right, bottom = box
    if right - left > bottom - top:
        _sidebar(draw, rng, theme, (left, top, left + unit * 11, bottom), unit)
        left += unit * 11
    colors = ((198, 120, 221), (97, 175, 239), (152, 195, 121), (229, 192, 123), theme.ink)
    font, y, line, indent = font_of(unit), top + unit * 0.8, rng.randint(1, 400), 0
    while y < bottom - unit:
        draw.text((left + unit * 0.8, y), f"{line}", fill=theme.faint, font=font)
        x = left + unit * (4.2 + 1.8 * indent)
        if rng.random() > 0.12:
            for _ in range(rng.randint(1, 7)):
                token = words.label(rng).lower() + rng.choice(("", "", "(", " =", ",", ":", ".", ")"))
                if x + draw.textlength(token, font=font) > right - unit:
                    break
                draw.text((x, y), token, fill=rng.choice(colors), font=font)
                x += draw.textlength(token, font=font) + unit * 0.5
        indent = min(6, max(0, indent + rng.choice((-1, 0, 0, 0, 1))))
        line, y = line + 1, y + unit * 1.55


def _dashboard(draw: ImageDraw.ImageDraw, rng: Random, theme: _Theme, box: Box, unit: int) -> None:
    left, top, right, bottom = box
    if right - left > bottom - top:
        _sidebar(draw, rng, theme, (left, top, left + unit * 10, bottom), unit)
        left += unit * 10
    gap = unit * 1.2
    columns = max(1, round((right - left) / (unit * 15)))
    rows = max(1, round((bottom - top) / (unit * 11)))
    width, height = (right - left - gap) / columns - gap, (bottom - top - gap) / rows - gap
    for index in range(columns * rows):
        x = left + gap + (width + gap) * (index % columns)
        y = top + gap + (height + gap) * (index // columns)
        draw.rounded_rectangle((x, y, x + width, y + height), unit // 2, fill=theme.panel)
        draw.text((x + unit, y + unit * 0.8), words.label(rng), fill=theme.faint, font=font_of(unit))
        draw.text(
            (x + unit, y + unit * 2.2), f"{rng.randint(10, 9999):,}", fill=theme.ink, font=font_of(round(unit * 1.7))
        )
        count = max(4, int(width / (unit * 1.1)))
        color = SERIES[index % len(SERIES)]
        for i in range(count):
            bar = max(unit * 0.5, height - unit * 5.6) * rng.uniform(0.15, 1.0)
            at = x + unit + (width - 2 * unit) * i / count
            draw.rectangle(
                (at, y + height - unit - bar, at + (width - 2 * unit) / count * 0.66, y + height - unit), fill=color
            )


def _chat(draw: ImageDraw.ImageDraw, rng: Random, theme: _Theme, box: Box, unit: int) -> None:
    left, top, right, bottom = box
    font, y, mine = font_of(unit), top + unit, False
    limit = min(right - left - unit * 5, unit * 30)
    while y < bottom - unit * 4:
        lines: list[str] = []
        left_over = words.paragraph(rng, rng.randint(4, 40)).split()
        while left_over and len(lines) < 5:
            kept = clip(left_over, unit, limit - unit * 2)
            lines.append(" ".join(kept))
            left_over = left_over[len(kept) :]
        width = max(draw.textlength(line, font=font) for line in lines) + unit * 2
        height = unit * (1.45 * len(lines) + 1.1)
        x = right - unit * 1.2 - width if mine else left + unit * 1.2
        draw.rounded_rectangle((x, y, x + width, y + height), unit, fill=theme.accent if mine else theme.panel)
        for i, line in enumerate(lines):
            draw.text(
                (x + unit, y + unit * (0.6 + 1.45 * i)), line, fill=(255, 255, 255) if mine else theme.ink, font=font
            )
        y, mine = y + height + unit * 0.9, rng.random() < 0.5


def paint_icon(picture: Picture) -> Image.Image:
    """A rounded tile with a letter, painted four times as large and reduced."""
    W, H = picture.width * 4, picture.height * 4
    rng = Random(picture.seed)
    image = Image.new("RGB", (W, H), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    color = rng.choice(SERIES)
    draw.rounded_rectangle((W * 0.04, H * 0.04, W * 0.96, H * 0.96), min(W, H) * 0.22, fill=color)
    draw.ellipse((W * 0.5, -H * 0.3, W * 1.3, H * 0.5), fill=mix(color, (255, 255, 255), 0.18))
    draw.text((W / 2, H / 2), picture.title[0], fill=(255, 255, 255), font=font_of(round(min(W, H) * 0.6)), anchor="mm")
    return image.resize((picture.width, picture.height), Image.Resampling.LANCZOS)
