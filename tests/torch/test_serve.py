"""The endpoint over a tiny model: answers, refusals, queue, drain, folders. Needs torch, Transformers and [serve]."""

# ruff: noqa: E402 - what may be absent is asked for first, so that the file is skipped with a reason

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="carries the endpoint: pip install 'trimtab[serve]'")
pytest.importorskip("uvicorn", reason="carries the endpoint: pip install 'trimtab[serve]'")
openai = pytest.importorskip("openai", reason="asks the endpoint: pip install 'trimtab[serve]'")

from running_server import CHAT, Running, running_server
from tiny_chat import chat_inputs, data_url, picture, question, save_chat_model

from trimtab.serve import server
from trimtab.serve.chat import ChatProcessor
from trimtab.serve.limits import ServeLimits

WHAT = "what is in the picture?"
LONG = 3000
HANGS_S = 120  # no test waits so long for what happens at all, on however busy a machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It never ends an answer by itself."""
    saved = save_chat_model(tmp_path_factory.mktemp("chat") / "tiny", "llava")  # its answers are taken as they are
    settings = saved / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": None}))
    return saved


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with running_server(
        folder, max_new_tokens=LONG, max_images=2, max_pixels=40_000, max_body_bytes=2_000_000, max_characters=20_000
    ) as server:
        yield server


def wait_for(true: Any) -> None:
    end = time.monotonic() + HANGS_S
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def said(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


HELLO = said("hello", max_tokens=3, temperature=0)


# -- right answers ----------------------------------------------------------------------------------------------------


def test_openais_own_client_gets_the_tokens_of_generate(running: Running) -> None:
    """Chat whole and as a stream, completions and responses; tools are read by the template, as Transformers does."""
    body = question(WHAT, picture(1), max_tokens=12, temperature=0)
    inputs = chat_inputs(running.processor, WHAT, picture(1))
    length = inputs["input_ids"].shape[1]
    tokens = running.plain.generate(**inputs, max_new_tokens=12, do_sample=False)[0, length:]
    text = running.processor.tokenizer.decode(tokens, skip_special_tokens=True)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=HANGS_S) as client:
        whole = client.chat.completions.create(model="tiny", tools=[tool], **body)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, "length")
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.model) == (length, 12, "tiny")
        chunks = list(client.chat.completions.create(model="tiny", stream=True, **body))
        assert "".join(x.choices[0].delta.content or "" for x in chunks) == text
        parts = [{"type": "input_image", "image_url": data_url(picture(1))}, {"type": "input_text", "text": WHAT}]
        asked = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 12, "temperature": 0}
        assert client.responses.create(model="tiny", **asked).output_text == text
        prompt = {"prompt": "once upon a time", "max_tokens": 4, "temperature": 0}
        assert client.completions.create(model="tiny", **prompt).usage.completion_tokens == 4
        assert [x.id for x in client.models.list()] == [client.models.retrieve("tiny").id] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("another")


def test_concurrent_clients_are_answered_together_as_alone(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [question("what? " * (1 + k), picture(k), max_tokens=12, temperature=0) for k in range(4)]

    def ask(k: int, stream: bool) -> str:
        reply = running.send({**bodies[k], "stream": stream})
        assert reply.status == 200, reply.content
        return "".join(x["choices"][0]["delta"].get("content", "") for x in reply.events) if stream else reply.text

    alone = {(k, stream): ask(k, stream) for k in range(4) for stream in (False, True)}
    batches, generate = [], running.plain.generate
    monkeypatch.setattr(running.plain, "generate", lambda **named: batches.append(1) or generate(**named))

    def client(k: int) -> None:
        for stream in (True, False, False):
            assert ask(k, stream) == alone[k, stream]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client, range(4)))
    assert len(batches) <= 8  # of 12 requests
    wait_for(lambda: running.num_accepted == 0)


def test_an_answer_ends_at_a_stop_and_a_seed_repeats_it(running: Running) -> None:
    sampled = {**HELLO, "max_tokens": 20, "temperature": 1.5}
    first = running.send({**sampled, "seed": 7}).text
    assert running.send({**sampled, "seed": 7}).text == first != running.send({**sampled, "seed": 8}).text
    whole = running.send({**HELLO, "max_tokens": 40})
    assert running.send({**HELLO, "max_tokens": 40, "temperature": 1e-300}).text == whole.text
    stop = whole.text[6:9]
    ended = running.send({**HELLO, "max_tokens": 40, "stop": stop})
    assert ended.json["usage"]["completion_tokens"] < 40
    assert ended.json["choices"][0]["finish_reason"] == "stop"
    assert stop in ended.text
    assert whole.text.startswith(ended.text)


