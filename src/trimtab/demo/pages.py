"""Document pages: letters, two columns, forms and receipts, in grey levels."""

# ruff: noqa: S311 - pictures guard no secret

from __future__ import annotations

from random import Random

from PIL import Image, ImageDraw

from trimtab.demo import words
from trimtab.demo.canvas import Box, clip, font_of
from trimtab.demo.recipe import Picture


def paint_page(picture: Picture) -> Image.Image:
    W, H = picture.width, picture.height
    rng = Random(picture.seed)
    image = Image.new("L", (W, H), rng.choice((255, 252, 247)))
    draw = ImageDraw.Draw(image)
    if picture.style == "receipt":
        _receipt(draw, picture, rng)
    else:
        margin = W * 0.1
        body = max(7, round(W / (62 if picture.style == "columns" else 52)))
        draw.text((margin, margin * 0.9), picture.title, fill=20, font=font_of(body * 2))
        draw.line(
            (margin, margin * 0.9 + body * 3, W - margin, margin * 0.9 + body * 3), fill=120, width=max(1, body // 8)
        )
        top, bottom = margin * 0.9 + body * 4.4, H - margin
        if picture.style == "form":
            top = _form(draw, picture, rng, (margin, top, W - margin, bottom), body)
        columns = 2 if picture.style == "columns" else 1
        gap = body * 2.0
        width = (W - 2 * margin - gap * (columns - 1)) / columns
        for column in range(columns):
            x = margin + column * (width + gap)
            y = _figure(draw, rng, (x, top, x + width, bottom), body) if rng.random() < 0.5 else top
            _paragraphs(draw, rng, (x, y, x + width, bottom), body)
    return image.point([(level + 8) // 17 * 17 for level in range(256)])  # sixteen greys compress well


def _paragraphs(draw: ImageDraw.ImageDraw, rng: Random, box: Box, body: int) -> None:
    left, top, right, bottom = box
    font, y = font_of(body), top
    while y < bottom - body:
        left_over = words.paragraph(rng, rng.randint(45, 120)).split()
        while left_over and y < bottom - body:
            line = clip(left_over, body, right - left)
            draw.text((left, y), " ".join(line), fill=40, font=font)
            left_over = left_over[len(line) :]
            y += body * 1.45
        y += body * 0.9


def _figure(draw: ImageDraw.ImageDraw, rng: Random, box: Box, body: int) -> float:
    """A framed plot with its caption, where there is room for it; returns where the text goes on."""
    left, top, right, bottom = box
    if bottom - top < body * 8:
        return top
    height = min((right - left) * 0.55, (bottom - top) * 0.5)
    draw.rectangle((left, top, right, top + height), fill=236, outline=150, width=max(1, body // 10))
    count = 24
    level, points = 0.4, []
    for i in range(count):
        level = min(0.9, max(0.1, level + rng.uniform(-0.14, 0.16)))
        points.append((left + (right - left) * (i + 0.5) / count, top + height * (1 - level)))
    draw.line(points, fill=60, width=max(1, body // 5), joint="curve")
    caption = clip(f"Figure {rng.randint(1, 9)}. {words.sentence(rng)}".split(), body, right - left)
    draw.text((left, top + height + body * 0.5), " ".join(caption), fill=90, font=font_of(body))
    return top + height + body * 2.8


def _form(draw: ImageDraw.ImageDraw, picture: Picture, rng: Random, box: Box, body: int) -> float:
    """A ruled table of the page's labels and values; returns where the text goes on."""
    left, y, right, _ = box
    font = font_of(body)
    for i, (name, value) in enumerate(zip(picture.labels, picture.values, strict=True)):
        if i % 2 == 0:
            draw.rectangle((left, y, right, y + body * 1.9), fill=238)
        draw.text((left + body * 0.5, y + body * 0.35), name, fill=30, font=font)
        draw.text((left + (right - left) * 0.55, y + body * 0.35), words.label(rng), fill=90, font=font)
        text = str(value)
        draw.text((right - body * 0.5 - draw.textlength(text, font=font), y + body * 0.35), text, fill=30, font=font)
        y += body * 1.9
    draw.line((left, y, right, y), fill=120, width=max(1, body // 8))
    return y + body * 1.6


def _receipt(draw: ImageDraw.ImageDraw, picture: Picture, rng: Random) -> None:
    W, H = picture.width, picture.height
    body = max(8, W // 22)
    font, y = font_of(body), body * 2.0
    large = round(body * 1.5)
    heading = " ".join(clip(picture.title.split(), large, W - 2 * body))
    draw.text((W / 2, y), heading, fill=20, font=font_of(large), anchor="ma")
    y += body * 3.4
    total = 0
    while y < H - body * 6:
        cents = rng.randint(45, 9990)
        total += cents
        price = f"{cents / 100:.2f}"
        draw.text((body, y), f"{rng.randint(1, 9)} x {words.label(rng).lower()}", fill=50, font=font)
        draw.text((W - body - draw.textlength(price, font=font), y), price, fill=50, font=font)
        y += body * 1.6
    draw.line((body, y + body * 0.4, W - body, y + body * 0.4), fill=80, width=max(1, body // 8))
    price = f"{total / 100:.2f}"
    draw.text((body, y + body), "TOTAL", fill=10, font=font)
    draw.text((W - body - draw.textlength(price, font=font), y + body), price, fill=10, font=font)
