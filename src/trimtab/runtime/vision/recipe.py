"""The published recipe of vision data parallel by its own names, for trees that have its calls already.

The recipe (verl pull request 5230, ROLL pull request 357) replaces the forward of Qwen's vision towers: every rank of
a sequence-parallel group encodes some images of the batch that all of them hold, and embeddings are gathered. Change
the import and keep the calls; what runs is `vision_dp`: shares by cost, empty ranks, frozen towers, Transformers 4.57
and 5, and the exact adjoint in the backward, where the recipe's first version scaled its own slice by `dp_size`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from trimtab.balance.images import share_images
from trimtab.errors import TrimtabError
from trimtab.runtime.vision.apply import vision_dp
from trimtab.runtime.vision.exchange import gather_rows, lay_out_rows
from trimtab.runtime.vision.hooks import holder_of

TOWERS = (
    "modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel",
    "modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
    "modeling_qwen3_vl.Qwen3VLVisionModel",
    "modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel",
)
"""The classes that the recipe patches, by the modules of Transformers that hold them."""

_originals: dict[type, Callable[..., Any]] = {}


def apply_vision_dp_patch(
    dp_group: Any = None,
    dp_size: int | None = None,
    dp_rank: int | None = None,
    *,
    classes: Sequence[type] | None = None,
) -> None:
    """Call it once before or after models are made: towers of `classes` share their images over `dp_group`.

    `dp_group` None: verl's or ROLL's Ulysses group, looked up when a tower first runs. `dp_size` and `dp_rank` are
    ROLL's arguments and must be the group's. `classes` None: the four that the recipe patches (`TOWERS`). A group of
    one, or none, changes nothing; a second call patches nothing twice. Gradients need no scale by `dp_size`: wherever
    those of the text are right, those of the tower are (`runtime/vision/exchange.py` has the proof).
    """
    if dp_group is not None and dp_size not in (None, dist.get_world_size(dp_group)):
        raise TrimtabError(f"dp_size must be {dist.get_world_size(dp_group)}, the group's, not {dp_size}: leave it out")
    if dp_group is not None and dp_rank not in (None, dist.get_rank(dp_group)):
        raise TrimtabError(f"dp_rank must be {dist.get_rank(dp_group)}, not {dp_rank}: leave it out")
    for tower in _tower_classes() if classes is None else classes:
        if tower not in _originals:
            _originals[tower] = tower.forward  # type: ignore[attr-defined]
            tower.forward = create_dp_vision_forward(tower.forward, dp_group)  # type: ignore[attr-defined]


def unapply_vision_dp_patch() -> None:
    """Give all patched classes their own forward again; towers that have run go on sharing until they are gone."""
    while _originals:
        tower, forward = _originals.popitem()
        tower.forward = forward  # type: ignore[attr-defined]


def create_dp_vision_forward(original_forward: Callable[..., Any], dp_group: Any = None) -> Callable[..., Any]:
    """Return a class's forward that puts `vision_dp` on the instance when it first runs."""

    @functools.wraps(original_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = dp_group if dp_group is not None else _ulysses_group()
        if holder_of(self) is not None or group is None or dist.get_world_size(group) == 1:
            return original_forward(self, *args, **kwargs)
        vision_dp(self, group, at="tower")
        return self.forward(*args, **kwargs)  # the instance's now

    return forward


def get_image_patch_counts(grid_thw: Tensor) -> list[int]:
    """Return the patches of each image or clip, from (n, 3) grids: frames x height x width."""
    return [int(count) for count in grid_thw.prod(dim=-1).tolist()]


def get_image_embedding_counts(grid_thw: Tensor, spatial_merge_size: int = 1) -> list[int]:
    """Return the rows that leave the tower for each image or clip."""
    return [count // spatial_merge_size**2 for count in get_image_patch_counts(grid_thw)]


def assign_images_to_dp_ranks(patch_counts: Sequence[int], dp_size: int) -> tuple[list[list[int]], list[int]]:
    """Return images of each rank, whole runs in order, and each rank's patches; the largest load is the least possible.

    The recipe cuts greedily or by equal counts. Exact: of the cuts with the least largest load the evenest; a rank may
    get no image where others hold more than the mean. `share_images(cost, rule="balanced")` needs no runs and is
    evener; `vision_dp` uses it.
    """
    shares = share_images(np.asarray(patch_counts, np.float64), dp_size, rule="contiguous")
    assigned = [shares.atoms_of(rank).tolist() for rank in range(dp_size)]
    return assigned, [sum(patch_counts[i] for i in images) for images in assigned]


def prepare_local_vision_inputs(
    pixel_values: Tensor,
    grid_thw: Tensor,
    image_assignments: Sequence[Sequence[int]],
    dp_rank: int,
    patch_counts: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, list[int]]:
    """Return pixels (rows of patches), grids and numbers of the images that `dp_rank` encodes; none is 0 rows of each.

    `patch_counts` are those of `get_image_patch_counts`, where they are at hand.
    """
    if not 0 <= dp_rank < len(image_assignments):
        raise TrimtabError(f"dp_rank must be 0 to {len(image_assignments) - 1}, not {dp_rank}")
    counts = np.asarray(get_image_patch_counts(grid_thw) if patch_counts is None else patch_counts, np.int64)
    if int(counts.sum()) != len(pixel_values):
        raise TrimtabError(
            f"grid_thw counts {int(counts.sum())} patches, pixel_values has {len(pixel_values)}: give both of the same "
            "images"
        )
    own = list(image_assignments[dp_rank])
    starts = np.cumsum(counts) - counts
    rows = np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in own] or [np.empty(0, np.int64)])
    return pixel_values[rows], grid_thw[own], own


def gather_vision_embeddings(local_embeddings: Tensor, dp_group: Any = None, all_counts: Sequence[int] = ()) -> Tensor:
    """Gather embeddings of all ranks in order, `all_counts[r]` rows from rank r; backward adds up all gradients.

    Where every rank has the whole loss and parameters are averaged, that sum is the recipe's scale by `dp_size`.
    `dp_group` None, or of one rank: the embeddings as they are.
    """
    if dp_group is None or dist.get_world_size(dp_group) == 1:
        return local_embeddings
    counts = np.asarray(all_counts, np.int64)
    layout = lay_out_rows(np.arange(len(counts)), np.arange(len(counts) + 1), counts)
    return gather_rows(local_embeddings, layout, dp_group)


class GatherVisionEmbeddings:
    """`gather_vision_embeddings` by the name and the call of the recipe's autograd function."""

    apply = staticmethod(gather_vision_embeddings)


def _tower_classes() -> list[type]:
    """Return those of `TOWERS` that the installed Transformers has."""
    found = []
    for module, _, name in (tower.partition(".") for tower in TOWERS):
        family = module.removeprefix("modeling_")
        try:
            found.append(getattr(importlib.import_module(f"transformers.models.{family}.{module}"), name))
        except ModuleNotFoundError:
            continue
    return found


_ULYSSES = {
    "verl.utils.ulysses": "get_ulysses_sequence_parallel_group",
    "roll.utils.context_parallel.globals": "get_ulysses_group",
}
"""Where hosts keep the group of this rank."""


def _ulysses_group() -> Any:
    for module, function in _ULYSSES.items():
        if sys.modules.get(module.partition(".")[0]) is not None:  # the host that runs
            return getattr(importlib.import_module(module), function)()
    raise TrimtabError("neither verl nor ROLL runs here: call apply_vision_dp_patch(group)")