def test_special_tokens_in_a_text_are_text(running: Running) -> None:
    tokenizer = running.processor.tokenizer
    chat = ChatProcessor(running.processor, ServeLimits(), name="tiny")

    def prompt(text: str) -> list[int]:
        turn = {"role": "user", "content": [{"type": "text", "text": text}]}
        return chat.apply_chat_template([turn], add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ][0]

    for marker in ("<|im_end|>", "<|image_pad|>"):
        number = tokenizer.convert_tokens_to_ids(marker)
        assert list(prompt(f"a {marker} b")).count(number) == list(prompt("a b")).count(number)


def test_fields_that_change_nothing_are_taken(running: Running) -> None:
    fields = {
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "top_logprobs": 0,
        "user": "me",
        "n": 1,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "chat_template_kwargs": None,
        "seed": None,
    }
    assert running.send({**HELLO, **fields}).text == running.send(HELLO).text


# -- refusals ---------------------------------------------------------------------------------------------------------


def image_part(url: Any) -> list[Any]:
    return [{"type": "image_url", "image_url": {"url": url}}]


def encoded(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


PNG = base64.b64decode(data_url(picture(1)).split(",")[1])
MALFORMED: list[tuple[Any, int, str]] = [
    (b"", 400, "must be one JSON object"),
    (b"[" * 100_000, 400, "must be one JSON object"),
    ([], 400, "must be one JSON object"),
    (b'{"model": "\\ud800"}', 400, "must be one JSON object ('utf-8' codec can't encode"),
    (b'{"seed": 1, "seed": 2}', 400, "key 'seed' stands twice"),
    (b'{"temperature": NaN}', 400, "NaN is not a number in JSON"),
    ({}, 400, "cannot be read (KeyError: 'messages')"),
    ({"messages": []}, 400, "cannot be"),
    ({"messages": [3]}, 400, "cannot be read"),
    ({"messages": [{"role": "root", "content": "x"}]}, 400, "role must be one of"),
    (said([{"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/a"}}]), 400, "neither text nor image"),
    (said([{"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/a"}}]), 400, "video is not taken"),
    (said([{"type": "image", "image": "/etc/passwd"}]), 400, "neither text nor image"),
    (said(image_part("https://example.com/cat.png")), 400, "nothing is fetched from the network"),
    (said(image_part("file:///etc/passwd")), 400, "no file is opened"),
    (said(image_part("/etc/passwd")), 400, "no file is opened"),
    (said(image_part(encoded(b"II*\0" + bytes(60)))), 400, "an image cannot be used"),
    (said(image_part(encoded(PNG[:45] + bytes(20) + PNG[65:]))), 400, "send another, as PNG, JPEG, WEBP, GIF, BMP"),
    (question(WHAT, picture(1, 300, 200)), 400, "300 x 200"),
    (question(WHAT, picture(1), picture(2), picture(3)), 400, "may hold 2 images"),
    (question(WHAT, picture(1, 1500, 7)), 400, "more than 200 times as long as wide"),
    (b'{"messages": [' + b"[]," * 600_000, 400, "more than 100,000 values beside its texts"),
    (said("a" * 20_001), 400, "more than 20,000 characters"),
    (said("cat mat sun " * 1500, max_tokens=9), 400, "this server takes 1 to 4087 with 9 new ones"),
    ({**HELLO, "model": "hf-internal-testing/tiny"}, 400, "pinned to 'tiny'"),
    ({**HELLO, "max_tokens": 10**9}, 400, "max_tokens must be a number from 1 to 3000"),
    ({**HELLO, "temperature": -1}, 400, "temperature must be a number from 0 to 2"),
    ({**HELLO, "top_p": 0}, 400, "top_p must be a number"),
    ({**HELLO, "seed": "x"}, 400, "seed must be a number"),
    ({**HELLO, "stop": ["a"] * 5}, 400, "stop must be up to 4"),
    ({**HELLO, "logit_bias": {"999999": 1}}, 400, "logit_bias is not offered"),
    ({**HELLO, "n": 2}, 400, "n is not offered"),
    ({**HELLO, "response_format": {"type": "json_object"}}, 400, "response_format is not offered"),
    ({**HELLO, "generation_config": json.dumps({"num_beams": 99})}, 400, "generation_config is not offered"),
    ({**HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "chat_template_kwargs is not offered"),
    ({**HELLO, "trust_remote_code": True}, 422, "Unexpected fields"),
    (b" " * 2_000_001, 413, "larger than 2000000 bytes"),
]


