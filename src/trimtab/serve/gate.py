"""In front of the application: who may ask, how much, how many at once, for how long; one line of log for each."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab.serve.body import Bodies, ClientGoneError, parse_json
from trimtab.serve.limits import ServeLimits
from trimtab.serve.problems import RequestError

_LOG = logging.getLogger("trimtab.serve.requests")
_ASKED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_TOLD = ("/v1/models", "/health")
_NEWEST_SHARE = 0.2  # of the running mean of answering times
_STOPPED = "the server stopped before the answer was done: ask again elsewhere"


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the IP address; False for names."""
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


class Gate:
    """Lets through what the application shall answer, and refuses the rest in OpenAI's shape.

    With a key: refuses whoever does not send it, /health aside. Without one: requests whose Host is no loopback name,
    which is what a web page makes that points its own name at 127.0.0.1.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ServeLimits,
        *,
        abandon: Callable[[str], None],
        api_key: str | None = None,
    ) -> None:
        self._app, self._limits, self._abandon, self._key = app, limits, abandon, api_key
        self._bodies = Bodies(limits)
        self._places = limits.num_places
        self._recent_s = 0.0  # of an answer

    @property
    def num_accepted(self) -> int:
        """Requests that have a place in the queue or in the model."""
        return self._limits.num_places - self._places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn runs without lifespan and websockets"
        exchange = _Exchange(send, self._limits.max_transfer_s)
        began, request = time.monotonic(), Request(scope)
        status: int | None = None  # where it is not what was sent
        try:
            self._check_caller(request)
            if self._is_asking(request):
                await self._ask(request, receive, exchange)
            else:
                await self._app(scope, receive, exchange.send)
        except RequestError as error:
            status = error.status
            await exchange.refuse(error, scope, receive)
        except (ClientGoneError, TimeoutError, OSError):  # the client stopped sending, taking or listening
            status = 499
        except asyncio.CancelledError:  # uvicorn's, when the drain ran out of time; the task ends here either way
            status = 503
            await exchange.refuse(RequestError(503, _STOPPED), scope, receive)
        finally:
            status = exchange.status if status is None else status
            client, path = (scope.get("client") or ("?",))[0], ascii(request.url.path[:100])[1:-1]
            _LOG.info("%s %s %s %s %.2f s", client, request.method, path, status, time.monotonic() - began)

    def _check_caller(self, request: Request) -> None:
        if "content-length" in request.headers and "transfer-encoding" in request.headers:  # proxies disagree on it
            raise RequestError(400, "Content-Length and Transfer-Encoding are both given: send one of them")
        if self._key is None:
            host = request.headers.get("host", "")
            name = host[: host.rindex(":")] if ":" in host.rsplit("]", 1)[-1] else host
            if name.lower() != "localhost" and not is_loopback(name.strip("[]")):
                raise RequestError(403, f"this server answers to localhost, not to {host[:100]!r}: ask for that")
        elif request.url.path != "/health":
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
                raise RequestError(
                    401, "this server wants its key: send Authorization: Bearer KEY", code="invalid_api_key"
                )

    def _is_asking(self, request: Request) -> bool:
        """Whether the model is asked. Every other route of the application than these is closed: Transformers' own
        load and unload models by name."""
        path = request.url.path
        asking, telling = path in _ASKED, path in _TOLD or path.startswith("/v1/models/")
        if not asking and not telling:
            known = f"POST {', '.join(_ASKED)}, GET {', '.join(_TOLD)}"
            raise RequestError(404, f"there is no {path[:100]}: this server knows {known}")
        if request.method != ("POST" if asking else "GET"):
            raise RequestError(405, f"{path[:100]} does not take {request.method}: send {'POST' if asking else 'GET'}")
        return asking

    async def _ask(self, request: Request, receive: Receive, exchange: _Exchange) -> None:
        body = await self._bodies.read(receive)
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "the body must be JSON: send Content-Type: application/json")
        self._take_place()
        began, freed, request_id = time.monotonic(), False, uuid.uuid4().hex

        def free() -> None:
            nonlocal freed
            self._places += not freed
            freed = True

        exchange.before_end = free  # before the client hears of the end: its next request must find the place free
        # of the client's headers the application gets none but what the body is; the id is not the client's to choose
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
        try:
            async with asyncio.timeout(self._limits.max_request_s), _listening(receive, exchange) as gone:
                await asyncio.to_thread(parse_json, body, self._limits)
                await self._app({**request.scope, "headers": headers}, _replay(body, gone), exchange.send)
            self._recent_s += _NEWEST_SHARE * (time.monotonic() - began - self._recent_s)
        except TimeoutError:
            if time.monotonic() - began < self._limits.max_request_s:  # the client did not take a piece in time
                raise
            raise RequestError(
                504,
                f"the answer was not done after {self._limits.max_request_s:g} s, the waiting included: ask for fewer "
                "tokens, or try when fewer wait",
                code="timeout",
            ) from None
        finally:
            free()
            self._abandon(request_id)

    def _take_place(self) -> None:
        if self._places == 0:
            raise RequestError(
                429,
                f"{self._limits.num_places} requests are being served or wait already: try again shortly",
                code="rate_limit_exceeded",
                retry_after_s=max(1, math.ceil(self._recent_s)),
            )
        self._places -= 1


class _Exchange:
    """What was sent of one answer."""

    def __init__(self, send: Send, max_transfer_s: float) -> None:
        self._send, self._max_transfer_s = send, max_transfer_s
        self.status, self._started, self._streams, self.ended = 500, False, False, False
        self.before_end: Callable[[], None] = lambda: None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._started = message["status"], True
            self._streams = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
        elif not message.get("more_body", False):
            self.ended = True
            self.before_end()
        async with asyncio.timeout(self._max_transfer_s):
            await self._send(message)

    async def refuse(self, error: RequestError, scope: Scope, receive: Receive) -> None:
        """As an answer, or as the last event of a stream that has begun."""
        response = error.response()
        if not self._started:
            await response(scope, receive, self.send)
        elif self._streams and not self.ended:
            await self.send({"type": "http.response.body", "body": b"data: %b\n\n" % response.body})


@asynccontextmanager
async def _listening(receive: Receive, exchange: _Exchange) -> AsyncIterator[asyncio.Event]:
    """An event that the client went away; what is done meanwhile ends with `ClientGoneError`, but for a sent answer."""
    gone, task = asyncio.Event(), asyncio.current_task()
    assert task is not None

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        if not exchange.ended:
            task.cancel()

    listener = asyncio.create_task(listen())
    try:
        yield gone
    except asyncio.CancelledError:
        if not gone.is_set() or task.uncancel() > 0:
            raise
        raise ClientGoneError from None
    finally:
        listener.cancel()


def _replay(body: bytes, gone: asyncio.Event) -> Receive:
    """Receives the body that was read, then nothing until the client goes away."""
    parts = [body]

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive
