"""Transformers' own application over one placed model: its handlers, our model, and nothing else that it could load."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState, Modality

from trimtab.serve.chat import ChatProcessor
from trimtab.serve.limits import ServeLimits
from trimtab.serve.problems import RequestError
from trimtab.serve.worker import ModelThread

# Fields that Transformers takes and ignores: these change nothing in an answer, whatever they hold ...
_HARMLESS = {"metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "stream_options", "user"}
# ... and these ask for nothing by these values. All others are refused, not ignored.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "include": ([],),
    "logprobs": (False, 0),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "truncation": ("auto", "disabled"),
}
_RANGES = {"temperature": (0, 2), "top_p": (1e-6, 1), "frequency_penalty": (-0.99, 2)}  # it becomes 1 + penalty
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_MAX_STOPS, _MAX_STOP_LENGTH = 4, 256
_MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


class PlacedModel(ModelManager):  # type: ignore[misc] # Transformers is not read by the type checker
    """One model, loaded by `load` at once; whatever else is asked for is not there."""

    def __init__(self, name: str, load: Callable[[], Any], processor: ChatProcessor) -> None:
        self._name, self._load, self._processor = name, load, processor
        super().__init__(force_model=name)
        self.model, _ = self.load_model_and_processor(self.process_model_name(name))

    def _load_processor(self, *_: Any, **__: Any) -> ChatProcessor:
        return self._processor

    def _load_model(self, model_id_and_revision: str, *_: Any, **__: Any) -> Any:
        if model_id_and_revision != self.process_model_name(self._name):
            raise RequestError(404, f"this server has one model, {self._name!r}", code="model_not_found")
        return self._load()

    def get_model_modality(self, *_: Any, **__: Any) -> Modality:
        return Modality.VLM

    def get_gen_models(self) -> list[dict[str, Any]]:
        return [{"id": self._name, "object": "model", "created": 0, "owned_by": "trimtab"}]


class PlacedGeneration(GenerationState):  # type: ignore[misc]
    """Every prompt goes to one thread, whatever model Transformers' handlers name."""

    def __init__(self, thread: ModelThread, limits: ServeLimits) -> None:
        super().__init__()
        self.thread, self.limits = thread, limits
        # Handlers decode, template and tokenise where they run: on a loop of their own, one after the other, so that
        # the server's loop is free for those that wait.
        self.intake = asyncio.new_event_loop()
        threading.Thread(target=self.intake.run_forever, name="trimtab-intake", daemon=True).start()

    def use_continuous_batching(self, *_: Any) -> bool:
        return False

    def get_manager(self, *_: Any, **__: Any) -> ModelThread:
        return self.thread

    def is_cb_alive(self) -> bool:
        """What /health asks."""
        return self.thread.healthy

    def shutdown(self) -> None:
        self.thread.stop()
        self.intake.call_soon_threadsafe(self.intake.stop)


