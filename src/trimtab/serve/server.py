"""Runs the endpoint until it is told to stop: takes a port, serves, finishes what it accepted, leaves nothing."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from trimtab.errors import TrimtabError
from trimtab.serve.application import PlacedModel, build_application
from trimtab.serve.chat import ChatProcessor
from trimtab.serve.gate import Gate
from trimtab.serve.limits import ServeLimits
from trimtab.serve.worker import ModelThread

_MAX_IDLE = 512  # open connections without a request; below the 1,024 open files that a process often may have


def open_port(host: str, port: int, *, api_key: str | None) -> socket.socket:
    """A bound socket that does not listen yet; `port` 0 takes a free one.

    Only a loopback address may be served without a key.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise TrimtabError(f"{host} is no address of this machine ({error.strerror}): serve on 127.0.0.1") from None
    if api_key is None and not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
        raise TrimtabError(
            f"{host} can be reached from other machines, and no key is asked for: "
            "serve on 127.0.0.1, or name a file with a key as --api-key-file"
        )
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT, never one in use
        opened.bind(address)
    except OSError as error:
        opened.close()
        raise TrimtabError(
            f"cannot serve on {host} port {port} ({error.strerror}): name another with --port, or 0 for a free one"
        ) from None
    return opened


def url_of(opened: socket.socket) -> str:
    """http://127.0.0.1:8000, IPv6 addresses in brackets."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):  # type: ignore[misc] # uvicorn is not read by the type checker
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._captured_signals.clear()  # uvicorn (0.54) raises them once more when it is done, and the process dies


class ModelServer:
    """One placed model on one port. `run` returns after SIGTERM, SIGINT or `stop` once every accepted request is
    answered; a second SIGINT, or `drain_s` after the first, ends the requests that are left at their next token."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        opened: socket.socket,
        limits: ServeLimits,
        *,
        name: str,
        api_key: str | None = None,
    ) -> None:
        chat = ChatProcessor(processor, limits, name=name)
        self.name, self.thread, self._socket = name, ModelThread(model, limits), opened
        self.thread.try_batch(chat.examples())
        app = build_application(PlacedModel(name, model, chat), self.thread)
        config = uvicorn.Config(
            Gate(app, self.thread, limits, api_key=api_key),
            http=connection_class(limits.max_transfer_s),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",  # not a line for every scanner that sends no HTTP
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(limits.drain_s),
        )
        self._uvicorn = _Server(config)

    def run(self, on_ready: Callable[[str], None] | None = None) -> None:
        """Serves; `on_ready` gets the server's URL once the port listens."""
        with self._socket:
            self._socket.listen()
            self.thread.start()
            try:
                if on_ready is not None:
                    on_ready(url_of(self._socket))
                self._uvicorn.run(sockets=[self._socket])
            finally:
                self.thread.shutdown()

    def stop(self) -> None:
        """As SIGTERM does, from another thread."""
        self._uvicorn.should_exit = True


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
