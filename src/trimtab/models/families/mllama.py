"""Mllama (Llama 3.2 Vision): the tower takes as many tiles of every image; its layers are asked of Transformers."""

from __future__ import annotations

from trimtab.models.families.family import Family
from trimtab.models.images.reading import Fields, read_tile, require_resize
from trimtab.models.images.size import MAX_TILES
from trimtab.models.images.tiles import PaddedTiles
from trimtab.specs import ImageRule


def _padded_tiles(s: Fields) -> ImageRule:
    """Llama 3.2 Vision: the tower learns positions for `max_num_tiles` tiles, and the processor pads to as many."""
    require_resize(s)
    _, grid = read_tile(s, "vision_config.image_size", "preprocessor_config.size")
    tiles = s.agreed("vision_config.max_num_tiles", "preprocessor_config.max_image_tiles", maximum=MAX_TILES)
    s.raise_problems()
    rows = grid**2 + 1
    return PaddedTiles(tiles=tiles, rows_per_tile=-(-rows // 8) * 8)  # the tower pads each tile to a multiple of 8


FAMILIES = {"mllama": Family(image_rule=_padded_tiles, stacks_states=True)}
