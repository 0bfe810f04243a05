"""`trimtab demo`: draw a data set, size it, plan it, and say where everything is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.data import WorkersOption
from trimtab.cli.output import JsonOption, console, log, print_json


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the data set, the plan and the report.")] = Path("trimtab-demo"),
    model: Annotated[str, typer.Option(help="A shipped description or a config.json.")] = "InternVL-Chat-V1-5",
    cluster: Annotated[str, typer.Option(help="Devices to plan for.")] = "32xA100-80GB",
    num_samples: Annotated[int, typer.Option(min=50, max=100_000, help="Samples to draw.")] = 2000,
    max_tiles: Annotated[
        int | None, typer.Option(min=1, help="Most tiles of an image; default: 4 where the model has tiles.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same data and plan.")] = 0,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole flow on a small data set of real images that is drawn here: no download, no GPU, no torch."""
    from trimtab.cli.show import plan_json
    from trimtab.demo.flow import run_demo
    from trimtab.report.text import print_plan

    result = run_demo(
        out, model=model, cluster=cluster, num_samples=num_samples, max_tiles=max_tiles, seed=seed, workers=workers
    )
    if as_json:
        print_json({**plan_json(result.details, result.files), "data": str(result.data.data)})
        return
    log("")
    print_plan(result.details, console())
    print("\n".join(f"{name:>9}: {path}" for name, path in result.files.items()))
