"""`trimtab report` and `demo`, and what `plan` shares with them: planning with a bar, all files, figures as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from trimtab.adapters.frameworks import FRAMEWORKS
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

if TYPE_CHECKING:
    from trimtab.adapters.megatron_check import Finding, Launcher

PlanArgument = Annotated[Path, typer.Argument(help="plan.yaml, or the folder that `trimtab plan` wrote.")]
OWN_LOOP = "trimtab"  # `trimtab train`
if TYPE_CHECKING:
    Framework = str
else:
    Framework = Literal[OWN_LOOP, *FRAMEWORKS]


def check(
    plan: Annotated[Path | None, typer.Argument(help="plan.yaml, or the folder that `trimtab plan` wrote.")] = None,
    framework: Annotated[
        Framework | None, typer.Option("--for", help="Also check that this framework can run it, and as planned.")
    ] = None,
    flags: Annotated[
        str | None, typer.Option(help="Check these Megatron-LM flags, instead of a plan; needs --for and --config.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="The model of --flags: config.json, its folder, or a name.")
    ] = None,
    vision_cleared: Annotated[
        bool,
        typer.Option("--vision-cleared", help="Your launcher clears the pipeline split in the vision tower's config."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check coverage, limits, memory and input hashes of PLAN; exit code 1 when something does not hold.

    With --for, also what keeps a framework from running the plan, or the given --flags, as they stand.
    """
    from trimtab.plan.file.check import check_plan

    if (plan is None) == (flags is None):
        raise PlanError("give a plan to check, or --flags")
    warnings: list[str] = []
    if plan is None:
        problems, warnings = _check_flags(flags or "", framework, config, vision_cleared)
    elif config is not None:
        raise PlanError(f"--config {config} is for --flags: a plan names its model itself")
    else:
        problems = check_plan(plan)
        if framework is not None and not problems:
            problems, warnings = _check_for(plan, framework, vision_cleared)
    if as_json:
        print_json({"ok": not problems, "problems": problems} | ({} if framework is None else {"warnings": warnings}))
    else:
        for line in (*problems, *(f"warning: {warning}" for warning in warnings)):
            print(line)
        if not problems:
            holds = f"{plan}: every sample is packed as the plan says, it fits its memory, and its inputs are unchanged"
            runs = "" if framework is None else f"; {framework} can run it"
            print(f"{framework}: these flags build every layer of the model once" if plan is None else holds + runs)
    if problems:
        raise typer.Exit(1)


def _check_flags(
    flags: str, framework: Framework | None, config: str | None, vision_cleared: bool
) -> tuple[list[str], list[str]]:
    from trimtab.adapters.megatron_check import LAUNCHERS, check_megatron, parse_megatron_flags
    from trimtab.models.describe import describe

    launcher = next((name for name in LAUNCHERS if name == framework), None)
    if launcher is None:
        raise PlanError(f"--flags are Megatron-LM's: give --for one of {', '.join(LAUNCHERS)}")
    if config is None:
        raise PlanError("--flags need the model: give --config")
    model = describe(config)
    return _sorted(check_megatron(model, parse_megatron_flags(flags), launcher=launcher, vision_cleared=vision_cleared))


def _check_for(plan: Path, framework: Framework, vision_cleared: bool) -> tuple[list[str], list[str]]:
    """The framework's refusals as problems; where it is one of Megatron's launchers, those of its flags too."""
    from trimtab.adapters.frameworks import find_target
    from trimtab.adapters.megatron import megatron_flags
    from trimtab.adapters.megatron_check import LAUNCHERS, check_megatron, parse_megatron_flags
    from trimtab.adapters.running import cost_of_running, decided, export_plan
    from trimtab.errors import UnsupportedPlanError
    from trimtab.plan.file.reload import reload_plan

    found = reload_plan(plan)
    try:
        if framework == OWN_LOOP:
            from trimtab.plan.layout import read_layout, refuse_quantised

            refuse_quantised(found.case.options.lora)
            read_layout(found.plan)
            return [], []
        exported = export_plan(found, find_target(framework))
    except UnsupportedPlanError as error:
        return str(error).splitlines(), []
    warnings = [*exported.warnings, *cost_of_running(found, exported)]
    launcher: Launcher | None = next((name for name in LAUNCHERS if name == framework), None)
    if launcher is None:
        return [], warnings
    parsed = parse_megatron_flags(" ".join(megatron_flags(decided(found, "megatron")).flags))
    if launcher == "pai-megatron":  # its scripts have no layout
        first = cast("dict[str, str]", exported.fields["environment"]).get("MP_PP0_LAYERS")
        count = None if first is None else int(first)
        parsed = replace(parsed, pipeline_model_parallel_layout=None, decoder_first_pipeline_num_layers=count)
    failing, costly = _sorted(
        check_megatron(found.case.model, parsed, launcher=launcher, vision_cleared=vision_cleared)
    )
    return failing, [*warnings, *costly]


def _sorted(findings: list[Finding]) -> tuple[list[str], list[str]]:
    return [f.message for f in findings if f.fails], [f.message for f in findings if not f.fails]


# -- trimtab report, demo and compare ---------------------------------------------------------------------------------


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
    from trimtab.report.plan_tables import differences

    named = {str(path): load_plan(path) for path in plans}
    if len(named) < 2:
        raise PlanError(f"{len(named)} plan was given, and plans are compared: name two or more")
    print_compared(named, differences(named), as_json=as_json)


def print_compared(plans: Mapping[str, Plan], differing: Mapping[str, tuple[str, ...]], *, as_json: bool) -> None:
    """Print one table, or each plan's estimates and device-hours."""
    from trimtab.report.plan_tables import compared_table, device_hours
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
    """Run `make_plan` with one bar for all its steps."""
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
    """Write plan, tables and report."""
    report = folder / "report.html"
    with written_together():
        write_atomically(report, html_report(details))
        return {"plan": write_plan(details, folder), "report": report}


def plan_json(details: PlanDetails, paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the decisions, estimates and where the files are."""
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
    from trimtab.demo import draw_dataset, write_model
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
