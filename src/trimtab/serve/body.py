"""Reading requests' bodies within bounds: whoever sends slowly gives way, and keeps nobody else out."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from trimtab.serve.limits import ServeLimits
from trimtab.serve.problems import RequestError

if TYPE_CHECKING:
    from starlette.types import Receive

_SWALLOW = 4  # times max_body_bytes that are read and dropped, so that a refused client gets to read the refusal
_MAX_READING = 256  # bodies on their way in at the same time


class ClientGoneError(Exception):
    """The connection closed before the request was whole."""


class Bodies:
    """All bodies on their way in. They take no place in the queue; where they are too many, or fill the memory that
    `num_places` whole ones may take, the one that began first is given up."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._sizes: dict[asyncio.Timeout, int] = {}  # bytes of each so far, the oldest first

    async def read(self, receive: Receive) -> bytes:
        """The whole body. Raises `RequestError` 413 past the limit, 408 where it takes too long or gives way."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.max_transfer_s) as clock:
                self._grow(clock, 0)
                try:
                    return await self._read(receive, clock)
                finally:
                    self._sizes.pop(clock, None)
        except TimeoutError:
            raise RequestError(
                408,
                f"the body was not here after {limits.max_transfer_s:g} s, or others needed its room: send it faster, "
                "or send less",
            ) from None

    async def _read(self, receive: Receive, clock: asyncio.Timeout) -> bytes:
        chunks: list[bytes] = []
        size, more, most = 0, True, self._limits.max_body_bytes
        while more and size <= _SWALLOW * most:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            size, more = size + len(chunk), message.get("more_body", False)
            if size > most:
                chunks.clear()
            else:
                chunks.append(chunk)
                self._grow(clock, len(chunk))
        if size > most:
            raise RequestError(
                413, f"the body is larger than {most} bytes: send fewer or smaller images", code="request_too_large"
            )
        return b"".join(chunks)

    def _grow(self, clock: asyncio.Timeout, size: int) -> None:
        self._sizes[clock] = self._sizes.get(clock, 0) + size
        room = self._limits.num_places * self._limits.max_body_bytes
        while len(self._sizes) > _MAX_READING or (len(self._sizes) > 1 and sum(self._sizes.values()) > room):
            oldest = next(iter(self._sizes))
            del self._sizes[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())


def parse_json(body: bytes, limits: ServeLimits) -> object:
    """What the body says; `RequestError` 400 where readers would disagree on it, or it is made to fill memory."""
    # values are counted before any is made: an empty list takes 2 bytes here, 60 in memory
    if sum(body.count(mark) for mark in b"[{,") > limits.max_characters + 100_000:
        raise RequestError(400, "the body holds more than 100,000 values beside its texts: send less")
    try:
        return json.loads(body, parse_constant=_no_constant, object_pairs_hook=_no_twin)
    except RecursionError:
        reason = "it is nested too deeply"
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except ValueError as error:  # also Python's own limit for digits of whole numbers
        reason = str(error)[:200]
    raise RequestError(400, f"the body is not JSON: {reason}; send one JSON object")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _no_twin(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: readers disagree on which of two counts."""
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object names {next(x for x in found if names.count(x) > 1)[:100]!r} twice")
    return found
