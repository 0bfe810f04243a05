"""The one thread that owns the model: answers requests one at a time, in the order in which they were accepted."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trimtab.serve.answers import Done, Event, Piece
from trimtab.serve.chat import ChatRequest
from trimtab.serve.limits import ServeLimits
from trimtab.serve.metrics import Metrics
from trimtab.serve.problems import RequestError
from trimtab.serve.text import TextPieces

if TYPE_CHECKING:
    from trimtab.serve.model import ChatModel

_LOG = logging.getLogger("trimtab.serve")
_FAILURES_TO_BE_SICK = 3
_GONE = "the client went away"
_NEWEST_SHARE = 0.2  # of the running mean of answering times


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the model; `events` belongs to the event loop, the rest to the model's thread."""

    request: ChatRequest
    loop: asyncio.AbstractEventLoop
    accepted_at: float  # of time.monotonic
    max_request_s: float
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    cancelled: bool = False  # set by either thread, never taken back

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.accepted_at

    @property
    def too_old(self) -> bool:
        return self.age_s > self.max_request_s

    def overdue(self) -> RequestError:
        return RequestError(
            504,
            f"the answer was not done after {self.max_request_s:g} s, the waiting included: ask for fewer tokens, or "
            "try when fewer wait",
            code="timeout",
        )

    def tell(self, event: Event) -> None:
        """To the event loop, from the model's thread."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop is closed: the drain ran out of time
            self.cancelled = True


class ModelThread:
    """A bounded number of places, and one queue: first come, first served."""

    def __init__(self, model: ChatModel, limits: ServeLimits, metrics: Metrics) -> None:
        self._model, self._limits, self._metrics = model, limits, metrics
        self._jobs: deque[Job] = deque()
        self._places = limits.max_waiting + 1
        self._changed = threading.Condition()  # holds the jobs, the places and whether to stop
        self._stopping = False
        self._failures = 0  # in a row
        self._recent_s = 0.0  # of an answer: a place is free again about so often
        self._thread = threading.Thread(target=self._run, name="trimtab-model")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended; jobs that are still queued are answered first."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and self._failures < _FAILURES_TO_BE_SICK

    def enter(self) -> None:
        """Takes a place, or raises `RequestError` 429."""
        with self._changed:
            if self._places == 0:
                raise RequestError(
                    429,
                    f"{self._limits.max_waiting + 1} requests are being served or wait already: try again shortly",
                    code="rate_limit_exceeded",
                    retry_after_s=max(1, math.ceil(self._recent_s)),
                )
            self._places -= 1
        self._metrics.waiting.inc()

    def leave(self) -> None:
        """Gives back a place whose job was never submitted."""
        self._metrics.waiting.dec()
        self._free()

    def submit(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def abandon(self, job: Job) -> None:
        """Nobody wants the answer: a job that waits gives its place back, one being answered ends at its next token.

        On the event loop's thread, whose queue gets an end.
        """
        job.cancelled = True
        with self._changed:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
            self._places += 1
        self._metrics.waiting.dec()
        job.events.put_nowait(RequestError(499, _GONE))

    def _free(self) -> None:
        with self._changed:
            self._places += 1

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopping)
            return self._jobs.popleft() if self._jobs else None

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._metrics.waiting.dec()
            self._metrics.queue_s.observe(job.age_s)
            began = time.monotonic()
            with self._metrics.running.track_inprogress():
                outcome = self._outcome(job)
            self._recent_s += _NEWEST_SHARE * (time.monotonic() - began - self._recent_s)
            self._free()  # before the client hears of the end: its next request must find the place free
            job.tell(outcome)

    def _outcome(self, job: Job) -> Done | RequestError:
        try:
            done = self._answer(job)
        except RequestError as error:
            return error
        except Exception:  # one request's failure, of whatever kind, must not end the others'
            _LOG.exception("a request failed in the model")
            self._failures += 1
            return RequestError(500, "the model failed on this request: the server's log says why")
        self._failures = 0
        return done

    def _answer(self, job: Job) -> Done:
        _check_alive(job)
        request, metrics = job.request, self._metrics
        prompt = self._model.prepare(request)
        metrics.images.inc(len(request.pictures))
        metrics.prompt_tokens.inc(prompt.num_tokens)
        tokenizer = self._model.tokenizer
        pieces = TextPieces(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), request.stop)
        count = 0

        def on_token(token: int) -> bool:
            nonlocal count
            count += 1
            if count == 1:
                metrics.first_token_s.observe(job.age_s)
            if text := pieces.push(token):
                job.tell(Piece(text))
            return not (pieces.stopped or job.cancelled or job.too_old)

        ended = self._model.generate(prompt, request, on_token)
        metrics.new_tokens.inc(count)
        if not ended and not pieces.stopped and count < request.max_new_tokens:
            _check_alive(job)
        if text := pieces.finish():
            job.tell(Piece(text))
        metrics.answer_s.observe(job.age_s)
        return Done(
            finish_reason="stop" if ended or pieces.stopped else "length",
            prompt_tokens=prompt.num_tokens,
            new_tokens=count,
        )


def _check_alive(job: Job) -> None:
    if job.cancelled:
        raise RequestError(499, _GONE)
    if job.too_old:
        raise job.overdue()
