"""Published training runs of text models, predicted by the plan's own costs and simulator.

bench/data/published_text.json holds the runs as printed, in groups of one source. A group may name models whose rows on
one node two shares of the peak are fitted to, those of products and of attention; every other row is blind. A group
without them takes what is known of its device (`efficiency_of`), and its kernel's share for attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from text_decoder import decoder_of
from trimtab.costs.curves import Efficiency, efficiency_of, product_rates
from trimtab.costs.devices import parse_cluster
from trimtab.costs.flops import layer_matmuls
from trimtab.costs.profile import profile_model
from trimtab.options import Dispatcher, RecomputedTier, ScheduleName
from trimtab.partition.baselines import even_stages
from trimtab.partition.simulate import simulate, stage_times
from trimtab.plan.decide.setting import link_rates
from trimtab.plan.decide.work import stage_link
from trimtab.specs import (
    AttentionSpec,
    ClusterSpec,
    FloatArray,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    ParallelDims,
    Profile,
    SampleTable,
    Stage,
    recomputing,
)

DATA = Path(__file__).resolve().parent / "data" / "published_text.json"

ATTENTION = {
    "cudnn": 0.55,  # cuDNN and FlashAttention-3 on Hopper: arXiv 2407.08608, figures 5 to 7
}
"""Shares of the peak of attention kernels that are not FlashAttention-2, which `efficiency_of` takes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A row of a published table, with the settings of its group."""

    group: str
    model: str
    sequence: int
    gpus: int
    batch: int  # sequences of a micro-batch
    tokens_per_s: float  # of one device
    device: str
    attention: str
    is_fitted: bool
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    num_chunks: int = 1
    num_microbatches: int = 1
    recompute: str = "none"  # half: of torchtitan's "op", which keeps every second product
    dtype: str = "bf16"
    zero_stage: int = 1
    grad_dtype: str = "fp32"
    fused_kernels: bool = False
    sequence_parallel: bool = False
    early_stop: bool = False  # recompute stops before a block's last product
    figures: Mapping[str, Any] = field(default_factory=dict)  # of the device, where they are not the table's
    devices_per_node: int = 8
    node_gbit: float | None = None  # Gbit/s of a node's ports together; None: as the device's vendor describes it
    tp_overlap: bool = False
    ep_overlap: bool = False
    dispatcher: Dispatcher = "alltoall"

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(dp=self.dp, pp=self.pp, tp=self.tp, cp=self.cp, ep=self.ep, etp=self.etp)

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def step_s(self) -> float:
        tokens = self.dp * self.num_microbatches * self.batch * self.sequence
        return tokens / self.gpus / self.tokens_per_s

    @property
    def cluster(self) -> ClusterSpec:
        found = parse_cluster(f"{self.gpus}x{self.device}", devices_per_node=min(self.gpus, self.devices_per_node))
        found = replace(found, device=replace(found.device, **self.figures))
        if self.node_gbit is not None:
            found = replace(found, node_link_bytes_per_s=self.node_gbit * 1e9 / 8 / found.devices_per_node)
        return found


@cache
def _data() -> Any:
    return json.loads(DATA.read_text())


def groups() -> list[dict[str, Any]]:
    """As the file has them."""
    found: list[dict[str, Any]] = _data()["groups"]
    return found


def _read(group: dict[str, Any], row: dict[str, Any]) -> Run:
    row = {"device": group.get("device"), "figures": group.get("figures", {}), **group["settings"], **row}
    row["recompute"] = {0: "none", 1: "full"}.get(row.get("recompute", 0), row.get("recompute"))
    row["devices_per_node"] = group.get("devices_per_node", {}).get(row["device"], 8)
    fitted = row["model"] in group.get("fitted_models", ()) and row["gpus"] == 8
    if "fitted_row" in group:
        fitted = all(row[name] == value for name, value in group["fitted_row"].items())
    return read_run(row, group=group["name"], attention=group["attention"], is_fitted=fitted)


def read_run(row: dict[str, Any], **others: Any) -> Run:
    """A row of a data file; its batch over all devices becomes micro-batches."""
    row = dict(row)
    if "global_batch" in row:
        dp = row["gpus"] // (row.get("tp", 1) * row.get("pp", 1) * row.get("cp", 1))
        row["num_microbatches"] = row.pop("global_batch") // (dp * row["batch"])
    return Run(**others, **row)


@cache
def text_model(name: str) -> ModelSpec:
    """Blocks without biases, from its width, blocks, heads, key/value heads, MLP width, gate, vocabulary, tied head."""
    h, num_blocks, heads, kv, f, gated, vocabulary, tied = _data()["models"][name]
    d = h // heads
    matmul = h * d * (2 * heads + 2 * kv) + (3 if gated else 2) * h * f
    block = LayerSpec(
        name="block",
        tower="language",
        kind="block",
        hidden_size=h,
        output_size=h,
        num_params=matmul + 2 * h,
        num_matmul_params=matmul,
        attention=AttentionSpec(
            num_heads=heads, num_kv_heads=kv, head_dim=d, value_head_dim=d, causal=True, fused_qkv=heads == kv
        ),
        mlp=MlpSpec(intermediate_size=f, gated=bool(gated)),
        norm="rms_norm" if gated else "layer_norm",
    )
    return decoder_of(name, [block] * num_blocks, vocabulary, tied=bool(tied))


def predict(
    run: Run, *, model: ModelSpec | None = None, matmul: float | None = None, attention: float | None = None
) -> float:
    """Seconds of a step; None: the model of that name, what is known of the device. Routing is balanced."""
    cluster = run.cluster
    e = efficiency_of(cluster.device)
    e = replace(e, matmul=matmul or e.matmul, attention=attention or ATTENTION.get(run.attention, e.attention))
    dims = run.dims
    model = model or text_model(run.model)
    profile = profile_model(
        model,
        cluster.device,
        dims=dims,
        dtype=run.dtype,
        zero_stage=run.zero_stage,
        grad_dtype=run.grad_dtype,
        packed=False,
        fused_kernels=run.fused_kernels,
        sequence_parallel=run.sequence_parallel and run.tp > 1,
        dispatcher=run.dispatcher,
        expert_imbalance=1.0,
        tp_overlap=run.tp_overlap,
        ep_overlap=run.ep_overlap,
        efficiency=e,
        **link_rates(cluster, dims),
    )
    tokens = run.batch * run.sequence
    lengths = np.full(run.batch, run.sequence)
    work = SampleTable.of(0 * lengths, lengths).work(token_window=model.token_window).sum(axis=0)
    work[0] = 1.0
    stages = _recomputed(profile, even_stages(profile, run.pp * run.num_chunks), run)
    times = stage_times(
        profile,
        stages,
        np.tile(work, (run.num_microbatches, 1)),
        link_bytes_per_s=stage_link(cluster),
        latency_s=cluster.latency_s,
    )
    schedule: ScheduleName = "Interleaved1F1B" if run.num_chunks > 1 else "1F1B"
    seconds = simulate(times, schedule=schedule, num_devices=run.pp).makespan_s
    if run.early_stop and run.recompute == "full":
        seconds -= run.num_microbatches * _last_products_s(model, run, e, cluster.device.peak_flops, tokens)
    once = [sum(layer.step_s for layer in profile.layers[stage.start : stage.stop]) for stage in stages]
    return seconds + max(sum(once[rank :: run.pp]) for rank in range(run.pp))


def _recomputed(profile: Profile, stages: tuple[Stage, ...], run: Run) -> tuple[Stage, ...]:
    blocks = [i for i, layer in enumerate(profile.layers) if layer.kind == "block"]
    tiers: dict[int, RecomputedTier] = {}
    if run.recompute in ("full", "selective"):
        tiers = dict.fromkeys(blocks, run.recompute)
    elif run.recompute == "half":  # half of the products are run again: all of half of the blocks
        tiers = {i: "attention" if i % 2 else "selective" for i in blocks}
    return tuple(recomputing(stage, tiers) for stage in stages)


def _last_products_s(model: ModelSpec, run: Run, e: Efficiency, peak_flops: float, tokens: float) -> float:
    """The last product of every block, which recompute that stops early leaves out."""
    rates = product_rates(e, peak_flops, run.dtype)
    blocks = [layer for layer in model.layers if layer.kind == "block"]
    last = layer_matmuls(blocks[0], run.dims)[-1].forward_line(*rates)
    return float(len(blocks) * (last.row * tokens + last.once))


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """A group's shares of the peak, None where nothing was fitted, and each run's error."""

    matmul: float | None
    attention: float | None
    runs: tuple[Run, ...]
    errors: FloatArray

    def blind(self) -> list[float]:
        return [float(x) for run, x in zip(self.runs, self.errors, strict=True) if not run.is_fitted]


def fits() -> dict[str, Fit]:
    """Every group's, in the order of the file."""
    found: dict[str, Fit] = {}
    for group in groups():
        runs = [_read(group, dict(zip(group["columns"], row, strict=True))) for row in group["rows"]]
        shares = found.get(group.get("shares_of", ""))
        found[group["name"]] = _fit(runs) if any(run.is_fitted for run in runs) else _apply(runs, shares)
    return found


