"""Gradients after a step's backwards: summed over data-parallel ranks, and over the two halves of a tied weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimtab.runtime.vision.gradients import sum_in_place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiedWeight:
    """A parameter that a layer of this rank shares with a layer of another pipeline rank."""

    parameter: nn.Parameter
    peer: int  # the other rank, in the pipeline group
    owner: bool  # the rank of the earlier layer; counts in the norm


def sum_over_ranks(parameters: Sequence[nn.Parameter], group: Any) -> None:
    """All-reduce (sum) of the gradients over the data-parallel group, in flat buckets.

    A parameter that some rank's micro-batches used and this rank's did not counts as zero here: a vision tower whose
    rank saw only text. One that no rank used keeps no gradient, as in one process.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, is_used in zip(trained, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    sum_in_place(gradients, group)


def exchange_tied(tied: TiedWeight, group: Any) -> None:
    """Both halves become their sum: this rank's plus the peer's, the same bits on either side."""
    parameter = tied.parameter
    if not parameter.requires_grad:
        return
    own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
    other = torch.empty_like(own)
    peer = dist.get_global_rank(group, tied.peer)
    operations = [dist.P2POp(dist.isend, own, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    parameter.grad = own + other
