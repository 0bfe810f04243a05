"""Small agreements between the ranks of a group, over gloo on the CPU: no device waits for them."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.specs import IntArray

_HEADER = 16  # integers of the first exchange: what it is for, how many follow, and the first of them
_NAME_BYTES = 128  # of what a rank came for, told where ranks came for different things
PATIENCE_S = 10.0
"""After so long a rank says whom it waits for; `timeout_s` ends the wait."""


@dataclass(slots=True, kw_only=True, eq=False)
class Control:
    """The ranks of one group, able to exchange a few integers until `close`."""

    gloo: Any  # of these ranks alone, for nothing else: a call of another kind cannot be taken for one of ours
    rank: int  # within the group
    num_ranks: int
    timeout_s: float
    waits: Waits

    def gather(self, what: str, values: Iterable[int]) -> list[IntArray]:
        """The integers of every rank, in rank order; ranks may give different numbers of them.

        `what` names the place in the program: ranks that are at different ones all raise. One exchange of 16 integers,
        and one of the rest where a rank has more.
        """
        own = np.fromiter(values, np.int64)
        header = np.zeros(_HEADER, np.int64)
        header[0], header[1] = fingerprint([what], []), len(own)
        first = min(len(own), _HEADER - 2)
        header[2 : 2 + first] = own[:first]
        headers = self._exchange(header, what)
        if len(set(headers[:, 0].tolist())) > 1:
            self._raise_lost(what)
        lengths, heads = headers[:, 1], headers[:, 2:]
        if lengths.max() <= heads.shape[1]:
            return [head[:length] for head, length in zip(heads, lengths, strict=True)]
        padded = np.zeros(int(lengths.max()), np.int64)
        padded[: len(own)] = own
        return [row[:length] for row, length in zip(self._exchange(padded, what), lengths, strict=True)]

    def close(self) -> None:
        """Ends the connections; harmless when that was done already."""
        self.gloo = None

    def _exchange(self, own: IntArray, what: str) -> IntArray:
        """(N, k) from k integers of each rank."""
        everyone = torch.empty(self.num_ranks, len(own), dtype=torch.int64)
        self._run(lambda: self.gloo.allgather([list(everyone)], [torch.from_numpy(own)]), what)
        return everyone.numpy()

    def _raise_lost(self, what: str) -> None:
        name = np.frombuffer(what.encode()[:_NAME_BYTES].ljust(_NAME_BYTES), np.int64)
        places = [bytes(row.tobytes()).decode(errors="replace").strip() for row in self._exchange(name.copy(), what)]
        where = ", ".join(f"rank {rank} at {place}" for rank, place in enumerate(places))
        raise TrimtabError(
            f"the ranks of a group that shares images are not at the same call: {where}; run the same "
            f"forwards, with the same kinds of images, on every rank"
        )

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._run(lambda: self.gloo.broadcast([tensor], options), "the smallest image")
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

    def _run(self, collective: Callable[[], Any], what: str) -> None:
        self.waits.count += 1
        start = time.monotonic()
        try:
            work = collective()
            if self.timeout_s > PATIENCE_S and not _is_done(work, PATIENCE_S):
                self._say_who_is_missing(what)
            work.wait()
        except RuntimeError as error:
            missing = ", ".join(map(str, self._find_missing()))
            whom = f"rank {missing}" if missing else "the others"
            raise TrimtabError(
                f"rank {self.rank} of {self.num_ranks} waited {time.monotonic() - start:.0f} s at {what} for {whom}, "
                f"or a process ended: every rank must run the same calls; where some have no image, use "
                f"`vision_heartbeat` ({str(error).splitlines()[0]})"
            ) from error

    def _say_who_is_missing(self, what: str) -> None:
        self._find_missing()
        time.sleep(0.5)  # the others wait about as long as this rank, and say so
        if missing := self._find_missing():
            print(
                f"trimtab: rank {self.rank} has waited {PATIENCE_S:g} s at {what} for rank "
                f"{', '.join(map(str, missing))} of {self.num_ranks}; it gives up after {self.timeout_s:g} s",
                file=sys.stderr,
                flush=True,
            )

    def _find_missing(self) -> list[int]:
        """Ranks that have not said that they wait here; this one does."""
        try:
            self.waits.announce(self.rank)
            return self.waits.missing(self.num_ranks)
        except RuntimeError:  # the process that keeps the store has ended
            return []


def _is_done(work: Any, seconds: float) -> bool:
    """Whether it ended, well or badly, in that time; a wait that is too short leaves the work as it is."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        return bool(work.is_completed())
    return True


@dataclass(slots=True, kw_only=True, eq=False)
class Waits:
    """Who has come to an exchange, told through the store of torch's processes, by ranks that wait long alone."""

    store: Any
    prefix: str
    count: int = 0  # exchanges so far, the same on every rank

    def announce(self, rank: int) -> None:
        self.store.set(self._key(rank), "here")

    def missing(self, num_ranks: int) -> list[int]:
        return [rank for rank in range(num_ranks) if not self.store.check([self._key(rank)])]

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/{self.count}/{rank}"


def open_control(group: Any, timeout_s: float) -> Control:
    """Connects the ranks of `group`; all of them must call this, others need not. Closed when nothing holds it.

    Not by `new_group`: that names a group of some ranks by how many groups each of them is in, and ranks in unequally
    many would wait for one another.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    rank, members = ranks.index(dist.get_rank()), "-".join(map(str, ranks))
    # private: the only store that all processes share, torch 2.6 to 2.13
    store = dist.distributed_c10d._get_default_store()
    opened = store.add(f"trimtab/images/{members}/{rank}", 1)  # by this rank, for these: the same number on each
    prefix = f"trimtab/images/{members}/{opened}"
    timeout = timedelta(seconds=timeout_s)
    control = Control(
        gloo=dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, len(ranks), timeout),  # type: ignore[attr-defined]
        rank=rank,
        num_ranks=len(ranks),
        timeout_s=timeout_s,
        waits=Waits(store=store, prefix=f"{prefix}/waits"),
    )
    control.gather("vision_dp", [])  # a rank that is done and closes early would break off others that still connect
    return control


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
