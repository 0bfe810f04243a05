"""Photograph-like landscapes, made of fractal noise."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from trimtab.demo.canvas import Color
from trimtab.demo.recipe import Picture

# sky at the top, sky at the horizon, far ridge, near ridge
_SCENES: dict[str, tuple[Color, Color, Color, Color]] = {
    "dawn": ((52, 66, 118), (247, 182, 140), (142, 118, 150), (38, 32, 58)),
    "forest": ((142, 182, 205), (226, 236, 228), (122, 158, 146), (22, 52, 42)),
    "desert": ((78, 142, 190), (250, 222, 176), (214, 160, 112), (120, 62, 40)),
    "night": ((10, 14, 38), (56, 76, 124), (40, 54, 92), (6, 9, 20)),
    "sea": ((94, 150, 204), (232, 238, 240), (112, 158, 180), (24, 66, 92)),
    "autumn": ((150, 168, 186), (246, 226, 190), (196, 140, 84), (92, 40, 26)),
}
_MAX_SCENE = 1200  # photographs longer than this are painted smaller and enlarged, as a camera's own zoom would


def _noise(rng: np.random.Generator, shape: tuple[int, int], cells: int, octaves: int) -> npt.NDArray[np.float32]:
    """Fractal noise in 0..1: random grids, each twice as fine and half as strong, enlarged smoothly and added.

    Added at half the size and enlarged once: the finest grid is far coarser than a pixel.
    """
    height, width = (shape[0] + 1) // 2, (shape[1] + 1) // 2
    total = np.zeros((height, width), np.float32)
    strength, weight = 1.0, 0.0
    for _ in range(octaves):
        rows = max(2, round(cells * min(1.0, height / width)))
        grid = rng.random((rows, max(2, cells)), dtype=np.float32)
        total += strength * np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC))
        weight += strength
        cells, strength = cells * 2, strength / 2
    shares = np.clip(total / np.float32(weight), 0.0, 1.0)
    return np.asarray(Image.fromarray(shares).resize((shape[1], shape[0]), Image.Resampling.BILINEAR))


def _ridge(rng: np.random.Generator, width: int, cells: int) -> npt.NDArray[np.float32]:
    """A mountain's outline over `width` columns, around 0: midpoints of cells, octave by octave."""
    line = np.zeros(width, np.float32)
    x, strength = np.linspace(0.0, 1.0, width, dtype=np.float32), 1.0
    while cells < width // 2 and strength > 0.02:
        heights = rng.random(cells + 1) - 0.5
        line += (strength * np.interp(x, np.linspace(0.0, 1.0, cells + 1), heights)).astype(np.float32)
        cells, strength = cells * 2, strength * 0.52
    return line


def paint_photo(picture: Picture) -> Image.Image:
    """A landscape: sky, clouds, a sun or moon, ridges that fade into the haze, and film grain."""
    scale = min(1.0, _MAX_SCENE / max(picture.width, picture.height))
    W, H = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    rng = np.random.default_rng(picture.seed)
    zenith, horizon, far, near = (np.array(color, np.float32) for color in _SCENES[picture.style])
    y = np.linspace(0.0, 1.0, H, dtype=np.float32)[:, None]
    blend = np.minimum(y / 0.62, 1.0)
    canvas = np.empty((3, H, W), np.float32)
    clouds = np.clip((_noise(rng, (H, W), 3, 5) - 0.48) * 3.2, 0.0, 1.0) * (1.0 - blend) * 0.9
    disc_x, disc_y, radius = rng.uniform(0.15, 0.85) * W, rng.uniform(0.12, 0.45) * H, 0.045 * math.sqrt(W * H)
    columns = np.arange(W, dtype=np.float32)[None, :]
    rows = np.arange(H, dtype=np.float32)[:, None]
    distance = np.sqrt((columns - disc_x) ** 2 + (rows - disc_y) ** 2)
    glow = np.clip(radius + 1.0 - distance, 0.0, 1.0) + 0.5 * np.exp(-distance / (4.0 * radius))
    for c in range(3):
        sky = zenith[c] + (horizon[c] - zenith[c]) * blend
        sky = sky + clouds * (0.5 * (horizon[c] + 255.0) - sky)
        canvas[c] = sky + np.minimum(glow, 1.0) * (252.0 - sky) * 0.9
    count = int(rng.integers(3, 6))
    texture = _noise(rng, (H, W), 24, 4) - 0.5
    for i in range(count):
        depth = i / (count - 1)
        outline = H * (0.52 + 0.36 * depth - (0.34 - 0.14 * depth) * _ridge(rng, W, 3 + 2 * i))
        top = max(0, int(outline.min()))  # nothing changes above
        below = rows[top:] - outline[None, :]
        mask = np.clip(below, 0.0, 1.0)
        mist = np.clip(below / (0.3 * H), 0.0, 1.0) * (0.3 * (1.0 - depth))
        rock = texture[top:] * (18.0 + 34.0 * depth)
        for c in range(3):
            tone = far[c] + (near[c] - far[c]) * depth
            canvas[c, top:] += mask * (tone + mist * (horizon[c] - tone) + rock - canvas[c, top:])
    canvas += rng.standard_normal((H, W), dtype=np.float32) * 2.2
    pixels = np.clip(canvas, 0.0, 255.0).astype(np.uint8).transpose(1, 2, 0)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return image if scale == 1.0 else image.resize((picture.width, picture.height), Image.Resampling.BICUBIC)
