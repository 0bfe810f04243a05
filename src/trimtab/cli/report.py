"""`trimtab report`: a plan as one HTML page and one trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.check import PlanArgument
from trimtab.cli.output import JsonOption, console, print_json


def report(
    plan: PlanArgument,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html and trace.json; else PLAN's own.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="run.jsonl of `trimtab train`, or its folder: measured against planned.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate PLAN again and write report.html (self-contained) and trace.json (for Perfetto)."""
    from trimtab.files import write_atomically, written_together
    from trimtab.plan.file.reload import load_details
    from trimtab.plan.file.yaml import plan_folder
    from trimtab.plan.runs import read_run_of
    from trimtab.report.html import html_report
    from trimtab.report.run import run_lines
    from trimtab.report.text import print_plan
    from trimtab.report.trace import chrome_trace

    details = load_details(plan)
    log = None if run is None else read_run_of(details.plan, run / "run.jsonl" if run.is_dir() else run)
    folder = out or plan_folder(plan)
    html, trace = folder / "report.html", folder / "trace.json"
    with written_together():
        write_atomically(html, html_report(details, run=log))
        write_atomically(trace, chrome_trace(details))
    if as_json:
        print_json({"report": html, "trace": trace})
        return
    print_plan(details, console())
    if log is not None:
        print("\n".join(["", "Training run", *run_lines(details, log), ""]))
    print(f"report: {html}\ntrace:  {trace}")
