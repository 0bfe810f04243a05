"""Small agreements between the ranks of a group, over gloo on the CPU: no device waits for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.specs import IntArray

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the second until torch 2.12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Control:
    """The ranks of one group, able to exchange a few integers."""

    group: Any  # a gloo group of the same ranks
    rank: int  # within the group
    num_ranks: int
    timeout_s: float

    def gather(self, values: Iterable[int]) -> IntArray:
        """(N, k): the k integers of every rank; all must give equally many."""
        own = torch.tensor(list(values), dtype=torch.int64)
        everyone = torch.empty(self.num_ranks * len(own), dtype=torch.int64)
        self.run(lambda: _all_gather(everyone, own, group=self.group))
        return everyone.view(self.num_ranks, len(own)).numpy()

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        self.run(lambda: dist.broadcast(tensor, dist.get_global_rank(self.group, source), group=self.group))
        return tensor

    def send_named(self, tensors: dict[str, Tensor] | None, source: int) -> dict[str, Tensor]:
        """Named tensors of rank `source`, on every rank's CPU: a header of JSON, then the bytes of each."""
        header = b""
        if tensors is not None:
            table = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
            header = json.dumps(table).encode()
        size = int(self.broadcast(torch.tensor([len(header)]), source)[0])
        text = torch.frombuffer(bytearray(header.ljust(size, b" ")), dtype=torch.uint8)
        rows = json.loads(bytes(self.broadcast(text, source).numpy()))
        received = {}
        for name, dtype, shape in rows:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            if tensors is not None:
                tensor.copy_(tensors[name])
            received[name] = self.broadcast(tensor, source)
        return received

    def run(self, collective: Any) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise TrimtabError(
                f"rank {self.rank} of {self.num_ranks} waited {self.timeout_s:g} s for the others to reach the vision "
                f"tower, or one of them ended: every rank must run the same calls; where some have no image, use "
                f"`vision_heartbeat` ({str(error).splitlines()[0]})"
            ) from error


def open_control(group: Any, timeout_s: float) -> Control:
    """A gloo group of the ranks of `group`; all of them must call this, others need not."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    control = dist.new_group(
        ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True
    )
    return Control(group=control, rank=ranks.index(dist.get_rank()), num_ranks=len(ranks), timeout_s=timeout_s)


def fingerprint(words: Sequence[object], tensors: Sequence[Tensor]) -> int:
    """63 bits of everything that must be equal: of a tensor its type, shape and 64 elements spread over it."""
    digest = hashlib.blake2b(repr(tuple(words)).encode(), digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        step = max(1, len(flat) // 64)
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(flat[::step].to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def differing_ranks(column: IntArray) -> list[int]:
    """Ranks whose number is not that of most; of equally common numbers the first counts as the rule."""
    values, first, counts = np.unique(column, return_index=True, return_counts=True)
    usual = values[np.lexsort((first, -counts))[0]]
    return [int(rank) for rank in np.flatnonzero(column != usual)]
