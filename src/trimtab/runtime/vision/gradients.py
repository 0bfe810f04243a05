"""How gradients are added up over the group, and which sums of losses that is right for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import TrimtabError

BUCKET_BYTES = 64 * 2**20
Loss = Literal["sharded", "sharded x N", "replicated"]
Reduction = Literal["sum", "mean", "none"]

KAPPA_IS_N: dict[Loss, bool] = {"sharded": False, "sharded x N": True, "replicated": True}
"""Σ_r ℓ_r = κ L over the ranks of the group. `sharded`: each rank's loss covers its part of the tokens, κ = 1;
`sharded x N`: the same, scaled by the group's size, κ = N; `replicated`: each rank has the whole loss, κ = N."""


def check_convention(loss: Loss, reduction: Reduction, num_ranks: int) -> None:
    """Raise where text and vision gradients would both be wrong by a factor: `sum` needs κ = 1, `mean` needs κ = N.

    With `none` (tensor-parallel replicas whose text gradients are whole already) the host leaves these parameters
    alone, and `VisionDataParallel.reduce_gradients()` takes the mean of the vision parameters' gradients.
    """
    if loss not in KAPPA_IS_N:
        raise TrimtabError(f"'{loss}' is no way to divide a loss: choose one of {', '.join(KAPPA_IS_N)}")
    if reduction not in ("sum", "mean", "none"):
        raise TrimtabError(f"'{reduction}' is no way to add gradients up: choose one of sum, mean, none")
    fits = {"sum": loss == "sharded", "mean": KAPPA_IS_N[loss], "none": loss == "replicated"}
    if num_ranks == 1 or fits[reduction]:
        return
    if reduction == "sum":
        wrong, cure = f"{num_ranks} times too large", f"divide each rank's loss by {num_ranks}, or average gradients"
    elif reduction == "mean":
        wrong, cure = f"{num_ranks} times too small", f"multiply each rank's loss by {num_ranks}, or sum gradients"
    else:
        wrong, cure = "those of only one rank's tokens", "sum gradients over the group"
    raise TrimtabError(
        f"a {loss} loss with gradients reduced by {reduction} over {num_ranks} ranks leaves every gradient, of text "
        f"and of vision, {wrong}: {cure}"
    )


def sum_in_place(gradients: Sequence[Tensor], group: Any) -> None:
    """All-reduce (sum) over the group, in flat buckets; every rank gives the same sizes and types in one order."""
    for bucket in _buckets(gradients):
        flat = torch.cat([x.reshape(-1) for x in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(bucket, torch.split(flat, [x.numel() for x in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of gradients of one dtype, about `BUCKET_BYTES` each."""
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
