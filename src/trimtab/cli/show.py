"""What `plan` and `demo` share: planning with progress bars, writing everything, and the figures as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.files import fingerprint_file, write_atomically, written_together
from trimtab.plan.build import Within, make_plan, write_plan
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.plan.plan import DataFile
from trimtab.report.html import html_report
from trimtab.report.trace import chrome_trace
from trimtab.samples.sources import SourceFile
from trimtab.specs import ClusterSpec, ModelSpec, SampleTable


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
    """Plan, tables, report and trace."""
    report, trace = folder / "report.html", folder / "trace.json"
    with written_together():
        write_atomically(report, html_report(details))
        write_atomically(trace, chrome_trace(details))
        return {"plan": write_plan(details, folder), "report": report, "trace": trace}


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
