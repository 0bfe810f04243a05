"""Concurrent clients with images against `trimtab serve` for minutes: errors, wrong answers, memory, fairness, the end.

    python bench/serve_soak.py [--clients 32] [--seconds 300]

A tiny LLaVA with random weights on the CPU. Each client sends one request after the other: a picture of its own
(64 to 1,200 pixels a side, PNG or JPEG), 1 to 24 tokens, every other answer as a stream. Every answer is compared with
the one that the server gave to the same request before the crowd came. SIGTERM comes while all clients wait: what
was accepted must be answered, and nothing of the server may stay. Needs trimtab[serve].
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "torch"))

from tiny_chat import data_url, picture, save_chat_model

CHAT = "/v1/chat/completions"
NUM_PICTURES = 24


@dataclass
class Tally:
    """What all clients saw."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    seconds: list[float] = field(default_factory=list)
    answered: Counter[int] = field(default_factory=Counter)  # by client
    lock: threading.Lock = field(default_factory=threading.Lock)


def ask(port: int, body: dict[str, Any]) -> tuple[int, str]:
    """Status, and the answer's text; a stream that does not end as it should is a status of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        return answer.status, content.decode()
    if not body.get("stream"):
        return 200, json.loads(content)["choices"][0]["message"]["content"]
    lines = content.decode().strip().split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines]
    if "choices" not in chunks[-1] or not chunks[-1]["choices"][0].get("finish_reason"):
        return 599, lines[-1]
    return 200, "".join(x["choices"][0]["delta"].get("content", "") for x in chunks)


def make_questions(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    questions = []
    for i in range(NUM_PICTURES):
        url = data_url(picture(i, rng.randint(64, 1200), rng.randint(64, 1200)), rng.choice(("PNG", "JPEG")))
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]
        questions.append(
            {
                "messages": [{"role": "user", "content": content}],
                "max_tokens": rng.randint(1, 24),
                "temperature": 0,
                "stream": i % 2 == 0,
            }
        )
    return questions


def client(
    number: int, port: int, questions: list[dict[str, Any]], expected: list[str], end: float, tally: Tally
) -> None:
    rng = random.Random(number)
    while time.monotonic() < end:
        which = rng.randrange(NUM_PICTURES)
        began = time.monotonic()
        try:
            status, text = ask(port, questions[which])
            name = str(status)
        except ConnectionRefusedError:
            name, text = "refused", ""
        except (OSError, http.client.HTTPException) as error:
            name, text = type(error).__name__, ""
        with tally.lock:
            tally.statuses[name] += 1
            if name == "200":
                tally.wrong += text != expected[which]
                tally.seconds.append(time.monotonic() - began)
                tally.answered[number] += 1
        if name == "refused":
            return


def resident_mib(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def session_members(session: int) -> int:
    """Processes of the server's session, itself included."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        count += int(words[3]) == session and words[0] != "Z"
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        model = save_chat_model(Path(folder) / "tiny", "llava")
        command = [sys.executable, "-m", "trimtab", "serve", str(model), "--port", "0"]
        command += ["--set", f"max_waiting={arguments.clients}"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert server.stderr is not None
        line = next(x for x in server.stderr if x.startswith("serving "))
        threading.Thread(target=deque, args=(server.stderr, 0), daemon=True).start()  # its log of requests
        port = int(line.rsplit(":", 1)[1].split("/")[0])
        try:
            return soak(server, port, arguments.clients, arguments.seconds)
        finally:
            server.kill()
            server.wait()


def soak(server: subprocess.Popen[str], port: int, num_clients: int, seconds: float) -> int:
    questions = make_questions(0)
    alone = [ask(port, question) for question in questions]  # nobody else asks yet
    assert all(status == 200 for status, _ in alone), alone
    expected = [text for _, text in alone]
    members = session_members(server.pid)
    print(f"{len(set(expected))} unlike answers to {NUM_PICTURES} questions; {members} process")

    tally, began = Tally(), time.monotonic()
    end = began + seconds + 60  # the server goes first
    threads = [
        threading.Thread(target=client, args=(i, port, questions, expected, end, tally)) for i in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    memory: list[float] = []
    while time.monotonic() < began + seconds:
        time.sleep(1)
        memory.append(resident_mib(server.pid))
        if len(memory) % 30 == 0:
            print(f"{len(memory):4d} s  {sum(tally.answered.values()):6d} answers  {memory[-1]:6.0f} MiB", flush=True)
    done = sum(tally.answered.values())
    before = dict(tally.statuses)
    stopped_at = time.monotonic()
    server.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    code = server.wait(60)
    drain_s = time.monotonic() - stopped_at
    after = {name: count - before.get(name, 0) for name, count in tally.statuses.items() if count != before.get(name)}
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        port_left = True
    except ConnectionRefusedError:
        port_left = False

    half = len(memory) // 2
    counts = [tally.answered[i] for i in range(num_clients)]
    print(f"before SIGTERM: {before}, {tally.wrong} wrong answers, {done / seconds:.1f} answers/s")
    print(f"answers per client: {min(counts)} to {max(counts)}")
    print(f"seconds per answer: median {statistics.median(tally.seconds):.2f}, longest {max(tally.seconds):.2f}")
    print(
        f"resident memory: after 10 s {memory[min(9, len(memory) - 1)]:.0f} MiB, mean of the first half of the run "
        f"{statistics.mean(memory[:half]):.0f}, of the second {statistics.mean(memory[half:]):.0f}, "
        f"most {max(memory):.0f}"
    )
    print(f"SIGTERM under load: {after}, exit code {code} after {drain_s:.1f} s")
    print(f"left behind: {session_members(server.pid)} processes, port {'open' if port_left else 'closed'}")
    # a connection that was open and had not sent its request yet is closed: not accepted, so not answered
    late = {"200", "refused", "RemoteDisconnected", "ConnectionResetError"}
    clean = set(before) == {"200"} and set(after) <= late and not tally.wrong
    return 0 if clean and code == 0 and not port_left and session_members(server.pid) == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
