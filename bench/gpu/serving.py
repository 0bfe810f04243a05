"""Answers a second of a placed model behind `trimtab serve`, at one client and at sixteen (`serve_throughput`).

Beside it plain `generate` on the same device: the same questions one by one, and as one static batch, which is what the
server cannot pass. Random weights in the device's number format; every answer has the same number of tokens.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from bench.gpu.setting import Case, Setting
from packaging.version import Version  # Transformers needs it, too
from tiny_chat import picture, save_chat_model

from serve_throughput import endless, measure, serving
from trimtab.serve.processor import load_processor

NEEDED = Version("5.23")  # as the extra `serve` says
WIDE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 16}


def cases(setting: Setting) -> list[Case]:
    if setting.tiny:
        return [Case(name="tiny", run=partial(run, setting, num_clients=4, rounds=1, tokens=8))]
    return [Case(name="2B", run=partial(run, setting, num_clients=16, rounds=4, tokens=64))]


def run(setting: Setting, *, num_clients: int, rounds: int, tokens: int) -> dict[str, Any]:
    if Version(transformers.__version__) < NEEDED:
        told = f"the server needs Transformers {NEEDED} or newer, and here is {transformers.__version__}"
        return {"not_there": f"{told}: bring it as a wheel (--also transformers)"}
    with tempfile.TemporaryDirectory() as name:
        folder = endless(save_chat_model(Path(name) / "model"))
        if not setting.tiny:
            widen(folder, setting)
        with serving(folder, f"{sys.executable} -m trimtab") as (port, pid):
            served = [dataclasses.asdict(rates) for rates in measure(port, pid, num_clients, rounds, tokens)]
        return {"served": served, "generate_answers_per_s": _generate(setting, folder, num_clients, tokens)}


def widen(folder: Path, setting: Setting) -> None:
    """The language model of a real one, with random weights; tokenizer and vision tower as they are."""
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"] |= {**WIDE, "num_key_value_heads": 8}
    fields["text_config"]["rope_parameters"]["mrope_section"] = [16, 24, 24]
    fields["vision_config"]["out_hidden_size"] = WIDE["hidden_size"]
    (folder / "config.json").write_text(json.dumps(fields))
    config = transformers.AutoConfig.from_pretrained(folder)
    settings = (folder / "generation_config.json").read_bytes()
    with torch.device(setting.device):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_bytes(settings)


def _generate(setting: Setting, folder: Path, count: int, tokens: int) -> dict[str, float]:
    """Answers a second of plain Transformers: one by one, and all in one batch."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").to(setting.device).eval()
    processor = load_processor(folder)
    shown = [
        [{"role": "user", "content": [{"type": "image", "image": picture(i)}, {"type": "text", "text": "what is it?"}]}]
        for i in range(count)
    ]

    def answer(messages: list[Any]) -> float:
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(setting.device)
        began = time.perf_counter()
        model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        if setting.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    answer(shown[:1])  # warm up
    return {
        "one by one": count / sum(answer([each]) for each in shown),
        "one batch": count / answer(shown),
    }
