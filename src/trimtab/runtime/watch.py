"""Whom the ranks of a group wait for, where and since when: said while they wait.

A collective tells nobody who is missing. So a thread of every rank writes once a second into the store of torch's
processes that the rank is there, and at which place of the program. A rank that is stopped or has ended no longer does;
one that is late is at another place. The first and the last rank read what all have written, and a second thread of
theirs, which never waits for the store, names whom an old wait is for.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from trimtab.errors import TrimtabError

PATIENCE_S = 10.0
"""After so long a rank is named that others wait for."""
BEAT_S = 1.0
ANSWER_S = 10.0  # ten beats: who has written nothing in that time is taken for ended, once a connection has broken


@dataclass(slots=True, eq=False)
class Place:
    """Where a rank is; `is_over` is asked by the threads."""

    name: str  # "step 7": the same words on every rank
    number: int | None  # of those to which all ranks come in one order; None: other ranks may skip it
    waits: bool = True  # for other ranks; False: they may wait for this one
    advice: str = ""
    is_over: Callable[[], bool] = lambda: False
    since: float = field(default_factory=time.monotonic)
    clock: str = field(default_factory=lambda: _clock(0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a rank writes about itself."""

    who: str  # "process 412 on node-3"
    beat: int
    number: int  # of the place it came to last
    places: list[list[Any]]  # name, waits, clock: of those where it is
    has_left: bool

    def at(self) -> str:
        return " and ".join(f"{name} since {clock}" for name, _, clock in self.places)


