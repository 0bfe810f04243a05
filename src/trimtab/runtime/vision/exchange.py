"""Rows of image features between the ranks of a group, and the exact adjoint of that in the backward.

Why the backward is a sum and nothing else. Rank s encodes rows e_s with its copy of the tower's parameters θ and every
rank r computes a loss ℓ_r from gathered rows e = (e_1, ..., e_N). With Σ_r ℓ_r = κ L, L the loss of one process,

    Σ_s ∂(Σ_r ℓ_r)/∂e_s · ∂e_s/∂θ  =  κ ∂L/∂θ,      and      ∂(Σ_r ℓ_r)/∂e_s  =  Σ_r ∂ℓ_r/∂e_s :

each rank must receive the gradients that *all* ranks have for its rows, added up (reduce-scatter). The gradients of θ
then add up over the ranks to κ ∂L/∂θ, as those of the replicated text parameters do. So a host that sums parameter
gradients needs κ = 1, one that averages them needs κ = N, and vision is right exactly where text is. Keeping the own
slice of the own gradient drops the other ranks' terms; multiplying it by N puts the own term in their place: both are
wrong as soon as ranks read different rows.

Symbols: N ranks, T rows in all, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trimtab.errors import TrimtabError
from trimtab.specs import IntArray

MAX_PADDING = 1.25
"""All-gather pads every rank's rows to the most; past this factor rows go by all-to-all, which pads nothing."""

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the second until torch 2.12
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLayout:
    """Who made which row: row i of the batch is row `position[i]` of those that rank `owner[i]` made."""

    owner: IntArray  # (T,)
    position: IntArray  # (T,)
    counts: IntArray  # (N,) rows each rank made

    def __len__(self) -> int:
        return len(self.owner)


def lay_out_rows(order: IntArray, offsets: IntArray, rows: IntArray) -> RowLayout:
    """Lay out from atoms: rank r makes those of `order[offsets[r]:offsets[r + 1]]`, atom i has `rows[i]` rows."""
    # rows as they are made: rank after rank, atom after atom
    made = rows[order]
    ends = np.concatenate([[0], np.cumsum(made)])
    num_ranks = len(offsets) - 1
    # of each atom its rank, and where its first row lies among those of that rank
    rank_of = np.empty(len(rows), np.int64)
    rank_of[order] = np.repeat(np.arange(num_ranks), np.diff(offsets))
    first = np.empty(len(rows), np.int64)  # of each atom, within its rank's rows
    first[order] = ends[:-1] - np.repeat(ends[offsets[:-1]], np.diff(offsets))
    # of each row its place within its atom
    within = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
    return RowLayout(
        owner=np.repeat(rank_of, rows),
        position=np.repeat(first, rows) + within,
        counts=ends[offsets[1:]] - ends[offsets[:-1]],
    )


