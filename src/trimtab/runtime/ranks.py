"""The processes of a run: torchrun's group, whom its ranks wait for, and what becomes of it when one fails.

A collective does not say who is missing. So a thread of every rank writes once a second into the store of torch's
processes: that the rank is alive, and how many common places of the program it has come to. The first and the last rank
read what all have written. A rank that has stopped writing, or has not come as far as one that waits, is named once.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimtab.errors import PlanError, TrimtabError

PATIENCE_S = 10.0  # after so long a rank is named that others wait for
BEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank writes about itself."""

    who: str  # "process 412 on node-3"
    number: int  # of this beat
    places: int  # common places that the rank has come to
    has_left: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A rank that others wait for."""

    rank: int
    waited_s: float
    is_silent: bool  # it writes no more: it is stopped or has ended
    words: str  # "rank 1 of 2 (process 412 on node-3), which does not answer"


@dataclass(slots=True, kw_only=True, eq=False)
class Watch:
    """One rank's beat, and what it has read of the others; `meet` begins it, `close` ends it."""

    rank: int
    num_ranks: int
    store: Any  # a connection of its own: the main thread may wait in another one
    patience_s: float = PATIENCE_S
    give_up_s: float = float("inf")
    give_up: Callable[[str], object] = print  # called by the thread, with the sentence, after so long
    ending: threading.Lock = field(default_factory=threading.Lock)  # of the thread that ends this rank; never let go
    _places: int = 0
    _since: float = field(default_factory=time.monotonic)  # at the last place
    _awake: float = field(default_factory=time.monotonic)  # since then this process was not stopped itself
    _number: int = 0
    _reads: bool = False
    _asked: float = 0.0  # when the last read that the store has answered began
    _is_cut_off: bool = False  # the store does not answer
    _heard: dict[int, tuple[Beat, float]] = field(default_factory=dict)  # and when this rank first read it
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def meet(self, words: Mapping[str, str], timeout_s: float) -> None:
        """Wait until all ranks have begun; raises, on each of them, where one has other `words` or does not come."""
        self._reads = self.rank in (0, self.num_ranks - 1)
        self.beat()  # a rank that stops before its thread writes is missed too
        self.store.set(f"words/{self.rank}", json.dumps(words))
        began, is_named = time.monotonic(), False
        while not self.store.check(["met"]):
            waited_s = time.monotonic() - began
            missing = [r for r in range(self.num_ranks) if not self.store.check([f"words/{r}"])] if self._reads else []
            if self.rank == 0 and not missing:
                self.store.set("met", _difference([self.store.get(f"words/{r}") for r in range(self.num_ranks)]))
            whom = f"rank {listed(missing)} of {self.num_ranks}" if missing else "the others"
            sentence = f"rank {self.rank} has waited {waited_s:.0f} s at the start for {whom}"
            if waited_s >= timeout_s:
                raise TrimtabError(f"{sentence}: start every rank, or wait longer")
            if missing and waited_s >= self.patience_s and not is_named and self.rank not in range(1, missing[0]):
                is_named = True
                say(sentence)
            time.sleep(min(0.01 + waited_s / 10, BEAT_S))
        if problem := self.store.get("met").decode():
            raise TrimtabError(problem)
        self._thread = threading.Thread(target=self._run, name="trimtab watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a process that ends while a thread of it is in the store's code is aborted

    def arrive(self) -> None:
        """Say that the main thread has come to the next place where ranks wait for one another, the same on each."""
        self._places, self._since = self._places + 1, time.monotonic()

    def beat(self, *, has_left: bool = False) -> None:
        self._number += 1
        who = f"process {os.getpid()} on {socket.gethostname()}"
        own = Beat(who=who, number=self._number, places=self._places, has_left=has_left)
        self.store.set(f"beat/{self.rank}", json.dumps(asdict(own)))

    def read(self) -> None:
        """Take in what the others have written; one that has written nothing yet is left out."""
        began = time.monotonic()
        ranks = [r for r in range(self.num_ranks) if r != self.rank]
        ranks = [r for r in ranks if r in self._heard or self.store.check([f"beat/{r}"])]
        texts = self.store.multi_get([f"beat/{r}" for r in ranks]) if ranks else []
        for rank, text in zip(ranks, texts, strict=True):
            beat = Beat(**json.loads(text))
            if rank not in self._heard or beat.number != self._heard[rank][0].number:
                self._heard[rank] = beat, time.monotonic()
        self._asked = began

    def late(self) -> list[Late]:
        """Return the ranks that have kept this one waiting for `patience_s`."""
        now, found = time.monotonic(), []
        for rank, (beat, changed) in sorted(self._heard.items()):
            silent_s, waited_s = now - max(changed, self._awake), now - max(self._since, self._awake)
            if not beat.has_left and silent_s >= self.patience_s:
                found.append(self._late(rank, silent_s, is_silent=True))
            elif beat.places < self._places and waited_s >= self.patience_s:
                found.append(self._late(rank, waited_s, is_silent=False))
        return found

    def name(self) -> None:
        """Name the ranks that this one waits for, each once over all ranks; give up after `give_up_s`."""
        if not (late := self.late()):
            return
        waited_s = max(x.waited_s for x in late)
        sentence = f"rank {self.rank} has waited {waited_s:.0f} s for "
        if waited_s >= self.give_up_s:
            self.give_up(sentence + join_words(late))
        new = [
            x for x in late if self.store.add(f"named/{x.rank}/{x.is_silent}/{self._heard[x.rank][0].places}", 1) == 1
        ]
        if new:
            say(sentence + join_words(new))

    def find_missing(self) -> list[Late]:
        """Return the ranks that have ended or not come, once a wait has failed; takes `PATIENCE_S` at most."""
        self._reads, began = True, time.monotonic()
        first: dict[int, int] = {}  # beat of each rank; what a rank wrote before it ended does not count
        silent = {r for r in range(self.num_ranks) if r != self.rank}
        while silent and not self._is_cut_off and time.monotonic() - began < PATIENCE_S:
            time.sleep(self._period / 4)
            for rank, (beat, _) in list(self._heard.items()) if self._asked > began else ():
                if beat.has_left or beat.number > first.setdefault(rank, beat.number):
                    silent.discard(rank)
        if self._is_cut_off:  # rank 0 keeps the store, or torchrun next to it does
            silent = {0} - {self.rank}
        behind = {r for r, (beat, _) in self._heard.items() if beat.places < self._places}
        waited_s = time.monotonic() - began
        return [self._late(rank, waited_s, is_silent=rank in silent) for rank in sorted(silent | behind)]

    def has_left(self, rank: int) -> bool:
        return rank in self._heard and self._heard[rank][0].has_left

    def close(self) -> None:
        """Say that this rank has left; harmless when it was closed already."""
        atexit.unregister(self.close)
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=PATIENCE_S)  # not longer: it may wait for a store that is gone
        self._thread = self.store = None

    @property
    def _period(self) -> float:
        return min(BEAT_S, self.patience_s / 4)

    def _run(self) -> None:
        is_last, last = False, time.monotonic()
        while not is_last:
            is_last, now = self._closing.wait(self._period), time.monotonic()
            if now - last > self._period + BEAT_S:
                self._awake = now
            last = now
            try:
                self.beat(has_left=is_last)
                if self._reads:
                    self.read()
                    if not is_last:
                        self.name()
            except RuntimeError:  # who keeps the store has ended, and with it the run
                self._is_cut_off = True
                return

    def _late(self, rank: int, waited_s: float, *, is_silent: bool) -> Late:
        beat = self._heard[rank][0] if rank in self._heard else None
        state = "does not answer" if is_silent else "has left" if beat and beat.has_left else "has not come"
        who = f" ({beat.who})" if beat else ""
        words = f"rank {rank} of {self.num_ranks}{who}, which {state}"
        return Late(rank=rank, waited_s=waited_s, is_silent=is_silent, words=words)


