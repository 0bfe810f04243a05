"""Images of data-parallel ranks to other ranks, and their features back.

Atoms are numbered rank after rank; every rank learns their sizes, shares them alike, sends its pixels away and gets
the rows of its own images. The backward sends gradients to whoever encoded; parameters' gradients add up over the
group to the same sum as before, so the host's reduction over it stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import ImageShares, keep_at_home, share_images
from trimtab.errors import TrimtabError
from trimtab.options import Rule
from trimtab.runtime.vision.agreement import Control
from trimtab.runtime.vision.exchange import move_rows
from trimtab.runtime.vision.inputs import Part, VisionInputs, join_inputs
from trimtab.specs import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """All atoms of the group, and who encodes which."""

    home: IntArray  # (n,) rank that holds the image
    sizes: VisionInputs  # of all n atoms, without their pixels
    shares: ImageShares

    def rows_by_home(self, num_rows: IntArray) -> list[IntArray]:
        """Rows each rank wants: those of its own images, which follow one another."""
        owner = np.repeat(self.home, num_rows)
        return [np.flatnonzero(owner == rank) for rank in range(self.shares.num_ranks)]


def pool_images(
    inputs: Sequence[VisionInputs | None], template: VisionInputs, *, control: Control, cost: LinearCost, rule: Rule
) -> list[Pool]:
    """Who encodes what in each of several calls of the tower, in one exchange of sizes; None: no image here."""
    none = _without_pixels(template.take(np.empty(0, np.int64)))
    told = control.gather("sizes of images", [none if x is None else _without_pixels(x) for x in inputs])
    if len({(len(calls), *(part.name for call in calls for part in call.parts)) for calls in told}) > 1:
        raise TrimtabError(
            "ranks call the vision tower with different tensors, or a different number of times, so their images "
            "cannot be exchanged: use the same processor and equally many micro-batches on every rank"
        )
    pools = []
    for ranks in zip(*told, strict=True):
        home = np.repeat(np.arange(len(ranks)), [len(x) for x in ranks])
        sizes = join_inputs(ranks)
        assert sizes is not None
        shares = share_images(cost.of(sizes.patches, patches_windowed=sizes.windowed), len(ranks), rule=rule)
        pools.append(Pool(home=home, sizes=sizes, shares=keep_at_home(shares, home, sizes.patches)))
    return pools


def move_images(
    inputs: VisionInputs | None, template: VisionInputs, pool: Pool, *, rank: int, group: Any
) -> VisionInputs:
    """The atoms that this rank encodes; `template` shows the parts where `inputs` is None."""
    shares, home, sizes = pool.shares, pool.home, pool.sizes
    N = shares.num_ranks
    rank_of = np.empty(len(home), np.int64)
    rank_of[shares.order] = np.repeat(np.arange(N), np.diff(shares.offsets))
    mine = rank_of[home == rank]  # where each of my atoms goes; without any, nothing of the template leaves
    outgoing = np.argsort(mine, kind="stable")
    incoming = shares.atoms_of(rank)
    parts = []
    for own, there in zip((template if inputs is None else inputs).parts, sizes.parts, strict=True):
        sent = np.bincount(mine, there.lengths[home == rank], N).astype(np.int64)
        arriving = np.bincount(home[incoming], there.lengths[incoming], N).astype(np.int64)
        moved = move_rows(own.take(outgoing), sent.tolist(), arriving.tolist(), group)
        parts.append(Part(name=own.name, rows=moved, lengths=there.lengths[incoming]))
    return VisionInputs(
        parts=tuple(parts),
        patches=sizes.patches[incoming],
        entries=np.ones(len(incoming), np.int64),
        rows=None if sizes.rows is None else sizes.rows[incoming],
        fixed=template.fixed,
    )


def _without_pixels(inputs: VisionInputs) -> VisionInputs:
    parts = tuple(Part(name=x.name, rows=torch.empty(0), lengths=x.lengths) for x in inputs.parts)
    return replace(inputs, parts=parts, fixed={})
