"""What is declared of a family: only what Transformers does not say of it, or a machine without torch has to know.

A family that follows Transformers' conventions needs no line at all. An odd one is a `Family` in `known.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.models.images.reading import Fields
from trimtab.specs import ImageMarkup, ImageRule

Smallest = Literal["block", "tile", "fewest tiles"]
"""One block of a grid of patches, one tile of fixed size, or the tile grid that leaves the fewest tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFormat:
    """Give this as `PackedCollator(config, family=...)` where what Transformers says of your model is not enough.

    Example: a family of tiles, of fixed size, whose image tokens see their whole image.

    >>> from trimtab.models import PackFormat
    >>> PackFormat(joined=("pixel_values",), sees="images").counts
    'model'
    """

    joined: tuple[str, ...]  # keys concatenated along dimension 0, in sample order; further dimensions padded with 0
    mrope: bool = False  # positions have several axes, and the rows (text, temporal, height, width) in a pack
    text_row: bool = True  # False: the model takes no row of text positions beside the axes; masks are given explicitly
    sees: Literal["images", "prefix"] | None = None  # tokens that see their whole block, under masks given explicitly
    stateful: bool = False  # layers carry a state along the row: seq_idx and lengths say where samples start
    types_key: str | None = None  # argument of the forward that says which tokens are images
    counts: Literal["grid", "tiles", "sizes", "model"] = (
        "model"  # what tells an image's LLM tokens; the model checks too
    )
    # for packs without images: a kind known here, or config -> (LLM tokens, tensors by key); None: no filler image
    smallest: Smallest | Callable[[Any], tuple[int, dict[str, Any]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All that is declared of one `model_type`; what is left out is asked of Transformers, or not needed.

    Use it to declare what is odd about a family of your own, as an entry of `trimtab.models.FAMILIES`: docs/models.md.
    """

    image_rule: Callable[[Fields], ImageRule] | None = None  # counts of images without torch; None: asked
    markup: ImageMarkup | None = None  # how its processor writes an image, without torch; None: asked
    pack: PackFormat | None = None  # None: asked of the model's classes
    is_remote_code: bool = False  # Transformers has no class of its own for it
    joins_tiles: bool = False  # generating, tiles of several images are joined in front of the tower
    stacks_states: bool = False  # its tower hands on the states of all its blocks, which live until its end
