"""HTTP/1.1 connections that nobody holds open without sending a request."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

_MAX_IDLE = 512  # open connections without a request; below the 1,024 open files that a process often may have


def connection_class(max_head_s: float) -> type[H11Protocol]:
    """uvicorn's h11 connection, closed where `max_head_s` pass between connecting, or an answer, and a request's head.

    The one that has been silent for longest gives way where more than 512 are. uvicorn bounds the silence behind an
    answer, not that in front of the first request nor a head that drips in. Overrides methods that uvicorn does not
    document (0.54).
    """
    silent: dict[H11Protocol, asyncio.TimerHandle] = {}  # the longest first, each with what will close it

    class Connection(H11Protocol):  # type: ignore[misc] # uvicorn is not read by the type checker
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self not in silent:
                silent[self] = self.loop.call_later(max_head_s, self.transport.close)
                if len(silent) > _MAX_IDLE:
                    next(iter(silent)).transport.abort()

        def _stop_timer(self) -> None:
            if self in silent:
                silent.pop(self).cancel()

    return Connection