def _apply(runs: list[Run], shares: Fit | None) -> Fit:
    """With the shares that another group was fitted to, or with what is known of the device."""
    matmul, attention = (None, None) if shares is None else (shares.matmul, shares.attention)
    errors = np.array([predict(run, matmul=matmul, attention=attention) / run.step_s - 1 for run in runs])
    return Fit(matmul=matmul, attention=attention, runs=tuple(runs), errors=errors)


def _fit(runs: list[Run]) -> Fit:
    """Least sum of |predicted / logged - 1| over fitted rows; seconds are linear in 1 / matmul and 1 / attention."""
    own = [run for run in runs if run.is_fitted]
    logged = np.array([run.step_s for run in own])
    if len(own) == 1:
        return _apply(runs, _fit_both(own[0]))
    matmul, attention = 0.7, 0.3
    for _ in range(2):  # with a pipeline, linear near the answer alone
        whole = np.array([predict(run, matmul=matmul, attention=attention) for run in own])
        products = np.array([predict(run, matmul=matmul / 2, attention=attention) for run in own]) - whole
        pairs = np.array([predict(run, matmul=matmul, attention=attention / 2) for run in own]) - whole
        J = np.stack([products, pairs], axis=1) / logged[:, None]
        y = 1 - (whole - products - pairs) / logged
        weight = np.ones(len(own))
        for _ in range(50):  # least squares weighed again and again: least absolute errors
            found, *_ = np.linalg.lstsq(J * weight[:, None], y * weight, rcond=None)
            weight = 1 / np.sqrt(np.maximum(np.abs(J @ found - y), 0.005))
        matmul, attention = float(matmul / found[0]), float(attention / found[1])
    return _apply(runs, Fit(matmul=matmul, attention=attention, runs=(), errors=np.zeros(0)))


def _fit_both(run: Run) -> Fit:
    """Both shares of the device times one factor, that gives one run its seconds."""
    known = efficiency_of(run.cluster.device)
    half, whole = (
        predict(run, matmul=factor * known.matmul, attention=factor * known.attention) for factor in (0.5, 1.0)
    )
    factor = (half - whole) / (run.step_s - whole + half - whole)
    return Fit(matmul=factor * known.matmul, attention=factor * known.attention, runs=(), errors=np.zeros(0))
