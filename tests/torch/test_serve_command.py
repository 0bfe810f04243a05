"""`trimtab serve` as a process: serves, drains on a signal, leaves nothing. Needs torch, Transformers and [serve]."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="carries the endpoint: pip install 'trimtab[serve]'")
pytest.importorskip("uvicorn", reason="carries the endpoint: pip install 'trimtab[serve]'")
pytest.importorskip("openai", reason="has the types of the answers: pip install 'trimtab[serve]'")

from running_server import CHAT, running_server
from tiny_chat import picture, question, save_chat_model

from trimtab.errors import TrimtabError
from trimtab.serve.server import open_port, url_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved = save_chat_model(tmp_path_factory.mktemp("chat") / "tiny")
    settings = json.loads((saved / "generation_config.json").read_text())
    (saved / "generation_config.json").write_text(
        json.dumps({**settings, "eos_token_id": None})
    )  # never ends by itself
    return saved


@contextmanager
def served(folder: Path, *words: str | Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The running command and its port."""
    command = [sys.executable, "-W", "error", "-m", "trimtab", "serve", str(folder), "--port", "0", *map(str, words)]
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("serving tiny on http://127.0.0.1:"):
                break
        else:
            pytest.fail(f"it never served: {''.join(lines)}")
        yield process, int(lines[-1].rsplit(":", 1)[1].split("/")[0])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def members(session: int) -> list[str]:
    """Processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text()
        except OSError:
            continue
        if int(words.rsplit(")", 1)[1].split()[3]) == session:
            found.append(words)
    return found


def post(port: int, body: object) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content["choices"][0]["message"]["content"]


def test_a_placed_model_answers_and_a_signal_finishes_what_was_accepted(folder: Path, tmp_path: Path) -> None:
    places = {"model.visual": "cpu", "model.language_model": "cpu", "lm_head": "disk"}
    (tmp_path / "map.json").write_text(json.dumps({"device_map": places, "run_on_cpu": []}))
    short = question("what is it?", picture(1), max_tokens=20, temperature=0)
    body = json.dumps({**short, "stream": True, "max_tokens": 400}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with running_server(folder) as whole, served(folder, "--map", tmp_path / "map.json") as (process, port):
        assert post(port, short) == (200, whole.send(short).text)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            answer = client.recv(1)  # the first token is there, the last one is not
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)  # impatience changes nothing
            answer += b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"completion_tokens":400' in answer
        assert process.wait(60) == 0
        assert process.stderr is not None
        *logged, last = process.stderr.read().splitlines()
        assert len(logged) == 2
        assert all('"POST /v1/chat/completions HTTP/1.1" 200' in line for line in logged)
        assert last == "stopped"
        assert members(process.pid) == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_second_interrupt_ends_what_is_left(folder: Path) -> None:
    body = json.dumps(question("what is it?", max_tokens=3900, temperature=0, stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with served(folder, "--set", "max_new_tokens=4000") as (process, port):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            answer = client.recv(1)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            with suppress(ConnectionResetError):
                answer += b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'finish_reason":"length' not in answer
        assert process.wait(60) == 0
        assert members(process.pid) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{missing}"], "is no folder: give one that holds config.json"),
        (["{folder}", "--host", "0.0.0.0"], "no key is asked for"),
        (["{folder}", "--set", "max_body=much"], "size in bytes"),
        (["{folder}", "--set", "max_waiting=-1"], "--set max_waiting -1 leaves nothing to serve"),
        (["{folder}", "--api-key-file", "{empty}"], "holds no key"),
        (["{folder}", "--api-key-file", "{missing}"], "cannot use"),
        (["{folder}", "--map", "{empty}"], "holds no device map"),
    ],
)
def test_bad_input_ends_in_one_sentence(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    from trimtab.cli.main import main

    (tmp_path / "empty").touch()
    places = {"folder": folder, "missing": tmp_path / "missing", "empty": tmp_path / "empty"}
    monkeypatch.setattr(sys, "argv", ["trimtab", "serve", "--port", "0", *(x.format(**places) for x in words)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "Traceback" not in told
    assert len(told.splitlines()) == 1


def test_without_a_key_only_loopback_is_served() -> None:
    with pytest.raises(TrimtabError, match="can be reached from other machines, and no key is asked for"):
        open_port("0.0.0.0", 0, api_key=None)
    open_port("0.0.0.0", 0, api_key="secret").close()
    with open_port("127.0.0.1", 0, api_key=None) as taken:
        taken.listen()
        with pytest.raises(TrimtabError, match=r"Address already in use.*or 0 for a free one"):
            open_port("127.0.0.1", taken.getsockname()[1], api_key=None)
    for host, url in (("localhost", "http://127.0.0.1:"), ("::1", "http://[::1]:")):
        try:
            with open_port(host, 0, api_key=None) as opened:
                assert url_of(opened).startswith((url, "http://[::1]:"))
        except TrimtabError as error:
            assert host == "::1" and "cannot serve" in str(error)  # noqa: PT017, PT018 - a machine without IPv6
    with pytest.raises(TrimtabError, match="no address of this machine"):
        open_port("no.such.host.invalid", 0, api_key=None)
