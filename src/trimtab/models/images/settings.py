"""What image rules of several families read, each from the files and spellings that hold it.

A rule's setting stands in preprocessor_config.json (`preprocessor_config.NAME`), in the mapping `preprocess` of a table
of models, or in config.json.
"""

from __future__ import annotations

from trimtab.models.fields import Fields

MAX_PATCH = 4096  # pixels a side of a patch
MAX_MERGE = 64  # patches a side that become one token
MAX_GRID = 4096  # patches a side of a tile
MAX_PINPOINTS = 1024


def require_resize(s: Fields) -> None:
    s.check(
        s.raw("preprocessor_config.do_resize") is not False,
        "preprocessor_config.do_resize is false: images would reach the tower in sizes that no rule describes: set it "
        "to true",
    )


def patch_and_merge(s: Fields) -> tuple[int, int]:
    patch = s.agreed("vision_config.patch_size", "preprocessor_config.patch_size", maximum=MAX_PATCH)
    merge = s.agreed("vision_config.spatial_merge_size", "preprocessor_config.merge_size", maximum=MAX_MERGE)
    s.expect(patch * merge, "patch_size x merge_size", "preprocess.factor")
    return patch, merge


def pixel_limits(s: Fields) -> tuple[int, int]:
    """min_pixels and max_pixels; at the file's top level they override `size`, as in the processor."""
    name = "preprocessor_config"
    low = s.size(f"{name}.min_pixels", f"{name}.size.shortest_edge", "preprocess.min_pixels")
    high = s.size(f"{name}.max_pixels", f"{name}.size.longest_edge", "preprocess.max_pixels")
    return low, high


def read_tile(s: Fields, *sides: str) -> tuple[int, int]:
    """Side of a square tile in pixels, on which all of `sides` agree, and in patches."""
    tile, patch = s.agreed(*sides), s.side("vision_config.patch_size", maximum=MAX_PATCH)
    s.check(
        1 <= tile // patch <= MAX_GRID,
        f"vision_config.patch_size {patch} cuts a tile of {tile} pixels into {tile // patch} patches a side, and 1 to "
        f"{MAX_GRID} can be counted: correct image_size or patch_size",
    )
    return tile, max(tile // patch, 1)


def read_pinpoints(s: Fields) -> tuple[tuple[int, int], ...]:
    """image_grid_pinpoints as (height, width), equal wherever they are given."""
    names = [f"{prefix}image_grid_pinpoints" for prefix in ("preprocessor_config.", "preprocess.", "")]
    given = [name for name in names if s.given(name)] or names[2:]
    found = [s.pairs(name, maximum=MAX_PINPOINTS) for name in given]
    s.check(
        len(set(found)) == 1,
        f"{' and '.join(given)} differ: take both files of one checkpoint: image features and placeholders would not "
        "match",
    )
    return found[0]
