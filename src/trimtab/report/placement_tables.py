"""A placement in a terminal: bytes of every device, and the public maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from trimtab.placement.bytes import DeviceUse
from trimtab.placement.placed import Placement
from trimtab.placement.published import Assessed
from trimtab.plan.file.placement import summary
from trimtab.report.table import Cell, Column, Table, numeric, print_table
from trimtab.report.words import clean, memory_scale
from trimtab.units import fold_modules, format_bytes

_KINDS = (
    ("Weights", "weight_bytes"),
    ("KV cache", "kv_bytes"),
    ("Activations", "activation_bytes"),
    ("Streamed weights", "streamed_bytes"),
    ("Reserve", "reserve_bytes"),
)
"""Name and field of `DeviceUse`."""


def _devices_table(placement: Placement) -> Table:
    """Bytes of every device by kind, and what is free there."""
    largest = max(max(use.total_bytes, use.capacity_bytes or 0) for use in placement.uses)
    scale = replace(memory_scale([largest]), digits=3)  # a cache or a reserve is small beside the weights
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
    """This placement beside the public maps."""
    found = [("This placement", placement, ()), *((x.rule, x.placement, x.problems) for x in compared)]
    return Table(
        title="Beside the public maps",
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
    """What `trimtab map` prints: a summary, bytes and modules of every device, then the public maps."""
    console.print(Text(clean(summary(placement), limit=800)))
    print_table(_devices_table(placement), console)
    for use in placement.uses:
        if use.modules:
            console.print(Text(f"{_device_name(use)}: {clean(', '.join(fold_modules(use.modules)), limit=2000)}"))
    if placement.run_on_cpu:
        console.print(Text(f"computed in host memory: {clean(', '.join(placement.run_on_cpu))}"))
    if compared:
        print_table(_rules_table(placement, compared), console)
