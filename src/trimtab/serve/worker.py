"""The one thread that owns the model: requests that wait and ask for the same kind of generation run together."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from starlette.exceptions import HTTPException
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import DirectStreamer, GenerationState, _GenerationCancelled, _StreamError
from transformers.generation import BaseStreamer

from trimtab.runtime.placing.load import move_inputs
from trimtab.serve.batch import Inputs, fit_together, join_rows, prompt_length, rows_agree
from trimtab.serve.limits import ServeLimits

_LOG = logging.getLogger("trimtab.serve")
_FAILURES_TO_BE_SICK = 3
_PAUSE_SHARE = 0.5  # of the last batch's seconds, for which the next one waits until all that are coming are there
_MAX_PAUSE_S = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One prompt on its way through the model. `done` gets the new tokens; a stream hears them one by one."""

    request_id: str
    wanted: set[str]  # requests that somebody waits for; one that is gone is left out, or ends at its next token
    inputs: Inputs
    settings: Any  # a GenerationConfig: this request's max_new_tokens, stop_strings, and its seed if it has one
    decode: Callable[[list[int]], str]
    streamer: Any = None
    done: Future[list[int]] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        return self.request_id not in self.wanted

    @property
    def seed(self) -> int | None:
        return getattr(self.settings, "seed", None)

    def alike(self, other: Job) -> bool:
        """Whether both may run in one `generate`: all settings are the same but the number of tokens."""
        if self.seed is not None or self.settings.no_repeat_ngram_size:  # padding would make n-grams
            return False
        mine, others = ({**x.settings.to_dict(), "max_new_tokens": None} for x in (self, other))
        return mine == others

    def hear(self, token: int, ends: frozenset[int]) -> bool:
        """Whether that was the request's last token; then it has its answer, while others go on."""
        self.tokens.append(token)
        if self.streamer is not None:
            with suppress(_GenerationCancelled, RuntimeError):  # nobody listens any more, or the server's loop is over
                self.streamer.put(torch.tensor([token]))
        over = token in ends or len(self.tokens) >= self.settings.max_new_tokens
        if (stops := self.settings.stop_strings) and not over:
            tail = self.decode(self.tokens[-max(len(x.encode()) for x in stops) - 4 :])
            over = any(stop in tail for stop in stops)
        if over:
            self.end()
        return over

    def end(self, error: HTTPException | None = None) -> None:
        """Tells whoever waits; the second time nothing."""
        if self.done.done():
            return
        self.wanted.discard(self.request_id)  # the client's next request must find the place free
        with suppress(InvalidStateError, RuntimeError):  # nobody waits any more, or the server's loop is over
            if error is None:
                self.done.set_result(self.tokens)
            else:
                self.done.set_exception(error)
            if self.streamer is not None:
                self.streamer.end() if error is None else self.streamer._enqueue(_StreamError(error.detail))


class Rows(BaseStreamer, StoppingCriteria):  # type: ignore[misc]
    """Hears every token of one `generate`, gives it to its request, and stops a row at that request's own end."""

    def __init__(self, batch: Sequence[Job], ends: int | list[int] | None) -> None:
        self._batch, self._over = batch, [False] * len(batch)
        self._ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            for i, (job, token) in enumerate(zip(self._batch, value.reshape(-1).tolist(), strict=True)):
                self._over[i] = self._over[i] or job.gone or job.hear(token, self._ends)
        self._prompt_seen = True  # `generate` puts the prompt first

    def end(self) -> None:
        pass

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.tensor(self._over, device=input_ids.device)


