"""Tokens a second of padded, length-grouped, ISF and balanced micro-batches of the same samples (`training_gain`).

Qwen2.5-VL-3B with random weights and AdamW in bf16 trains on the mixture's lengths; packs go through the packed
collator, with varlen attention where flash-attn is installed. Every block is recomputed under every scheme, so that the
padded batches fit, too. MFU counts the real tokens' forward and backward, and nothing twice. On a device that the model
does not fit, tiles shrink and the language model is cut: the case's name says so.
"""

import argparse
import dataclasses
from typing import Any

import torch
from bench.gpu.setting import Case, Setting
from transformers.utils import is_flash_attn_2_available

from lengths import DEFAULT_DATA
from training_gain import LIMITS, compare
from trimtab.costs.measured.timed import measure_device
from trimtab.models.describe import describe
from trimtab.specs import ModelSpec

MODEL = "Qwen2.5-VL-3B"
STATE_BYTES = 8  # a parameter: weight, gradient and two moments, all in bf16
LOGIT_BYTES, BLOCK_BYTES = 14, 150_000  # of a logit with its loss; of a token in the one block that runs again
BATCH = 4  # samples in a padded batch, about, each of at most a pack's tokens
SHRUNK = ((None, 1), (None, 4), (18, 4), (9, 4), (9, 16), (2, 16), (2, 64))
"""Layers of the language model (None: all) and scale of the tiles: the first that fits is run."""


def cases(setting: Setting) -> list[Case]:
    if setting.tiny:
        return [Case(name="tiny", run=lambda: measure(setting, "qwen-tiny", samples=24, scale=16, text_layers=None))]
    layers, scale = sizes_for(describe(MODEL), setting.memory_bytes)
    name = f"{MODEL}{'' if layers is None else f', {layers} text layers'}, tiles of {256 // scale} tokens"
    return [Case(name=name, run=lambda: measure(setting, MODEL, samples=400, scale=scale, text_layers=layers))]


def sizes_for(model: ModelSpec, memory_bytes: float) -> tuple[int | None, int]:
    """The first of `SHRUNK` whose state and widest batch take at most 90 % of the memory; the last if none does."""
    return next((size for size in SHRUNK if needed_bytes(model, *size) <= 0.9 * memory_bytes), SHRUNK[-1])


def needed_bytes(model: ModelSpec, text_layers: int | None, scale: int) -> float:
    blocks = [x for x in model.layers if x.tower == "language" and x.kind == "block"]
    words = max(x.num_matmul_params // x.hidden_size for x in model.layers if x.kind == "head")
    left = len(blocks) if text_layers is None else text_layers
    params = sum(x.num_params for x in model.layers) - sum(x.num_params for x in blocks[left:])
    rows = BATCH * LIMITS[1] // scale
    return STATE_BYTES * params + rows * (LOGIT_BYTES * words + 2 * left * blocks[0].hidden_size + BLOCK_BYTES)


def measure(setting: Setting, size: str, *, samples: int, scale: int, text_layers: int | None) -> dict[str, Any]:
    attention = "flash_attention_2" if setting.device.type == "cuda" and is_flash_attn_2_available() else "sdpa"
    arguments = argparse.Namespace(
        data=DEFAULT_DATA,
        size=size,
        text_layers=text_layers,
        recompute=True,
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
    peak_flops = measure_device(setting.device, setting.dtype).peak_flops / (2 if setting.dtype == "fp32" else 1)
    for row in rows:
        row["mfu"] = row["real_flops"] / row["seconds"] / peak_flops
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
