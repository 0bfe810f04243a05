"""The endpoint: /v1/chat/completions, /v1/models, /health and /metrics as one ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab.serve.answers import AnswerHead, Done, Event, Piece
from trimtab.serve.body import ClientGoneError, read_body, until_disconnected
from trimtab.serve.chat import parse_chat
from trimtab.serve.limits import ServeLimits
from trimtab.serve.metrics import Metrics
from trimtab.serve.problems import RequestError
from trimtab.serve.worker import Job, ModelThread

_CLIENT_GONE = Response(status_code=499)  # nobody is left to read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What the routes share."""

    name: str
    markers: tuple[str, ...]
    thread: ModelThread
    limits: ServeLimits
    metrics: Metrics
    api_key: str | None = None  # None: no key is asked for, and only requests to a loopback name are answered


def make_app(endpoint: Endpoint) -> ASGIApp:
    """Every error, the framework's own included, leaves in OpenAI's shape."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", _Chat(endpoint), methods=["POST"]),
            Route("/v1/models", _models, methods=["GET"]),
            Route("/health", _health, methods=["GET"]),
            Route("/metrics", _metrics, methods=["GET"]),
        ],
        middleware=[Middleware(_Doorkeeper, endpoint=endpoint)],
        exception_handlers={HTTPException: _framework_error, Exception: _bug},
    )
    app.router.redirect_slashes = False
    app.state.endpoint = endpoint
    return app


# -- who may ask ------------------------------------------------------------------------------------------------------


class _Doorkeeper:
    """Refuses strangers before anything is read.

    With a key: whoever does not send it, /health aside. Without one: requests whose Host is no loopback name, which
    is what a web page makes that points its own name at 127.0.0.1.
    """

    def __init__(self, app: ASGIApp, endpoint: Endpoint) -> None:
        self._app, self._endpoint = app, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn runs without lifespan and websockets"
        try:
            self._check(Request(scope))
        except RequestError as error:
            await _error(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        key = self._endpoint.api_key
        if key is None:
            host = request.headers.get("host", "")
            name = host[: host.rindex(":")] if ":" in host.rsplit("]", 1)[-1] else host
            if name.lower() != "localhost" and not is_loopback(name.strip("[]")):
                raise RequestError(403, f"this server answers to localhost, not to {host[:100]!r}: ask for that")
        elif request.url.path != "/health":
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                raise RequestError(
                    401, "this server wants its key: send Authorization: Bearer KEY", code="invalid_api_key"
                )


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the IP address; False for names."""
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


# -- chat -------------------------------------------------------------------------------------------------------------


class _Chat:
    """POST /v1/chat/completions. An ASGI application, because the connection is watched while the model works."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500
        started = False

        async def note(message: Any) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
            async with asyncio.timeout(self._endpoint.limits.max_transfer_s):
                await send(message)

        try:
            await self._answer(Request(scope), receive, note)
        except RequestError as error:
            await _error(error)(scope, receive, note)
        except (ClientGoneError, TimeoutError, OSError):  # the client stopped sending, taking or listening
            status = 499
            if not started:
                await _CLIENT_GONE(scope, receive, send)
        except asyncio.CancelledError:  # uvicorn's, when the drain ran out of time; the task ends here either way
            status = 503
            if not started:
                stopped = RequestError(503, "the server stopped before the answer was done: ask again elsewhere")
                await _error(stopped)(scope, receive, note)
        finally:
            self._endpoint.metrics.requests.labels(status).inc()

    async def _answer(self, request: Request, receive: Receive, send: Send) -> None:
        endpoint, limits, thread = self._endpoint, self._endpoint.limits, self._endpoint.thread
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            await read_body(receive, limits, keep=False)
            raise RequestError(415, "the body must be JSON: send Content-Type: application/json")
        try:
            thread.enter()
        except RequestError:
            await read_body(receive, limits, keep=False)
            raise
        try:
            body = await read_body(receive, limits)
            chat = await asyncio.to_thread(
                parse_chat, body, model=endpoint.name, limits=limits, markers=endpoint.markers
            )
        except BaseException:
            thread.leave()
            raise
        job = Job(chat, asyncio.get_running_loop(), time.monotonic(), limits.max_request_s)
        thread.submit(job)
        del body
        async with _watched(job, thread, receive):
            answer = _Answer(name=endpoint.name, job=job)
            await (answer.stream(send) if chat.stream else answer.send(request.scope, receive, send))


@asynccontextmanager
async def _watched(job: Job, thread: ModelThread, receive: Receive) -> AsyncIterator[None]:
    """Abandons the job when its client goes away, or when this request is given up for any other reason."""

    async def watch() -> None:
        await until_disconnected(receive)
        thread.abandon(job)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        thread.abandon(job)
        watcher.cancel()


class _Answer:
    """Sends what one job tells."""

    def __init__(self, *, name: str, job: Job) -> None:
        self._job, self._head = job, AnswerHead(name)

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The whole answer at once."""
        texts: list[str] = []
        while isinstance(event := await self._next(), Piece):
            texts.append(event.text)
        if isinstance(event, RequestError):
            raise event
        await JSONResponse(self._head.whole("".join(texts), event))(scope, receive, send)

    async def stream(self, send: Send) -> None:
        """Server-sent events; a refusal before the first token still has its own status."""
        event = await self._next()
        if isinstance(event, RequestError):
            raise event
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_event(send, self._head.delta({"role": "assistant", "content": ""}))
        while isinstance(event, Piece):
            await _send_event(send, self._head.delta({"content": event.text}))
            event = await self._next()
        if isinstance(event, Done):
            await _send_event(send, self._head.delta({}, event.finish_reason))
            if self._job.request.include_usage:
                await _send_event(send, self._head.usage(event))
            await _send_line(send, "[DONE]")
        else:
            await _send_event(send, event.body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> Event:
        """The model's thread looks at the clock between tokens; here nobody waits for it longer than was promised."""
        job = self._job
        try:
            async with asyncio.timeout(max(0.0, job.max_request_s - job.age_s)):
                return await job.events.get()
        except TimeoutError:
            return job.overdue()


async def _send_event(send: Send, content: dict[str, Any]) -> None:
    await _send_line(send, json.dumps(content, ensure_ascii=False))


async def _send_line(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


# -- the rest ---------------------------------------------------------------------------------------------------------


async def _models(request: Request) -> Response:
    entry = {"id": _endpoint(request).name, "object": "model", "created": 0, "owned_by": "trimtab"}
    return JSONResponse({"object": "list", "data": [entry]})


async def _health(request: Request) -> Response:
    healthy = _endpoint(request).thread.healthy
    return JSONResponse({"status": "ok" if healthy else "failing"}, status_code=200 if healthy else 503)


async def _metrics(request: Request) -> Response:
    return Response(_endpoint(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _endpoint(request: Request) -> Endpoint:
    found = request.app.state.endpoint
    assert isinstance(found, Endpoint)
    return found


def _error(error: RequestError) -> JSONResponse:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def _framework_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    known = "POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics"
    path = f"{request.method} {request.url.path[:100]}"
    answer = _error(RequestError(error.status_code, f"there is no {path}: this server knows {known}"))
    answer.headers.update(error.headers or {})
    return answer


async def _bug(_request: Request, _error_of_ours: Exception) -> Response:
    """uvicorn writes the traceback into the log."""
    return _error(RequestError(500, "the server failed on this request: its log says why"))