@pytest.mark.parametrize(("body", "status", "words"), MALFORMED, ids=[words for _, _, words in MALFORMED])
def test_a_malformed_request_is_refused_in_one_sentence(running: Running, body: Any, status: int, words: str) -> None:
    for stream in (False, True):
        reply = running.send({**body, "stream": stream} if isinstance(body, dict) else body)
        assert reply.status == status, reply.content
        assert words in reply.error["message"]
        assert "\n" not in reply.error["message"]
        assert len(reply.error["message"]) < 400
        assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "words"),
    [
        ("POST", CHAT, {"Content-Type": "text/plain"}, 415, "Content-Type: application/json"),
        ("POST", CHAT, {"Host": "evil.example:80"}, 403, "answers to localhost"),
        ("POST", CHAT, {"Host": "127.0.0.1.evil.example"}, 403, "answers to localhost"),
        ("POST", CHAT, {"Transfer-Encoding": "chunked", "Content-Length": "5"}, 400, "both given"),
        ("POST", "/v1/completions", {}, 422, "Unexpected fields in the request: {'messages'}"),
        ("GET", CHAT, {}, 405, "Method Not Allowed"),
        ("OPTIONS", CHAT, {"Origin": "https://evil.example"}, 405, "Method Not Allowed"),
        *[
            ("POST", path, {}, 404, "Not Found")
            for path in ("/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone", "/v1/chat/completions/")
        ],
        ("GET", "/docs", {}, 404, "Not Found"),
    ],
)
def test_whoever_knocks_at_the_wrong_door(
    running: Running, method: str, path: str, headers: dict[str, str], status: int, words: str
) -> None:
    chunked = "Transfer-Encoding" in headers
    content = b"5\r\nhello\r\n0\r\n\r\n" if chunked else json.dumps(HELLO).encode()
    reply = running.send(content, method=method, path=path, headers=headers)
    assert reply.status == status, reply.content
    assert words in reply.error["message"]
    assert "access-control-allow-origin" not in reply.headers


def test_with_a_key_nobody_else_is_served(folder: Path) -> None:
    with running_server(folder, api_key="secret", max_batch=1) as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sécret"}):
            reply = running.send(HELLO, headers={k: v.encode("utf-8").decode("latin-1") for k, v in headers.items()})
            assert reply.status == 401
            assert reply.error["type"] == "authentication_error"
        assert running.get("/v1/models").status == 401
        assert running.get("/health").status == 200
        known = {"Authorization": "Bearer secret", "Host": "models.example"}
        assert running.send({**HELLO, "max_tokens": 1}, headers=known).status == 200


# -- queue, time, clients that go away --------------------------------------------------------------------------------


@pytest.fixture
def blocked(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Running, threading.Event]]:
    """A server of two places whose model waits, before each batch, until the event is set."""
    limits = {"max_request_s": HANGS_S, "max_transfer_s": HANGS_S, **getattr(request, "param", {})}
    with running_server(folder, max_waiting=1, max_batch=1, max_body_bytes=200_000, **limits) as running:
        gate, generate = threading.Event(), running.plain.generate

        def wait(**named: Any) -> Any:
            assert gate.wait(HANGS_S)
            return generate(**named)

        running.plain.generate = wait
        try:
            yield running, gate
        finally:
            gate.set()


def address(running: Running) -> tuple[str, int]:
    host, port = running.url.removeprefix("http://").split(":")
    return host, int(port)


def sent(body: bytes, length: int | None = None) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def test_stalled_bodies_take_no_place_and_a_full_queue_says_when_to_come_back(
    blocked: tuple[Running, threading.Event],
) -> None:
    running, gate = blocked
    with ExitStack() as stalled, ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            client = stalled.enter_context(socket.create_connection(address(running), timeout=HANGS_S))
            client.sendall(sent(b'{"mess', 100_000))
        accepted = [pool.submit(running.send, HELLO) for _ in range(2)]
        wait_for(lambda: running.num_accepted == 2)
        reply = running.send(HELLO)
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.error["type"] == "rate_limit_error"
        assert running.get("/health").status == 200
        gate.set()
        assert [x.result().status for x in accepted] == [200, 200]


def test_a_client_that_goes_away_frees_its_place_and_the_model(blocked: tuple[Running, threading.Event]) -> None:
    running, gate = blocked
    for stream in (False, True):
        body = json.dumps(said("go on", max_tokens=1000, temperature=0, stream=stream)).encode()
        with ExitStack() as clients:
            for _ in range(2):  # one in the model, one that waits
                clients.enter_context(socket.create_connection(address(running), timeout=HANGS_S)).sendall(sent(body))
            wait_for(lambda: running.num_accepted == 2)
        wait_for(lambda: running.num_accepted == 0)
    gate.set()
    assert running.send(HELLO).status == 200


