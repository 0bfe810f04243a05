"""Published training runs of models with experts, predicted: `python bench/moe_runs.py`.

Rows, their sources and models lie in data/moe_runs.json: routing is forced to be balanced, so that an imbalance of 1
is priced. Fitted is one number, `expert_s` of costs/host.py, to the rows that say so; every other row is blind.
Not in the formulas: GPT-OSS's sinks of attention, CUDA graphs, all-to-all beside other micro-batches' products.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from published_text import Run, predict, read_run
from text_decoder import decoder_of
from trimtab.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec

DATA = json.loads((Path(__file__).resolve().parent / "data" / "moe_runs.json").read_text())
SEQUENCE = 4096


@cache
def text_model(name: str) -> ModelSpec:
    """Blocks of attention and experts alone; every second block sees a window where the model has one."""
    m = DATA["models"][name]
    h, d, vocabulary = m["width"], m["head"], m["vocabulary"]
    attention, expert = 2 * h * d * (m["heads"] + m["kv"]), 3 * h * m["expert"]
    router, biases = h * m["experts"], m["experts"] * (2 * m["expert"] + h) if m.get("biased") else 0
    block = LayerSpec(
        name="block",
        tower="language",
        kind="block",
        hidden_size=h,
        output_size=h,
        num_params=attention + router + m["experts"] * expert + biases + 2 * h,
        num_matmul_params=attention + router + m["chosen"] * expert,
        attention=AttentionSpec(
            num_heads=m["heads"],
            num_kv_heads=m["kv"],
            head_dim=d,
            value_head_dim=d,
            causal=True,
            qk_norm=m.get("qk_norm", False),
        ),
        mlp=MlpSpec(intermediate_size=m["expert"], gated=True, num_experts=m["experts"], experts_per_token=m["chosen"]),
        norm="rms_norm",
    )
    assert block.attention is not None
    seen = replace(block.attention, window=m.get("window"))
    windowed = [replace(block, attention=seen if i % 2 == 0 else block.attention) for i in range(m["blocks"])]
    return decoder_of(name, windowed, vocabulary, family="moe")


def megatron_flops(name: str) -> float:
    """FLOPs of a token as Megatron-LM counts them: forward and backward, every pair of a sequence."""
    m = DATA["models"][name]
    h, q, kv = m["width"], m["heads"] * m["head"], m["kv"] * m["head"]
    block = 2 * h * (q + kv) + 2 * SEQUENCE * q + 3 * m["chosen"] * h * m["expert"]
    return float(6 * (m["blocks"] * block + h * m["vocabulary"]))


def runs() -> list[Run]:
    """Every row, in the order of the data file. Heads of 128 run cuDNN's attention, narrower ones no faster kernel."""
    found = []
    for data in DATA["runs"]:
        row = {"sequence": SEQUENCE, **DATA["settings"][data["source"]], **data}
        flops = row.pop("tflops", None)
        if flops is not None:
            row["tokens_per_s"] = flops * 1e12 / megatron_flops(row["model"])
        others = {"group": row.pop("source"), "is_fitted": row.pop("fitted", False)}
        row.pop("release", None)
        wide = DATA["models"][row["model"]]["head"] >= 128
        found.append(
            read_run(row, attention="cudnn" if wide else "fa2", recompute=row.pop("recompute", "none"), **others)
        )
    return found


def errors(rows: list[Run]) -> list[float]:
    """Predicted over published seconds, - 1."""
    return [predict(run, model=text_model(run.model)) / run.step_s - 1 for run in rows]


def main() -> None:
    rows = runs()
    found = errors(rows)
    for run, error in zip(rows, found, strict=True):
        degrees = f"tp {run.tp} pp {run.pp} ep {run.ep} batch {run.batch}"
        device = f"{run.gpus}x{run.device}"
        print(
            f"{run.model:16} {device:13} {run.dtype:6} {degrees:24} {run.group:10} {run.tokens_per_s:7.0f} tokens/s, "
            f"predicted {run.tokens_per_s / (1 + error):7.0f}: {error:+6.1%}{' fitted' if run.is_fitted else ''}"
        )
    blind = np.abs([error for run, error in zip(rows, found, strict=True) if not run.is_fitted])
    print(f"{len(blind)} blind rows: median |error| {np.median(blind):.1%}, {np.sum(blind <= 0.2)} within 20 %")


if __name__ == "__main__":
    main()