class _Checked:
    """Before Transformers' handlers: a request means what it says, or is refused in one sentence."""

    model_manager: PlacedModel
    generation_state: PlacedGeneration

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """On the server's loop; the handler itself runs on the intake's."""
        thread = self.generation_state.thread
        thread.loop = asyncio.get_running_loop()
        thread.preparing.add(request_id)
        handled = asyncio.run_coroutine_threadsafe(self._handle(body, request_id), self.generation_state.intake)
        answer = await asyncio.wrap_future(handled)
        if isinstance(answer, StreamingResponse) and not isinstance(self, ResponseHandler):
            answer.body_iterator = _with_end(answer.body_iterator)
        return answer

    async def _handle(self, body: dict[str, Any], request_id: str) -> Any:
        body = {name: value for name, value in body.items() if value is not None}
        body.setdefault("stream", False)  # as OpenAI has it everywhere
        try:
            return await super().handle_request(body, request_id)  # type: ignore[misc]
        except _MALFORMED as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise RequestError(400, f"the request cannot be read ({reason}): write it as OpenAI's API has it") from None
        finally:
            self.generation_state.thread.preparing.discard(request_id)

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)  # type: ignore[misc]
        for name in sorted(self._unused_fields & body.keys() - _HARMLESS):  # type: ignore[attr-defined]
            if body[name] not in _NEUTRAL.get(name, ()):
                raise RequestError(400, f"{name} is not offered by this server: leave it out", param=name)
        if body.pop("tool_choice", None) == "none":
            body.pop("tools", None)
        for name, (low, high) in _RANGES.items():
            value = body.get(name, high)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise RequestError(400, f"{name} must be a number from {low:g} to {high:g}", param=name)
        if body.get("generation_config") or set(body.get("chat_template_kwargs", ())) - {"enable_thinking"}:
            raise RequestError(400, "generation_config and chat_template_kwargs are this server's: leave them out")
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
        if len(stops) > _MAX_STOPS or not all(isinstance(x, str) and 0 < len(x) <= _MAX_STOP_LENGTH for x in stops):
            raise RequestError(400, f"stop must be up to {_MAX_STOPS} texts of up to {_MAX_STOP_LENGTH} characters")
        if isinstance(self, CompletionHandler):
            self.model_manager._processor.check_prompt(body.get("prompt", ""))

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, ChatProcessor]:
        """Transformers' handlers read configs and move inputs to "the model's device": they stay on the CPU until
        their batch begins."""
        manager = self.model_manager
        name = manager.force_model
        if body.get("model", name) != name:
            raise RequestError(404, f"this server has one model, {name!r}: ask for it by that name", param="model")
        seen = SimpleNamespace(
            device="cpu", config=manager.model.config, generation_config=manager.model.generation_config
        )
        return name, seen, manager._processor

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Modality) -> Any:
        found = ChatCompletionHandler.get_processor_inputs_from_messages(messages, modality)
        for message, parsed in zip(messages, found, strict=True):
            given = message.get("content")
            if isinstance(given, list) and "tool_calls" not in message and len(given) != len(parsed["content"]):
                raise RequestError(400, "a part of a message is neither text nor image: leave it out", param="messages")
        return found

    def _build_generation_config(self, body: dict[str, Any], model_generation_config: Any, **_: Any) -> Any:
        """Transformers' settings, within our limits, of one sequence; the seed is applied by the model's thread."""
        limits, seed = self.generation_state.limits, body.pop("seed", None)
        if seed is not None and (isinstance(seed, bool) or not -(2**63) <= int(seed) < 2**63):
            raise RequestError(400, "seed must be a whole number of 64 bits", param="seed")
        asked = [name for name in _LENGTHS if name in body]
        settings = super()._build_generation_config(body, copy.deepcopy(model_generation_config))  # type: ignore[misc]
        if not asked:
            settings.max_new_tokens = limits.max_new_tokens
        elif not 1 <= settings.max_new_tokens <= limits.max_new_tokens:
            raise RequestError(400, f"{asked[0]} must be from 1 to {limits.max_new_tokens}", param=asked[0])
        settings.max_length, settings.min_length, settings.min_new_tokens = None, 0, None
        settings.num_beams = settings.num_return_sequences = 1
        if "temperature" in body:
            settings.do_sample = body["temperature"] > 0
        if not settings.do_sample:
            settings.temperature = settings.top_p = settings.top_k = None  # unused; Transformers warns if they are set
        if settings.sequence_bias is not None:
            size = self.model_manager.model.config.get_text_config().vocab_size
            if not all(0 <= token < size and abs(bias) <= 100 for (token,), bias in settings.sequence_bias.items()):
                raise RequestError(400, "logit_bias must give tokens of the model numbers from -100 to 100")
        settings.seed = None if seed is None else int(seed)
        return settings


class _Chat(_Checked, ChatCompletionHandler):  # type: ignore[misc]
    pass


class _Completion(_Checked, CompletionHandler):  # type: ignore[misc]
    pass


class _Response(_Checked, ResponseHandler):  # type: ignore[misc]
    pass


async def _with_end(pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    """The line that OpenAI's streams end with, unless they end with an error."""
    last = ""
    async for piece in pieces:
        yield piece
        last = piece
    if not last.startswith('data: {"error"'):
        yield "data: [DONE]\n\n"


def chat_handler(placed: PlacedModel, generation: PlacedGeneration) -> Any:
    """Transformers' handler of chat completions; for those who have an HTTP server of their own."""
    return _Chat(model_manager=placed, generation_state=generation)


def build_application(placed: PlacedModel, generation: PlacedGeneration) -> FastAPI:
    """/v1/chat/completions, /v1/completions, /v1/responses, /v1/models and /health. What else Transformers
    routes is kept out by `Gate`, which lets pass what it knows."""
    named = {"model_manager": placed, "generation_state": generation}
    app = build_server(
        placed,
        chat_handler(placed, generation),
        completion_handler=_Completion(**named),
        response_handler=_Response(**named),
        transcription_handler=None,
        systemone_handler=None,
        generation_state=generation,
    )
    for kind in (RequestError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refuse)

    def one_model(name: str) -> Any:
        for entry in placed.get_gen_models():
            if entry["id"] == name:
                return entry
        raise RequestError(404, f"there is no model {name[:100]!r} here", code="model_not_found")

    app.add_api_route("/v1/models/{name:path}", one_model)
    return app


async def _refuse(_request: Request, error: Exception) -> JSONResponse:
    """Every error in OpenAI's shape. Of a bug uvicorn writes the traceback into the log."""
    if isinstance(error, HTTPException):
        error = RequestError(error.status_code, str(error.detail))
    elif isinstance(error, RequestValidationError):
        error = RequestError(400, "the body must be one JSON object")
    elif not isinstance(error, RequestError):
        error = RequestError(500, "the server failed on this request: its log says why")
    return error.response()


def quiet_transformers() -> None:
    """No line of Transformers' for every request: the gate writes one."""
    logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)
