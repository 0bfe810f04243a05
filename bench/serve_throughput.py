"""Answers a second of `trimtab serve` at 1 and 16 clients, beside a static batch of plain `generate`.

    python bench/serve_throughput.py [--clients 16] [--rounds 4] [--tokens 64]

A tiny Qwen2.5-VL with random weights in float32 on the CPU, which never ends an answer by itself. Every client shows a
picture of its own size and asks a text of its own length, and sends the next request when it has its answer. Each
answer is compared with the one given alone. Speaks HTTP only, so that it measures any version of the server: `--server
"PYTHON -m trimtab"` names the command. Needs trimtab[serve].
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "torch"))

from tiny_chat import picture, question, save_chat_model


def ask(port: int, body: dict[str, Any]) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    assert answer.status == 200, content
    return str(content["choices"][0]["message"]["content"])


def make_questions(count: int, tokens: int) -> list[dict[str, Any]]:
    """Unlike pictures, sizes and lengths."""
    return [
        question("what is it? " * (1 + i % 5), picture(i, 64 + 16 * (i % 4), 80), max_tokens=tokens, temperature=0)
        for i in range(count)
    ]


def batch_of_generate_s(folder: Path, count: int, tokens: int) -> float:
    """CPU seconds of one static batch in plain Transformers, its preparation not counted."""
    from transformers import AutoModelForImageTextToText

    from trimtab.serve.processor import load_processor

    model, processor = AutoModelForImageTextToText.from_pretrained(folder).eval(), load_processor(folder)
    shown = [
        [{"role": "user", "content": [{"type": "image", "image": picture(i)}, {"type": "text", "text": "what is it?"}]}]
        for i in range(count)
    ]
    inputs = processor.apply_chat_template(
        shown, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    began = time.process_time()
    model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return time.process_time() - began


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Answers a second of the server at some number of clients, and of a CPU second of its process.

    The latter does not feel who else works on the machine.
    """

    num_clients: int
    answers_per_s: float
    answers_per_cpu_s: float
    unlike: int  # answers unlike those given alone


@contextmanager
def serving(folder: Path, server: str) -> Iterator[tuple[int, int]]:
    """Port and process of a server of this model folder, while the context is open."""
    process = subprocess.Popen(
        [*shlex.split(server), "serve", str(folder), "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    told: list[str] = []
    try:
        while not (told and told[-1].startswith("serving ")):
            told.append(process.stderr.readline())
            assert told[-1], f"it never served: {''.join(told)}"
        threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()  # its log of requests
        yield int(told[-1].rsplit(":", 1)[1].split("/")[0]), process.pid
    finally:
        process.terminate()
        process.wait()


def measure(port: int, pid: int, num_clients: int, rounds: int, tokens: int) -> list[Rates]:
    """One client first, then all of them, each `rounds` questions."""
    questions = make_questions(num_clients, tokens)
    ask(port, questions[0])
    alone: list[str] = []

    def one_client() -> int:
        alone.extend(ask(port, body) for body in questions)
        return 0

    def client(number: int) -> int:
        return sum(ask(port, questions[number]) != alone[number] for _ in range(rounds))

    def all_clients() -> int:
        with ThreadPoolExecutor(num_clients) as clients:
            return sum(clients.map(client, range(num_clients)))

    found = []
    for number, count, run in ((1, num_clients, one_client), (num_clients, num_clients * rounds, all_clients)):
        began, cpu = time.monotonic(), cpu_s(pid)
        unlike = run()
        wall, cpu = time.monotonic() - began, cpu_s(pid) - cpu
        found.append(
            Rates(
                num_clients=number,
                answers_per_s=count / wall,
                answers_per_cpu_s=count / max(cpu, 1e-9),
                unlike=unlike,
            )
        )
    return found


def endless(folder: Path) -> Path:
    """The model folder, whose model now never ends an answer by itself."""
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": None}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--server", default=f"{sys.executable} -m trimtab")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = endless(save_chat_model(Path(temporary) / "tiny"))
        with serving(folder, given.server) as (port, pid):
            for rates in measure(port, pid, given.clients, given.rounds, given.tokens):
                print(
                    f"{rates.num_clients:2} clients: {rates.answers_per_s:6.2f} answers/s, "
                    f"{rates.answers_per_cpu_s:6.2f} a CPU second; {rates.unlike} unlike those given alone",
                    flush=True,
                )
        seconds = batch_of_generate_s(folder, given.clients, given.tokens)
        print(f"plain generate, batch of {given.clients}: {given.clients / seconds:6.2f} a CPU second")


if __name__ == "__main__":
    main()
