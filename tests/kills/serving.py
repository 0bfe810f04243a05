"""`trimtab serve` under load, ended by SIGKILL or SIGTERM at random moments: the port and the folder are as before."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is this?"}], "max_tokens": 60, "temperature": 0}
STARTS_S = 300  # a server that does not answer then hangs


def ask(port: int, answers: list[str] | None = None, *, wait_s: float = 60) -> str | None:
    """The answer; None where the server is not there or goes away."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=wait_s)
    try:
        connection.request("POST", CHAT, json.dumps(QUESTION), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        content = json.loads(reply.read())
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    text = content["choices"][0]["message"]["content"] if reply.status == 200 else None
    if answers is not None and text is not None:
        answers.append(text)
    return text


def children(pid: int) -> list[int]:
    """Processes of the session that `pid` leads, itself aside."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[3]) == pid and int(stat.parent.name) != pid and words[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """The server once it answers."""
    command = [sys.executable, "-m", "trimtab", "serve", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + STARTS_S
    while ask(port, wait_s=5) is None:
        assert process.poll() is None, f"it ended with {process.returncode}: the port was not free"
        assert time.monotonic() < end, "it does not answer"
        time.sleep(0.2)
    return process


def attack(folder: Path, times: int, draw: random.Random) -> int:
    """Findings, each printed; a restart takes the same port."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))
    from tiny_chat import save_chat_model

    saved = save_chat_model(folder / "served")
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    findings, answered, right = 0, 0, None
    for number in range(times):
        process, answers = start(saved, port), list[str]()
        clients = [threading.Thread(target=ask, args=(port, answers)) for _ in range(8)]
        for client in clients:
            client.start()
        time.sleep(draw.uniform(0.0, 0.5))
        asked = signal.SIGTERM if number % 2 else signal.SIGKILL
        process.send_signal(asked)
        code = process.wait(STARTS_S)
        for client in clients:
            client.join()
        answered += len(answers)
        right = right or (answers[0] if answers else None)
        found = {file.name: file.read_bytes() for file in saved.iterdir()}
        for wrong, told in (
            (asked is signal.SIGTERM and code != 0, f"SIGTERM ends with {code}"),
            (any(text != right for text in answers), "an answer is another"),
            (found != before, f"the folder holds {sorted(found)}"),
            (bool(children(process.pid)), f"left processes {children(process.pid)}"),
        ):
            if wrong:
                findings += 1
                print(f"serve: kill {number}: {told}")
    print(f"serve: {times} kills, {answered} answers on the way, {findings} findings")
    return findings
