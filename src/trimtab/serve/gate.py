"""In front of the application: who may ask, how much, how many at once, for how long."""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import uuid

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab.serve.limits import ServeLimits
from trimtab.serve.problems import refusal
from trimtab.serve.worker import ModelThread
from trimtab.typed_json import parse_json

_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
_SWALLOW = 4  # times max_body_bytes that are read and dropped, so that a refused client gets to read the refusal
_LAST_EVENT = b"data: [DONE]\n\n"  # of OpenAI's streams, which Transformers leaves out
_MAX_VALUES = 100_000  # of a body beside its texts: an empty list takes 2 bytes there, 60 in memory


class Gate:
    """Lets through what the application shall answer, and refuses the rest in OpenAI's shape.

    With a key: refuses whoever does not send it, /health aside. Without one: requests whose Host is no loopback name,
    which is what a web page makes that points its own name at 127.0.0.1.
    """

    def __init__(self, app: ASGIApp, thread: ModelThread, limits: ServeLimits, *, api_key: str | None = None) -> None:
        self._app, self._thread, self._limits, self._key = app, thread, limits, api_key
        self._bodies: dict[asyncio.Timeout, int] = {}  # on their way in: bytes of each so far, the oldest first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn runs without lifespan and websockets"
        started = ends = False

        async def send_on(message: Message) -> None:
            nonlocal started, ends
            started = True
            if message["type"] == "http.response.start":
                kind = dict(message.get("headers", ())).get(b"content-type", b"")
                ends = kind.startswith(b"text/event-stream") and scope["path"].endswith("/completions")
            elif ends and not message.get("more_body"):
                message = {**message, "body": message.get("body", b"") + _LAST_EVENT}
            await send(message)

        try:
            self._check_caller(Request(scope))
            if scope["method"] == "POST":
                await self._ask(scope, receive, send_on)
            else:
                await self._app(scope, receive, send_on)
        except HTTPException as error:
            if not started:  # a stream that has begun breaks off
                await refusal(error)(scope, receive, send)
        except ClientDisconnect:
            pass

    def _check_caller(self, request: Request) -> None:
        headers = request.headers
        if "content-length" in headers and "transfer-encoding" in headers:  # proxies disagree on what counts
            raise HTTPException(400, "Content-Length and Transfer-Encoding are both given: send one of them")
        if self._key is None:
            if not _LOOPBACK.fullmatch(host := headers.get("host", "")):
                raise HTTPException(403, f"this server answers to localhost, not to {host[:100]!r}: ask for that")
        elif request.url.path != "/health":
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
                raise HTTPException(401, "this server wants its key: send Authorization: Bearer KEY")
        # what another site's web page sends without asking whether it may
        if request.method == "POST" and headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise HTTPException(415, "the body must be JSON: send Content-Type: application/json")

    async def _ask(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A place in the queue is taken when the body is here: whoever sends slowly keeps nobody else out."""
        body, limits, wanted = await self._read(Request(scope, receive)), self._limits, self._thread.wanted
        if sum(body.count(mark) for mark in b"[{,") > limits.max_characters + _MAX_VALUES:
            raise HTTPException(400, f"the body holds more than {_MAX_VALUES:,} values beside its texts: send less")
        try:
            if not isinstance(parse_json(body), dict):
                raise ValueError("it holds something else")
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise HTTPException(400, f"the body must be one JSON object ({reason}): send one") from None
        if len(wanted) >= limits.num_places:
            again_s = max(1, math.ceil(self._thread.last_batch_s))
            raise HTTPException(
                429,
                f"{limits.num_places} requests are being served or wait already: try again shortly",
                headers={"Retry-After": str(again_s)},
            )
        request_id = uuid.uuid4().hex
        # of the client's headers the application gets none but what the body is; the id is not the client's to choose
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
        wanted.add(request_id)
        answer = asyncio.create_task(self._app({**scope, "headers": headers}, _replay(body), send))
        left = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({answer, left}, timeout=limits.max_request_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
            elif not left.done():
                raise HTTPException(
                    504,
                    f"the answer was not done after {limits.max_request_s:g} s, the waiting included: ask for fewer "
                    "tokens, or try when fewer wait",
                )
        except asyncio.CancelledError:  # uvicorn's, when the drain ran out of time; the task ends here either way
            raise HTTPException(503, "the server stopped before the answer was done: ask again elsewhere") from None
        finally:
            wanted.discard(request_id)
            answer.cancel()
            left.cancel()

    async def _read(self, request: Request) -> bytes:
        """The whole body. Where all bodies together fill the memory that the queue's own may take, the one that began
        first is given up."""
        most, chunks, size = self._limits.max_body_bytes, [], 0
        try:
            async with asyncio.timeout(self._limits.max_transfer_s) as clock:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= most:
                        chunks.append(chunk)
                        self._bodies[clock] = size
                    elif size > _SWALLOW * most:
                        break
                    while sum(self._bodies.values()) > self._limits.num_places * most:
                        oldest = next(iter(self._bodies))
                        del self._bodies[oldest]
                        if not oldest.expired():
                            oldest.reschedule(0)
        except TimeoutError:
            raise HTTPException(
                408,
                f"the body was not here after {self._limits.max_transfer_s:g} s, or others needed its room: send it "
                "faster, or send less",
            ) from None
        finally:
            self._bodies.pop(clock, None)
        if size > most:
            raise HTTPException(413, f"the body is larger than {most} bytes: send fewer or smaller images")
        return b"".join(chunks)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes) -> Receive:
    """Receives the body that was read, then nothing: `Gate` itself listens for the client's end."""
    parts = [body]

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    return receive
