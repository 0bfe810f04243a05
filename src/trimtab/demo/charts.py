"""Charts: upright bars, lines of two series, and bars that lie."""

# ruff: noqa: S311 - pictures guard no secret

from __future__ import annotations

import math
from random import Random

from PIL import Image, ImageDraw

from trimtab.demo.canvas import GREY, INK, RULE, SERIES, Box, Color, font_of, mix
from trimtab.demo.recipe import Picture


def paint_chart(picture: Picture) -> Image.Image:
    W, H = picture.width, picture.height
    rng = Random(picture.seed)
    image = Image.new("RGB", (W, H), rng.choice(((255, 255, 255), (250, 250, 247), (246, 248, 251))))
    draw = ImageDraw.Draw(image)
    unit = max(9, min(W, H) // 24)
    font, large = font_of(unit), font_of(round(unit * 1.45))
    left, top, right, bottom = unit * 4.2, unit * 3.4, W - unit * 1.5, H - unit * 2.8
    draw.text((unit, unit * 0.7), picture.title, fill=INK, font=large)
    highest = max(picture.values)
    ceiling = math.ceil(highest / 10 ** (len(str(highest)) - 1)) * 10 ** (len(str(highest)) - 1)
    colors = SERIES[picture.seed % 5 :] + SERIES[: picture.seed % 5]
    if picture.style == "rows":
        _rows(draw, picture, colors[0], (left + unit * 3, top, right, bottom), ceiling, unit)
        return image
    for tick in range(5):
        y = bottom - (bottom - top) * tick / 4
        draw.line((left, y, right, y), fill=RULE, width=max(1, unit // 12))
        text = f"{ceiling * tick / 4:g}"
        draw.text((left - unit * 0.6 - draw.textlength(text, font=font), y - unit * 0.6), text, fill=GREY, font=font)
    draw.line((left, bottom, right, bottom), fill=GREY, width=max(1, unit // 8))
    step = (right - left) / len(picture.values)
    every = max(1, math.ceil(max(draw.textlength(x, font=font) for x in picture.labels) * 1.2 / step))
    points = []
    for i, (name, value) in enumerate(zip(picture.labels, picture.values, strict=True)):
        x, y = left + step * (i + 0.5), bottom - (bottom - top) * value / ceiling
        points.append((x, y))
        if picture.style == "bars":
            draw.rectangle((x - step * 0.34, y, x + step * 0.34, bottom - 1), fill=colors[0])
        if i % every == 0:
            half = draw.textlength(name, font=font) / 2
            draw.text((x - half, bottom + unit * 0.5), name, fill=GREY, font=font)
    if picture.style == "lines":
        second = [(x, bottom - (bottom - y) * rng.uniform(0.35, 0.8)) for x, y in points]
        for series, color in ((second, colors[1]), (points, colors[0])):
            draw.line(series, fill=color, width=max(2, unit // 5), joint="curve")
            r = max(2.0, unit / 4)
            for x, y in series:
                draw.ellipse((x - r, y - r, x + r, y + r), fill=color)
    return image


def _rows(
    draw: ImageDraw.ImageDraw,
    picture: Picture,
    color: Color,
    box: Box,
    ceiling: float,
    unit: int,
) -> None:
    """Bars that lie, each with its label before and its value behind."""
    left, top, right, bottom = box
    step = (bottom - top) / len(picture.values)
    for i, (name, value) in enumerate(zip(picture.labels, picture.values, strict=True)):
        y, end = top + step * i, left + (right - left - unit * 3) * value / ceiling
        font = font_of(max(8, min(unit, round(step * 0.7))))
        draw.rectangle((left, y + step * 0.15, end, y + step * 0.85), fill=mix(color, (255, 255, 255), 0.06 * (i % 4)))
        draw.text((unit * 0.8, y + step * 0.2), name, fill=INK, font=font)
        draw.text((end + unit * 0.4, y + step * 0.2), str(value), fill=GREY, font=font)
