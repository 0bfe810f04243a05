"""Small agreements between the ranks of a group, over gloo on the CPU: no device waits for them."""

from __future__ import annotations

import hashlib
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.watch import MEETING_S, Watch

_FIRST_BYTES = 256  # of the first exchange: a value that is no longer needs no second one
_LENGTH_BYTES = 8
PATIENCE_S = 10.0
"""After so long a rank says whom it waits for; `timeout_s` ends the wait."""


@dataclass(slots=True, kw_only=True, eq=False)
class Control:
    """The ranks of one group, able to exchange small Python values until `close`."""

    gloo: Any  # of these ranks alone, for nothing else: a call of another kind cannot be taken for one of ours
    rank: int  # within the group
    num_ranks: int
    timeout_s: float
    store: Any  # of torch's processes: there a rank that waits long says that it has come
    prefix: str
    patience_s: float = PATIENCE_S
    num_exchanges: int = 0  # so far, the same on every rank
    watch: Watch = field(init=False)  # of the backwards

    def __post_init__(self) -> None:
        self.watch = Watch(
            rank=self.rank, num_ranks=self.num_ranks, patience_s=self.patience_s, find_missing=self._find_missing
        )

    def gather(self, what: str, value: object) -> list[Any]:
        """The value of every rank, in rank order.

        `what` names the place in the program: ranks that are at different ones all raise. One exchange of 256 bytes,
        and one of the rest where a rank has more.
        """
        own = pickle.dumps((what, value))
        room = _FIRST_BYTES - _LENGTH_BYTES
        heads = self._exchange(len(own).to_bytes(_LENGTH_BYTES, "little") + own[:room].ljust(room, b"\0"), what)
        told = [head[_LENGTH_BYTES:] for head in heads]
        longest = max(int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads)
        if longest > room:
            rest = self._exchange(own[room:].ljust(longest - room, b"\0"), what)
            told = [first + more for first, more in zip(told, rest, strict=True)]
        found = [pickle.loads(text) for text in told]  # noqa: S301 (what ranks of this run have sent)
        if len({place for place, _ in found}) > 1:
            where = ", ".join(f"rank {rank} at {place}" for rank, (place, _) in enumerate(found))
            raise TrimtabError(
                f"the ranks of a group that shares images are not at the same call: {where}; run the same "
                f"forwards, with the same kinds of images, on every rank"
            )
        return [sent for _, sent in found]

    def gather_unless(self, problem: Exception | None, what: str, value: object, *, failed: str) -> list[Any]:
        """As `gather`; raises on all ranks where one has a problem, there the problem itself.

        `failed` is the sentence for the other ranks, with {} for the names of those that have one.
        """
        told = self.gather(what, (problem is None, None if problem is not None else value))
        if problem is not None:
            raise problem
        if failing := [rank for rank, (is_well, _) in enumerate(told) if not is_well]:
            raise TrimtabError(failed.format(listed(failing)))
        return [sent for _, sent in told]

    def send(self, value: object, source: int, what: str) -> Any:
        """The value of rank `source`, on every rank; what others give is not looked at."""
        own = pickle.dumps(value) if self.rank == source else b""
        size = self._broadcast(torch.tensor([len(own)]), source, what)
        content = torch.frombuffer(bytearray(own.ljust(int(size), b"\0")), dtype=torch.uint8)
        return pickle.loads(self._broadcast(content, source, what).numpy().tobytes())  # noqa: S301 (as above)

    def close(self) -> None:
        """Ends the connections; harmless when that was done already."""
        self.gloo = None

    def _exchange(self, own: bytes, what: str) -> list[bytes]:
        """Equally many bytes of every rank."""
        everyone = torch.empty(self.num_ranks, len(own), dtype=torch.uint8)
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._run(lambda: self.gloo.allgather([list(everyone)], [mine]), what)
        return [row.numpy().tobytes() for row in everyone]

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._run(lambda: self.gloo.broadcast([tensor], options), what)
        return tensor

    def _run(self, collective: Callable[[], Any], what: str) -> None:
        self.num_exchanges += 1
        start = time.monotonic()
        try:
            work = collective()
            if self.timeout_s > self.patience_s and not _is_done(work, self.patience_s):
                self._say_who_is_missing(what)
            work.wait()
        except RuntimeError as error:
            missing = self._find_missing(self._here)
            whom = f"rank {listed(missing)}" if missing else "the others"
            raise TrimtabError(
                f"rank {self.rank} of {self.num_ranks} waited {time.monotonic() - start:.0f} s at {what} for {whom}, "
                f"or a process ended: every rank must run the same calls; where some have no image, use "
                f"`vision_heartbeat` ({str(error).splitlines()[0]})"
            ) from error

    def _say_who_is_missing(self, what: str) -> None:
        self._find_missing(self._here)
        time.sleep(MEETING_S)
        if missing := self._find_missing(self._here):
            print(
                f"trimtab: rank {self.rank} has waited {self.patience_s:g} s at {what} for rank "
                f"{listed(missing)} of {self.num_ranks}; it gives up after {self.timeout_s:g} s",
                file=sys.stderr,
                flush=True,
            )

    @property
    def _here(self) -> str:
        return f"exchange {self.num_exchanges}"

    def _find_missing(self, place: str) -> list[int]:
        """Ranks that have not said that they wait at this place; this one does."""
        here = f"{self.prefix}/waits/{place}"
        try:
            self.store.set(f"{here}/{self.rank}", "here")
            return [rank for rank in range(self.num_ranks) if not self.store.check([f"{here}/{rank}"])]
        except RuntimeError:  # the process that keeps the store has ended
            return []


def _is_done(work: Any, seconds: float) -> bool:
    """Whether it ended, well or badly, in that time; a wait that is too short leaves the work as it is."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        return bool(work.is_completed())
    return True


def open_control(group: Any, timeout_s: float, patience_s: float = PATIENCE_S) -> Control:
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
        patience_s=patience_s,
        store=store,
        prefix=prefix,
    )
    control.gather("vision_dp", None)  # a rank that is done and closes early would break off others that still connect
    return control


def fingerprint(words: Sequence[object], tensors: Sequence[Tensor]) -> int:
    """64 bits of everything that must be equal: of a tensor its type, shape and 64 elements spread over it."""
    digest = hashlib.blake2b(repr(tuple(words)).encode(), digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        step = max(1, len(flat) // 64)
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(flat[::step].to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def differing_ranks(values: Sequence[Hashable]) -> list[int]:
    """Ranks whose value is not that of most; of equally common ones the first counts as the rule."""
    usual = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != usual]


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
