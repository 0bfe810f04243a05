"""What the other ranks of a group have written, who of them is late, and how that is told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trimtab.runtime.watch.places import Place, Record, clock, key_of


@dataclass(frozen=True, slots=True)
class Late:
    """A rank that others wait for."""

    rank: int
    waited_s: float
    is_silent: bool  # it has written nothing for so long that it must be stopped or have ended


@dataclass(frozen=True, slots=True)
class Heard:
    """The last that a rank has written."""

    record: Record
    changed: float  # when this rank first read it


@dataclass(slots=True, kw_only=True, eq=False)
class Others:
    """All ranks but `rank`, as far as this one has read of them. Times are of `time.monotonic`."""

    rank: int
    num_ranks: int
    patience_s: float
    heard: dict[int, Heard] = field(default_factory=dict)
    answered: float = field(default_factory=time.monotonic)  # the store, last
    awake: float = field(default_factory=time.monotonic)  # since then this process was not stopped itself

    def ranks(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.rank]

    def read(self, store: Any) -> None:
        keys = [key_of(rank) for rank in self.ranks()]
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        for rank, text in zip(self.ranks(), found, strict=True):
            record = Record(**json.loads(text))
            if rank not in self.heard or record.beat != self.heard[rank].record.beat:
                self.heard[rank] = Heard(record, time.monotonic())
        self.answered = time.monotonic()

    def waited_s(self, place: Place) -> float:
        """By this rank, not counting the time in which it was stopped itself."""
        return time.monotonic() - max(place.since, self.awake)

    def late_at(self, place: Place) -> list[Late]:
        """Whom this rank waits for at its `place`."""
        now = time.monotonic()
        # rank 0 keeps the store, or torchrun beside it does
        if self.rank and now - max(self.answered, self.awake) >= self.patience_s:
            return [Late(0, now - self.answered, True)]
        found = []
        for rank, heard in sorted(self.heard.items()):
            if not heard.record.has_left and self.answered - heard.changed >= self.patience_s:
                found.append(Late(rank, min(now - heard.changed, self.waited_s(place)), True))
            elif not _is_or_was_at(place, heard.record):
                found.append(Late(rank, self.waited_s(place), False))
        return found

    def has_left(self, rank: int) -> bool:
        return rank in self.heard and self.heard[rank].record.has_left

    def first_speaks(self, late: Iterable[Late]) -> bool:
        """Whether rank 0 waits as well, and so says it; else the last rank does."""
        if any(x.rank == 0 for x in late):
            return False
        return any(waits for _, waits, _ in self.heard[0].record.places)

    def describe(self, late: Iterable[Late]) -> str:
        """ "rank 1 of 4 (process 412 on node-3), which does not answer since 12:03:04 (it was at step 7 since ...)"."""
        told = []
        for each in late:
            name = f"rank {each.rank} of {self.num_ranks}"
            heard = self.heard.get(each.rank)
            told.append(name if heard is None else f"{name} ({heard.record.who}), which {_state(heard, each)}")
        return "; ".join(told[:4]) + (f"; and {len(told) - 4} more" if len(told) > 4 else "")


def _is_or_was_at(place: Place, record: Record) -> bool:
    if place.name in [name for name, *_ in record.places]:
        return True
    return place.number is not None and record.number >= place.number


def _state(heard: Heard, late: Late) -> str:
    """Behind "which"."""
    record = heard.record
    if record.has_left:
        return "has left"
    if late.is_silent:
        where = f" (it was at {record.at()})" if record.places else ""
        return f"does not answer since {clock(time.monotonic() - heard.changed)}{where}"
    return f"is at {record.at()}" if record.places else "has not come there"


def listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
