"""`trimtab probe`: what a plan's layers keep on the device that is here, and the recompute that fits its memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.options import verb
from trimtab.cli.output import JsonOption, console, log, print_json
from trimtab.runtime.probe.settings import ProbeSettings

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.runtime.probe.run import ProbedDevice, ProbedKind, ProbeResult
    from trimtab.specs import Tower


@verb
def probe(
    settings: ProbeSettings,
    out: Annotated[Path, typer.Option(help="Folder for the probed plan, its profile and tables.")] = Path("probed"),
    as_json: JsonOption = False,
) -> None:
    """Run PLAN's heaviest packs through MODEL, alone or under torchrun as `trimtab train`; choose recompute that fits.

    Everything recomputes first, then one layer of each kind does not, then the best choice runs. On the CPU the memory
    is a budget that is counted.
    """
    from trimtab.cli.show import plan_json, write_all
    from trimtab.plan.measured.check import refuse_broken
    from trimtab.runtime.probe.run import probe as run  # torch: only for what can be run

    result = run(settings, progress=log)
    if os.environ.get("RANK", "0") != "0":
        return
    paths = write_all(result.details, out)
    refuse_broken(out)
    if as_json:
        print_json(
            {
                "limit_bytes": result.limit_bytes,
                "devices": result.devices,
                "steps": [device.steps(result.limit_bytes) for device in result.devices],
                "runs": result.runs,
                "num_step_backs": result.num_step_backs,
                "plan": plan_json(result.details, paths),
            }
        )
        return
    print_probe(result, console())
    print("\n".join(f"{name}: {path}" for name, path in paths.items()))


def print_probe(result: ProbeResult, console: Console) -> None:
    """A row a device: what full recompute leaves, what layers keep, what was chosen and how full it ran."""
    from rich.text import Text

    from trimtab.report.table import Column, Table, numeric, print_table
    from trimtab.report.words import memory_scale
    from trimtab.units import format_bytes, format_seconds

    scale = memory_scale([result.limit_bytes, *(x.full_peak_bytes for x in result.devices)])
    unit = scale.unit
    table = Table(
        title="Devices",
        columns=numeric(
            *("Device", f"Full,\n{unit}", f"Left,\n{unit}", "ViT layer\nfrees", "LLM layer\nfrees"),
            *("Recompute\nchosen", f"Peak,\n{unit}", "Predicted", f"Left,\n{unit}"),
        ),
        rows=[
            (
                str(device.device),
                scale.number(device.full_peak_bytes),
                scale.number(result.limit_bytes - device.full_peak_bytes),
                _kinds_text(device, "vision"),
                _kinds_text(device, "language"),
                "\n".join(f"{tier} {count}" for tier, count in device.recompute.items()) or "none",
                scale.number(device.peak_bytes),
                f"{device.predicted_bytes / device.peak_bytes - 1:+.1%}",
                scale.number(result.limit_bytes - device.peak_bytes),
            )
            for device in result.devices
        ],
    )
    print_table(table, console)
    fullest = max(result.devices, key=lambda x: x.full_peak_bytes)
    steps = Table(
        title=f"The four steps on device {fullest.device}",
        columns=(Column("Step"), *numeric(f"Before,\n{unit}", f"After,\n{unit}"), Column("What it bought")),
        rows=[
            (x.what, scale.number(x.before_bytes), scale.number(x.after_bytes), x.bought)
            for x in fullest.steps(result.limit_bytes)
        ],
    )
    print_table(steps, console)
    runs, backs = len(result.runs), result.num_step_backs
    console.print(
        Text(
            f"{runs} runs in {format_seconds(result.wall_s)}; {backs or 'no'} step{'' if backs == 1 else 's'} back; "
            f"limit {format_bytes(result.limit_bytes)}. Freed: of one micro-batch (predicted, off)."
        )
    )


def _kinds_text(device: ProbedDevice, tower: Tower) -> str:
    """A line for each kind of the tower's layers: bytes that full recompute frees, and how far the profile was off."""
    from trimtab.units import format_bytes

    def tell(kind: ProbedKind) -> str:
        return f"{format_bytes(kind.measured_bytes)} ({kind.predicted_bytes / kind.measured_bytes - 1:+.0%})"

    return "\n".join(tell(x) for x in device.kinds if x.tower == tower and x.tier == "none") or "-"
