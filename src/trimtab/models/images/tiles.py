"""Rules that cut an image into tiles of one size, each a separate input of the vision tower."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

from trimtab.errors import ConfigError
from trimtab.models.images.size import MAX_TILES, check_size
from trimtab.specs import ImageCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedImage:
    """Every image becomes one square of one size: LLaVA-1.5, Gemma 3 without pan and scan, tiling switched off."""

    rows: int  # of the vision tower, class token included
    tokens: int
    name: str = "fixed"

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        return _equal_tiles(1, self.rows, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedTiles:
    """Mllama: an image is cut into some of its tiles and the others are blank, so every image costs the same.

    The tower attends over all tiles of an image at once. In the text an image is its one placeholder.
    """

    tiles: int
    rows_per_tile: int  # class token and padding included
    name: str = "mllama_tiles"

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        rows = self.tiles * self.rows_per_tile
        pairs = rows * rows
        return ImageCounts(patches=rows, tokens=1, tiles=self.tiles, patches_sq=pairs, patches_windowed=pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicTiling:
    """InternVL: the grid of i x j tiles whose aspect ratio is nearest, plus a thumbnail where there is more than one.

    Grids hold min_tiles <= i j <= max_tiles and are tried in order of i j; on an equal distance |W/H - i/j| the
    larger grid wins while W H > tile^2 i j / 2. The remote code of `internvl_chat` and GotOcr2's `crop_to_patches`,
    which serves Transformers' `internvl`, are this one rule: they list grids of equal i j in different order, which
    can change the grid but never the number of tiles.
    """

    min_tiles: int
    max_tiles: int  # without the thumbnail
    tile_size: int
    thumbnail: bool
    rows_per_tile: int
    tokens_per_tile: int
    name: str = "internvl_dynamic_tiling"
    _ratios: tuple[float, ...] = field(init=False, repr=False, compare=False)  # distinct i / j, ascending
    _areas: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)  # per ratio the i j, ascending
    _counts: tuple[ImageCounts, ...] = field(init=False, repr=False, compare=False)  # by i j

    def __post_init__(self) -> None:
        if not 0 < self.min_tiles <= self.max_tiles <= MAX_TILES:
            raise ConfigError(
                f"cannot cut an image into {self.min_tiles} to {self.max_tiles} tiles: the first must be positive "
                f"and not above the second, which is at most {MAX_TILES}: change the least or the largest number of "
                "tiles"
            )
        areas: dict[float, list[int]] = defaultdict(list)  # per ratio i j grows with i
        for i in range(1, self.max_tiles + 1):
            for j in range(-(-self.min_tiles // i), self.max_tiles // i + 1):
                areas[i / j].append(i * j)
        object.__setattr__(self, "_ratios", tuple(sorted(areas)))
        object.__setattr__(self, "_areas", tuple(tuple(areas[ratio]) for ratio in sorted(areas)))
        tiles = [n + (self.thumbnail and n > 1) for n in range(self.max_tiles + 1)]
        counts = tuple(_equal_tiles(n, self.rows_per_tile, n * self.tokens_per_tile) for n in tiles)
        object.__setattr__(self, "_counts", counts)

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        ratio = width / height
        right = bisect_left(self._ratios, ratio)
        # only the two neighbours of `ratio` can be nearest: distinct i / j lie further apart than an ulp of any ratio
        if right == 0:
            tied = self._areas[0]
        elif right == len(self._ratios):
            tied = self._areas[-1]
        else:
            below, above = abs(ratio - self._ratios[right - 1]), abs(ratio - self._ratios[right])
            if below == above:
                tied = tuple(sorted(self._areas[right - 1] + self._areas[right]))
            else:
                tied = self._areas[right - 1 if below < above else right]
        best = tied[0]
        for n in tied[1:]:
            if width * height > 0.5 * self.tile_size * self.tile_size * n:
                best = n
        return self._counts[best]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyRes:
    """LLaVA-NeXT, and LLaVA-OneVision's anyres_max_N: padded tiles of a chosen canvas, plus the image as one tile.

    The canvas (pinpoint) is the one that keeps most of the image's pixels, then the least area, then the first
    listed. The tower sees all tiles; the LLM sees the base tile, the canvas without its padding and one newline per
    row of it. With N, a canvas above 1.21 N tiles' worth of features is shrunk to N before the newlines.
    """

    tile_size: int
    pinpoints: tuple[tuple[int, int], ...]  # (height, width) in pixels, multiples of tile_size
    grid_size: int  # patches a side of a tile
    rows_per_tile: int  # grid_size^2 and the class token
    max_feature_tiles: int | None = None  # N; None: LLaVA-NeXT
    lone_images_only: bool = False  # OneVision: an image that is not alone in its sample is not tiled
    name: str = "llava_anyres"
    _canvases: tuple[tuple[int, int, int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        t = self.tile_size
        bad = [[h, w] for h, w in self.pinpoints if min(h, w) < 1 or h % t or w % t or (h // t) * (w // t) > MAX_TILES]
        if bad or not self.pinpoints:
            raise ConfigError(
                f"cannot tile images by image_grid_pinpoints {bad[:3] or '[]'}: each pair must be positive multiples "
                f"of the tile of {t} pixels, at most {MAX_TILES} tiles: correct image_grid_pinpoints"
            )
        canvases = [
            (h, w, self.grid_size * (h // self.tile_size), self.grid_size * (w // self.tile_size))
            for h, w in sorted(self.pinpoints, key=lambda p: p[0] * p[1])  # stable: first listed first
        ]
        object.__setattr__(self, "_canvases", tuple(canvases))

    def in_sample(self, num_images: int) -> AnyRes | FixedImage:
        """LLaVA-OneVision: an image that is not alone is one tile, its tokens and one newline."""
        if num_images > 1 and self.lone_images_only:
            return FixedImage(rows=self.rows_per_tile, tokens=self.grid_size**2 + 1, name=self.name)
        return self

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        rows, columns = self._choose_canvas(width, height)
        num_tiles = rows * columns // (self.grid_size * self.grid_size) + 1

        if width / height > columns / rows:
            kept = int(round(height * (columns / width), 7))
            rows -= (rows - kept) // 2 * 2
        else:
            kept = int(round(width * (rows / height), 7))
            columns -= (columns - kept) // 2 * 2
        if self.max_feature_tiles is not None:
            shrink = math.sqrt(rows * columns / (self.max_feature_tiles * self.grid_size**2))
            if shrink > 1.1:
                rows, columns = int(rows // shrink), int(columns // shrink)
        base = self.grid_size * self.grid_size
        return _equal_tiles(num_tiles, self.rows_per_tile, base + rows * columns + rows)

    def _choose_canvas(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of the best canvas.

        Canvases come by ascending area, so the first that keeps the most pixels is the best. What a canvas keeps
        never falls as its scale grows, so a scale not above the best one need not be looked at.
        """
        best, best_scale, most = (0, 0), 0.0, -1
        area = width * height
        for canvas_height, canvas_width, rows, columns in self._canvases:
            x, y = canvas_width / width, canvas_height / height
            scale = x if x < y else y
            if scale > best_scale:
                best_scale = scale
                kept = min(int(width * scale) * int(height * scale), area)
                if kept > most:
                    best, most = (rows, columns), kept
                    if kept == area:
                        break
        return best


