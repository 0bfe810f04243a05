"""Transformers' own application over one placed model: its handlers, our model, and nothing else that it could load."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import Modality

from trimtab.serve.chat import ChatProcessor
from trimtab.serve.problems import refusal
from trimtab.serve.worker import ModelThread

_ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health"}
# Fields that Transformers takes and ignores: these change nothing in an answer, whatever they hold ...
_HARMLESS = {"metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "stream_options", "user"}
# ... and these ask for nothing by these values, as all do by false, 0 and empty. All others are refused, not ignored.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "modalities": (["text"],),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto",),
    "truncation": ("auto", "disabled"),
}
_OURS = {"chat_template_kwargs", "generation_config", "logit_bias"}  # Transformers takes them, this server does not
_RANGES = {
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "frequency_penalty": (-0.99, 2),  # it becomes 1 + penalty
    "seed": (-(2**63), 2**63 - 1),
}
_LEAST_TEMPERATURE = 1e-5  # below, the likeliest token is taken: logits over less overflow float32
_LENGTHS = {"max_completion_tokens", "max_tokens", "max_output_tokens"}
_MAX_STOPS, _MAX_STOP_LENGTH = 4, 256
_MALFORMED = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)


class PlacedModel:
    """One loaded model, whatever is asked for: what Transformers' handlers ask of their `ModelManager`."""

    def __init__(self, name: str, model: Any, processor: ChatProcessor) -> None:
        logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # no line for every request
        self.force_model, self._model, self.processor = name, model, processor

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, ChatProcessor]:
        return self._model, self.processor

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Without a revision."""
        return model_id

    def get_model_modality(self, *_: Any, **__: Any) -> Modality:
        return Modality.VLM

    def get_gen_models(self) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "trimtab"}]


class _Checked:
    """Before Transformers' handlers: a request means what it says, or is refused in one sentence."""

    model_manager: PlacedModel
    generation_state: ModelThread
    _unused_fields: set[str]

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """On the server's loop; the handler itself runs on the intake's."""
        self.generation_state.loop = asyncio.get_running_loop()
        handled = asyncio.run_coroutine_threadsafe(self._handle(body, request_id), self.generation_state.intake)
        return await asyncio.wrap_future(handled)

    async def _handle(self, body: dict[str, Any], request_id: str) -> Any:
        # null is as good as absent, and nothing streams unless it is asked to: as OpenAI has it everywhere
        body = {"stream": False} | {name: value for name, value in body.items() if value is not None}
        try:
            return await super().handle_request(body, request_id)  # type: ignore[misc]
        except _MALFORMED as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise HTTPException(
                400, f"the request cannot be read ({reason}): write it as OpenAI's API has it"
            ) from None

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)  # type: ignore[misc]
        for name in sorted((self._unused_fields | _OURS) & body.keys() - _HARMLESS):
            value = body.pop(name)
            if value and value not in _NEUTRAL.get(name, ()):
                raise HTTPException(400, f"{name} is not offered by this server: leave it out")
        self.model_manager.processor.check_length(body.get("prompt", ""))
        ranges = _RANGES | dict.fromkeys(_LENGTHS, (1, self.generation_state.limits.max_new_tokens))
        for name, (low, high) in ranges.items():
            value = body.get(name, high)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise HTTPException(400, f"{name} must be a number from {low:g} to {high:g}")
        stops = body["stop"] = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
        if len(stops) > _MAX_STOPS or not all(isinstance(x, str) and 0 < len(x) <= _MAX_STOP_LENGTH for x in stops):
            raise HTTPException(400, f"stop must be up to {_MAX_STOPS} texts of up to {_MAX_STOP_LENGTH} characters")

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ChatCompletionHandler.get_processor_inputs_from_messages(messages, modality)
        for message, parsed in zip(messages, found, strict=True):
            given = message.get("content")
            if isinstance(given, list) and "tool_calls" not in message and len(given) != len(parsed["content"]):
                raise HTTPException(400, "a part of a message is neither text nor image: leave it out")
        return found

    def _build_generation_config(self, body: dict[str, Any], model_generation_config: Any, **_: Any) -> Any:
        """Transformers' settings, within our limits, of one sequence; the seed is applied by the model's thread."""
        seed = body.pop("seed", None)
        settings = super()._build_generation_config(body, copy.deepcopy(model_generation_config))  # type: ignore[misc]
        if not _LENGTHS & body.keys():
            settings.max_new_tokens = self.generation_state.limits.max_new_tokens
        settings.max_length, settings.min_length, settings.min_new_tokens = None, 0, None
        settings.num_beams = settings.num_return_sequences = 1
        if "temperature" in body:
            settings.do_sample = body["temperature"] >= _LEAST_TEMPERATURE
        if not settings.do_sample:
            settings.temperature = settings.top_p = settings.top_k = None  # unused; Transformers warns if they are set
        settings.seed = None if seed is None else int(seed)
        return settings


class Chat(_Checked, ChatCompletionHandler):  # type: ignore[misc]
    """Also for those who have an HTTP server of their own."""


class Completion(_Checked, CompletionHandler):  # type: ignore[misc]
    """Prompts without a template, in which special tokens are special."""


class Response(_Checked, ResponseHandler):  # type: ignore[misc]
    """OpenAI's newer API of chats."""


def build_application(placed: PlacedModel, thread: ModelThread) -> FastAPI:
    """/v1/chat/completions, /v1/completions, /v1/responses, /v1/models and /health. What else Transformers routes is
    taken out: it loads and unloads models by name."""
    named = {"model_manager": placed, "generation_state": thread}
    app = build_server(
        placed,
        Chat(**named),
        completion_handler=Completion(**named),
        response_handler=Response(**named),
        transcription_handler=None,
        systemone_handler=None,
        generation_state=thread,
    )
    app.router.routes[:] = [route for route in app.router.routes if route.path in _ROUTES]
    app.router.redirect_slashes = False
    for kind in (HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)

    def one_model(name: str) -> Any:
        if name != placed.force_model:
            raise HTTPException(404, f"there is no model {name[:100]!r} here")
        return placed.get_gen_models()[0]

    app.add_api_route("/v1/models/{name:path}", one_model)
    return app


async def _refuse(_request: Request, error: Exception) -> JSONResponse:
    """Every error in OpenAI's shape. Of a bug uvicorn writes the traceback into the log."""
    if not isinstance(error, HTTPException):
        error = HTTPException(500, "the server failed on this request: its log says why")
    return refusal(error)
