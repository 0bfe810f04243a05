"""`OnlineBalancer`: at every step the samples that ranks hold, shared anew among them. No plan and no sizes beforehand.

Every rank says what its samples cost; all decide alike who runs what, and each sends only what another rank runs. The
loss of a batch is divided by the labels of all ranks, so the mean gradient is that of one process with all samples.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trimtab.balance.images import ImageShares, keep_at_home
from trimtab.balance.step import share_step
from trimtab.errors import TrimtabError
from trimtab.runtime.data.collate import step_denominator
from trimtab.runtime.training.shared import SampleSize, size_of_sample
from trimtab.runtime.vision.agreement import Control, open_control
from trimtab.runtime.vision.exchange import move_rows
from trimtab.specs import FloatArray, IntArray

Collate = Callable[[list[Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankShares:
    """Who runs which samples, numbered rank after rank as they are held."""

    members: tuple[IntArray, ...]  # by rank
    load: FloatArray  # by rank
    held: FloatArray  # by rank, without sharing

    @property
    def slowest_over_mean(self) -> float:
        return float(self.load.max() / self.load.mean())


def size_row(size: SampleSize) -> tuple[float, float, float]:
    """As `share_ranks` takes it."""
    return size.patches, size.tokens, size.flops


def share_ranks(sizes: Sequence[FloatArray], *, step: int = 0) -> RankShares:
    """Samples that each rank holds, shared so that all ranks cost alike, and so that much stays where it is.

    `sizes[rank]` (n, 3): patches, tokens and flops of its samples. The same on every rank of equal input; every rank
    runs a sample at least.
    """
    N, every = len(sizes), np.concatenate(sizes)
    home = np.repeat(np.arange(N), [len(x) for x in sizes])
    if len(every) < N:
        raise TrimtabError(f"{N} ranks hold {len(every)} samples in all: give a batch of one sample a rank or more")
    columns, cost = every[:, :2].astype(np.int64), np.ascontiguousarray(every[:, 2])
    # 1. who runs what: the search that shares a planned step
    shared = share_step(columns, cost, limits=None, dp=N, num_microbatches=1, keys=(step,))
    order, offsets = shared.members, shared.offsets
    if (np.diff(offsets) == 0).any():  # a few expensive samples: a rank that would have none takes one
        order, offsets = _one_at_least(order, offsets)
    # 2. which rank each share goes to
    load = np.add.reduceat(cost[order], offsets[:-1])
    given = ImageShares(order=order, offsets=offsets, load=load, lower_bound=0.0, rule="balanced")
    kept = keep_at_home(given, home, columns.sum(axis=1))
    return RankShares(
        members=tuple(kept.atoms_of(rank) for rank in range(N)),
        load=kept.load,
        held=np.bincount(home, cost, N).astype(np.float64),
    )


def _one_at_least(order: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
    parts = [order[a:b] for a, b in pairwise(offsets.tolist())]
    for rank, part in enumerate(parts):
        if not len(part):
            most = max(range(len(parts)), key=lambda r: len(parts[r]))
            parts[rank], parts[most] = parts[most][-1:], parts[most][:-1]
    return np.concatenate(parts), np.concatenate([[0], np.cumsum([len(part) for part in parts])])


class OnlineBalancer:
    """Use it in a loop of your own, around `model(**batch).loss`, where no plan was made: ranks then have even work.

    `balancer = trimtab.OnlineBalancer(model, collate)` before `accelerator.prepare`, and in the loop
    `batch = balancer(samples)`, with a DataLoader that hands out lists of samples (`collate_fn=list`). `collate` makes
    a batch of a list of samples, and of one: its size is asked so. Samples travel to the ranks that run them; the batch
    has `num_items_in_batch`, by which models of Transformers divide the sum of token losses, so that gradients averaged
    over the ranks are those of one process with the samples of all. `size`: what a sample costs, where the model's
    multiply-adds are not what counts. All ranks of `group` must call it equally often. On one process nothing changes:

    >>> alone = OnlineBalancer(torch.nn.Linear(1, 1), dict, size=lambda _: SampleSize(tokens=1, patches=0, flops=1.0))
    >>> alone.share(["one", "two"])
    ['one', 'two']
    """

    def __init__(
        self,
        model: nn.Module,
        collate: Collate,
        *,
        group: Any = None,
        size: Callable[[Any], SampleSize] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._collate, self._group, self._timeout_s = collate, group, timeout_s
        self._asked = size_of_sample(model, collate) if size is None else None
        self._given = size
        self._model, self._steps = model, 0
        self._control: Control | None = None
        self.last: RankShares | None = None  # what was decided for the batch at hand

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """This rank's even share of the samples that all ranks hold, as a batch; collective."""
        mine = self.share(samples)
        batch = dict(self._collate(mine))
        num_ranks = dist.get_world_size(self._group) if dist.is_initialized() else 1
        device = next(self._model.parameters()).device
        batch["num_items_in_batch"] = step_denominator([batch], group=self._group).to(device) / num_ranks
        return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}

    def share(self, samples: Sequence[Any]) -> list[Any]:
        """The samples that this rank runs, for a loop that makes batch and loss by itself; collective."""
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return list(samples)
        if self._control is None:
            self._control = open_control(self._group or dist.group.WORLD, self._timeout_s)
        control = self._control
        # 1. every rank learns what all samples cost, and decides alike
        own = np.array([size_row(self._size(sample)) for sample in samples], np.float64).reshape(-1, 3)
        sizes = control.gather("sizes of samples", own)
        self.last = shares = share_ranks(sizes, step=self._steps)
        self._steps += 1
        # 2. samples of others go to them, in the order of their numbers
        first = int(np.cumsum([0, *map(len, sizes)])[control.rank])
        sent = [
            [samples[i - first] for i in part.tolist() if first <= i < first + len(samples)] for part in shares.members
        ]
        kept, sent[control.rank] = sent[control.rank], []
        arrived = self._exchange(sent)
        arrived[control.rank] = kept
        return [sample for part in arrived for sample in part]  # rank after rank: the order of their numbers

    def _size(self, sample: Any) -> SampleSize:
        if self._given is not None:
            return self._given(sample)
        assert self._asked is not None
        return self._asked([sample])[0]

    def _exchange(self, sent: list[list[Any]]) -> list[list[Any]]:
        """What every rank sends here; one all-to-all of bytes, whose lengths go before them."""
        assert self._control is not None
        packed = [pickle.dumps(part) if part else b"" for part in sent]
        lengths = self._control.gather("lengths of samples", [len(x) for x in packed])
        received = [each[self._control.rank] for each in lengths]
        nccl = dist.get_backend(self._group) == "nccl"
        device = next(self._model.parameters()).device if nccl else torch.device("cpu")
        own = torch.frombuffer(bytearray(b"".join(packed) or b"\0"), dtype=torch.uint8)[: sum(map(len, packed))]
        arrived = move_rows(own.to(device), lengths[self._control.rank], received, self._group).cpu().numpy().tobytes()
        ends = np.cumsum([0, *received]).tolist()
        parts = [arrived[a:b] for a, b in pairwise(ends)]
        return [pickle.loads(part) if part else [] for part in parts]  # noqa: S301 (what ranks of this run have sent)
