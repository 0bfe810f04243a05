"""One rank's watch: what its main thread calls, and the two threads that write, read and speak."""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from trimtab.errors import TrimtabError
from trimtab.runtime.watch.others import Late, Others, listed
from trimtab.runtime.watch.places import Place, Places, key_of

PATIENCE_S = 10.0
"""After so long a rank is named that others wait for."""
BEAT_S = 1.0
ANSWER_S = 10.0  # ten beats: who has written nothing in that time is taken for ended, once a connection has broken


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
    places: Places = field(init=False)
    others: Others = field(init=False)
    _reads: bool = field(init=False)
    _named: set[tuple[str, tuple[tuple[int, bool], ...]]] = field(default_factory=set)
    _closing: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = Places(rank=self.rank)
        self.others = Others(rank=self.rank, num_ranks=self.num_ranks, patience_s=self.patience_s)
        self._reads = self.rank in (0, self.num_ranks - 1)  # two of different machines: the store bears it

    # -- the main thread ----------------------------------------------------------------------------------------------

    def meet(self, place: str, words: Mapping[str, str], timeout_s: float) -> None:
        """Wait until all ranks are here; raises, on each of them, where one has other `words` or does not come."""
        self.come_to(place)
        self.store.set(f"words/{self.rank}", json.dumps(words))
        self.places.write(self.store)
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
        for run in (self._talk, self._look) if self._reads else (self._talk,):
            self._threads.append(threading.Thread(target=run, name="trimtab watch", daemon=True))
            self._threads[-1].start()
        atexit.register(self.close)  # a process that ends while a thread of it is in the store's code is aborted

    def come_to(self, name: str | None, *, waits: bool = True, advice: str = "") -> None:
        """The main thread is at this place now; None: anywhere. All ranks come to the same ones in one order."""
        self.places.come_to(name, waits=waits, advice=advice)

    def wait_for(self, work: Any, place: str, result: Tensor, *, may_skip: bool, advice: str = "") -> None:
        """`work.wait()`, watched; on a GPU that only queues the wait, so an event after it tells its end.

        `may_skip`: other ranks may pass without this collective, as one that runs no backward does.
        """
        self.places.wait_for(work, place, result, may_skip=may_skip, advice=advice)

    def find_missing(self) -> list[Late]:
        """Ranks that have ended, or are not at this rank's place, once a wait has failed; takes ANSWER_S at most."""
        self._reads, began = True, time.monotonic()
        first: dict[int, int] = {}
        silent = self.others.ranks()
        while silent and time.monotonic() - began < ANSWER_S:
            time.sleep(self._period / 4)
            for rank, heard in self.others.heard.items() if self.others.answered > began else ():
                if heard.record.has_left or heard.record.beat > first.setdefault(rank, heard.record.beat):
                    silent = [other for other in silent if other != rank]
        here = self.places.current
        late = [] if here is None else [x for x in self.others.late_at(here) if x.rank not in silent]
        return [Late(rank, 0.0, True) for rank in silent] + late

    @property
    def place(self) -> str:
        return "its end" if self.places.current is None else self.places.current.name

    def has_left(self, rank: int) -> bool:
        return self.others.has_left(rank)

    def describe(self, late: Iterable[Late]) -> str:
        return self.others.describe(late)

    def close(self) -> None:
        """This rank has left; harmless when it was closed already."""
        atexit.unregister(self.close)
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=ANSWER_S)  # not longer: it may wait for a store that is gone
        self._threads, self.store = [], None

    def _not_here(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if not self.store.check([key_of(rank)])]

    # -- the threads --------------------------------------------------------------------------------------------------

    @property
    def _period(self) -> float:
        return min(BEAT_S, self.patience_s / 4)

    def _talk(self) -> None:
        """Writes, and reads where that is this rank's part."""
        is_last, store = False, self.store
        while not is_last:
            is_last = self._closing.wait(self._period)
            try:
                self.places.write(store, has_left=is_last)
                if self._reads:
                    self.others.read(store)
            except RuntimeError:  # who keeps the store has ended, and with it the run
                return

    def _look(self) -> None:
        """Speaks; asks nothing of the store, which may not answer."""
        last = time.monotonic()
        while not self._closing.wait(self._period):
            now = time.monotonic()
            if now - last > self._period + BEAT_S:
                self.others.awake = now
            last = now
            for place in self.places.open():
                if place.waits and self.others.waited_s(place) >= self.patience_s:
                    self.tell(place)

    def tell(self, place: Place) -> None:
        """Whom this rank waits for there: once of each, and again of one that has stopped answering since."""
        late = self.others.late_at(place)
        if not late:
            return
        waited_s = max(x.waited_s for x in late)
        sentence = (
            f"rank {self.rank} has waited {waited_s:.0f} s (since {place.clock}) at {place.name} for "
            f"{self.describe(late)}"
        )
        if waited_s >= self.give_up_s:
            self.give_up(sentence)
        key = place.name, tuple((x.rank, x.is_silent) for x in late)
        if key not in self._named and (self.rank == 0 or not self.others.first_speaks(late)):
            self._named.add(key)
            say(sentence + place.advice)


def open_watch(group: Any, name: str, *, timeout_s: float, patience_s: float = PATIENCE_S) -> Watch:
    """Of the ranks of a group that is there (None: all), which all call this: they are named, and the run goes on.

    Raises where a rank has not come after `timeout_s`.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    rank, members = ranks.index(dist.get_rank()), "-".join(map(str, ranks))
    # private: the only store that all processes share, torch 2.6 to 2.13
    store: Any = dist.distributed_c10d._get_default_store()
    opened = store.add(f"trimtab/{name}/{members}/{rank}", 1)  # by this rank, for these: the same number on each
    # a connection serves one thread at a time, and torch's own may wait in it for minutes
    own = PrefixStore(f"trimtab/{name}/{members}/{opened}", store.clone())
    watch = Watch(rank=rank, num_ranks=len(ranks), store=own, patience_s=patience_s)
    watch.meet(f"the start of {name}", {}, timeout_s)
    return watch


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


def say(sentence: str) -> None:
    """On this rank, whatever the others say."""
    print(f"trimtab: {sentence}", file=sys.stderr, flush=True)