def open_watch(group: Any, name: str, *, timeout_s: float) -> Watch:
    """Watch the ranks of a group that is there (None: all), which all call this.

    Raises where a rank has not come after `timeout_s`.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    rank, members = ranks.index(dist.get_rank()), "-".join(map(str, ranks))
    # private: the only store that all processes share, torch 2.6 to 2.13
    store: Any = dist.distributed_c10d._get_default_store()
    opened = store.add(f"trimtab/{name}/{members}/{rank}", 1)  # by this rank, for these: the same number on each
    # a connection serves one thread at a time, and torch's own may wait in it for minutes
    own = PrefixStore(f"trimtab/{name}/{members}/{opened}", store.clone())
    watch = Watch(rank=rank, num_ranks=len(ranks), store=own)
    watch.meet({}, timeout_s)
    return watch


def _difference(words: list[bytes]) -> str:
    """Return a sentence about the first rank whose words are not those of rank 0; empty where all are alike."""
    first, *others = map(json.loads, words)
    for rank, own in enumerate(others, 1):
        unlike = [f"{name} {own[name]}, rank 0 with {value}" for name, value in first.items() if own[name] != value]
        if unlike:
            return f"rank {rank} was started with {unlike[0]}: start all by one command, with the same files"
    return ""


def join_words(late: Iterable[Late]) -> str:
    words = [x.words for x in late]
    return "; ".join(words[:4]) + (f"; and {len(words) - 4} more" if len(words) > 4 else "")


def listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def say(sentence: str) -> None:
    """Print on this rank, whatever the others print."""
    print(f"trimtab: {sentence}", file=sys.stderr, flush=True)


# -- the process group ----------------------------------------------------------------------------------------------


Result = TypeVar("Result")

MARGIN_S = 30.0
"""Torch's own limit is so much later than ours, whose sentence says more."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """This rank's device, and who watches that the others come along; None: one process, or another's group."""

    device: torch.device
    watch: Watch | None = None
    timeout_s: float = 1800.0

    def arrive(self) -> None:
        """Say that this rank has come to the next place where all wait for one another."""
        if self.watch is not None:
            self.watch.arrive()


