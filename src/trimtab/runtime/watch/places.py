"""Where this rank is, and what it writes of that into the store."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Place:
    """Where a rank is; `is_over` is asked by the threads."""

    name: str  # "step 7": the same words on every rank
    number: int | None  # of those to which all ranks come in one order; None: other ranks may skip it
    waits: bool = True  # for other ranks; False: they may wait for this one
    advice: str = ""
    is_over: Callable[[], bool] = lambda: False
    since: float = field(default_factory=time.monotonic)
    clock: str = field(default_factory=lambda: clock(0.0))


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


@dataclass(slots=True, kw_only=True, eq=False)
class Places:
    """Where this rank is: where its main thread says, and the collectives whose results have not come."""

    rank: int
    current: Place | None = None
    _number: int = 0
    _beat: int = 0
    _waits: list[Place] = field(default_factory=list)  # each for a collective
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def come_to(self, name: str | None, *, waits: bool = True, advice: str = "") -> None:
        self._number += name is not None
        self.current = None if name is None else Place(name, self._number, waits, advice)

    def wait_for(self, work: Any, place: str, result: Tensor, *, may_skip: bool, advice: str = "") -> None:
        self._number += not may_skip
        wait = Place(place, None if may_skip else self._number, True, advice)
        with self._lock:
            self._waits.append(wait)
        try:
            work.wait()
        finally:
            if result.device.type == "cpu":
                wait.is_over = lambda: True
            else:
                event = torch.Event(device=result.device)
                event.record()
                wait.is_over = event.query

    def open(self) -> list[Place]:
        """That are not over."""
        with self._lock:
            self._waits = [place for place in self._waits if not place.is_over()]
            return [place for place in (self.current, *self._waits) if place is not None]

    def write(self, store: Any, *, has_left: bool = False) -> None:
        self._beat += 1
        record = Record(
            who=f"process {os.getpid()} on {socket.gethostname()}",
            beat=self._beat,
            number=self._number,
            places=[[place.name, place.waits, place.clock] for place in self.open()],
            has_left=has_left,
        )
        store.set(key_of(self.rank), json.dumps(asdict(record)))


def key_of(rank: int) -> str:
    """In the store, of its record."""
    return f"rank/{rank}"


def clock(ago_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() - ago_s))
