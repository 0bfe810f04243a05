"""The one thread that owns the model: requests that wait and ask for the same kind of generation run together."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.cli.serving.utils import BaseGenerateManager

from trimtab.serve.batch import (
    Inputs,
    depends_on_length,
    fit_together,
    items_of,
    join_rows,
    prompt_length,
    rows_agree,
    seeded,
)
from trimtab.serve.job import Job, Listener, Rows, gone
from trimtab.serve.limits import ServeLimits
from trimtab.serve.problems import RequestError

_LOG = logging.getLogger("trimtab.serve")
_FAILURES_TO_BE_SICK = 3
_GATHER_SHARE = 0.2  # of the last batch's seconds: the longest pause in which the next one waits for more requests
_MAX_GATHER_S = 1.0  # in all, before a batch
_FAILED = "the model failed on this request: the server's log says why"


class ModelThread(BaseGenerateManager):  # type: ignore[misc] # Transformers is not read by the type checker
    """Where Transformers' handlers send their prompts. First come, first served; those alike go with the first."""

    def __init__(self, model: Any, move_inputs: Callable[..., dict[str, Tensor]], limits: ServeLimits) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None  # the server's, which reads the streams
        self.preparing: set[str] = set()  # requests whose prompt is being made
        self._model, self._move_inputs, self._limits = model, move_inputs, limits
        self._positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._together: tuple[bool, bool] = (False, False)  # rows without pictures, with pictures
        self._jobs: deque[Job] = deque()
        self.running: list[Job] = []  # the batch that is being generated
        self._changed = threading.Condition()  # holds the jobs and whether to stop
        self._stopping = False
        self._last = (1, 0.0)  # requests of the last batch, and seconds it took
        self._failures = 0  # in a row
        self._thread = threading.Thread(target=self._run, name="trimtab-model", daemon=True)

    def try_batches(self, texts: Sequence[Inputs], pictures: Sequence[Inputs]) -> str:
        """Finds out which requests this model answers together as alone; says it in words. Before `start`."""
        if self._limits.max_batch == 1 or depends_on_length(self._model.config):
            return "one request at a time"

        def agree(rows: Sequence[Inputs]) -> bool:
            cast = [self._cast(row) for row in rows]
            return bool(rows) and rows_agree(self._model, cast, self._model.generation_config, self._move_inputs)

        shown = agree(pictures)
        self._together = (shown or agree(texts), shown)
        if shown:
            return f"up to {self._limits.max_batch} requests together"
        return "requests without images together" if self._together[0] else "one request at a time"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended. Nobody waits any more: what is left ends at its next token."""
        with self._changed:
            self._stopping = True
            for job in (*self._jobs, *self.running):
                job.cancelled = True
            self._changed.notify()
        self._thread.join()

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and self._failures < _FAILURES_TO_BE_SICK

    # -- from the handlers ------------------------------------------------------------------------------------------

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
        assert self.loop is not None, "a stream is asked for by a server"
        streamer = Listener(processor.tokenizer._tokenizer, self.loop, queue, response_parser=response_parser)
        streamer.job = self._submit(processor, inputs, gen_config, request_id, streamer)
        return queue, streamer

    async def generate_non_streaming(
        self, _model: Any, processor: Any, inputs: Inputs, gen_config: Any, request_id: str
    ) -> tuple[str, int, Tensor]:
        job = self._submit(processor, inputs, gen_config, request_id, None)
        tokens = await asyncio.wrap_future(job.done)
        return job.decode(tokens), prompt_length(inputs), torch.tensor(tokens)

    def _submit(self, processor: Any, inputs: Inputs, settings: Any, request_id: str, streamer: Any) -> Job:
        self._check_length(prompt_length(inputs), settings.max_new_tokens)
        stops, settings.stop_strings = settings.stop_strings or (), None
        job = Job(
            request_id=request_id,
            inputs=self._cast(inputs),
            settings=settings,
            seed=settings.__dict__.pop("seed", None),
            stops=(stops,) if isinstance(stops, str) else tuple(stops),
            streamer=streamer,
            decode=lambda tokens: str(processor.decode(tokens, skip_special_tokens=True)),
        )
        with self._changed:
            job.cancelled = request_id not in self.preparing  # abandoned while its prompt was made
            self._jobs.append(job)
            self.preparing.discard(request_id)
            self._changed.notify()
        return job

    def abandon(self, request_id: str) -> None:
        """Nobody waits for this request's answer, if it has none yet."""
        with self._changed:
            self.preparing.discard(request_id)
            for job in (*self._jobs, *self.running):
                job.cancelled = job.cancelled or job.request_id == request_id

    def _check_length(self, num_tokens: int, max_new_tokens: int) -> None:
        most = self._limits.max_prompt_tokens
        if num_tokens == 0:
            raise RequestError(400, "the prompt has no token: send a text")
        if most is not None and num_tokens > most:
            problem = f"{num_tokens} tokens and this server takes {most}: send less text or smaller images"
        elif self._positions is not None and num_tokens + max_new_tokens > self._positions:
            problem = (
                f"{num_tokens} tokens and may be answered with {max_new_tokens}, and the model has {self._positions} "
                "positions: send less, or ask for fewer with max_tokens"
            )
        else:
            return
        raise RequestError(400, f"the conversation has {problem}", param="messages", code="context_length_exceeded")

    def _cast(self, inputs: Inputs) -> dict[str, Tensor]:
        return {name: x.to(self._model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}

    # -- on the model's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._take():
            now = time.monotonic()
            self._answer(batch)
            self._last, self.running = (len(batch), time.monotonic() - now), []

    def _take(self) -> list[Job]:
        """The next batch; empty when there is nothing left to do."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._jobs or self._stopping)
                self._gather()
                for job in [x for x in self._jobs if x.cancelled]:
                    self._jobs.remove(job)
                    job.end(gone())
                if self._jobs or self._stopping:
                    break
            self.running = self._pick()
            return self.running

    def _gather(self) -> None:
        """Waits for requests that are on their way: clients whose answers came in one batch ask again together.

        A batch as large as the last one goes at once, and so does a lone request after a lone one.
        """
        size, seconds = self._last
        until = time.monotonic() + min(_MAX_GATHER_S, seconds)
        while self._together[0] and not self._stopping and len(self._jobs) < self._limits.max_batch:
            left = until - time.monotonic()
            if left <= 0 or (len(self._jobs) >= size and not self.preparing):
                return
            if not self._changed.wait(min(left, _GATHER_SHARE * seconds)) and not self.preparing:
                return

    def _pick(self) -> list[Job]:
        """The oldest request, and those behind it that can go with it."""
        batch: list[Job] = []
        for job in list(self._jobs):
            if len(batch) < self._limits.max_batch and self._fits(batch, job):
                batch.append(job)
                self._jobs.remove(job)
        return batch

    def _fits(self, batch: Sequence[Job], job: Job) -> bool:
        if not batch:
            return True
        rows = [x.inputs for x in (*batch, job)]
        longest = max(map(prompt_length, rows))
        answer = max(x.settings.max_new_tokens for x in (*batch, job))
        shown = any(items_of(row) for row in rows)
        return (
            self._together[1 if shown else 0]
            and batch[0].alike(job)
            and len(rows) * longest <= self._limits.max_batch_tokens
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
                    job.end(RequestError(500, _FAILED))
            for job in again:  # each alone: the one that fails is the one at fault
                self._answer([job])

    def _generate(self, batch: Sequence[Job]) -> None:
        """Answers every job of the batch; the settings are those of the first, but for the number of tokens."""
        settings = copy.deepcopy(batch[0].settings)
        settings.max_new_tokens = max(job.settings.max_new_tokens for job in batch)
        rows = Rows(batch, settings.eos_token_id)
        with seeded(batch[0].seed):
            self._model.generate(
                **self._move_inputs(self._model, join_rows([job.inputs for job in batch])),
                generation_config=settings,
                streamer=rows,
                stopping_criteria=StoppingCriteriaList([rows]),
            )
        for job in batch:
            job.end()


def to_hooked_device(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """To where Accelerate's hook, if Transformers placed the model, wants inputs and brings results back to."""
    hooked = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return {name: x.to(model.device if hooked is None else hooked) for name, x in inputs.items()}