@dataclass(frozen=True, slots=True, kw_only=True)
class PanAndScan:
    """Gemma 3 with `do_pan_and_scan`: long images add 2 to max_num_crops crops along their long side.

    Not counted: the sentence of plain text that Gemma3Processor writes around the crops.
    """

    rows_per_crop: int
    tokens_per_crop: int
    min_crop_size: int
    max_num_crops: int
    min_ratio: float
    name: str = "gemma3_pan_and_scan"

    def count(self, width: int, height: int) -> ImageCounts:
        check_size(width, height)
        n = 1 + self._num_crops(max(width, height), min(width, height))
        return _equal_tiles(n, self.rows_per_crop, n * self.tokens_per_crop)

    def _num_crops(self, long: int, short: int) -> int:
        if long / short < self.min_ratio:
            return 0
        n = min(math.floor(long / self.min_crop_size), math.floor(long / short + 0.5))
        n = min(self.max_num_crops, max(2, n))
        return 0 if min(math.ceil(long / n), short) < self.min_crop_size else n


def _equal_tiles(num_tiles: int, rows: int, tokens: int) -> ImageCounts:
    squares = num_tiles * rows * rows
    return ImageCounts(
        patches=num_tiles * rows, tokens=tokens, tiles=num_tiles, patches_sq=squares, patches_windowed=squares
    )
