"""Published training runs of models with experts, predicted: `python bench/moe_runs.py`.

Rows, their sources and models lie in data/moe_runs.json: routing is forced to be balanced, so that an imbalance of 1
is priced. Nothing was fitted to any of them: every row is blind. GPT-OSS adds biases and clamps to its experts and
sinks to its attention, which no formula has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from text_decoder import decoder_of
from trimtab.costs.devices import parse_cluster
from trimtab.plan.given import GivenRun
from trimtab.plan.predict import predict_run
from trimtab.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, SampleTable

DATA = json.loads((Path(__file__).resolve().parent / "data" / "moe_runs.json").read_text())
SEQUENCE = 4096
STEPS = 1


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A row and what the formulas say of it, tokens/s of one device."""

    name: str
    logged: float
    predicted: float

    @property
    def error(self) -> float:
        """Of the step's seconds: positive where the run is faster than predicted."""
        return self.logged / self.predicted - 1


def text_model(name: str) -> ModelSpec:
    """Blocks of attention and experts alone; every second block sees a window where the model has one."""
    m = DATA["models"][name]
    h, d, vocabulary = m["width"], m["head"], m["vocabulary"]
    attention, expert = 2 * h * d * (m["heads"] + m["kv"]), 3 * h * m["expert"]
    router = h * m["experts"]
    block = LayerSpec(
        name="block",
        tower="language",
        kind="block",
        hidden_size=h,
        output_size=h,
        num_params=attention + router + m["experts"] * expert + 2 * h,
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


def predict(row: dict[str, Any]) -> Predicted:
    cluster = parse_cluster(row["cluster"], devices_per_node=row.get("devices_per_node", 8))
    chunks, pp = row.get("chunks"), row.get("pp", 1)
    run = GivenRun(
        pp=pp,
        tp=row.get("tp"),
        ep=row["ep"],
        etp=row.get("etp"),
        dtype=row.get("dtype", "bf16"),
        batch=row["batch"],
        global_batch=row["global_batch"],
        zero_stage=row["zero_stage"],
        recompute=row.get("recompute"),
        schedule="Interleaved1F1B" if chunks else None,
        num_chunks=chunks,
        fused_kernels=True,
        expert_imbalance=1.0,
        dispatcher=row.get("dispatcher", "alltoall"),
    )
    lengths = np.full(STEPS * row["global_batch"], SEQUENCE)
    found = predict_run(text_model(row["model"]), SampleTable.of(0 * lengths, lengths), cluster, run)
    logged = row["tokens_per_s"] if "tokens_per_s" in row else row["tflops"] * 1e12 / megatron_flops(row["model"])
    degrees = f"pp {pp} ep {row['ep']} batch {row['batch']}"
    return Predicted(
        name=f"{row['model']:16} {row['cluster']:13} {row.get('dtype', 'bf16'):6} {degrees:22} {row['source']}",
        logged=logged,
        predicted=found.samples_per_s * SEQUENCE / cluster.num_devices,
    )


def predictions() -> list[Predicted]:
    """Every row, in the order of the data file."""
    return [predict(row) for row in DATA["runs"]]


def main() -> None:
    rows = predictions()
    for row in rows:
        print(f"{row.name:73} {row.logged:7.0f} tokens/s, predicted {row.predicted:7.0f}: {row.error:+6.1%}")
    for what, chosen in (("all", rows), ("Qwen3 and Mixtral", [x for x in rows if "GPT" not in x.name])):
        errors = np.abs([row.error for row in chosen])
        print(
            f"{len(errors)} rows, {what}: median |error| {np.median(errors):.1%}, {np.sum(errors <= 0.2)} within 20 %"
        )


if __name__ == "__main__":
    main()
