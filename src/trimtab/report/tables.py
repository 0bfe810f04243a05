"""What `describe`, `size` and `pack` print on a terminal."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from trimtab.report.table import Column, Table, numeric, print_table
from trimtab.report.words import balance_rows
from trimtab.units import fold_modules, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.balance.metrics import BalanceReport
    from trimtab.samples.table import SizingResult
    from trimtab.specs import IntArray, LayerSpec, ModelSpec, SampleTable


def print_model(model: ModelSpec, console: Console) -> None:
    """Layers in forward order, equal neighbours in one row, and parameters per tower."""
    rows = []
    for _, group in itertools.groupby(model.layers, key=lambda layer: (layer.alike, _stem(layer.name))):
        layers = list(group)
        first = layers[0]
        rows.append(
            (
                "\n".join(fold_modules([layer.name for layer in layers])),
                first.tower,
                str(len(layers)),
                str(first.hidden_size),
                _heads(first),
                format_count(sum(layer.num_params for layer in layers)),
            )
        )
    table = Table(
        title=f"{model.name}: {len(model.layers)} layers, {format_count(model.num_params)} parameters",
        columns=(Column("Modules"), Column("Tower"), *numeric("Layers", "Width", "Heads", "Parameters")),
        rows=rows,
    )
    print_table(table, console)
    towers = ", ".join(
        f"{tower} {format_count(model.num_tower_params(tower))}"
        for tower in ("audio", "vision", "projector", "language")
        if model.num_tower_params(tower)
    )
    lines = [f"Parameters: {towers}. Image rule: {model.image_rule.name}."]
    lines += [f"Tied: {borrower} uses the weight of {owner}." for owner, borrower in model.tied]
    if model.forbidden_cuts:
        lines.append(f"Forbidden cuts: {_ranges(sorted(model.forbidden_cuts))}. {model.forbidden_cut_reason or ''}")
    for line in (*lines, *(f"Note: {note}" for note in model.notes)):
        console.print(Text(line))


def print_sizes(result: SizingResult, console: Console) -> None:
    """Mean, quantiles and largest of each column."""
    samples, rows = result.table, []
    columns: tuple[tuple[str, IntArray], ...] = (
        ("images", samples.num_images),
        (f"ViT {samples.patch_unit}", samples.num_patches),
        ("LLM tokens", samples.num_tokens),
    )
    for name, column in columns if len(samples) else ():
        figures = (f"{x:,.0f}" for x in (*np.percentile(column, (50, 95, 99)), column.max()))
        rows.append((name, f"{column.mean():,.1f}", *figures, format_count(float(column.sum()))))
    table = Table(
        title=f"{len(samples):,} samples sized, {len(result.bad):,} skipped",
        columns=(Column("Per sample"), *numeric("Mean", "Median", "p95", "p99", "Largest", "Sum")),
        rows=rows,
    )
    print_table(table, console)
    for sentence in result.assumptions:
        console.print(Text(f"Assumed: {sentence}"))


def print_balance(samples: SampleTable, balance: BalanceReport, seconds: float, console: Console) -> None:
    """The packs' figures, a line each."""
    unit = samples.patch_unit
    table = Table(
        title=f"{balance.num_packed:,} samples in {balance.num_packs:,} packs "
        f"({balance.packs_over_bound:.4f} x the lower bound), {format_seconds(seconds)} of CPU",
        columns=(Column("Figure"), *numeric("Value"), Column("Meaning")),
        rows=(
            ("samples per pack", f"{balance.samples_per_pack:.2f}", "mean"),
            *balance_rows(balance, patches=unit),
            (f"fill {unit}", f"{balance.fill_patches:.4f}", "share of the limit that is used"),
            ("fill tokens", f"{balance.fill_tokens:.4f}", "share of the limit that is used"),
        ),
    )
    print_table(table, console)
    if balance.num_oversize:
        console.print(Text(f"{balance.num_oversize:,} oversize samples left out, as asked."))


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
