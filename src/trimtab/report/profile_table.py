"""A profile as a table: one row for each kind of layer, at one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.text import Text

from trimtab.costs.formula.flops import layer_matmuls, pair_flops
from trimtab.costs.formula.layers import find_columns
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.measured.fitted import Calibration
from trimtab.costs.measured.timed_fit import KindFit
from trimtab.costs.measured.traced_fit import KindCounts
from trimtab.report.table import Column, Table, numeric, print_table
from trimtab.report.words import percent
from trimtab.specs import WORK_TERMS, LayerSpec, ModelSpec, Profile
from trimtab.units import TERA, format_bytes, format_seconds


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
    """A row for each group, in forward order.

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
    transient_bytes: float  # its backward's own, beside those


def kept_rows(
    kinds: Sequence[KindCounts], model: ModelSpec, settings: CostSettings, *, size: int
) -> tuple[KeptRow, ...]:
    """A row for each kind of block that was traced, in forward order."""
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
    """Bytes of one layer of each kind."""
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
    console.print(
        Text(f"Seconds ± {percent(profile.time_error, digits=0)}, bytes ± {percent(profile.memory_error, digits=0)}.")
    )


def print_runs(calibration: Calibration, console: Console) -> None:
    """Each logged run beside the fit; what was fitted stands in the profile's assumptions."""
    table = Table(
        title="Logged runs",
        columns=(Column("Run"), *numeric("Logged", "Fitted", "Error")),
        rows=[
            (run.name, format_seconds(run.logged_s), format_seconds(run.fitted_s), f"{run.error:+.1%}")
            for run in calibration.runs
        ],
    )
    print_table(table, console)
