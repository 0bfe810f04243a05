"""Published memory and speed of LoRA and QLoRA runs, predicted: python bench/lora_runs.py

Qwen's own table of 42 runs on one A100 (peak GPU memory, seconds of a step), and weights of Llama models as torchtune
logs them and LLaMA-Factory estimates them. The figures and where they are from: bench/data/lora_runs.json. Nothing is
fitted. A published GB is taken as 10^9 bytes. Not in the prediction: CUDA's context, the allocator's rounding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from text_decoder import decoder_of
from trimtab.costs.adapters import count_adapters
from trimtab.costs.devices import DEVICES
from trimtab.costs.profile import profile_model
from trimtab.lora import Lora
from trimtab.partition.stages import SplitProblem
from trimtab.specs import (
    AttentionSpec,
    LayerSpec,
    Linear,
    MlpSpec,
    ModelSpec,
    ParallelDims,
    Profile,
    RecomputeChoice,
    Stage,
)

DATA = json.loads((Path(__file__).resolve().parent / "data" / "lora_runs.json").read_text())
SIZES = {  # width, blocks, heads, heads of keys, intermediate, vocabulary: the config.json of each
    "1.8B": (2048, 24, 16, 16, 5504, 151936),
    "7B": (4096, 32, 32, 32, 11008, 151936),
    "14B": (5120, 40, 40, 40, 13696, 152064),
    "72B": (8192, 80, 64, 64, 24576, 152064),
    "Llama-2-7B": (4096, 32, 32, 32, 11008, 32000),
    "Llama-2-70B": (8192, 80, 64, 8, 28672, 32000),
}
MICROBATCHES = 8


def text_model(name: str) -> ModelSpec:
    """A decoder with gated blocks and a head of its own; Qwen's q, k, v are one matrix."""
    h, num_blocks, heads, kv, f, vocab = SIZES[name]
    d = h // heads
    widths = {"c_attn": (h, h + 2 * kv * d), "attn.c_proj": (h, h), "w1": (h, f), "w2": (h, f), "mlp.c_proj": (f, h)}
    if name.startswith("Llama"):
        del widths["c_attn"]
        widths = {"q_proj": (h, h), "k_proj": (h, kv * d), "v_proj": (h, kv * d), **widths}
    matrices = sum(a * b for a, b in widths.values())
    block = LayerSpec(
        name="block",
        tower="language",
        kind="block",
        hidden_size=h,
        output_size=h,
        num_params=matrices + 2 * h,
        num_matmul_params=matrices,
        attention=AttentionSpec(num_heads=heads, num_kv_heads=kv, head_dim=d, value_head_dim=d, causal=True),
        mlp=MlpSpec(intermediate_size=f, gated=True),
        norm="rms_norm",
        linears=tuple(Linear(name=x, in_width=a, out_width=b) for x, (a, b) in widths.items()),
    )
    return decoder_of(name, [block] * num_blocks, vocab, last_norm=True)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    memory_bytes: float
    step_s: float


def price(name: str, *, bits: int, rank: int) -> Profile:
    """PEFT of their time made adapters in the model's format."""
    lora = Lora(r=rank, bits=bits, weights="same")
    return profile_model(text_model(name), DEVICES["A100-80GB"], dims=ParallelDims(), packed=False, lora=lora)


def predict(profile: Profile, sequence: int) -> Predicted:
    """One sample of `sequence` tokens a micro-batch, every block recomputed."""
    blocks = tuple(i for i, layer in enumerate(profile.layers) if layer.kind == "block")
    choice = RecomputeChoice(tier="full", layers=blocks)
    stage = Stage(index=0, start=0, stop=len(profile.layers), recompute=(choice,))
    work = np.array([1, 0, 0, 0, sequence, sequence**2, sequence**2], dtype=float)
    problem = SplitProblem(profile=profile, num_stages=1, work_mean=work, work_max=work, num_microbatches=MICROBATCHES)
    found = problem.assess((stage,))
    once = sum(layer.step_s for layer in profile.layers)
    return Predicted(
        memory_bytes=found.memory[0].total_bytes,
        step_s=MICROBATCHES * float(found.forward_s[0] + found.backward_s[0]) + once,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published run beside its prediction."""

    model: str
    bits: int
    sequence: int
    memory_gb: float
    step_s: float
    predicted: Predicted

    @property
    def memory_error(self) -> float:
        return self.predicted.memory_bytes / 1e9 / self.memory_gb - 1

    @property
    def time_error(self) -> float:
        return self.predicted.step_s / self.step_s - 1


def rows() -> list[Row]:
    found = []
    for row in DATA["rows"]:
        profile = price(row["model"], bits=row["bits"], rank=64)
        for sequence, memory_gb, step_s in zip(DATA["sequences"], row["memory_gb"], row["step_s"], strict=True):
            found.append(
                Row(
                    model=row["model"],
                    bits=row["bits"],
                    sequence=sequence,
                    memory_gb=memory_gb,
                    step_s=step_s,
                    predicted=predict(profile, sequence),
                )
            )
    return found


def print_lora() -> None:
    """Every row, and the medians by kind."""
    print("Qwen's table: peak memory and step, published and predicted")
    print(f"{'model':6}{'bits':>5}{'tokens':>8}{'GB':>8}{'ours':>8}{'error':>8}{'s/it':>8}{'ours':>8}{'error':>8}")
    found = rows()
    for r in found:
        print(
            f"{r.model:6}{r.bits:5}{r.sequence:8}{r.memory_gb:8.1f}{r.predicted.memory_bytes / 1e9:8.1f}"
            f"{r.memory_error:+8.1%}{r.step_s:8.1f}{r.predicted.step_s:8.2f}{r.time_error:+8.1%}"
        )
    for bits in (16, 4):
        memory = [abs(r.memory_error) for r in found if r.bits == bits]
        times = [abs(r.time_error) for r in found if r.bits == bits and r.sequence >= 1024]
        print(
            f"{bits} bits: memory error {np.median(memory):.1%} in the median, at most {max(memory):.1%}; "
            f"step of 1,024 tokens and more {np.median(times):.1%}, at most {max(times):.1%}"
        )
    print("Weights, adapters and their state")
    for row in DATA["tables"]:
        profile = price(row["model"], bits=row["bits"], rank=row["rank"])
        held = sum(layer.state_bytes for layer in profile.layers)
        count = count_adapters(text_model(row["model"]), Lora(r=row["rank"]))
        print(
            f"{row['model']:12}{row['bits']:3} bits, {count.num_params / 1e6:6.1f} M trained: {row['gb']:6.1f} GB "
            f"({row['what']}), ours {held / 1e9:6.1f} ({held / 1e9 / row['gb'] - 1:+.1%})"
        )


if __name__ == "__main__":
    print_lora()
