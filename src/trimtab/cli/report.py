"""`trimtab report`, and what `plan` and `demo` share with it: planning with a bar, all files, figures as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.check import PlanArgument
from trimtab.cli.output import JsonOption, console, print_json
from trimtab.files import fingerprint_file, write_atomically, written_together
from trimtab.plan.build import Within, make_plan, write_plan
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.plan.plan import DataFile
from trimtab.report.html import html_report
from trimtab.samples.sources import SourceFile
from trimtab.specs import ClusterSpec, ModelSpec, SampleTable


def report(
    plan: PlanArgument,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html; else PLAN's own.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="run.jsonl of `trimtab train`, or its folder: measured against planned.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate PLAN again and write report.html (self-contained)."""
    from trimtab.files import write_atomically
    from trimtab.plan.file.reload import load_details
    from trimtab.plan.file.yaml import plan_folder
    from trimtab.plan.runs import read_run_of
    from trimtab.report.html import html_report
    from trimtab.report.plan_tables import print_plan
    from trimtab.report.run import run_lines

    details = load_details(plan)
    log = None if run is None else read_run_of(details.plan, run / "run.jsonl" if run.is_dir() else run)
    html = (out or plan_folder(plan)) / "report.html"
    write_atomically(html, html_report(details, run=log))
    if as_json:
        print_json({"report": html})
        return
    print_plan(details, console())
    if log is not None:
        print("\n".join(["", "Training run", *run_lines(details, log), ""]))
    print(f"report: {html}")


# -- shared with plan and demo -----------------------------------------------------------------------------------------


def data_files(sources: Sequence[SourceFile]) -> tuple[DataFile, ...]:
    """Each file as it was found, with its fingerprint and the media folder that was stated for it."""
    return tuple(
        DataFile(
            path=str(source.file),
            num_bytes=source.file.stat().st_size,
            blake2b=fingerprint_file(source.file),
            media_root=None if source.media_root is None else str(source.media_root),
        )
        for source in sources
    )


def plan_with_progress(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions,
    origin: PlanOrigin,
    within: Within | None = None,
) -> PlanDetails:
    """`make_plan` with one bar for all its steps."""
    from trimtab.cli.output import progress, told_of_compiling

    with told_of_compiling(), progress("planning") as advance:
        return make_plan(
            model,
            samples,
            cluster,
            options,
            origin=origin,
            within=within,
            progress=lambda _step, done, total: advance(done, total),
        )


def write_all(details: PlanDetails, folder: Path) -> Mapping[str, Path]:
    """Plan, tables and report."""
    report = folder / "report.html"
    with written_together():
        write_atomically(report, html_report(details))
        return {"plan": write_plan(details, folder), "report": report}


def plan_json(details: PlanDetails, paths: Mapping[str, Path]) -> dict[str, Any]:
    """Decisions, estimates and where the files are."""
    plan = details.plan
    return {
        "summary": plan.summary,
        "files": paths,
        "decisions": plan.decisions,
        "estimates": plan.estimates,
        "num_samples": plan.inputs.data.num_samples,
        "num_skipped": plan.inputs.data.num_skipped,
        **({"mixture": plan.inputs.data.mixture} if plan.inputs.data.mixture else {}),
        "assumptions": plan.assumptions,
    }
