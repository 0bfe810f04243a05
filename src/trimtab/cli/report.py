"""`trimtab report` and `demo`, and what `plan` shares with them: planning with a bar, all files, figures as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.check import PlanArgument
from trimtab.cli.data import SizingOptions, size_data
from trimtab.cli.output import JsonOption, console, log, print_json
from trimtab.errors import PlanError
from trimtab.files import fingerprint_file, write_atomically, written_together
from trimtab.plan.build import Within, make_plan, write_plan
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.plan.plan import DataFile, Plan
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
    from trimtab.plan.file.reload import load_details
    from trimtab.plan.file.yaml import plan_folder
    from trimtab.plan.runs import read_run_of
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


def compare(
    plans: Annotated[list[Path], typer.Argument(help="Two plans or more: plan.yaml, or its folder.")],
    as_json: JsonOption = False,
) -> None:
    """Show what plans take, and which inputs and decisions differ, in one table."""
    from trimtab.plan.file.yaml import load_plan
    from trimtab.report.compared import differences

    named = {str(path): load_plan(path) for path in plans}
    if len(named) < 2:
        raise PlanError(f"{len(named)} plan was given, and plans are compared: name two or more")
    print_compared(named, differences(named), as_json=as_json)


def print_compared(plans: Mapping[str, Plan], differing: Mapping[str, tuple[str, ...]], *, as_json: bool) -> None:
    """One table, or each plan's estimates and device-hours."""
    from trimtab.report.compared import compared_table, device_hours
    from trimtab.report.table import print_table

    if not as_json:
        print_table(compared_table(plans, differing), console())
        return
    rows = {name: {"device_hours": device_hours(plan), "estimates": plan.estimates} for name, plan in plans.items()}
    print_json(
        {"plans": rows, "differs": {place: dict(zip(plans, row, strict=True)) for place, row in differing.items()}}
    )


# -- shared with plan and demo -----------------------------------------------------------------------------------------


def data_files(sources: Sequence[SourceFile]) -> tuple[DataFile, ...]:
    """Return each file as it was found, with its fingerprint and the media folder that was stated for it."""
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


# -- trimtab demo ------------------------------------------------------------------------------------------------------


_MAX_TILES = 4  # and a thumbnail, as the OmniBal paper trains this model; its own limit of 12 suits inference


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the data set, the plan and the report.")] = Path("trimtab-demo"),
    model: Annotated[str, typer.Option(help="A shipped description or a config.json.")] = "InternVL-Chat-V1-5",
    cluster: Annotated[str, typer.Option(help="Devices to plan for.")] = "32xA100-80GB",
    num_samples: Annotated[int, typer.Option(min=50, max=100_000, help="Samples to draw.")] = 2000,
    seed: Annotated[int, typer.Option(help="Same seed, same data and plan.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run the whole flow on a small data set of images that is drawn here: no download, no GPU, no torch."""
    from trimtab.costs.devices import parse_cluster
    from trimtab.demo.draw import draw_dataset, write_model
    from trimtab.models.describe import describe
    from trimtab.models.images.rules import DynamicTiling
    from trimtab.options import ReadingOptions
    from trimtab.report.plan_tables import print_plan
    from trimtab.samples.sources import find_sources
    from trimtab.samples.table import save_sizing

    spec, devices = describe(model), parse_cluster(cluster)
    if isinstance(spec.image_rule, DynamicTiling):
        spec = describe(model, max_tiles=_MAX_TILES)
    data = draw_dataset(out / "data", num_samples=num_samples, seed=seed) / "data.jsonl"
    log(f"drew {num_samples:,} samples with their images and a tokenizer")
    reading = ReadingOptions(tokenizer=data.with_name("tokenizer.json"))
    sized = size_data(spec, [data], SizingOptions(reading=reading, source_key="source", workers=1))
    save_sizing(sized, out / "sizes.npz")
    num_patches, num_tokens = int(sized.table.num_patches.sum()), int(sized.table.num_tokens.sum())
    log(f"sized them for {spec.name}: {num_patches:,} ViT patches, {num_tokens:,} tokens")
    origin = PlanOrigin(
        command=f"trimtab demo --model {model} --cluster {cluster} --num-samples {num_samples} --seed {seed}",
        data_files=data_files(find_sources(data)),
        assumptions=sized.assumptions,
    )
    details = plan_with_progress(spec, sized.table, devices, PlanOptions(seed=seed), origin)
    files = {"data": data, "sizes": out / "sizes.npz", **write_all(details, out / "plan")}
    files["model"] = write_model(out / "model", data.parent)
    if as_json:
        print_json({**plan_json(details, files), "data": str(data)})
        return
    log("")
    print_plan(details, console())
    print("\n".join(f"{name:>9}: {path}" for name, path in files.items()))