@dataclass(frozen=True, slots=True)
class Late:
    """A rank that others wait for."""

    rank: int
    waited_s: float
    is_silent: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Watch:
    """One rank's places in one group, and what it knows of the others; `meet` begins it, `close` ends it."""

    rank: int
    num_ranks: int
    store: Any  # a connection of its own: the main thread may wait in its one
    patience_s: float = PATIENCE_S
    give_up_s: float = float("inf")
    give_up: Callable[[str], object] = print  # called by a thread, with the sentence, after so long
    ending: threading.Lock = field(default_factory=threading.Lock)  # of the thread that ends this rank; never let go
    _place: Place | None = None
    _number: int = 0
    _beat: int = 0
    _waits: list[Place] = field(default_factory=list)  # backwards
    _seen: dict[int, tuple[Record, float]] = field(default_factory=dict)  # and when it last changed
    _answered: float = field(default_factory=time.monotonic)  # the store
    _awake: float = field(default_factory=time.monotonic)  # since then this process was not stopped itself
    _named: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _reads: bool = field(init=False)

    def __post_init__(self) -> None:
        self._reads = self.rank in (0, self.num_ranks - 1)  # two of different machines: the store bears it

    # -- the main thread ----------------------------------------------------------------------------------------------

    def meet(self, place: str, words: Mapping[str, str], timeout_s: float) -> None:
        """Wait until all ranks are here; raises, on each of them, where one has other `words` or does not come."""
        self.come_to(place)
        self.store.set(f"words/{self.rank}", json.dumps(words))
        self._write(self.store)
        began, is_told = time.monotonic(), False
        while not self.store.check(["met"]):
            waited_s = time.monotonic() - began
            missing = self._not_here() if self._reads else []
            if self.rank == 0 and not missing:
                self.store.set("met", _difference([self.store.get(f"words/{r}") for r in range(self.num_ranks)]))
            whom = f"rank {listed(missing)} of {self.num_ranks}" if missing else "the others"
            sentence = f"rank {self.rank} has waited {waited_s:.0f} s at {place} for {whom}"
            if waited_s >= timeout_s:
                raise TrimtabError(f"{sentence}: start every rank, or wait longer where starting takes so long")
            if missing and waited_s >= self.patience_s and not is_told and self.rank not in range(1, missing[0]):
                is_told = True
                say(sentence)
            time.sleep(min(0.01 + waited_s / 10, BEAT_S))
        if problem := self.store.get("met").decode():
            raise TrimtabError(problem)
        self.come_to(None)
        self._threads += [threading.Thread(target=run, name="trimtab watch", daemon=True) for run in self._runs()]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a process that ends while a thread of it is in the store's code is aborted

    def come_to(self, name: str | None, *, waits: bool = True, advice: str = "") -> None:
        """The main thread is at this place now; None: anywhere. All ranks come to the same ones in one order."""
        self._number += name is not None
        self._place = None if name is None else Place(name, self._number, waits, advice)

    def wait_for(self, work: Any, place: str, result: Tensor, advice: str = "") -> None:
        """`work.wait()`, watched; on a GPU that only queues the wait, so an event behind it tells its end."""
        wait = Place(place, None, True, advice)
        with self._lock:
            self._waits.append(wait)
        work.wait()
        if result.device.type == "cpu":
            wait.is_over = lambda: True
        else:
            event = torch.Event(device=result.device)
            event.record()
            wait.is_over = event.query

    def find_missing(self) -> list[Late]:
        """Ranks that have ended, or are not at this rank's place, once a wait has failed; takes ANSWER_S at most."""
        self._reads, began = True, time.monotonic()
        first: dict[int, int] = {}
        silent = self._others()
        while silent and time.monotonic() - began < ANSWER_S:
            time.sleep(self._period / 4)
            for rank, (record, _) in self._seen.items() if self._answered > began else ():
                if record.has_left or record.beat > first.setdefault(rank, record.beat):
                    silent = [other for other in silent if other != rank]
        late = [] if self._place is None else [x for x in self._late(self._place) if x.rank not in silent]
        return [Late(rank, 0.0, True) for rank in silent] + late

    @property
    def place(self) -> str:
        return "its end" if self._place is None else self._place.name

    def has_left(self, rank: int) -> bool:
        return rank in self._seen and self._seen[rank][0].has_left

    def describe(self, late: Iterable[Late]) -> str:
        """ "rank 1 of 4 (process 412 on node-3), which does not answer since 12:03:04 (it was at step 7 since ...)"."""
        told = []
        for each in late:
            record, changed = self._seen.get(each.rank, (None, 0.0))
            if record is None:
                told.append(f"rank {each.rank} of {self.num_ranks}")
                continue
            state = f"is at {record.at()}" if record.places else "has not come there"
            if record.has_left:
                state = "has left"
            elif each.is_silent:
                where = f" (it was at {record.at()})" if record.places else ""
                state = f"does not answer since {_clock(time.monotonic() - changed)}{where}"
            told.append(f"rank {each.rank} of {self.num_ranks} ({record.who}), which {state}")
        return "; ".join(told[:4]) + (f"; and {len(told) - 4} more" if len(told) > 4 else "")

    def close(self) -> None:
        """This rank has left; harmless when it was closed already."""
        atexit.unregister(self.close)
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=ANSWER_S)  # not longer: it may wait for a store that is gone
        self._threads, self.store = [], None

    # -- the threads --------------------------------------------------------------------------------------------------

    @property
    def _period(self) -> float:
        return min(BEAT_S, self.patience_s / 4)

    def _runs(self) -> Iterator[Callable[[], None]]:
        yield self._talk
        if self._reads:
            yield self._look

    def _talk(self) -> None:
        """Writes, and reads where that is this rank's part."""
        is_last, store = False, self.store
        while not is_last:
            is_last = self._closing.wait(self._period)
            try:
                self._write(store, has_left=is_last)
                if self._reads:
                    self._read(store)
            except RuntimeError:  # who keeps the store has ended, and with it the run
                return

    def _write(self, store: Any, *, has_left: bool = False) -> None:
        self._beat += 1
        record = Record(
            who=f"process {os.getpid()} on {socket.gethostname()}",
            beat=self._beat,
            number=self._number,
            places=[[place.name, place.waits, place.clock] for place in self._open()],
            has_left=has_left,
        )
        store.set(f"rank/{self.rank}", json.dumps(asdict(record)))

    def _read(self, store: Any) -> None:
        keys = [f"rank/{rank}" for rank in self._others()]
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        for rank, text in zip(self._others(), found, strict=True):
            record = Record(**json.loads(text))
            if rank not in self._seen or record.beat != self._seen[rank][0].beat:
                self._seen[rank] = record, time.monotonic()
        self._answered = time.monotonic()

    def _look(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(self._period):
            now = time.monotonic()
            if now - last > self._period + BEAT_S:
                self._awake = now
            last = now
            for place in self._open():
                if place.waits and now - self._since(place) >= self.patience_s:
                    self._say(place)

    def _open(self) -> list[Place]:
        with self._lock:
            self._waits = [place for place in self._waits if not place.is_over()]
            return [place for place in (self._place, *self._waits) if place is not None]

    def _say(self, place: Place) -> None:
        late = self._late(place)
        if not late:
            return
        waited_s = max(x.waited_s for x in late)
        sentence = (
            f"rank {self.rank} has waited {waited_s:.0f} s (since {place.clock}) at {place.name} for "
            f"{self.describe(late)}"
        )
        if waited_s >= self.give_up_s:
            self.give_up(sentence)
        key = place.name, tuple(x.rank for x in late)
        if key not in self._named and self._speaks(late):
            self._named.add(key)
            say(sentence + place.advice)

    def _speaks(self, late: list[Late]) -> bool:
        """The first rank, or the last one where the first is not among those that wait."""
        if self.rank == 0 or any(x.rank == 0 for x in late):
            return True
        record, _ = self._seen[0]
        return not any(waits for _, waits, _ in record.places)

    def _since(self, place: Place) -> float:
        """Not the time in which this rank itself was stopped."""
        return max(place.since, self._awake)

    def _late(self, place: Place) -> list[Late]:
        now, found = time.monotonic(), []
        if (
            self.rank and now - max(self._answered, self._awake) >= self.patience_s
        ):  # rank 0 keeps it, or torchrun there
            return [Late(0, now - self._answered, True)]
        for rank, (record, changed) in sorted(self._seen.items()):
            if not record.has_left and self._answered - changed >= self.patience_s:
                found.append(Late(rank, now - max(changed, self._since(place)), True))
            elif place.name not in [name for name, *_ in record.places] and (
                place.number is None or record.number < place.number
            ):
                found.append(Late(rank, now - self._since(place), False))
        return found

    def _others(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.rank]

    def _not_here(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if not self.store.check([f"rank/{rank}"])]


def open_watch(group: Any, name: str, *, timeout_s: float, patience_s: float = PATIENCE_S) -> Watch:
    """Of the ranks of a group that is there (None: all), which all call this: they are named, and the run goes on.

    Raises where a rank has not come after `timeout_s`.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    rank, members = ranks.index(dist.get_rank()), "-".join(map(str, ranks))
    # private: the only store that all processes share, torch 2.6 to 2.13
    store = dist.distributed_c10d._get_default_store()
    opened = store.add(f"trimtab/{name}/{members}/{rank}", 1)  # by this rank, for these: the same number on each
    own = PrefixStore(f"trimtab/{name}/{members}/{opened}", own_connection(store))
    watch = Watch(rank=rank, num_ranks=len(ranks), store=own, patience_s=patience_s)
    watch.meet(f"the start of {name}", {}, timeout_s)
    return watch


def own_connection(store: Any) -> Any:
    """To the same store: one connection serves one thread at a time, and torch's own may wait in it for minutes."""
    return store.clone() if hasattr(store, "clone") else store  # before torch 2.8


def listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _difference(words: list[bytes]) -> str:
    """A sentence about the first rank whose words are not those of rank 0; empty: all are alike."""
    first, *others = map(json.loads, words)
    for rank, own in enumerate(others, 1):
        for name, value in first.items():
            if own[name] != value:
                return (
                    f"rank {rank} was started with {name} {own[name]}, and rank 0 with {value}: start every rank by "
                    "the same command, with the same files"
                )
    return ""


def _clock(ago_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - ago_s))


def say(sentence: str) -> None:
    """On this rank, whatever the others say."""
    print(f"trimtab: {sentence}", file=sys.stderr, flush=True)
