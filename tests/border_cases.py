"""What a hostile data set holds to make its reader connect or read elsewhere, and a watch over Python processes."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

CHAT = [{"from": "human", "value": "<video> what?"}, {"from": "gpt", "value": "a cat"}]


def playlists(port: int) -> dict[str, bytes]:
    """Files that FFmpeg, left to guess, reads as lists of other places; `secret.mp4` lies in the working folder."""
    address = f"http://127.0.0.1:{port}/seen"
    sdp = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 224.2.1.1/1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1,\n{address}.ts\n#EXT-X-ENDLIST\n"
    dash = (
        f'<?xml version="1.0"?><MPD type="static"><BaseURL>{address}.mp4</BaseURL><Period><AdaptationSet>'
        '<Representation id="1" bandwidth="1"/></AdaptationSet></Period></MPD>'
    )
    return {
        "session.mp4": f"{sdp}a=rtpmap:96 H264/90000\n".encode(),
        "concat.mp4": b"ffconcat version 1.0\nfile secret.mp4\n",
        "playlist.mp4": hls.encode(),
        "manifest.mp4": dash.encode(),
    }


def write_video_set(folder: Path, names: list[str]) -> Path:
    path = folder / "videos.jsonl"
    path.write_text("".join(json.dumps({"id": name, "video": name, "conversations": CHAT}) + "\n" for name in names))
    return path


# -- a server on this machine -----------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path, moved: Mapping[str, str] = MappingProxyType({})) -> Iterator[tuple[int, list[str]]]:
    """The folder over HTTP, ranges and all: the port, and what was asked for; what is `moved` leads on."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(with_body=True)

        def do_HEAD(self) -> None:
            self._reply(with_body=False)

        def _reply(self, *, with_body: bool) -> None:
            asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
            if self.path in moved:
                self.send_response(302)
                self.send_header("Location", moved[self.path])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            path = folder / self.path.lstrip("/").partition("?")[0]
            content = path.read_bytes() if path.is_file() else b""
            code, first, last = (200 if path.is_file() else 404), 0, len(content) - 1
            if (span := self.headers.get("Range")) and content:
                begin, _, end = span.removeprefix("bytes=").partition("-")
                first, last, code = int(begin), min(int(end or last), last), 206
            part = content[first : last + 1]
            self.send_response(code)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(part)))
            if code == 206:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.end_headers()
            if with_body:
                self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def spoken(parts: list[bytes], times: int = 1) -> Iterator[int]:
    """A server that says these parts to each of so many connections, a hundredth of a second apart, and then waits."""
    closing = threading.Event()

    def speak() -> None:
        with suppress(OSError):  # the other side, or this test, has ended
            for _ in range(times):
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    for part in parts:
                        connection.sendall(part)
                        closing.wait(0.01)
                    if times == 1:
                        closing.wait()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=speak, daemon=True).start()
        yield server.getsockname()[1]
        closing.set()


# -- a watch over every Python process of a command -------------------------------------------------------------------

_HOOK = """
import os, sys
_log = os.open(os.environ["TRIMTAB_WATCH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_EVENTS = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "subprocess.Popen", "os.system",
           "os.exec", "os.posix_spawn")
def _watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        name = os.fsdecode(arguments[0])
        mode = arguments[1] or ""
        os.write(_log, f"open {os.path.realpath(name)}\\n".encode())
    elif event in _EVENTS:
        os.write(_log, f"{event} {arguments[0]!r}\\n".encode())
sys.addaudithook(_watch)
"""


def watched_environment(folder: Path) -> tuple[dict[str, str], Path]:
    """An environment in which every Python process writes what it opens and starts into a file, which is returned."""
    hook, log = folder / "hook", folder / "watch.log"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(_HOOK)
    path = os.pathsep.join([str(hook), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "TRIMTAB_WATCH": str(log)}, log