def zigzag_rows(is_image: npt.ArrayLike, lengths: Sequence[int], num_ranks: int) -> list[IntArray]:
    """Return the rows of features that each of `num_ranks` context-parallel ranks needs for its own tokens.

    Use it for `vision_dp(..., rows=...)` where the text is cut before the model runs. `is_image` says of every token of
    the whole pack whether a feature takes its place; the pack holds documents of `lengths` tokens, each a multiple of
    2 x ranks. A document is cut into 2 x ranks pieces; rank r has the r-th of them and the r-th from the end.

    >>> [rows.tolist() for rows in zigzag_rows([0, 1, 1, 0, 0, 1, 0, 0], [8], 2)]
    [[0], [1, 2]]
    """
    image = np.asarray(is_image, np.bool_).reshape(-1)
    if int(sum(lengths)) != len(image) or any(length % (2 * num_ranks) for length in lengths):
        raise TrimtabError(
            f"documents of {list(lengths)} tokens were given for {len(image)} tokens on {num_ranks} ranks: pad each to "
            f"a multiple of {2 * num_ranks} tokens"
        )
    # the r-th piece and the r-th from the end together have the same causal pairs for every r
    piece = np.concatenate([np.arange(length) // (length // (2 * num_ranks)) for length in lengths if length])
    rank = np.minimum(piece, 2 * num_ranks - 1 - piece)[image]
    return [np.flatnonzero(rank == r) for r in range(num_ranks)]


def gather_rows(rows: Tensor, layout: RowLayout, group: Any) -> Tensor:
    """Return all rows (T, D) in the batch's order on every rank, from the `counts[rank]` rows this one made.

    One collective forward and one backward, of (N - 1) / N T D elements received by each rank.
    """
    num_ranks = dist.get_world_size(group)
    # padding would move more bytes than an all-to-all of the rows alone, which takes longer to start
    if num_ranks * layout.counts.max() > MAX_PADDING * max(1, len(layout)):
        everything = np.arange(len(layout))
        return route_rows(rows, layout, [everything] * num_ranks, group)
    # row i of rank r arrives at place r x padded + i
    padded = int(layout.counts.max())
    index = torch.from_numpy(layout.owner * padded + layout.position).to(rows.device)
    result: Tensor = _GatherRows.apply(rows, index, padded, group)  # type: ignore[no-untyped-call]
    return result


def route_rows(rows: Tensor, layout: RowLayout, wanted: list[IntArray], group: Any) -> Tensor:
    """Fetch rows `wanted[rank]` of the batch, in that order, from the ranks that made them; all ranks know `wanted`.

    One all-to-all forward and one backward. A row several ranks want gets the sum of their gradients, added in the
    order of ranks.
    """
    rank = dist.get_rank(group)
    # what goes to each rank, and where the rows that arrive belong
    send = [layout.position[ids[layout.owner[ids] == rank]] for ids in wanted]
    owners = layout.owner[wanted[rank]]
    received = np.bincount(owners, minlength=len(wanted))
    places = np.argsort(owners, kind="stable")  # rows come rank after rank
    indices = [torch.from_numpy(np.ascontiguousarray(ids)).to(rows.device) for ids in (*send, places)]
    result: Tensor = _RouteRows.apply(  # type: ignore[no-untyped-call]
        rows, indices[:-1], received.tolist(), indices[-1], group
    )
    return result


def move_rows(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send rows to other ranks, `sent[r]` of them to rank r in order; no gradient flows back."""
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _GatherRows(torch.autograd.Function):
    """All-gather of padded rows, put in order; backward: reduce-scatter (sum)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, padded: int, group: Any) -> Tensor:
        ctx.index, ctx.padded, ctx.num_rows, ctx.group = index, padded, len(rows), group
        num_ranks = dist.get_world_size(group)
        # all ranks send equally much; no index reads what is padded
        own = rows.new_zeros(padded, rows.shape[1])
        own[: len(rows)] = rows
        gathered = rows.new_empty(num_ranks * padded, rows.shape[1])
        _gather(gathered, own, group=group)
        return gathered.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # every rank's gradients of each row, added up where it was made
        spread = grad.new_zeros(dist.get_world_size(ctx.group) * ctx.padded, grad.shape[1])
        spread.index_copy_(0, ctx.index, grad)
        own = grad.new_empty(ctx.padded, grad.shape[1])
        _reduce_scatter(own, spread, group=ctx.group)
        return own[: ctx.num_rows], None, None, None


class _RouteRows(torch.autograd.Function):
    """All-to-all of chosen rows; backward: the reverse, and the sum over the ranks a row went to, in rank order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[Tensor], received: list[int], places: Tensor, group: Any) -> Tensor:
        """Send own rows `send[r]` to rank r, and receive `received[r]` from it; row i of those goes to `places[i]`."""
        ctx.send, ctx.received, ctx.places, ctx.group, ctx.num_rows = send, received, places, group, len(rows)
        sent = [len(ids) for ids in send]
        arrived = move_rows(rows.index_select(0, torch.cat(send)), sent, received, group)
        return torch.empty_like(arrived).index_copy_(0, places, arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        sent = [len(ids) for ids in ctx.send]
        returned = move_rows(grad.index_select(0, ctx.places), ctx.received, sent, ctx.group)
        own = grad.new_zeros(ctx.num_rows, grad.shape[1])
        for ids, part in zip(ctx.send, torch.split(returned, sent), strict=True):
            own.index_add_(0, ids, part)  # ids are distinct within one rank: no order of additions to depend on
        return own, None, None, None, None


# Gradients added up over the group.


BUCKET_BYTES = 64 * 2**20


def sum_in_place(gradients: Sequence[Tensor], group: Any, *, to: int | None = None) -> None:
    """Add up over the group, in flat buckets; every rank gives the same sizes and types in one order.

    `to` is the one rank of the group that gets the sum, what others hold is then undefined; None: all of them.
    """
    for bucket in _buckets(gradients):
        flat = _flatten(bucket)
        if to is None:
            dist.all_reduce(flat, group=group)
        else:
            dist.reduce(flat, dist.get_global_rank(group, to), group=group)
        _write_back(bucket, flat)


def send_in_place(tensors: Sequence[Tensor], group: Any) -> None:
    """Copy the first rank's values into those of the others, in flat buckets."""
    for bucket in _buckets(tensors):
        flat = _flatten(bucket)
        dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
        if dist.get_rank(group):
            _write_back(bucket, flat)


def used_gradients(parameters: Sequence[nn.Parameter], group: Any) -> list[Tensor]:
    """Return the gradients of parameters that some rank of the group used, zeros where only others did.

    One that no rank used keeps no gradient, as in one process.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return []
    # a rank without images used no weight of the tower: all agree on one list, or the collectives would not match
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, is_used in zip(trained, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    return gradients


def _flatten(bucket: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in bucket])


def _write_back(bucket: Sequence[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(bucket, torch.split(flat, [x.numel() for x in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of gradients of one dtype, about `BUCKET_BYTES` each."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
