"""Runs the endpoint until it is told to stop: takes a port, serves, finishes what it accepted, leaves nothing."""

from __future__ import annotations

import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from trimtab.errors import TrimtabError
from trimtab.serve.application import PlacedGeneration, PlacedModel, build_application, quiet_transformers
from trimtab.serve.chat import ChatProcessor
from trimtab.serve.connection import connection_class
from trimtab.serve.gate import Gate, is_loopback
from trimtab.serve.limits import ServeLimits
from trimtab.serve.worker import ModelThread, to_hooked_device


def open_port(host: str, port: int, *, api_key: str | None) -> socket.socket:
    """A bound socket that does not listen yet; `port` 0 takes a free one.

    Only a loopback address may be served without a key.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise TrimtabError(f"{host} is no address of this machine ({error.strerror}): serve on 127.0.0.1") from None
    if api_key is None and not is_loopback(str(address[0])):
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
        raise TrimtabError(_unservable(host, port, error)) from None
    return opened


def _listen(opened: socket.socket) -> None:
    """Refuses where another server took the port while both still loaded: two may bind it, one may listen."""
    try:
        opened.listen()
    except OSError as error:
        host, port = opened.getsockname()[:2]
        raise TrimtabError(_unservable(host, port, error)) from None


def _unservable(host: str, port: int, error: OSError) -> str:
    return f"cannot serve on {host} port {port} ({error.strerror}): name another with --port, or 0 for a free one"


def url_of(opened: socket.socket) -> str:
    """http://127.0.0.1:8000, IPv6 addresses in brackets."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ModelServer:
    """One placed model on one port. `run` returns after SIGTERM, SIGINT or `stop` once every accepted request is
    answered; a second SIGINT, or `drain_s` after the first, ends the requests that are left at their next token.

    `load` gives the model (as `load_placed` does), `move_inputs` puts inputs where it wants them.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        processor: Any,
        opened: socket.socket,
        limits: ServeLimits,
        *,
        name: str,
        move_inputs: Callable[..., Any] = to_hooked_device,
        api_key: str | None = None,
    ) -> None:
        quiet_transformers()
        chat = ChatProcessor(processor, limits, name=name)
        placed = PlacedModel(name, load, chat)
        self.name, self.model, self._socket = name, placed.model, opened
        self.placed = placed
        self.thread = ModelThread(placed.model, move_inputs, limits)
        self.batching = self.thread.try_batches(*chat.examples())
        self._generation = PlacedGeneration(self.thread, limits)
        app = build_application(placed, self._generation)
        self.gate = Gate(app, limits, abandon=self.thread.abandon, api_key=api_key)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self.gate,
                http=connection_class(limits.max_transfer_s),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="error",  # not a line for every scanner that sends no HTTP
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=math.ceil(limits.drain_s),
            )
        )

    def run(self, on_ready: Callable[[str], None] | None = None) -> None:
        """Serves; `on_ready` gets the server's URL once the port listens."""
        url = url_of(self._socket)
        with _signals_to(self.stop):
            try:
                _listen(self._socket)
                self.thread.start()
                try:
                    if on_ready is not None:
                        on_ready(url)
                    self._uvicorn.run(sockets=[self._socket])
                finally:
                    self._generation.shutdown()
            finally:
                self._socket.close()

    def stop(self) -> None:
        """As SIGTERM does, from another thread."""
        self._uvicorn.should_exit = True


@contextmanager
def _signals_to(stop: Callable[[], None]) -> Iterator[None]:
    """uvicorn raises the signals it caught once more when it is done, to whoever listened before it: nobody may die."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(_signal: int, _frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