@pytest.mark.parametrize("blocked", [{"max_transfer_s": 1.0}], indirect=True, ids=["impatient"])
def test_silent_connections_and_slow_bodies_are_closed(
    blocked: tuple[Running, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _ = blocked
    with socket.create_connection(address(running), timeout=HANGS_S) as silent:
        assert silent.recv(1) == b""
    with socket.create_connection(address(running), timeout=HANGS_S) as slow:
        slow.sendall(sent(b'{"mess', 100))
        assert b"408" in slow.recv(4096).split(b"\r\n")[0]


def test_the_longest_silent_connection_gives_way(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_IDLE", 4)
    with ExitStack() as opened:
        clients = [opened.enter_context(socket.create_connection(address(running), timeout=HANGS_S)) for _ in range(9)]
        wait_for(lambda: running.get("/health").status == 200)
        assert clients[0].recv(1) == b""


def test_an_answer_that_takes_too_long_is_given_up(folder: Path) -> None:
    with running_server(folder, max_request_s=1.0, max_new_tokens=100_000, max_batch=1) as running:
        running.server.thread._positions = None
        body = said("go on", max_tokens=100_000)
        reply = running.send(body)
        assert reply.status == 504
        with pytest.raises(http.client.IncompleteRead):  # the stream breaks off
            running.send({**body, "stream": True})
        wait_for(lambda: running.num_accepted == 0)


def test_a_failure_in_the_model_is_not_told_and_three_are_a_sickness(
    running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> Any:
        raise RuntimeError("CUDA out of memory, perhaps")

    with monkeypatch.context() as broken:
        broken.setattr(running.plain, "generate", fail)
        for stream in (False, True, False):
            assert running.get("/health").status == 200
            reply = running.send({**HELLO, "stream": stream})
            assert reply.status == (200 if stream else 500)
            assert b"the model failed on this request" in reply.content
            assert b"CUDA" not in reply.content
            assert b"finish_reason" not in reply.content
        assert "CUDA out of memory" in caplog.text
        assert running.get("/health").status == 503
    assert running.send(HELLO).status == 200
    wait_for(lambda: running.get("/health").status == 200)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_what_was_accepted_is_finished_and_nothing_else(blocked: tuple[Running, threading.Event]) -> None:
    running, gate = blocked
    with ThreadPoolExecutor(2) as pool:
        accepted = [pool.submit(running.send, {**HELLO, "stream": stream}) for stream in (False, True)]
        wait_for(lambda: running.num_accepted == 2)
        running.server.stop()

        def refused() -> bool:
            try:
                running.send(HELLO)
            except ConnectionRefusedError:
                return True
            except (OSError, http.client.HTTPException):  # it waited to be accepted when the port was closed
                return False
            return False

        wait_for(refused)
        assert running.thread.is_alive()
        gate.set()
        first, second = (x.result() for x in accepted)
    assert first.json["usage"]["completion_tokens"] == second.events[-1]["usage"]["completion_tokens"] == 3
    running.thread.join(HANGS_S)
    assert not running.thread.is_alive()


def test_a_drain_has_an_end(folder: Path) -> None:
    """What is not done after `drain_s` is ended at its next token, and told so."""
    with (
        running_server(folder, drain_s=1, max_new_tokens=10**6, max_batch=1) as running,
        ThreadPoolExecutor(2) as pool,
    ):
        running.server.thread._positions = None
        begun = [pool.submit(running.send, said("go on", max_tokens=10**6)) for _ in range(2)]
        wait_for(lambda: running.num_accepted == 2)
        running.server.stop()
        running.thread.join(HANGS_S)
        assert not running.thread.is_alive()
        for reply in begun:
            assert reply.result().status == 503
            assert reply.result().error["message"].startswith("the server stopped before the answer was done")


def test_a_server_that_ended_left_no_thread_in_torchs_code(folder: Path) -> None:
    """A process that ends while a thread of it is in C++ is aborted: `run` returns after both have ended."""
    with running_server(folder) as running:
        worker = running.server.thread
        worker.intake.call_soon_threadsafe(time.sleep, 1)
        running.server.stop()
        running.thread.join(HANGS_S)
        assert worker._threads
        assert not any(thread.is_alive() for thread in worker._threads)
