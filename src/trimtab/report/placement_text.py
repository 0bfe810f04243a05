"""What `trimtab map` prints on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab.placement.device_bytes import DeviceUse
from trimtab.placement.placed import Placement
from trimtab.placement.split_model import Assessed
from trimtab.plan.file.modules import fold_modules
from trimtab.plan.file.placement import summary
from trimtab.report.words import clean, memory_scale
from trimtab.units import format_bytes

_KINDS = (
    ("Weights", "weight_bytes"),
    ("KV", "kv_bytes"),
    ("Activ.", "activation_bytes"),
    ("Stream", "streamed_bytes"),
    ("Reserve", "reserve_bytes"),
)


def print_placement(placement: Placement, compared: Sequence[Assessed], console: Console) -> None:
    """Summary, bytes of every device by kind, modules of each; then the public maps, device by device."""
    console.print(Text(clean(summary(placement), limit=800)))
    console.print(_device_table(placement))
    for use in placement.uses:
        if use.modules:
            console.print(Text(f"{_name(use)}: {clean(', '.join(fold_modules(use.modules)), limit=2000)}"))
    if placement.run_on_cpu:
        console.print(Text(f"computed in host memory: {clean(', '.join(placement.run_on_cpu))}"))
    for other in compared:
        _print_other(other, console)


def _device_table(placement: Placement) -> Table:
    kinds = [kind for kind in _KINDS if any(getattr(use, kind[1]) for use in placement.uses)]
    scale = memory_scale([max(use.total_bytes, use.capacity_bytes or 0) for use in placement.uses])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{scale.unit} on")
    for title in (*(title for title, _ in kinds), "All", "Free", "Used"):
        table.add_column(title, justify="right")
    for use in placement.uses:
        table.add_row(
            _name(use),
            *(scale.number(getattr(use, field)) for _, field in kinds),
            scale.number(use.total_bytes),
            "" if use.capacity_bytes is None else scale.number(use.capacity_bytes),
            "" if use.capacity_bytes is None else f"{100 * use.fraction:.1f} %",
        )
    return table


def _print_other(other: Assessed, console: Console) -> None:
    if other.placement is None:
        console.print(Text(f"{other.rule}: not compared. {clean('; '.join(other.problems))}"))
        return
    found = other.placement
    gpus = [use for use in found.uses if isinstance(use.device, int)]
    shares = ", ".join(f"{format_bytes(use.total_bytes)}" for use in gpus)
    words = [f"fullest GPU {100 * found.fullest:.1f} %", *([] if found.fits else ["does not fit"]), *other.problems]
    if found.spilled:
        size = sum(x.weight_bytes for x in found.spilled)
        words.append(f"{format_bytes(size)} off the GPUs, {format_bytes(found.moved_bytes)} moved for each batch")
    console.print(Text(f"{other.rule}: {shares}; {clean('; '.join(words), limit=800)}"))


def _name(use: DeviceUse) -> str:
    return f"GPU {use.device}" if isinstance(use.device, int) else str(use.device)
