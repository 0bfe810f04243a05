"""What `describe`, `size`, `pack`, `map` and `profile` print on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trimtab.costs.formula.flops import layer_matmuls, pair_flops
from trimtab.costs.formula.layers import find_columns
from trimtab.models.description import runs_of
from trimtab.report.table import (
    Cell,
    Column,
    Table,
    balance_rows,
    memory_scale,
    numeric,
    percent,
    print_lines,
    print_table,
)
from trimtab.specs import WORK_TERMS, LayerSpec, ModelSpec, Profile, SampleTable
from trimtab.units import TERA, fold_modules, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.balance.metrics import BalanceReport
    from trimtab.costs.formula.settings import CostSettings
    from trimtab.costs.measured.fitted import Calibration
    from trimtab.costs.measured.timed_fit import KindFit
    from trimtab.costs.measured.traced_fit import KindCounts
    from trimtab.placement.bytes import DeviceUse
    from trimtab.placement.engines import Offer, Served
    from trimtab.placement.placed import Assessed, Placement
    from trimtab.plan.decide.omnibal import IsfIteration
    from trimtab.samples.table import SizingResult
    from trimtab.specs import IntArray


def print_model(model: ModelSpec, console: Console) -> None:
    """Print the layers in forward order, equal neighbours in one row, and parameters per tower."""
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
        runs = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs_of(model.forbidden_cuts))
        lines.append(f"Forbidden cuts: {runs}. {model.forbidden_cut_reason or ''}")
    print_lines(console, *lines, *(f"Note: {note}" for note in model.notes), limit=2000)


def print_sizes(result: SizingResult, console: Console) -> None:
    """Print the mean, quantiles and largest of each column."""
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
    print_lines(console, *(f"Assumed: {sentence}" for sentence in result.assumptions), limit=2000)


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
        print_lines(console, f"{balance.num_oversize:,} oversize samples left out, as asked.")


def print_iterations(iterations: Sequence[IsfIteration], console: Console) -> None:
    """Print how ISF converges, a line for each iteration."""
    names = ("Kept", "Left", "Packs", "ViT", "LLM", "Cost")
    rows = [
        (
            str(x.number),
            f"{x.num_kept:,}",
            f"{x.share_left:.2%}",
            f"{x.num_packs:,}",
            *(f"{ratio:.4f}" for ratio in (x.dist_ratio_vit, x.dist_ratio_llm, x.dist_ratio_cost)),
        )
        for x in iterations
    ]
    columns = (Column("Iteration"), *numeric(*names))
    print_table(
        Table(
            title="ISF: packs kept, share of samples left; packs and dist ratios if it is the last",
            columns=columns,
            rows=rows,
        ),
        console,
    )


def _heads(layer: LayerSpec) -> str:
    if layer.attention is None:
        return "-"
    heads, kv = layer.attention.num_heads, layer.attention.num_kv_heads
    window = "" if layer.attention.window is None else f", window {layer.attention.window}"
    return (f"{heads}" if heads == kv else f"{heads}/{kv}") + window


def _stem(name: str) -> str:
    return name.rstrip("0123456789")


_KINDS = (
    ("Weights", "weight_bytes"),
    ("KV cache", "kv_bytes"),
    ("Activations", "activation_bytes"),
    ("Streamed weights", "streamed_bytes"),
    ("Reserve", "reserve_bytes"),
)
"""Name and field of `DeviceUse`."""


def _devices_table(placement: Placement) -> Table:
    """Return the bytes of every device by kind, and what is free there."""
    largest = max(max(use.total_bytes, use.capacity_bytes or 0) for use in placement.uses)
    scale = replace(memory_scale([largest]), digits=3)  # a cache or a reserve is small compared with the weights
    kinds = [(name, field) for name, field in _KINDS if any(getattr(use, field) for use in placement.uses)]
    return Table(
        title=f"Devices, in {scale.unit}",
        columns=(
            Column("Device", look="wide"),
            *numeric(*(name.replace(" ", "\n") for name, _ in kinds), "All", "Free", "Used"),
        ),
        rows=[
            (
                _device_name(use),
                *(scale.number(getattr(use, field)) for _, field in kinds),
                scale.number(use.total_bytes),
                "-" if use.capacity_bytes is None else scale.number(use.capacity_bytes),
                "-" if use.capacity_bytes is None else f"{100 * use.fraction:.1f} %",
            )
            for use in placement.uses
        ],
    )


def _rules_table(placement: Placement, compared: Sequence[Assessed]) -> Table:
    """Show this placement next to the public maps."""
    found = [("This placement", placement, ()), *((x.rule, x.placement, x.problems) for x in compared)]
    return Table(
        title="Compared with the public maps",
        columns=(Column("Map"), *numeric("Fullest\nGPU", "GPUs\nin use", "Moved\nper batch"), Column("What it does")),
        rows=[_rule_row(*row) for row in found],
        marked=0,
    )


def _rule_row(name: str, placement: Placement | None, problems: Sequence[str]) -> tuple[str | Cell, ...]:
    if placement is None:
        return name, "-", "-", "-", f"not compared: {'; '.join(problems)}"
    words = [] if placement.fits else ["does not fit"]
    words += problems
    if placement.spilled:
        words.append(f"{format_bytes(sum(x.weight_bytes for x in placement.spilled))} of weights off the GPUs")
    used = sum(isinstance(use.device, int) and use.total_bytes > 0 for use in placement.uses)
    return (
        name,
        Cell(text=f"{100 * placement.fullest:.1f} %", bad=placement.fullest > 1),
        str(used),
        format_bytes(placement.moved_bytes) if placement.moved_bytes else "0",
        "; ".join(words) or "fits",
    )


def _device_name(use: DeviceUse) -> str:
    return f"GPU {use.device}" if isinstance(use.device, int) else {"cpu": "host memory"}.get(use.device, use.device)


def print_placement(placement: Placement, compared: Sequence[Assessed], console: Console) -> None:
    """Print what `trimtab map` shows: a summary, bytes and modules of every device, then the public maps."""
    from trimtab.plan.file.placement import summary

    print_lines(console, summary(placement), limit=800)
    print_table(_devices_table(placement), console)
    for use in placement.uses:
        if use.modules:
            print_lines(console, f"{_device_name(use)}: {', '.join(fold_modules(use.modules))}", limit=2000)
    if placement.run_on_cpu:
        print_lines(console, f"computed in host memory: {', '.join(placement.run_on_cpu)}")
    if compared:
        print_table(_rules_table(placement, compared), console)


def print_layouts(offers: Sequence[Offer], bound: Served, console: Console, *, title: str) -> None:
    """Print what a trace gets of the layouts that were simulated, the best first."""
    rows = [(str(x.layout), *_served(x.served), *_served(x.bound)) for x in offers[:_MOST_LAYOUTS]]
    rows.append(("any layout, at best", "", "", *_served(bound)))
    columns = (Column("Layout"), *numeric("Requests\na second", "First token\nof 99 %", "At most", "At least"))
    print_table(Table(title=title, columns=columns, rows=rows, marked=0), console)


_MOST_LAYOUTS = 8


def _served(found: Served) -> tuple[str, str]:
    return f"{found.requests_per_s:.2f}", format_seconds(found.first_token_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRow:
    """One kind of layer at one size."""

    name: str  # of its first layer
    num_layers: int
    rows: float  # patches or tokens of the micro-batch
    forward_s: float  # of one layer
    backward_s: float
    share: float  # of all kinds' seconds, each at its own size
    forward_flops: float  # products and attention that are computed, on one device
    flops_per_s: float  # forward
    efficiency: float  # forward, of the device's peak for this dtype
    error: float | None  # relative half-width of the measured band, so of the efficiency too; None: by formula


def kind_rows(
    profile: Profile, model: ModelSpec, settings: CostSettings, *, size: int, fits: Mapping[int, KindFit]
) -> tuple[KindRow, ...]:
    """Return a row for each group, in forward order.

    Timed groups at the largest size that was timed; others at `size` rows in one sample and one image, whose windows
    are full.
    """
    peak = profile.device.peak_flops * (0.5 if profile.dtype == "fp32" else 1.0)
    numbers: dict[int, list[int]] = {}
    for number, cost in enumerate(profile.layers):
        numbers.setdefault(cost.group, []).append(number)
    found = []
    for group, members in numbers.items():
        layer, cost, fit = model.layers[members[0]], profile.layers[members[0]], fits.get(group)
        work = np.array(fit.work if fit is not None else _work_of(layer, settings, size))
        forward = float(np.dot(cost.forward_s, work))
        columns = find_columns(layer, settings)
        flops = work[columns.rows] * layer.rows_per_input * sum(p.flops for p in layer_matmuls(layer, settings.dims.tp))
        flops += work[columns.pairs] * columns.pair_share * pair_flops(layer, settings.dims.tp)
        rate = float(flops) / forward if forward > 0 else 0.0
        found.append(
            KindRow(
                name=layer.name,
                num_layers=len(members),
                rows=float(work[columns.rows]),
                forward_s=forward,
                backward_s=float(np.dot(cost.backward_s, work)),
                share=0.0,
                forward_flops=float(flops),
                flops_per_s=rate,
                efficiency=rate / peak,
                error=None if fit is None else fit.error,
            )
        )
    seconds = [row.num_layers * (row.forward_s + row.backward_s) for row in found]
    return tuple(replace(row, share=own / sum(seconds)) for row, own in zip(found, seconds, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRow:
    """What one kind of block keeps between forward and backward at one size, counted."""

    name: str  # of its first layer
    num_layers: int
    rows: float  # patches or tokens of the micro-batch, in one image and one sample
    kept_bytes: float  # nothing recomputed
    recomputed_bytes: float  # the layer recomputed
    transient_bytes: float  # its backward's own, next to those


def kept_rows(
    kinds: Sequence[KindCounts], model: ModelSpec, settings: CostSettings, *, size: int
) -> tuple[KeptRow, ...]:
    """Return a row for each kind of block that was traced, in forward order."""
    found = []
    for kind in kinds:
        layer = model.layers[kind.layer]
        if layer.kind != "block":
            continue
        work = np.array(_work_of(layer, settings, size))
        found.append(
            KeptRow(
                name=layer.name,
                num_layers=sum(x.alike == layer.alike for x in model.layers),
                rows=float(work[find_columns(layer, settings).rows]),
                kept_bytes=float(np.dot(kind.kept_bytes, work)),
                recomputed_bytes=float(np.dot(kind.recomputed_bytes, work)),
                transient_bytes=float(np.dot(kind.transient_bytes, work)),
            )
        )
    return tuple(found)


def print_kept(rows: Sequence[KeptRow], console: Console) -> None:
    """Print the bytes of one layer of each kind."""
    table = Table(
        title="Bytes that one layer keeps for backward",
        columns=(Column("Layer"), *numeric("Like it", "Rows", "Keeps", "Recomputed", "Transient")),
        rows=[
            (
                row.name.removeprefix("model."),
                str(row.num_layers),
                f"{row.rows:.0f}",
                *map(format_bytes, (row.kept_bytes, row.recomputed_bytes, row.transient_bytes)),
            )
            for row in rows
        ],
    )
    print_table(table, console)


def _work_of(layer: LayerSpec, settings: CostSettings, size: int) -> list[float]:
    columns, work = find_columns(layer, settings), [0.0] * len(WORK_TERMS)
    work[0], work[columns.rows] = 1.0, float(size)
    window = None if layer.attention is None else layer.attention.window
    if not WORK_TERMS[columns.pairs].endswith("windowed") or window is None or window >= size:
        work[columns.pairs] = float(size) ** 2
    elif layer.tower == "language":
        work[columns.pairs] = 2.0 * size * window - float(window) ** 2
    else:
        work[columns.pairs] = float(size * window)
    return work


def print_kinds(rows: tuple[KindRow, ...], profile: Profile, console: Console) -> None:
    """The rows, then how far the seconds may be off. TFLOP/s are those of the forward."""
    cells = []
    for row in rows:
        band = "" if row.error is None else f" ± {100 * row.efficiency * row.error:.0f}"
        cells.append(
            (
                row.name.removeprefix("model."),
                str(row.num_layers),
                f"{row.rows:.0f}",
                f"{1e3 * row.forward_s:.3g}",
                f"{1e3 * row.backward_s:.3g}",
                percent(row.share),
                f"{row.flops_per_s / TERA:.3g}" if row.flops_per_s else "",
                f"{100 * row.efficiency:.0f}{band} %" if row.flops_per_s else "",
            )
        )
    table = Table(
        title=f"{profile.device.name}, {profile.dtype}, {profile.attention} attention: {profile.method}",
        columns=(Column("Layer"), *numeric("Like it", "Rows", "Fwd ms", "Bwd ms", "Share", "TFLOP/s", "Of peak")),
        rows=cells,
    )
    print_table(table, console)
    time, memory = (percent(error, digits=0) for error in (profile.time_error, profile.memory_error))
    print_lines(console, f"Seconds ± {time}, bytes ± {memory}.")


def print_runs(calibration: Calibration, console: Console) -> None:
    """Print each logged run next to the fit; what was fitted stands in the profile's assumptions."""
    table = Table(
        title="Logged runs",
        columns=(Column("Run"), *numeric("Logged", "Fitted", "Error")),
        rows=[
            (run.name, format_seconds(run.logged_s), format_seconds(run.fitted_s), f"{run.error:+.1%}")
            for run in calibration.runs
        ],
    )
    print_table(table, console)
