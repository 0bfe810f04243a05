"""A rank that waits in a backward which another rank skipped says so, and for whom, while it waits.

Backwards exchange gradients by the host's own collectives, which tell nobody who is missing. So each such wait is
noted, and a thread looks at the notes that have grown old: then every waiting rank says in the processes' store that it
is here, and names those that have not. Until then a wait costs a note in memory and, on a GPU, one event.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MEETING_S = 0.5
"""The others have waited about as long as this rank: so long it leaves them to say that they are here."""


@dataclass(slots=True, eq=False)
class Wait:
    """One exchange of one backward; `is_over` is asked by the thread."""

    place: str  # "the backward of get_image_features, call 7": the same words on every rank
    is_over: Callable[[], bool] = lambda: False
    since: float = field(default_factory=time.monotonic)
    clock: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))


@dataclass(slots=True, kw_only=True, eq=False)
class Watch:
    """The waits of one rank in one group, and the thread that looks after them once there is one."""

    rank: int
    num_ranks: int
    patience_s: float
    find_missing: Callable[[str], list[int]]  # says that this rank is at a place, and who has not said so
    _waits: deque[Wait] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_looking: bool = False

    def wait_for(self, work: Any, place: str, result: Tensor) -> None:
        """`work.wait()`, watched; on a GPU that only queues the wait, so an event behind it tells its end."""
        wait = Wait(place)
        with self._lock:
            self._waits.append(wait)
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._look, name="trimtab watch", daemon=True).start()
        work.wait()
        if result.device.type == "cpu":
            wait.is_over = lambda: True
        else:
            event = torch.Event(device=result.device)
            event.record()
            wait.is_over = event.query

    def _look(self) -> None:
        """Ends when there is nothing to look after: a group that is closed keeps no thread."""
        while True:
            with self._lock:
                if not self._waits:
                    self._is_looking = False
                    return
                oldest = self._waits.popleft()
            time.sleep(max(0.0, oldest.since + self.patience_s - time.monotonic()))
            if not oldest.is_over():
                self._say(oldest)

    def _say(self, wait: Wait) -> None:
        self.find_missing(wait.place)
        time.sleep(MEETING_S)
        missing = self.find_missing(wait.place)
        if missing and not wait.is_over():
            named = ", ".join(map(str, missing))
            print(
                f"trimtab: rank {self.rank} has waited {self.patience_s:g} s (since {wait.clock}) in {wait.place} for "
                f"rank {named} of {self.num_ranks}, which has not come there: every rank must run the backward of "
                "every forward, with a loss of zero where it has nothing to learn",
                file=sys.stderr,
                flush=True,
            )
