"""Images of data-parallel ranks to other ranks, and their features back.

Atoms are numbered rank after rank; every rank learns their sizes, shares them alike, sends its pixels away and gets
the rows of its own images. The backward sends gradients to whoever encoded; parameters' gradients add up over the
group to the same sum as before, so the host's reduction over it stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.balance.images import ImageShares, Rule, TowerCost, keep_at_home, share_images
from trimtab.errors import TrimtabError
from trimtab.runtime.vision.control import Control
from trimtab.runtime.vision.exchange import move_rows
from trimtab.runtime.vision.inputs import Part, VisionInputs
from trimtab.specs import IntArray

_ABSENT = -1  # in a table of integers: this family has no such number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """All atoms of the group, and which of them this rank encodes."""

    home: IntArray  # (n,) rank that holds the image
    patches: IntArray
    shares: ImageShares
    received: VisionInputs  # the atoms this rank encodes; none, where its share is empty

    def rows_by_home(self, num_rows: IntArray) -> list[IntArray]:
        """Rows each rank wants: those of its own images, which follow one another."""
        owner = np.repeat(self.home, num_rows)
        return [np.flatnonzero(owner == rank) for rank in range(self.shares.num_ranks)]


def swap_images(
    inputs: VisionInputs | None, template: VisionInputs, *, control: Control, group: Any, cost: TowerCost, rule: Rule
) -> Pool:
    """Share out the images of all ranks and move the pixels; `template` shows the parts where `inputs` is None."""
    N = control.num_ranks
    own = _table(inputs, len(template.parts))
    counts = control.gather([len(own), own.shape[1]])
    if len(set(counts[:, 1].tolist())) > 1:
        raise TrimtabError(
            "ranks call the vision tower with different tensors, so their images cannot be exchanged: "
            "use the same processor on every rank"
        )
    padded = np.full((int(counts[:, 0].max()), own.shape[1]), _ABSENT)
    padded[: len(own)] = own
    everyone = control.gather(padded.ravel().tolist()).reshape(N, -1, own.shape[1])
    table = np.concatenate([everyone[rank, : counts[rank, 0]] for rank in range(N)])
    home = np.repeat(np.arange(N), counts[:, 0])
    patches, windowed, rows, lengths = table[:, 0], table[:, 1], table[:, 2], table[:, 3:]
    costs = cost.of(patches, None, None if (windowed == _ABSENT).any() else windowed)
    shares = keep_at_home(share_images(costs, N, rule=rule), home, patches)

    rank_of = np.empty(len(home), np.int64)
    rank_of[shares.order] = np.repeat(np.arange(N), np.diff(shares.offsets))
    mine = rank_of[home == control.rank]  # where each of my atoms goes
    outgoing = np.argsort(mine, kind="stable")
    incoming = shares.atoms_of(control.rank)
    parts = []
    for i, like in enumerate(template.parts):
        source = like if inputs is None else inputs.parts[i]
        leaving = source.take(outgoing) if inputs is not None else like.rows[:0]
        sent = np.bincount(mine, lengths[home == control.rank, i], N).astype(np.int64)
        arriving = np.bincount(home[incoming], lengths[incoming, i], N).astype(np.int64)
        moved = move_rows(leaving, sent.tolist(), arriving.tolist(), group)
        parts.append(Part(name=like.name, rows=moved, lengths=lengths[incoming, i]))
    received = VisionInputs(
        parts=tuple(parts),
        patches=patches[incoming],
        windowed=None,
        entries=np.ones(len(incoming), np.int64),
        rows=None if template.rows is None else rows[incoming],
        fixed=template.fixed,
    )
    return Pool(home=home, patches=patches, shares=shares, received=received)


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
