"""Chat requests: what is read, what is refused and with which sentence; images judged by their header alone."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_sets import png

from trimtab.errors import TrimtabError
from trimtab.serve.chat import ChatRequest, Turn, parse_chat
from trimtab.serve.limits import ServeLimits
from trimtab.serve.problems import RequestError

LIMITS = ServeLimits(max_images=2, max_pixels=10_000, max_new_tokens=64, max_characters=200)
USER = {"role": "user", "content": "hello"}


def parse(fields: object, **limits: Any) -> ChatRequest:
    bound = LIMITS if not limits else ServeLimits(**{"max_new_tokens": 64, **limits})
    return parse_chat(json.dumps(fields).encode(), model="tiny", limits=bound, markers=("<image>", "<im>"))


def url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def shown(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": x}} for x in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}


def test_everything_that_is_offered_is_read() -> None:
    request = parse(
        {
            "model": "tiny",
            "messages": [
                {"role": "developer", "content": "short"},
                {"role": "user", "content": [{"type": "image_url", "image_url": url(png(40, 30))}]},
                {"role": "assistant", "content": "a cat", "name": "tiny", "refusal": None},
                {"role": "user", "content": [{"type": "text", "text": "sure?"}]},
            ],
            "max_completion_tokens": 5,
            "temperature": 0,
            "top_p": 0.5,
            "seed": -3,
            "stop": ["\n", "END"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": "me",
            "n": 1,
            "tools": [],
            "logit_bias": None,
        }
    )
    assert [turn.role for turn in request.turns] == ["system", "user", "assistant", "user"]
    assert [(x.width, x.height) for x in request.pictures] == [(40, 30)]
    assert (request.max_new_tokens, request.temperature, request.top_p, request.seed) == (5, 0.0, 0.5, -3)
    assert (request.stop, request.stream, request.include_usage) == (("\n", "END"), True, True)


def test_what_is_left_out_is_left_to_the_model() -> None:
    assert parse({"messages": [USER]}) == ChatRequest(
        turns=(Turn(role="user", parts=("hello",)),), max_new_tokens=LIMITS.max_new_tokens
    )


@pytest.mark.parametrize("names", [("<image>",), ("<im>",)])
def test_a_text_may_not_hold_what_the_tokenizer_reads_as_a_command(names: tuple[str]) -> None:
    with pytest.raises(RequestError, match=f"holds '{names[0]}'"):
        parse({"messages": [{"role": "user", "content": f"a {names[0]} b"}]})
    assert parse({"messages": [{"role": "user", "content": "<imag e>"}]})


def test_pixels_are_counted_over_all_images() -> None:
    assert len(parse(shown(url(png(100, 50)), url(png(50, 100)))).pictures) == 2
    with pytest.raises(RequestError, match="100 x 60 pixels is more than the 5,000 pixels left") as raised:
        parse(shown(url(png(100, 50)), url(png(100, 60))))
    assert raised.value.param == "messages[0].content[1]"


def test_an_image_bomb_is_refused_unread() -> None:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"not even zlib") + chunk(b"IEND", b"")
    with pytest.raises(RequestError, match="60000 x 60000 pixels"):
        parse(shown(url(bomb)))


def test_formats_without_a_reader_of_ours_never_reach_pillow() -> None:
    for content in (b"II*\0" + bytes(40), b"%PDF-1.7", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"P6 1 1 255\n"):
        with pytest.raises(RequestError, match="none of PNG, JPEG, WEBP, GIF, BMP"):
            parse(shown(url(content)))


@settings(deadline=None, max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ("messages", "role", "content", "type", "text", "image_url", "url", "stop", "seed", "stream", "n")
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_read_or_refused_in_one_sentence(value: object) -> None:
    for fields in (
        value,
        {"messages": value},
        {"messages": [USER], "stop": value},
        {"messages": [{**USER, "content": value}]},
    ):
        with suppress(RequestError):
            parse(fields)
            continue
        with pytest.raises(RequestError) as raised:
            parse(fields)
        assert raised.value.status in (400, 404)
        assert "\n" not in raised.value.message


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with pytest.raises(RequestError):
        parse_chat(content, model="tiny", limits=LIMITS)
    with pytest.raises(RequestError):
        parse(shown(url(b"\x89PNG\r\n\x1a\n" + content)))


def test_errors_have_the_shape_of_openais() -> None:
    with pytest.raises(RequestError) as raised:
        parse({"messages": [USER], "temperature": 3})
    assert raised.value.body == {
        "error": {
            "message": "temperature must be a number from 0 to 2",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": None,
        }
    }


@pytest.mark.parametrize(
    "bound", [{"max_new_tokens": 0}, {"max_waiting": -1}, {"max_request_s": float("nan")}, {"max_body_bytes": 0}]
)
def test_limits_that_leave_nothing_are_refused(bound: dict[str, Any]) -> None:
    with pytest.raises(TrimtabError, match="leaves nothing to serve: give"):
        ServeLimits(**bound)