@contextmanager
def process_group(
    kind: Literal["cpu", "cuda"] | None,
    *,
    timeout_s: float = 1800.0,
    words: Mapping[str, str] | None = None,
    again: str = "go on from the last checkpoint (--resume)",
) -> Iterator[Ranks]:
    """Yield this rank's device; in torchrun's process group, in one already there, or in one of this process alone.

    Under torchrun a rank that others wait for is named, and after `timeout_s` the run ends; so it does where ranks were
    started with other `words`. What one rank raises, the others raise or end by, marked as said; where a rank is lost
    `again` says how to start once more.
    """
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TrimtabError("torch sees no cuda device here: ask for cpu")
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if dist.is_initialized():
        yield Ranks(device)
        return
    backend = "nccl" if kind == "cuda" else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            yield Ranks(device)
        finally:
            dist.destroy_process_group()
        return
    store = _open_store(timeout_s)
    said_on = store.clone()
    watch = Watch(
        rank=int(os.environ["RANK"]),
        num_ranks=int(os.environ["WORLD_SIZE"]),
        store=store.clone(),
        give_up_s=timeout_s,
        give_up=lambda sentence: _give_up(sentence, watch, said_on),
    )
    try:
        with _said_once(watch, said_on, again):
            watch.meet(words or {}, timeout_s)
            timeout = timedelta(seconds=timeout_s + MARGIN_S)
            dist.init_process_group(backend, store=store, rank=watch.rank, world_size=watch.num_ranks, timeout=timeout)
            yield Ranks(device, watch, timeout_s)
    finally:
        watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_store(timeout_s: float) -> Any:
    """Open torchrun's own store, or one that rank 0 keeps; keys are of this start and this call."""
    host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, is_master=keeps, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except dist.DistError:
        raise TrimtabError(
            f"rank {rank} waited {timeout_s} s for rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT): start it too, "
            "or wait longer (--set timeout)"
        ) from None
    start = f"trimtab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return PrefixStore(f"{start}/{store.add(f'{start}/{rank}', 1)}", store)


