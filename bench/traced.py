"""Traced bytes beside autograd and the allocator, and how long a trace takes. Run: python bench/traced.py [PART ...]

subsets: saved bytes of ten subsets of recomputed layers, for every family of tests/torch/traced_families.py, SDPA and
    eager, fp32 and bf16; the error against what the real model keeps (saved-tensor hooks and storage identity).
peaks: peak live bytes of a step, nothing / all / every second layer recomputed, beside the CPU allocator's record.
sizes: CPU seconds, memory and figures of real sizes (one layer of each kind real).
"""

from __future__ import annotations

import copy
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "torch"))
from traced_families import FAMILIES, allocated_peak_bytes, find_layers, kept_bytes, make_family  # noqa: E402

from trimtab.costs.devices import DEVICES  # noqa: E402
from trimtab.costs.kind_model import build_to_run  # noqa: E402
from trimtab.costs.traced import profile_traced  # noqa: E402
from trimtab.costs.traced_step import trace_step  # noqa: E402
from trimtab.models.describe import describe, read_config  # noqa: E402
from trimtab.specs import WORK_TERMS, evaluate  # noqa: E402

SETTINGS = [(d, a) for a in ("sdpa", "eager") for d in (torch.float32, torch.bfloat16)]
PEAK_FAMILIES = ("llava", "internvl", "qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", "llama4", "paligemma")
MODELS = ("Qwen2.5-VL-7B", "Qwen2.5-VL-72B", "Qwen3-VL-8B", "Qwen3-VL-235B-A22B", "Gemma3-27B")
PATCHES, TOKENS = 16384, 8192


def print_subsets() -> None:
    exact = total = 0
    for name in FAMILIES:
        wrong = []
        for dtype, attention in SETTINGS:
            family = make_family(name, dtype)
            real = family.make_real(dtype=dtype, attention=attention)
            layers = find_layers(real)
            model = build_to_run(copy.deepcopy(family.config), dtype=dtype, attention=attention)
            trace = trace_step(model, layers, family.inputs)
            chance = random.Random(0)
            vision = [x for x in layers if "vis" in x]
            subsets = [[], layers, layers[::2], vision, [x for x in layers if x not in vision]]
            subsets += [[x for x in layers if chance.random() < share] for share in (0.2, 0.4, 0.5, 0.6, 0.8)]
            for subset in subsets:
                error = trace.saved_bytes(subset) - kept_bytes(real, family.inputs, subset)
                total += 1
                exact += error == 0
                if error:
                    wrong.append(error)
        print(f"{name:18s} {len(layers):2d} layers, errors in bytes: {wrong or 'none'}", flush=True)
    print(f"{exact} of {total} subsets exact, {len(FAMILIES)} families")


def print_peaks() -> None:
    worst = 0.0
    for name in PEAK_FAMILIES:
        for dtype, attention in ((torch.float32, "eager"), (torch.bfloat16, "sdpa")):
            family = make_family(name, dtype)
            real = family.make_real(dtype=dtype, attention=attention)
            layers = find_layers(real)
            model = build_to_run(copy.deepcopy(family.config), dtype=dtype, attention=attention)
            errors = []
            for subset in ([], layers, layers[::2]):
                allocated = allocated_peak_bytes(real, family.inputs, subset)
                traced = trace_step(model, layers, family.inputs, recomputed=subset).peak_bytes
                errors.append(traced / allocated - 1)
            worst = max(worst, *map(abs, errors))
            print(f"{name:12s} {attention:5s}", *(f"{error:+.4%}" for error in errors), flush=True)
    print(f"largest error of the peak {worst:.4%}")


def read_model(name: str) -> dict[str, Any]:
    """A whole configuration: the published sizes, Transformers' defaults for what decides no size."""
    row = read_config(name)
    text = dict(row["text_config"])
    if row["model_type"] == "qwen2_5_vl":
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = transformers.AutoConfig.for_model(
        row["model_type"], vision_config=dict(row["vision_config"]), text_config=text, tie_word_embeddings=False
    )
    saved: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return saved


def print_sizes() -> None:
    work = [[1.0, PATCHES, PATCHES**2, 64 * PATCHES, TOKENS, TOKENS**2, TOKENS**2]]
    assert len(work[0]) == len(WORK_TERMS)
    for name in MODELS:
        config = read_model(name)
        model = describe(config, name=name)
        for attention in ("flash", "sdpa"):
            start = time.process_time()
            traced = profile_traced(config, model, DEVICES["H200"], attention=attention)  # type: ignore[arg-type]
            seconds = time.process_time() - start
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"{name}, {attention}: {seconds:.1f} CPU s, process {resident:.2f} GiB")
            with_fused = profile_traced(config, model, DEVICES["H200"], attention=attention, fused_kernels=True)  # type: ignore[arg-type]
            for kind, other in zip(traced.kinds, with_fused.kinds, strict=True):
                layer = model.layers[kind.layer]
                kept, again, fused = (
                    evaluate(x, work)[0]  # type: ignore[arg-type]
                    for x in (kind.kept_bytes, kind.recomputed_bytes, other.kept_bytes)
                )
                flops, more = (evaluate(x, work)[0] for x in (kind.forward_flops, kind.recompute_flops))  # type: ignore[arg-type]
                if layer.kind == "block":
                    print(
                        f"  {layer.name:32s} keeps {kept / 2**20:6.0f} MiB, recomputed {again / 2**20:4.0f}, "
                        f"fused {1 - fused / kept:5.1%} less, recompute {more / flops:.3f} of its forward FLOPs"
                    )


if __name__ == "__main__":
    parts = {"subsets": print_subsets, "peaks": print_peaks, "sizes": print_sizes}
    for part in sys.argv[1:] or parts:
        parts[part]()
