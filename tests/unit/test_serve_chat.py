"""Bodies of requests and the images in them: what is refused before a processor sees it. Needs no torch."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_sets import png

from trimtab.errors import TrimtabError
from trimtab.serve import body
from trimtab.serve.body import Bodies, parse_json
from trimtab.serve.limits import ServeLimits
from trimtab.serve.pictures import Picture, read_data_url
from trimtab.serve.problems import RequestError

LIMITS = ServeLimits(max_body_bytes=100, max_waiting=1, max_batch=1)


def url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def read(content: bytes, max_pixels: int = 10_000) -> Picture:
    return read_data_url(url(content), param="messages", max_pixels=max_pixels)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b'{"seed": NaN}', "NaN is no JSON number"),
        (b'{"n": 1, "n": 2}', "an object names 'n' twice"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" + b"[]," * 600_000 + b"[]]", "more than 100,000 values beside its texts"),
    ],
)
def test_json_that_readers_disagree_on_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words) as raised:
        parse_json(content, ServeLimits())
    assert raised.value.body["error"]["type"] == "invalid_request_error"


class Client:
    """Sends pieces of a body, and then nothing."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    async def receive(self) -> Any:
        if not self._pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces) or self.stalls}

    stalls = True


def test_the_body_that_began_first_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bodies are too many, and where they hold more than the queue's own may."""
    monkeypatch.setattr(body, "_MAX_READING", 3)

    async def readings(*bodies: tuple[bytes, ...]) -> list[bool]:
        reading = Bodies(LIMITS)
        tasks = [asyncio.create_task(reading.read(Client(*pieces).receive)) for pieces in bodies]
        await asyncio.sleep(0.05)
        over = [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(RequestError, asyncio.CancelledError):
                await task
        return over

    assert asyncio.run(readings(*[(b"x",)] * 4)) == [True, False, False, False]
    assert asyncio.run(readings((b"x" * 90,), (b"x" * 90,), (b"x" * 30,))) == [True, False, False]


def test_a_body_past_the_limit_is_read_on_so_that_the_refusal_can_be_read() -> None:
    with pytest.raises(RequestError, match="larger than 100 bytes") as raised:
        asyncio.run(Bodies(LIMITS).read(Client(*[b"x" * 60] * 9).receive))
    assert raised.value.status == 413


def test_an_image_bomb_is_refused_unread() -> None:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0))
    with pytest.raises(RequestError, match="60000 x 60000 pixels"):
        read(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"not even zlib") + chunk(b"IEND", b""))


def test_formats_without_a_reader_of_ours_never_reach_pillow() -> None:
    assert read(png(40, 30)).num_pixels == 1200
    for content in (b"II*\0" + bytes(40), b"%PDF-1.7", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"P6 1 1 255\n"):
        with pytest.raises(RequestError, match="none of PNG, JPEG, WEBP, GIF, BMP"):
            read(content)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with suppress(RequestError):
        parse_json(content, LIMITS)
    with pytest.raises(RequestError):
        read(b"\x89PNG\r\n\x1a\n" + content)


@pytest.mark.parametrize(
    "bound", [{"max_new_tokens": 0}, {"max_waiting": -1}, {"max_request_s": float("nan")}, {"max_body_bytes": 0}]
)
def test_limits_that_leave_nothing_are_refused(bound: dict[str, Any]) -> None:
    with pytest.raises(TrimtabError, match="leaves nothing to serve: give"):
        ServeLimits(**bound)
