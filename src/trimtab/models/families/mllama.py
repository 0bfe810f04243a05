"""Mllama (Llama 3.2 Vision): the tower takes as many tiles of every image; its layers are asked of Transformers."""

from __future__ import annotations

from trimtab.models.families.family import Family
from trimtab.models.images.settings import Settings
from trimtab.models.images.size import MAX_TILES
from trimtab.models.images.tiles import PaddedTiles
from trimtab.specs import ImageRule


def _padded_tiles(s: Settings) -> ImageRule:
    """Llama 3.2 Vision: the tower learns positions for `max_num_tiles` tiles, and the processor pads to as many."""
    s.require_resize()
    tile = s.agreed_int(("vision", "image_size"), ("file", "size"))
    patch = s.first_int(("vision", "patch_size"))
    tiles = s.agreed_int(("vision", "max_num_tiles"), ("file", "max_image_tiles"), maximum=MAX_TILES)
    rows = s.grid(tile, patch) ** 2 + 1
    s.check()
    return PaddedTiles(tiles=tiles, rows_per_tile=-(-rows // 8) * 8)  # the tower pads each tile to a multiple of 8


FAMILIES = {"mllama": Family(image_rule=_padded_tiles, stacks_states=True)}
