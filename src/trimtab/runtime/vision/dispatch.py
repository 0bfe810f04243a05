"""Images of data-parallel ranks to other ranks, and their features back.

Atoms are numbered rank after rank; every rank learns their sizes, shares them alike, sends its pixels away and gets
the rows of its own images. The backward sends gradients to whoever encoded; parameters' gradients add up over the
group to the same sum as before, so the host's reduction over it stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.balance.images import ImageShares, TowerCost, keep_at_home, share_images
from trimtab.errors import TrimtabError
from trimtab.options import Rule
from trimtab.runtime.vision.control import Control
from trimtab.runtime.vision.exchange import move_rows
from trimtab.runtime.vision.inputs import Part, VisionInputs
from trimtab.specs import IntArray

_ABSENT = -1  # in a table of integers: this family has no such number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """All atoms of the group, and who encodes which."""

    home: IntArray  # (n,) rank that holds the image
    patches: IntArray
    rows: IntArray | None  # (n,) rows that leave, where the family's rule says so beforehand
    lengths: IntArray  # (n, parts) rows of every part
    shares: ImageShares

    def rows_by_home(self, num_rows: IntArray) -> list[IntArray]:
        """Rows each rank wants: those of its own images, which follow one another."""
        owner = np.repeat(self.home, num_rows)
        return [np.flatnonzero(owner == rank) for rank in range(self.shares.num_ranks)]


def pool_images(
    inputs: Sequence[VisionInputs | None], num_parts: int, *, control: Control, cost: TowerCost, rule: Rule
) -> list[Pool]:
    """Who encodes what in each of several calls of the tower, in one exchange of integers; None: no image here."""
    own = [_table(x, num_parts) for x in inputs]
    width = own[0].shape[1]
    sizes = [len(table) for table in own]
    told = control.gather("sizes of images", [width, len(own), *sizes, *np.concatenate(own).ravel().tolist()])
    if any(list(numbers[:2]) != [width, len(own)] for numbers in told):
        raise TrimtabError(
            "ranks call the vision tower with different tensors, or a different number of times, so their images "
            "cannot be exchanged: use the same processor and equally many micro-batches on every rank"
        )
    pools, start = [], np.full(control.num_ranks, 2 + len(own))
    for call in range(len(own)):
        counts = np.array([numbers[2 + call] for numbers in told])
        ends = start + counts * width
        tables = [numbers[a:b].reshape(-1, width) for numbers, a, b in zip(told, start, ends, strict=True)]
        start = ends
        pools.append(_share_out(np.concatenate(tables), counts, cost, rule))
    return pools


def _share_out(table: IntArray, counts: IntArray, cost: TowerCost, rule: Rule) -> Pool:
    patches, windowed, rows, lengths = table[:, 0], table[:, 1], table[:, 2], table[:, 3:]
    home = np.repeat(np.arange(len(counts)), counts)
    costs = cost.of(patches, None, None if (windowed == _ABSENT).any() else windowed)
    return Pool(
        home=home,
        patches=patches,
        rows=None if (rows == _ABSENT).any() else rows,
        lengths=lengths,
        shares=keep_at_home(share_images(costs, len(counts), rule=rule), home, patches),
    )


def move_images(
    inputs: VisionInputs | None, template: VisionInputs, pool: Pool, *, rank: int, group: Any
) -> VisionInputs:
    """The atoms that this rank encodes; `template` shows the parts, and stands in where `inputs` is None."""
    shares, home = pool.shares, pool.home
    N = shares.num_ranks
    rank_of = np.empty(len(home), np.int64)
    rank_of[shares.order] = np.repeat(np.arange(N), np.diff(shares.offsets))
    mine = rank_of[home == rank]  # where each of my atoms goes
    outgoing = np.argsort(mine, kind="stable")
    incoming = shares.atoms_of(rank)
    parts = []
    for i, like in enumerate(template.parts):
        lengths = pool.lengths[:, i]
        leaving = like.rows[:0] if inputs is None else inputs.parts[i].take(outgoing)
        sent = np.bincount(mine, lengths[home == rank], N).astype(np.int64)
        arriving = np.bincount(home[incoming], lengths[incoming], N).astype(np.int64)
        moved = move_rows(leaving, sent.tolist(), arriving.tolist(), group)
        parts.append(Part(name=like.name, rows=moved, lengths=lengths[incoming]))
    return VisionInputs(
        parts=tuple(parts),
        patches=pool.patches[incoming],
        windowed=None,
        entries=np.ones(len(incoming), np.int64),
        rows=None if template.rows is None or pool.rows is None else pool.rows[incoming],
        fixed=template.fixed,
    )


def _table(inputs: VisionInputs | None, num_parts: int) -> IntArray:
    """(atoms, 3 + parts): patches, windowed, rows, and rows of every part."""
    if inputs is None:
        return np.empty((0, 3 + num_parts), np.int64)
    absent = np.full(len(inputs), _ABSENT)
    windowed = absent if inputs.windowed is None else inputs.windowed
    rows = absent if inputs.rows is None else inputs.rows
    return np.stack([inputs.patches, windowed, rows, *(part.lengths for part in inputs.parts)], axis=1)


def send_template(inputs: VisionInputs | None, *, control: Control, source: int, device: Any) -> VisionInputs:
    """The smallest input of rank `source`, on every rank: what an image looks like where there is none."""
    tensors = None
    if inputs is not None:
        assert len(inputs) == 1
        tensors = {f"part {part.name}": part.rows for part in inputs.parts}
        tensors["patches"] = torch.from_numpy(inputs.patches)
        if inputs.rows is not None:
            tensors["rows"] = torch.from_numpy(inputs.rows)
    got = control.send_named(tensors, source)
    parts = {name.removeprefix("part "): t for name, t in got.items() if name.startswith("part ")}
    return VisionInputs(
        parts=tuple(
            Part(name=name, rows=_placed(rows, device), lengths=np.array([len(rows)])) for name, rows in parts.items()
        ),
        patches=got["patches"].numpy(),
        entries=np.ones(1, np.int64),
        rows=got["rows"].numpy() if "rows" in got else None,
        fixed={} if inputs is None else inputs.fixed,
    )


def _placed(rows: Tensor, device: Any) -> Tensor:
    return rows.to(device)
