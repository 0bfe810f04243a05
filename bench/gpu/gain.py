"""Tokens a second of padded, length-grouped, ISF and balanced micro-batches of the same samples (`training_gain`)."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from bench.gpu.setting import Case, Setting
from transformers.utils import is_flash_attn_2_available

from lengths import DEFAULT_DATA
from training_gain import SIZES, compare

ROOM_BYTES = {"2b": 40e9, "8b": 120e9}  # weights in bf16, gradients, AdamW's state, activations of the widest batch


def cases(setting: Setting) -> list[Case]:
    if setting.tiny:
        return [Case(name="tiny", run=lambda: measure(setting, "tiny", samples=24, scale=16))]
    return [
        Case(name=size, run=lambda size=size: measure(setting, size, samples=400, scale=1))
        for size, room in ROOM_BYTES.items()
        if room <= setting.memory_bytes
    ] or [Case(name="60m", run=lambda: measure(setting, "60m", samples=400, scale=1))]


def measure(setting: Setting, size: str, *, samples: int, scale: int) -> dict[str, Any]:
    assert size in SIZES
    attention = "flash_attention_2" if setting.device.type == "cuda" and is_flash_attn_2_available() else "sdpa"
    arguments = argparse.Namespace(
        data=DEFAULT_DATA,
        size=size,
        samples=samples,
        scale=scale,
        dp=4,
        seed=0,
        repeats=1,  # the record repeats
        device=setting.device.type,
        dtype="float32" if setting.dtype == "fp32" else "bfloat16",
        attention=attention,
    )
    setting.reset_peak()
    rows = [dataclasses.asdict(row) for row in compare(arguments)]
    rates = {row["scheme"]: row["real_tokens"] / row["seconds"] for row in rows}
    return {
        "attention": attention,
        "tokens_per_s": rates,
        "balanced_by_length_grouped": rates["balanced packs"] / rates["padded, length-grouped"],
        "balanced_by_isf": rates["balanced packs"] / rates["ISF packs"],
        "torch_threads": torch.get_num_threads(),
        "rows": rows,
        **setting.peak_bytes(),
    }
