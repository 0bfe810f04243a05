"""Gradients of parameters that several ranks hold, added up over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 * 2**20


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
