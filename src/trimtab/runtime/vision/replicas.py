"""Vision gradients where the host leaves replicated parameters alone (tensor-parallel ranks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def reduce_replicas(parameters: Sequence[nn.Parameter], group: Any) -> None:
    """Mean over the group of each gradient, in place, one collective for each type of number.

    Every rank has the whole loss (κ = N), so the exchanged gradients add up to N times those of one process.
    """
    num_ranks = dist.get_world_size(group)
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_type.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_type.values():
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=group)
        flat /= num_ranks
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
