"""One request on its way through the model: what it asks for, what it hears, and when it has its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.cli.serving.utils import DirectStreamer, _StreamError
from transformers.generation import BaseStreamer

from trimtab.serve.batch import Inputs
from trimtab.serve.problems import RequestError


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One prompt on its way through the model. `done` gets the new tokens; a stream hears them one by one."""

    request_id: str
    inputs: Inputs
    settings: Any  # a GenerationConfig whose max_new_tokens is this request's
    decode: Callable[[list[int]], str]
    seed: int | None = None
    stops: tuple[str, ...] = ()
    streamer: Any = None
    done: Future[list[int]] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False  # set by any thread, never taken back

    def alike(self, other: Job) -> bool:
        """Whether both may run in one `generate`: all settings are the same but the number of tokens."""
        if {self.seed, other.seed} != {None} or self.settings.no_repeat_ngram_size:  # padding would make n-grams
            return False
        mine, others = ({**x.settings.to_dict(), "max_new_tokens": None} for x in (self, other))
        return mine == others

    def end(self, error: Exception | None = None) -> None:
        """Tells whoever waits; the second time nothing."""
        if self.done.done():
            return
        if self.streamer is not None and error is None:
            self.streamer.end()
        elif self.streamer is not None:
            self.streamer.fail(str(error))
        if error is None:
            self.done.set_result(self.tokens)
        else:
            self.done.set_exception(error)


class Rows(BaseStreamer, StoppingCriteria):  # type: ignore[misc]
    """Hears every token of one `generate`, gives it to its request, and stops a row at that request's own end."""

    def __init__(self, batch: Sequence[Job], ends: int | list[int] | None) -> None:
        self._batch, self._over = batch, [False] * len(batch)
        self._ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:  # `generate` puts the prompt first
            self._prompt_seen = True
            return
        for i, token in enumerate(value.reshape(-1).tolist()):
            self._over[i] = self._over[i] or self._hear(self._batch[i], token)

    def _hear(self, job: Job, token: int) -> bool:
        """Whether that was the request's last token; then it has its answer, while others go on."""
        if job.cancelled:
            job.end(gone())
            return True
        job.tokens.append(token)
        if job.streamer is not None:
            job.streamer.put(torch.tensor([token]))
        over = token in self._ends or len(job.tokens) >= job.settings.max_new_tokens
        if job.stops and not over:
            tail = job.decode(job.tokens[-max(len(x.encode()) for x in job.stops) - 4 :])
            over = any(stop in tail for stop in job.stops)
        if over:
            job.end()
        return over

    def end(self) -> None:
        pass

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.tensor(self._over, device=input_ids.device)


class Listener(DirectStreamer):  # type: ignore[misc]
    """Transformers' own streamer of one answer, fed by a batch."""

    job: Job | None = None

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self.put(torch.tensor([]))  # it takes the first for the prompt

    def cancel(self) -> None:
        if self.job is not None:
            self.job.cancelled = True

    def fail(self, message: str) -> None:
        self._enqueue(_StreamError(message))

    def _enqueue(self, item: Any) -> None:
        try:
            super()._enqueue(item)
        except RuntimeError:  # the server's loop is closed: the drain ran out of time
            self.cancel()


def gone() -> RequestError:
    return RequestError(499, "nobody waited for this answer any more")
