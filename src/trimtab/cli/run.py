"""`trimtab train` and `trimtab probe`: a plan carried out, alone or on the processes that torchrun started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.output import JsonOption, console, log, print_json
from trimtab.cli.settings import verb
from trimtab.runtime.training.settings import ProbeSettings, TrainSettings

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.runtime.probe.run import ProbeResult


@verb
def train(settings: TrainSettings, as_json: JsonOption = False) -> None:
    """Train MODEL as PLAN says: `torchrun --nproc-per-node N --no-python trimtab train PLAN MODEL`, or alone."""
    from trimtab.runtime.training.loop import train as run

    records = run(settings)
    if as_json and os.environ.get("RANK", "0") == "0":
        loss = records[-1].loss if records else None
        print_json({"steps": len(records), "loss": loss, "log": settings.out / "run.jsonl"})


# -- trimtab probe -----------------------------------------------------------------------------------------------------


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
    from trimtab.cli.report import plan_json, write_all
    from trimtab.plan.file.check import refuse_broken
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
    """The four steps of every device: its peak before and after each, and what that bought."""
    from rich.text import Text

    from trimtab.report.table import Column, Table, numeric, print_table
    from trimtab.report.words import memory_scale
    from trimtab.units import format_bytes, format_seconds

    scale = memory_scale([result.limit_bytes, *(x.full_peak_bytes for x in result.devices)])
    columns = (Column("Step"), *numeric(f"Before,\n{scale.unit}", f"After,\n{scale.unit}"), Column("What it bought"))
    for device in result.devices:
        rows = [
            (x.what, scale.number(x.before_bytes), scale.number(x.after_bytes), x.bought)
            for x in device.steps(result.limit_bytes)
        ]
        print_table(Table(title=f"The four steps on device {device.device}", columns=columns, rows=rows), console)
    runs, backs = len(result.runs), result.num_step_backs
    console.print(
        Text(
            f"{runs} runs in {format_seconds(result.wall_s)}; {backs or 'no'} step{'' if backs == 1 else 's'} back; "
            f"limit {format_bytes(result.limit_bytes)}."
        )
    )
