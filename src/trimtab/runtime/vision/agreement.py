"""What the ranks of a group agree on before they exchange images: small values, over gloo on the CPU.

No device waits for these exchanges. A rank that differs, or that fails, raises on all ranks at once.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.balance.images import ImageShares
from trimtab.errors import TrimtabError
from trimtab.runtime.ranks import Watch, join_words, listed, open_watch
from trimtab.runtime.vision.inputs import Features, Kind, VisionInputs
from trimtab.specs import IntArray

_FIRST_BYTES = 256  # of the first exchange: a value that is no longer needs no second one
_LENGTH_BYTES = 8


@dataclass(slots=True, kw_only=True, eq=False)
class Control:
    """The ranks of one group, able to exchange small Python values until `close`."""

    gloo: Any  # only of these ranks, for nothing else: a call of another kind cannot be taken for one of ours
    rank: int  # within the group
    num_ranks: int
    watch: Watch

    def gather(self, what: str, value: object) -> list[Any]:
        """The value of every rank, in rank order.

        `what` names the place in the program: ranks that are at different ones all raise. One exchange of 256 bytes,
        and one of the rest where a rank has more.
        """
        # nearly all values fit one exchange of a fixed size; where one does not, all send the rest, padded alike
        own = pickle.dumps((what, value))
        room = _FIRST_BYTES - _LENGTH_BYTES
        heads = self._exchange(len(own).to_bytes(_LENGTH_BYTES, "little") + own[:room].ljust(room, b"\0"), what)
        answers = [head[_LENGTH_BYTES:] for head in heads]
        longest = max(int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads)
        if longest > room:
            rest = self._exchange(own[room:].ljust(longest - room, b"\0"), what)
            answers = [first + more for first, more in zip(answers, rest, strict=True)]
        # ranks at different places in the program say so, instead of reading one another's values
        found = [pickle.loads(text) for text in answers]  # noqa: S301 (what ranks of this run have sent)
        if len({place for place, _ in found}) > 1:
            where = ", ".join(f"rank {rank} at {place}" for rank, (place, _) in enumerate(found))
            raise TrimtabError(f"ranks that share images are not at one call ({where}): run the same forwards")
        return [sent for _, sent in found]

    def gather_unless(self, problem: Exception | None, what: str, value: object, *, failed: str) -> list[Any]:
        """Gather; raise on all ranks where one has a problem, there the problem itself.

        `failed` is the sentence for the other ranks, with {} for the names of those that have one.
        """
        answers = self.gather(what, (problem is None, None if problem is not None else value))
        if problem is not None:
            raise problem
        if failing := [rank for rank, (is_well, _) in enumerate(answers) if not is_well]:
            consequence = TrimtabError(failed.format(listed(failing)))
            consequence.is_said = True  # by those ranks
            raise consequence
        return [sent for _, sent in answers]

    def send(self, value: object, source: int, what: str) -> Any:
        """The value of rank `source`, on every rank; what others give is not looked at."""
        own = pickle.dumps(value) if self.rank == source else b""
        size = self._broadcast(torch.tensor([len(own)]), source, what)
        content = torch.frombuffer(bytearray(own.ljust(int(size), b"\0")), dtype=torch.uint8)
        return pickle.loads(self._broadcast(content, source, what).numpy().tobytes())  # noqa: S301 (as above)

    def close(self) -> None:
        """Ends the connections; harmless when that was done already."""
        self.watch.close()
        self.gloo = None

    def _exchange(self, own: bytes, what: str) -> list[bytes]:
        """Exchange equally many bytes of every rank."""
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
        start = time.monotonic()
        self.watch.arrive()
        try:
            collective().wait()
        except RuntimeError as error:
            waited_s, missing = time.monotonic() - start, self.watch.find_missing()
            raise TrimtabError(
                f"rank {self.rank} of {self.num_ranks} waited {waited_s:.0f} s at {what} for "
                f"{join_words(missing) or 'the others'}: run the same calls on every rank, or use `vision_heartbeat`"
            ) from error


def open_control(group: Any, timeout_s: float) -> Control:
    """Connects the ranks of `group`; all of them must call this, others need not. Closed when nothing holds it.

    Not by `new_group`: that names a group of some ranks by how many groups each of them is in, and ranks in unequally
    many would wait for one another.
    """
    name, timeout = "sharing images", timedelta(seconds=timeout_s)
    watch = open_watch(group, name, timeout_s=timeout_s)
    gloo = dist.ProcessGroupGloo(watch.store, watch.rank, watch.num_ranks, timeout)
    control = Control(gloo=gloo, rank=watch.rank, num_ranks=watch.num_ranks, watch=watch)
    control.gather(f"the start of {name}", None)  # a rank that closes early would break others off that connect
    return control


def fingerprint(words: Sequence[object], tensors: Sequence[Tensor]) -> int:
    """Return 64 bits of everything that must be equal: of a tensor its type, shape and 64 elements spread over it."""
    digest = hashlib.blake2b(repr(tuple(words)).encode(), digest_size=8)
    for tensor in tensors:
        # 64 elements tell other images apart; all of them would be copied from the device
        flat = tensor.detach().reshape(-1)
        step = max(1, len(flat) // 64)
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(flat[::step].to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def differing_ranks(values: Sequence[Hashable]) -> list[int]:
    """Return the ranks whose value is not that of most; of equally common ones the first counts as the rule."""
    usual = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != usual]


# -- before, in and behind a call of the tower ------------------------------------------------------------------------


def agree_on_inputs(
    control: Control, name: str, words: Sequence[object], inputs: VisionInputs | None, problem: Exception | None
) -> None:
    """Raise where a rank refused what it was given, or was given other images; `inputs` None compares only `words`."""
    parts = () if inputs is None else inputs.parts
    lengths = [(part.name, part.lengths.tolist()) for part in parts]
    fixed = [] if inputs is None else sorted(inputs.fixed)
    mark = fingerprint([*words, lengths, fixed, torch.is_grad_enabled()], [part.rows for part in parts])
    failed = f"rank {{}} refused what {name} was given: see its own message"
    if others := differing_ranks(control.gather_unless(problem, name, mark, failed=failed)):
        if inputs is None:
            raise TrimtabError(
                f"rank {listed(others)} called {name} with tensors or gradients of another form, or another rule or "
                "cost: use one processor and one call of vision_dp on every rank"
            )
        raise TrimtabError(
            f"rank {listed(others)} called {name} with other images or settings: give the same, or exchange='dispatch'"
        )


def compare_kinds(control: Control, present: Sequence[Kind], kinds: Sequence[Kind]) -> list[tuple[Kind, int]]:
    """Return the kinds of images that some ranks of a forward hold and others lack, with the first that holds it."""
    held = control.gather("the start of a forward", list(present))
    ranks = {kind: [rank for rank, own in enumerate(held) if kind in own] for kind in kinds}
    return [(kind, holding[0]) for kind, holding in ranks.items() if 0 < len(holding) < len(held)]


def agree_on_rows(
    control: Control, name: str, features: Features | None, shares: ImageShares, problem: Exception | None
) -> IntArray:
    """Return the rows of every atom; raises where a tower failed, or features differ in type, gradient or width."""
    own = None
    if features is not None:
        own = features.num_rows.tolist(), str(features.rows.dtype), features.rows.requires_grad, features.widths
    failed = "the vision tower failed on rank {}: see its own message"
    everyone = control.gather_unless(problem, f"the end of {name}", own, failed=failed)
    # a tower in another precision, or frozen on one rank alone, would end in a hang of the backward
    counts, *kinds = zip(*everyone, strict=True)
    for column, what in zip(kinds, ("another type", "another need of gradients", "other widths"), strict=True):
        if others := differing_ranks(column):
            raise TrimtabError(f"rank {listed(others)} has image features of {what}: use one precision and freezing")
    # what each rank counted of its own atoms, in the order of the batch
    num_rows = np.empty(len(shares.order), np.int64)
    for rank, counted in enumerate(counts):
        num_rows[shares.atoms_of(rank)] = counted
    return num_rows
