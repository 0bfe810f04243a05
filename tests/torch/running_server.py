"""A chat server in a thread of this process, and a client that needs nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.runtime.placing.load import load_placed
from trimtab.serve.limits import ServeLimits
from trimtab.serve.processor import load_processor
from trimtab.serve.server import ModelServer, open_port, url_of

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def text(self) -> str:
        return self.json["choices"][0]["message"]["content"]

    @property
    def events(self) -> list[Any]:
        """Server-sent events; the last but "[DONE]" must say why the answer ends."""
        *lines, done = [line for line in self.content.decode().split("\n\n") if line]
        assert done == "data: [DONE]"
        assert all(line.startswith("data: ") for line in lines)
        events = [json.loads(line[6:]) for line in lines]
        assert events[-1]["choices"][0]["finish_reason"]
        return events


@dataclass(frozen=True)
class Running:
    """A server and where it is."""

    server: ModelServer
    plain: Any  # the model and its processor as Transformers knows them
    processor: Any
    url: str
    thread: threading.Thread

    def send(
        self,
        body: Any = None,
        *,
        path: str = CHAT,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        timeout_s: float = 120,
    ) -> Reply:
        address = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, content, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.send(path=path, method="GET", headers=headers)

    @property
    def num_accepted(self) -> int:
        """Requests from acceptance to their last token."""
        return len(self.server.thread.wanted)


@contextmanager
def running_server(folder: Path, *, api_key: str | None = None, **limits: Any) -> Iterator[Running]:
    processor = load_processor(folder)
    opened = open_port("127.0.0.1", 0, api_key=api_key)
    model = load_placed(folder)
    server = ModelServer(model, processor, opened, ServeLimits(**limits), name="tiny", api_key=api_key)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda _url: ready.set(),))
    running = Running(server, model, processor, url_of(opened), thread)
    thread.start()
    try:
        assert ready.wait(300)
        yield running
    finally:
        server.stop()
        thread.join(300)
        assert not thread.is_alive()