# -- a rank that fails ------------------------------------------------------------------------------------------------


@contextmanager
def _said_once(watch: Watch, store: Any, again: str) -> Iterator[None]:
    """Mark what ends all ranks as said on all but one; where a connection broke, name who has ended."""
    try:
        yield
    except (TrimtabError, OSError, RuntimeError, CheckpointException) as problem:
        watch.ending.acquire()
        if _is_lost(problem):
            lost = TrimtabError(_explain(watch, watch.find_missing(), again))
            others_left = any(watch.has_left(rank) for rank in range(watch.num_ranks))  # they have said why
            lost.is_said = others_left or not _is_first(store)
            raise lost from problem
        if isinstance(problem, (TrimtabError, OSError)) and getattr(problem, "is_said", None) is None:
            problem.is_said = not _is_first(store)  # type: ignore[union-attr]
        raise


def _is_first(store: Any) -> bool:
    """Return whether no other rank has said why the run ends."""
    try:
        return bool(store.add("said", 1) == 1)
    except RuntimeError:  # who keeps it has ended
        return True


def _is_lost(error: BaseException) -> bool:
    """Return whether it, or what it came from, is a connection's: gloo has no class of its own, but names its files.

    >>> _is_lost(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    True
    """
    seen: list[BaseException] = []  # what a disk refused is a failure of the exception that is its context
    causes = [error]
    while causes:
        cause = causes.pop()
        if isinstance(cause, dist.DistError) or "/gloo/" in str(cause):
            return True
        seen.append(cause)
        further = [cause.__cause__, cause.__context__]
        if isinstance(cause, CheckpointException):
            further += [failure[0] for failure in cause.failures.values()]
        causes += [x for x in further if x is not None and not any(x is other for other in seen)]
    return False


def _explain(watch: Watch, lost: Sequence[Late], again: str) -> str:
    """Name the ranks that a wait which failed was for."""
    if not lost:
        return f"rank {watch.rank} lost its connections to ranks that are there: see the network, or --set timeout"
    return f"the run has lost {join_words(lost)}: see its messages and the system's log, and {again}"


def _give_up(sentence: str, watch: Watch, store: Any) -> None:
    """Called by a thread: the main one waits inside a collective, and nothing else wakes it."""
    if watch.ending.acquire(blocking=False):
        if _is_first(store):
            say(f"{sentence}: see what keeps it, or wait longer (--set timeout)")
        os._exit(2)


def tell(sentence: str) -> None:
    """Say it once for all ranks."""
    if dist.get_rank() == 0:
        say(sentence)


# -- who holds what ---------------------------------------------------------------------------------------------------


def device_mesh(num_devices: int, ranks: Ranks) -> DeviceMesh:
    """Return ("pp", "dp") over all ranks, for a pipeline of `num_devices`: rank r is on pipeline device r div dp."""
    number = dist.get_world_size()
    if number % num_devices:
        raise PlanError(f"{number} processes are no multiple of {num_devices}: see torchrun --nproc-per-node")
    mesh = init_device_mesh(ranks.device.type, (num_devices, number // num_devices), mesh_dim_names=("pp", "dp"))
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # public | torch 2.13, private
    for name in ("pp", "dp"):  # a mesh's groups have torch's own limit, not the world's
        set_timeout(timedelta(seconds=ranks.timeout_s + MARGIN_S), mesh.get_group(name))
    return mesh


def on_first_rank(find: Callable[[], Result], device: torch.device) -> Result:
    """Return what `find` returns on rank 0, on every rank; what it raises of a user's input is raised on every rank.

    Collective: a problem that only rank 0 sees would leave the others waiting for it.
    """
    found: list[tuple[Result | None, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            found = [(find(), None)]
        except (TrimtabError, OSError) as problem:
            found = [(None, problem)]
    dist.broadcast_object_list(found, src=0, device=device)
    result, raised = found[0]
    if raised is not None:
        raise raised
    return result  # type: ignore[return-value]  # None only where `find` returned it
