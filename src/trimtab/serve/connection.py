"""HTTP/1.1 connections: nobody holds them open without sending a request, and bytes that are none get a sentence."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from trimtab.serve.problems import RequestError

_MAX_IDLE = 512  # open connections without a request; below the 1,024 open files that a process often may have


def connection_class(max_head_s: float) -> type[H11Protocol]:
    """uvicorn's h11 connection, closed where `max_head_s` pass between connecting, or an answer, and a request's head.

    The one that has been silent for longest gives way where more than 512 are. uvicorn bounds the silence behind an
    answer, not that in front of the first request nor a head that drips in. Overrides methods that uvicorn does not
    document (0.54).
    """
    silent: dict[H11Protocol, None] = {}  # the longest first

    class Connection(H11Protocol):  # type: ignore[misc] # uvicorn is not read by the type checker
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's own words
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = json.dumps(RequestError(400, "the bytes are no HTTP/1.1 request: send one").body).encode()
                headers = [
                    (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode()),
                    (b"connection", b"close"),
                ]
                for event in (
                    h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                    h11.Data(data=body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _await_head(self) -> None:
            idle = self.cycle is None or self.cycle.response_complete
            if not idle:
                self._stop_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(max_head_s, self.transport.close)
                silent[self] = None
                if len(silent) > _MAX_IDLE:
                    next(iter(silent)).transport.abort()

        def _stop_timer(self) -> None:
            silent.pop(self, None)
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Connection
