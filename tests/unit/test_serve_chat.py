"""Bodies of requests and the images in them: what is refused before a processor sees it. Needs trimtab[serve]."""

from __future__ import annotations

import asyncio
import base64
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_sets import png, png_of

pytest.importorskip("fastapi", reason="carries the endpoint: pip install 'trimtab[serve]'")
pytest.importorskip("torch", reason="runs what is served")
pytest.importorskip("PIL", reason="pillow is not installed")

from starlette.exceptions import HTTPException
from starlette.requests import Request

from trimtab.errors import TrimtabError
from trimtab.serve.chat import open_picture
from trimtab.serve.gate import Gate
from trimtab.serve.limits import ServeLimits

LIMITS = ServeLimits(max_body_bytes=100, max_waiting=1, max_batch=1)


def url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def read(content: bytes, max_pixels: int = 10_000) -> Any:
    return open_picture(url(content), max_pixels=max_pixels)


class Client:
    """Sends pieces of a body, and then nothing."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    async def receive(self) -> Any:
        if not self._pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces) or self.stalls}

    stalls = True


async def read_body(gate: Gate, *pieces: bytes) -> bytes:
    return await gate._read(Request({"type": "http"}, Client(*pieces).receive))


def test_the_body_that_began_first_gives_way_where_all_fill_the_memory() -> None:
    async def readings(*bodies: bytes) -> list[bool]:
        gate: Any = Gate(None, None, LIMITS)  # type: ignore[arg-type] # which reading does not ask
        tasks = [asyncio.create_task(read_body(gate, content)) for content in bodies]
        await asyncio.sleep(0.05)
        over = [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(HTTPException, asyncio.CancelledError):
                await task
        return over

    assert asyncio.run(readings(b"x" * 90, b"x" * 90, b"x" * 30, b"x" * 90)) == [True, True, False, False]


def test_a_body_past_the_limit_is_read_on_so_that_the_refusal_can_be_read() -> None:
    with pytest.raises(HTTPException, match="larger than 100 bytes") as raised:
        asyncio.run(read_body(Gate(None, None, LIMITS), *[b"x" * 60] * 9))  # type: ignore[arg-type]
    assert raised.value.status_code == 413


def test_an_image_bomb_is_refused_unread() -> None:
    with pytest.raises(
        HTTPException, match="more than 178956970, where Pillow and trainers refuse an image: shrink it"
    ):
        read(png_of(60_000, 60_000))


def test_formats_without_a_reader_of_ours_never_reach_pillow() -> None:
    assert read(png(40, 30)).size == (40, 30)
    for content in (b"II*\0" + bytes(40), b"%PDF-1.7", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"P6 1 1 255\n"):
        with pytest.raises(HTTPException, match="as PNG, JPEG, WEBP, GIF, BMP"):
            read(content)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(HTTPException):
        read(b"\x89PNG\r\n\x1a\n" + content)


@pytest.mark.parametrize(
    "bound", [{"max_new_tokens": 0}, {"max_waiting": -1}, {"max_request_s": float("nan")}, {"max_body_bytes": 0}]
)
def test_limits_that_leave_nothing_are_refused(bound: dict[str, Any]) -> None:
    with pytest.raises(TrimtabError, match="leaves nothing to serve: give"):
        ServeLimits(**bound)
