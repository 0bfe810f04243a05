"""What `describe`, `size` and `pack` print on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab.balance.metrics import BalanceReport
from trimtab.plan.file.modules import fold_modules
from trimtab.report.words import clean
from trimtab.samples.table import SizingResult
from trimtab.specs import IntArray, LayerSpec, ModelSpec, SampleTable
from trimtab.units import format_count, format_seconds

if TYPE_CHECKING:
    from trimtab.balance.convergence import IsfIteration


def print_model(model: ModelSpec, console: Console) -> None:
    """Layers in forward order, equal neighbours in one row, and parameters per tower."""
    table = _table(f"{clean(model.name)}: {len(model.layers)} layers, {format_count(model.num_params)} parameters")
    table.add_column("Modules", overflow="fold")
    table.add_column("Tower")
    for name in ("Layers", "Width", "Heads", "Parameters"):
        table.add_column(name, justify="right")
    for _, group in itertools.groupby(model.layers, key=lambda layer: (layer.alike, _stem(layer.name))):
        layers = list(group)
        first = layers[0]
        table.add_row(
            Text("\n".join(clean(name) for name in fold_modules([layer.name for layer in layers]))),
            first.tower,
            str(len(layers)),
            str(first.hidden_size),
            _heads(first),
            format_count(sum(layer.num_params for layer in layers)),
        )
    console.print(table)
    towers = ", ".join(
        f"{tower} {format_count(model.num_tower_params(tower))}"
        for tower in ("audio", "vision", "projector", "language")
        if model.num_tower_params(tower)
    )
    console.print(Text(f"Parameters: {towers}. Image rule: {model.image_rule.name}."))
    for owner, borrower in model.tied:
        console.print(Text(f"Tied: {borrower} uses the weight of {owner}."))
    if model.forbidden_cuts:
        console.print(
            Text(f"Forbidden cuts: {_ranges(sorted(model.forbidden_cuts))}. {model.forbidden_cut_reason or ''}")
        )
    for note in model.notes:
        console.print(Text(f"Note: {note}"))


def print_sizes(result: SizingResult, console: Console) -> None:
    """Mean, quantiles and largest of each column."""
    samples = result.table
    table = _table(f"{len(samples):,} samples sized, {len(result.bad):,} skipped")
    table.add_column("Per sample")
    for name in ("Mean", "Median", "p95", "p99", "Largest", "Sum"):
        table.add_column(name, justify="right")
    columns: tuple[tuple[str, IntArray], ...] = (
        ("images", samples.num_images),
        (f"ViT {samples.patch_unit}", samples.num_patches),
        ("LLM tokens", samples.num_tokens),
    )
    for name, column in columns:
        if len(column) == 0:
            continue
        median, p95, p99 = np.percentile(column, (50, 95, 99))
        table.add_row(
            name,
            f"{column.mean():,.1f}",
            f"{median:,.0f}",
            f"{p95:,.0f}",
            f"{p99:,.0f}",
            f"{column.max():,}",
            format_count(float(column.sum())),
        )
    console.print(table)
    for sentence in result.assumptions:
        console.print(Text(f"Assumed: {sentence}"))


def print_balance(samples: SampleTable, balance: BalanceReport, seconds: float, console: Console) -> None:
    """The packs' figures, a line each."""
    unit = samples.patch_unit
    table = _table(
        f"{balance.num_packed:,} samples in {balance.num_packs:,} packs "
        f"({balance.packs_over_bound:.4f} x the lower bound), {format_seconds(seconds)}"
    )
    table.add_column("Figure")
    table.add_column("Value", justify="right")
    table.add_column("Meaning")
    chi2 = "-" if balance.shuffle_chi2 is None else f"{balance.shuffle_chi2:.3f}"
    for row in (
        ("samples per pack", f"{balance.samples_per_pack:.2f}", "mean"),
        ("pad ratio", f"{balance.pad_ratio:.4f}", "share of computed tokens that is padding"),
        ("dist ratio ViT", f"{balance.dist_ratio_vit:.4f}", f"share of a row the ranks wait, by {unit}"),
        ("dist ratio LLM", f"{balance.dist_ratio_llm:.4f}", "the same by tokens"),
        ("dist ratio cost", f"{balance.dist_ratio_cost:.4f}", "the same by cost"),
        ("utilisation", f"{balance.utilisation:.4f}", "useful share of the ranks' time"),
        (f"fill {unit}", f"{balance.fill_patches:.4f}", "share of the limit that is used"),
        ("fill tokens", f"{balance.fill_tokens:.4f}", "share of the limit that is used"),
        ("shuffle chi2", chi2, "sources per step; 1 is as random"),
    ):
        table.add_row(*row)
    console.print(table)
    if balance.num_oversize:
        console.print(Text(f"{balance.num_oversize:,} oversize samples left out, as asked."))


def print_iterations(steps: Sequence[IsfIteration], console: Console) -> None:
    """How ISF converges, a line for each iteration."""
    table = _table("ISF, iteration by iteration: dist ratios if it is the last")
    for name in ("Iteration", "Packs kept", "Samples left", "Packs if last", "ViT", "LLM", "cost"):
        table.add_column(name, justify="right")
    for x in steps:
        ratios = (f"{ratio:.4f}" for ratio in (x.dist_ratio_vit, x.dist_ratio_llm, x.dist_ratio_cost))
        table.add_row(str(x.number), f"{x.num_kept:,}", f"{x.share_left:.2%}", f"{x.num_packs:,}", *ratios)
    console.print(table)


def _heads(layer: LayerSpec) -> str:
    if layer.attention is None:
        return "-"
    heads, kv = layer.attention.num_heads, layer.attention.num_kv_heads
    window = "" if layer.attention.window is None else f", window {layer.attention.window}"
    return (f"{heads}" if heads == kv else f"{heads}/{kv}") + window


def _stem(name: str) -> str:
    return name.rstrip("0123456789")


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
