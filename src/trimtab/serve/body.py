"""Reading a request's body within bounds, and noticing when its client goes away."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive

from trimtab.serve.limits import ServeLimits
from trimtab.serve.problems import RequestError

_SWALLOW = 4  # times max_body_bytes that are read and dropped, so that a refused client gets to read the refusal


class ClientGoneError(Exception):
    """The connection closed before the request was whole."""


async def read_body(receive: Receive, limits: ServeLimits, *, keep: bool = True) -> bytes:
    """The whole body; `keep=False` reads and drops it. Raises `RequestError` 413 past the limit, 408 past the time."""
    try:
        async with asyncio.timeout(limits.max_transfer_s):
            return await _read(receive, limits.max_body_bytes, keep)
    except TimeoutError:
        raise RequestError(
            408, f"the body was not here after {limits.max_transfer_s:g} s: send it faster, or send less"
        ) from None


async def _read(receive: Receive, max_bytes: int, keep: bool) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        size, more = size + len(chunk), message.get("more_body", False)
        if size > max_bytes:
            chunks.clear()
            if size > _SWALLOW * max_bytes:
                break
        elif keep:
            chunks.append(chunk)
    if size > max_bytes:
        raise RequestError(
            413,
            f"the body is larger than {max_bytes} bytes: send fewer or smaller images",
            code="request_too_large",
        )
    return b"".join(chunks)


async def until_disconnected(receive: Receive) -> None:
    """Returns when the client closes the connection; only after the body was read whole."""
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            return
