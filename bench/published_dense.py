"""Published training runs of text models on A100 and H100, predicted: two shares fitted to two sizes of eight.

mosaicml/llm-foundry prints tokens/s of MPT models under FSDP. The curve of products, traffic, gathering and optimizer
are the formulas' own; fitted are the shares of the peak that products and attention reach (their attention is an early
Triton kernel, not FlashAttention-2), on the sizes 1b and 7b within one node. Every other row is blind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trimtab.costs.curves import efficiency_of, product_line
from trimtab.costs.devices import DEVICES, parse_cluster
from trimtab.costs.profile import profile_model
from trimtab.models.images.tiles import FixedImage
from trimtab.specs import (
    AttentionSpec,
    DeviceSpec,
    FloatArray,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    ParallelDims,
    evaluate,
)

DATA = Path(__file__).resolve().parent / "data" / "mpt_runs.json"
VOCABULARY = 50368
SIZES = {  # width, blocks, heads: scripts/train/yamls of llm-foundry
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
FITTED = ("1b", "7b")
KINDS = ("A100-80GB", "H100-80GB")  # nodes of eight with a port of 200 Gbit/s each; of the H100 they are not printed


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row of the table."""

    device: DeviceSpec
    model: str
    sequence: int
    gpus: int
    batch: int  # sequences of a micro-batch
    num_microbatches: int
    recomputes: bool
    tokens_per_s: float  # of one device

    @property
    def step_s(self) -> float:
        return self.num_microbatches * self.batch * self.sequence / self.tokens_per_s

    @property
    def is_fitted(self) -> bool:
        return self.model in FITTED and self.gpus == 8


def read_runs() -> list[Run]:
    data = json.loads(DATA.read_text())
    names = ("model", "sequence", "gpus", "batch", "num_microbatches", "recomputes", "tokens_per_s")
    return [
        Run(device=DEVICES[device], **dict(zip(names, row, strict=True))) for device in KINDS for row in data[device]
    ]


def mpt(size: str) -> ModelSpec:
    """GPT blocks without biases, the head tied to the embedding."""
    h, num_blocks, heads = SIZES[size]
    block = LayerSpec(
        name="block",
        tower="language",
        kind="block",
        hidden_size=h,
        output_size=h,
        num_params=12 * h * h + 2 * h,
        num_matmul_params=12 * h * h,
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=h // heads,
            value_head_dim=h // heads,
            causal=True,
            fused_qkv=True,
        ),
        mlp=MlpSpec(intermediate_size=4 * h, gated=False),
        norm="layer_norm",
    )
    embed = replace(block, name="wte", kind="embed", num_params=VOCABULARY * h, num_matmul_params=0, attention=None)
    head = replace(
        block, name="head", kind="head", output_size=VOCABULARY, num_params=0, num_matmul_params=VOCABULARY * h
    )
    layers = (
        replace(embed, mlp=None, norm=None),
        *(replace(block, name=f"blocks.{i}") for i in range(num_blocks)),
        replace(head, attention=None, mlp=None, norm=None),
    )
    return ModelSpec(
        name=size, family="mpt", layers=layers, image_rule=FixedImage(rows=1, tokens=1), vocab_size=VOCABULARY
    )


def predict(run: Run, *, matmul: float, attention: float) -> float:
    """Seconds of a step: nothing overlaps, gathering neither; recompute stops before a block's last product."""
    e = replace(efficiency_of(run.device), matmul=matmul, attention=attention)
    profile = profile_model(
        mpt(run.model),
        run.device,
        dims=ParallelDims(dp=run.gpus),
        zero_stage=3,
        grad_dtype="bf16",
        packed=False,
        efficiency=e,
        dp_bytes_per_s=parse_cluster(f"{run.gpus}x{run.device.name}").ring_bytes_per_s(run.gpus),
    )
    tokens = run.batch * run.sequence
    work = np.array([1, 0, 0, 0, tokens, tokens * run.sequence, tokens * run.sequence], dtype=float)
    seconds = sum(float(evaluate(profile.matrix(name), work).sum()) for name in ("forward_s", "backward_s"))
    if run.recomputes:
        h = SIZES[run.model][0]
        last = product_line(4 * h, h, e, run.device.peak_flops)
        for layer in profile.layers[1:-1]:
            tier = layer.tier("full")
            assert tier is not None
            seconds += float(evaluate(tier.extra_backward_s, work)) - last.row * tokens - last.once
    return run.num_microbatches * seconds + sum(layer.step_s for layer in profile.layers)


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """Shares of the peak fitted on the runs of one device, and each run's error with them."""

    matmul: float
    attention: float
    runs: tuple[Run, ...]
    errors: FloatArray

    def median(self, *, fitted: bool) -> float:
        return float(
            np.median([abs(x) for run, x in zip(self.runs, self.errors, strict=True) if run.is_fitted == fitted])
        )


def fit(runs: list[Run]) -> Fit:
    """Least sum of |predicted / logged - 1| over fitted rows: seconds are linear in 1 / matmul and 1 / attention."""
    whole = np.array([predict(run, matmul=1, attention=1) for run in runs])
    products = np.array([predict(run, matmul=0.5, attention=1) for run in runs]) - whole
    attention = np.array([predict(run, matmul=1, attention=0.5) for run in runs]) - whole
    logged = np.array([run.step_s for run in runs])
    mask = np.array([run.is_fitted for run in runs])
    J = np.stack([products, attention], axis=1) / logged[:, None]
    y = 1 - (whole - products - attention) / logged
    weight = np.ones(len(runs))
    for _ in range(50):  # least squares weighed again and again: least absolute errors
        found, *_ = np.linalg.lstsq(J[mask] * weight[mask, None], y[mask] * weight[mask], rcond=None)
        weight = 1 / np.sqrt(np.maximum(np.abs(J @ found - y), 0.005))
    return Fit(
        matmul=float(1 / found[0]), attention=float(1 / found[1]), runs=tuple(runs), errors=np.asarray(J @ found - y)
    )


def fits() -> dict[str, Fit]:
    runs = read_runs()
    return {name: fit([run for run in runs if run.device.name == name]) for name in KINDS}


def print_dense() -> None:
    print("MPT models under FSDP (mosaicml/llm-foundry), fitted on 1b and 7b of one node, the rest blind\n")
    every: list[float] = []
    for name, found in fits().items():
        blind = [x for run, x in zip(found.runs, found.errors, strict=True) if not run.is_fitted]
        every += blind
        print(
            f"{name}: products {found.matmul:.3f} of the peak, their attention {found.attention:.3f}; median |error| "
            f"{found.median(fitted=True):.1%} fitted, {found.median(fitted=False):.1%} of {len(blind)} blind rows "
            f"(widest {max(blind, key=abs):+.1%}; several nodes: "
            f"{max((x for r, x in zip(found.runs, found.errors, strict=True) if r.gpus > 8), key=abs):+.1%})"
        )
        for run, error in zip(found.runs, found.errors, strict=True):
            print(
                f"  {run.model:>4} seq {run.sequence:5} x {run.batch:3} x {run.num_microbatches:2} on {run.gpus:2}"
                f"{' recompute' if run.recomputes else '          '} {run.step_s:7.2f} s {error:+6.1%}"
                f"{'' if run.is_fitted else '  blind'}"
            )
    print(
        f"all {len(every)} blind rows: median |error| {np.median(np.abs(every)):.1%}, 90 % within "
        f"{np.quantile(np.abs(every), 0.9):.1%}\n"
    )


if __name__ == "__main__":
    print_dense()
