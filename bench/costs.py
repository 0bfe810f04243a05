"""Analytic costs beside measurements and beside the formulas in use. Run: python bench/costs.py

1. Bytes a layer keeps for backward, per row and hidden unit: ours, autograd's on the real layer (bf16, SDPA, CPU; needs
   torch and Transformers), and the popular 34 (activations) and 12 h^2 + 13 h (parameters).
2. Seconds and bytes of whole models on one A100-80GB.
3. OmniBal's setting, InternVL-Chat-1.5 (InternViT-6B + InternLM2-20B) with tp 2, pp 4, dp 4 on A100-80GB: remaining
   memory and stage times beside the paper's tables (arXiv 2407.20761).
4. Published training logs of Qwen2-VL-7B on H20: parameters, state, peak memory and time of text layers.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np

from trimtab.costs.activations import kept_by_layer
from trimtab.costs.devices import DEVICES
from trimtab.costs.profile import profile_model
from trimtab.costs.settings import CostSettings
from trimtab.costs.state import local_params
from trimtab.models.describe import describe
from trimtab.specs import ModelSpec, ParallelDims, Profile, evaluate

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "bench" / "data"
A100 = DEVICES["A100-80GB"]
ROWS = 64


def print_layers() -> None:
    """Every layer at its published widths, 64 rows, one run: the bytes are linear in the rows."""
    try:
        import torch

        sys.path.insert(0, str(ROOT / "tests" / "torch"))
        from real_layers import LAYERS, kept_bytes
    except ModuleNotFoundError as missing:
        print(f"layers: not measured, {missing.name} is not installed\n")
        return
    print("kept for backward, bytes per row and hidden unit     parameters, millions")
    print(f"{'layer':22}{'autograd':>9}{'ours':>8}{'error':>8}{'34':>8}   {'module':>9}{'ours':>9}{'12h2+13h':>9}")
    settings = CostSettings(dims=ParallelDims(), attention="sdpa", packed=False)
    for name, make in LAYERS.items():
        layer = make("sdpa", 1)
        h = layer.spec.hidden_size
        real = kept_bytes(layer, ROWS, torch.bfloat16) / ROWS / h
        ours = sum(k.row_bytes for k in kept_by_layer(layer.spec, settings)) / h
        params = sum(p.numel() for p in layer.module.parameters())
        popular = (12 * h * h + 13 * h) / params - 1
        print(
            f"{name:22}{real:9.2f}{ours:8.2f}{ours / real - 1:8.2%}{34 / real - 1:8.0%}   "
            f"{params / 1e6:9.1f}{local_params(layer.spec, 1) / 1e6:9.1f}{popular:9.0%}"
        )
    print()


def print_models() -> None:
    """One micro-batch of 9 x 1025 patches (InternVL) or 16,384 patches in one image, and 4,096 tokens in one sample."""
    print("one A100-80GB, bf16, flash attention, nothing recomputed, one micro-batch")
    print(f"{'model':40}{'params B':>9}{'forward s':>10}{'backward s':>11}{'kept GB':>9}{'full GB':>9}{'state GB':>9}")
    for model in _zoo():
        profile = profile_model(model, A100)
        tiled = model.family.startswith(("internvl", "llava"))
        patches, squares, windows = (9 * 1025, 9 * 1025**2, 0) if tiled else (16384, 16384**2, 16384 * 64)
        work = np.array([[1, patches, squares, windows, 4096, 4096**2, 4096**2]], dtype=float)
        kept, full = (
            sum(evaluate(layer.tiers[tier].saved_bytes, work)[0] for layer in profile.layers) for tier in (0, -1)
        )
        forward, backward = (evaluate(profile.matrix(t), work).sum() for t in ("forward_s", "backward_s"))
        state = sum(layer.state_bytes for layer in profile.layers)
        print(
            f"{model.name[:38]:40}{model.num_params / 1e9:9.2f}{forward:10.3f}{backward:11.3f}"
            f"{kept / 1e9:9.1f}{full / 1e9:9.1f}{state / 1e9:9.1f}"
        )
    print()


OMNIBAL_WORK = np.array([[1, 9 * 1025, 9 * 1025**2, 0, 4096, 4 * 1024**2, 4 * 1024**2]], dtype=float)


def print_omnibal() -> None:
    """Stages [22, 23, 24, 24]: 45 ViT, then 48 text layers; 9 tiles and 4,096 tokens; 4 - i micro-batches in flight."""
    tables = json.loads((REFERENCE / "omnibal_tables.json").read_text())
    published = {row["method"]: row["remaining_gb"] for row in tables["table_5_memory_balance_remaining_gb_per_stage"]}
    model = describe("InternVL-Chat-V1-5")
    dims = ParallelDims(tp=2, pp=4, dp=4)
    stages = _split_blocks(model, [22, 23, 24, 24])
    work = OMNIBAL_WORK
    print("OmniBal 6+20B, tp 2 pp 4 dp 4, ZeRO-1, stages [22, 23, 24, 24], A100: remaining GB of 80")
    for title, more in (
        ("PyTorch kernels", {}),
        ("fused kernels", {"fused_kernels": True}),
        ("fused, sequence parallel", {"fused_kernels": True, "sequence_parallel": True}),
    ):
        profile = profile_model(model, A100, dims=dims, **more)
        for tier, row in (("full", "data + model balance"), ("none", "+ memory balance")):
            remaining = [80 - _stage_bytes(profile, s, i, tier, work) / 1e9 for i, s in enumerate(stages)]
            paper = published[row]
            error = np.mean(np.abs(np.array(remaining) - np.array(paper)))
            print(f"  {title:26}{tier:6}{_row(remaining)}   paper {_row(paper)}   mean error {error:.1f}")
    print("forward ms of the stages; calibrated to the paper's standard deviations they are 161 170 182 193")
    for title, more in (("PyTorch kernels", {}), ("fused kernels", {"fused_kernels": True})):
        profile = profile_model(model, A100, dims=dims, **more)
        forward = evaluate(profile.matrix("forward_s"), work)[0] * 1e3
        blocks = {t: forward[model.indices(t, "block")[0]] for t in ("vision", "language")}
        print(
            f"  {title:26}{_row([forward[s[0] : s[1]].sum() for s in stages])}"
            f"   one layer: vision {blocks['vision']:.2f} (calibrated 7.32), language {blocks['language']:.2f} (7.60)"
        )


def omnibal_used_bytes() -> list[tuple[float, float]]:
    """Counted and published bytes of each stage under full recompute, fused kernels; the packs are assumed full."""
    tables = json.loads((REFERENCE / "omnibal_tables.json").read_text())
    published = {row["method"]: row["remaining_gb"] for row in tables["table_5_memory_balance_remaining_gb_per_stage"]}
    model = describe("InternVL-Chat-V1-5")
    profile = profile_model(model, A100, dims=ParallelDims(tp=2, pp=4, dp=4), fused_kernels=True)
    stages = _split_blocks(model, [22, 23, 24, 24])
    counted = [_stage_bytes(profile, stage, i, "full", OMNIBAL_WORK) for i, stage in enumerate(stages)]
    return list(zip(counted, [(80 - x) * 1e9 for x in published["data + model balance"]], strict=True))


def print_h20() -> None:
    """Middle stages (text layers alone) of published Qwen2-VL-7B runs on H20: Megatron-Core, fused kernels, ZeRO-0."""
    runs = json.loads((REFERENCE / "h20_uneven_pp_runs.json").read_text())["rows"]
    model = describe("Qwen2.5-VL-7B")  # its language model is Qwen2-VL-7B's
    block = model.indices("language", "block")[0]
    work = np.array([[1, 0, 0, 0, 2048, 2048**2, 2048**2]], dtype=float)
    errors: dict[str, list[float]] = {"parameters": [], "state": [], "state and kept": []}
    for run in runs:
        pp, tp = run["pp"], run["tp"]
        profile = profile_model(
            model, DEVICES["H20"], dims=ParallelDims(tp=tp, pp=pp), zero_stage=0, fused_kernels=True
        )
        layer = profile.layers[block]
        for stage in range(1, pp - 1):
            memory = run["memory_mib_by_global_rank"].get(str(stage * tp))
            if memory is None:
                continue
            num = run["decoder_layers_per_stage"][stage]
            state = num * layer.state_bytes
            kept = num * min(pp - stage, run["num_microbatches"]) * evaluate(layer.tiers[0].saved_bytes, work)[0]
            logged_params = run["params_per_rank_by_pp_stage"][stage]
            errors["parameters"].append(num * layer.num_params / logged_params - 1)
            errors["state"].append(state / (memory["allocated"] * 2**20) - 1)
            errors["state and kept"].append((state + kept) / (memory["max_allocated"] * 2**20) - 1)
    print("Qwen2-VL-7B on H20, middle stages of published runs: error of ours")
    for what, found in errors.items():
        if found:
            print(f"  {what:16} {len(found):3} points  mean {np.mean(found):+.2%}  widest {max(found, key=abs):+.2%}")
    profile = profile_model(model, DEVICES["H20"], dims=ParallelDims(tp=2, pp=2), fused_kernels=True)
    layer = profile.layers[block]
    both = (evaluate(layer.forward_s, work)[0] + evaluate(layer.backward_s, work)[0]) * 1e3
    print(f"  forward and backward of one text layer, tp 2: {both:.1f} ms; fitted to the runs' iteration times 27.1\n")


def _stage_bytes(profile: Profile, stage: tuple[int, int], index: int, tier: str, work: np.ndarray) -> float:
    layers = profile.layers[stage[0] : stage[1]]
    total, transient = 0.0, 0.0
    for layer in layers:
        chosen = next((t for t in layer.tiers if t.name == tier), layer.tiers[0])
        held = float(evaluate(chosen.saved_bytes, work)[0])
        total += layer.state_bytes + (profile.dims.pp - index) * held
        again = float(evaluate(layer.tiers[0].saved_bytes, work)[0]) - held
        moments = (layer.transient_bytes, layer.other_transient_bytes or layer.transient_bytes)
        transient = max(transient, *(float(evaluate(x, work)[0]) + again for x in moments))
    return total + transient


def _split_blocks(model: ModelSpec, counts: list[int]) -> list[tuple[int, int]]:
    """Ranges of layers that hold so many blocks each; everything between two stages' blocks goes with the later one."""
    blocks = [i for i, x in enumerate(model.layers) if x.kind == "block"]
    ends = np.cumsum(counts)
    cuts = [0, *(blocks[end - 1] + 1 for end in ends[:-1]), len(model.layers)]
    return list(itertools.pairwise(cuts))


def _zoo() -> list[ModelSpec]:
    wanted = (
        "InternVL-Chat-V1-5",
        "Qwen2.5-VL-7B",
        "Qwen2.5-VL-72B",
        "Qwen3-VL-8B",
        "Qwen3-VL-30B-A3B",
        "Gemma3-27B",
        "LLaVA-OneVision-72B",
    )
    return [describe(name) for name in wanted]


def _row(values: list[float]) -> str:
    return " ".join(f"{v:6.1f}" for v in values)


if __name__ == "__main__":
    print_layers()
    print_models()
    print_omnibal()
    print_h20()