class ModelThread(GenerationState):  # type: ignore[misc] # Transformers is not read by the type checker
    """Where Transformers' handlers send their prompts. First come, first served; those alike go with the first."""

    def __init__(self, model: Any, limits: ServeLimits) -> None:
        super().__init__()
        self.loop: asyncio.AbstractEventLoop | None = None  # the server's, which reads the streams
        self.wanted: set[str] = set()  # requests from acceptance to their last token
        self.together = False  # whether requests are answered together
        self.last_batch_s = 0.0
        self._last_size = 1
        self._model, self.limits = model, limits
        self._positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._jobs: list[Job] = []
        self._changed = threading.Condition()  # holds the jobs and whether to stop
        self._stopping = False
        self._failures = 0  # in a row
        self._threads: list[threading.Thread] = []

    def try_batch(self, rows: Sequence[Inputs]) -> None:
        """Finds out whether this model answers `rows` together as alone. Before `start`."""
        self.together = self.limits.max_batch > 1 and rows_agree(self._model, [self._cast(row) for row in rows])

    def start(self) -> None:
        # Handlers decode, template and tokenise where they run: on a loop of their own, one after the other, so that
        # the server's loop is free for those that wait.
        self.intake = asyncio.new_event_loop()
        self._threads = [
            threading.Thread(target=self._run, name="trimtab-model", daemon=True),
            threading.Thread(target=self.intake.run_forever, name="trimtab-intake", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def shutdown(self) -> None:
        """Returns when both threads have ended. Nobody waits any more: what is left ends at its next token."""
        self.intake.call_soon_threadsafe(self.intake.stop)
        self.wanted.clear()
        with self._changed:
            self._stopping = True
            self._changed.notify()
        for thread in self._threads:  # a process that ends while one of them is in torch's code is aborted
            thread.join()
        self.intake.close()

    def is_cb_alive(self) -> bool:
        """What /health asks."""
        return all(thread.is_alive() for thread in self._threads) and self._failures < _FAILURES_TO_BE_SICK

    # -- from the handlers ------------------------------------------------------------------------------------------

    def get_manager(self, *_: Any, **__: Any) -> ModelThread:
        """The same for whatever model the handlers name."""
        return self

    def generate_streaming(
        self,
        _model: Any,
        processor: Any,
        inputs: Inputs,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], Any]:
        """Queue and streamer as Transformers' handlers read them."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        streamer = DirectStreamer(processor.tokenizer._tokenizer, self.loop, queue, response_parser=response_parser)
        streamer.put(torch.tensor([]))  # it takes the first for the prompt
        self._submit(processor, inputs, gen_config, request_id, streamer)
        return queue, streamer

    async def generate_non_streaming(
        self, _model: Any, processor: Any, inputs: Inputs, gen_config: Any, request_id: str
    ) -> tuple[str, int, Tensor]:
        job = self._submit(processor, inputs, gen_config, request_id, None)
        tokens = await asyncio.wrap_future(job.done)
        return job.decode(tokens), prompt_length(inputs), torch.tensor(tokens)

    def _submit(self, processor: Any, inputs: Inputs, settings: Any, request_id: str, streamer: Any) -> Job:
        length, limits = prompt_length(inputs), self.limits
        room = limits.max_prompt_tokens
        if self._positions is not None:
            left = self._positions - settings.max_new_tokens
            room = left if room is None else min(room, left)
        if length == 0 or (room is not None and length > room):
            raise HTTPException(
                400,
                f"the prompt has {length} tokens, and this server takes 1 to {room} with {settings.max_new_tokens} new "
                "ones: send other texts, smaller images, or a smaller max_tokens",
            )
        job = Job(
            request_id=request_id,
            wanted=self.wanted,
            inputs=self._cast(inputs),
            settings=settings,
            streamer=streamer,
            decode=lambda tokens: str(processor.decode(tokens, skip_special_tokens=True)),
        )
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
        return job

    def _cast(self, inputs: Inputs) -> dict[str, Tensor]:
        return {name: x.to(self._model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}

    # -- on the model's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            if batch := self._take():
                began = time.monotonic()
                self._answer(batch)
                self._last_size, self.last_batch_s = len(batch), time.monotonic() - began

    def _take(self) -> list[Job]:
        """The next batch: the oldest request, and those behind it that can go with it. May be empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopping)
            # Clients whose answers came in one batch ask again together: a batch as large as the last one, or as all
            # that were accepted, goes at once.
            pause_s = min(_MAX_PAUSE_S, _PAUSE_SHARE * self.last_batch_s) if self.together else 0
            self._changed.wait_for(self._is_whole, pause_s)
            waiting = [job for job in self._jobs if not job.gone]
            batch: list[Job] = []
            for job in waiting:
                if len(batch) < self.limits.max_batch and self._fits(batch, job):
                    batch.append(job)
            self._jobs = [job for job in waiting if job not in batch]
            return batch

    def _is_whole(self) -> bool:
        whole = min(self.limits.max_batch, max(self._last_size, len(self.wanted)))
        return self._stopping or len(self._jobs) >= whole

    def _fits(self, batch: Sequence[Job], job: Job) -> bool:
        if not batch:
            return True
        rows = [x.inputs for x in (*batch, job)]
        longest = max(map(prompt_length, rows))
        answer = max(x.settings.max_new_tokens for x in (*batch, job))
        return (
            self.together
            and batch[0].alike(job)
            and len(rows) * longest <= self.limits.max_batch_tokens
            and (self._positions is None or longest + answer <= self._positions)
            and fit_together(rows)
        )

    def _answer(self, batch: Sequence[Job]) -> None:
        try:
            self._generate(batch)
            self._failures = 0
        except Exception:  # of whatever kind: one request's failure must not end the others'
            _LOG.exception("%d requests failed in the model", len(batch))
            again = [job for job in batch if not job.tokens] if len(batch) > 1 else []
            self._failures += not again
            for job in batch:
                if job not in again:
                    job.end(HTTPException(500, "the model failed on this request: the server's log says why"))
            for job in again:  # each alone: the one that fails is the one at fault
                self._answer([job])

    def _generate(self, batch: Sequence[Job]) -> None:
        """Answers every job of the batch; the settings are those of the first, but for the number of tokens."""
        settings = copy.deepcopy(batch[0].settings)
        settings.max_new_tokens = max(job.settings.max_new_tokens for job in batch)
        settings.stop_strings = None  # `Rows` stops each at its own
        rows = Rows(batch, settings.eos_token_id)
        seed = batch[0].seed
        if seed is not None:
            torch.manual_seed(seed)
        try:
            self._model.generate(
                **move_inputs(self._model, join_rows([job.inputs for job in batch])),
                generation_config=settings,
                streamer=rows,
                stopping_criteria=StoppingCriteriaList([rows]),
            )
        finally:
            if seed is not None:  # what others sample must not be foreseeable
                torch.seed()
        for job in batch:
            job.end()
