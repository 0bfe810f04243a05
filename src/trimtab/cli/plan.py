"""`trimtab plan` and `trimtab predict`: one reviewable plan, or what a run that exists takes."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.data import ClusterOptions, ConfigArgument, DataArgument, ImageOptions, SizingOptions, size_data
from trimtab.cli.output import JsonOption, console, given_command, log, print_json
from trimtab.cli.report import OWN_LOOP, Framework, PlanArgument
from trimtab.cli.settings import verb
from trimtab.errors import PartitionError, TrimtabError, join_problems
from trimtab.options import Option
from trimtab.plan.options import GivenRun, PlanOptions

if TYPE_CHECKING:
    from trimtab.plan.build import Within
    from trimtab.plan.file.figures import PlanDetails
    from trimtab.plan.plan import Plan
    from trimtab.plan.predict import Prediction
    from trimtab.specs import ModelSpec


_NOT_IN_THE_PLAN = {"out", "workers", "resume", "as_json"}


@verb
def plan(
    *,
    context: typer.Context,
    config: ConfigArgument,
    data: DataArgument,
    cluster: ClusterOptions,
    out: Annotated[Path, typer.Option(help="Folder for plan and report.")] = Path("plan"),
    target: Annotated[
        Framework | None, typer.Option("--for", help="Only what this target of `export` can run.")
    ] = None,
    as_json: JsonOption = False,
    options: PlanOptions,
    profile: Annotated[Path | None, typer.Option(help="Profile of `trimtab profile` to plan with.")] = None,
    sizing: SizingOptions,
    images: ImageOptions,
) -> None:
    """Plan the training of CONFIG on DATA: packs, stages and recompute, compared with the unbalanced baseline."""
    from trimtab.cli.report import data_files, plan_json, plan_with_progress, write_all
    from trimtab.costs.profile import load_profile
    from trimtab.plan.decide.members import default_global_batch
    from trimtab.plan.options import PlanOrigin
    from trimtab.samples.sources import find_sources

    model = images.describe(config)
    if target == OWN_LOOP and "towers" not in context.meta["settings"]:
        options = replace(options, vision=replace(options.vision, group="auto"))
    options, within = _narrowed(target, model, options)
    saved = None if profile is None else load_profile(profile)
    also = None if saved is None else saved.device
    names = [part.strip() for part in cluster.cluster.split(",")] if "," in cluster.cluster else [cluster.cluster]
    clusters = {name: cluster.parsed(also=also, text=name) for name in names}
    sized = size_data(model, data, sizing)
    sources = find_sources(data, sizing.reading.media_root, sizing.reading.allowed)
    if target == OWN_LOOP:
        from trimtab.plan.layout import refuse_data

        refuse_data(sized.table, [source.file for source in sources])
    origin = PlanOrigin(
        data_files=data_files(sources),
        num_skipped=len(sized.bad),
        assumptions=sized.assumptions,
    )
    options = replace(options, profile=saved)
    if len(clusters) > 1 and not options.fills_packs:  # the same batch on each
        batches = [default_global_batch(devices, options, len(sized.table)) for devices in clusters.values()]
        options = replace(options, global_batch=max(batches))

    def plan_on(name: str) -> "PlanDetails":
        given = {"global_batch": options.global_batch} if len(clusters) > 1 else {}
        command = given_command(context, without=_NOT_IN_THE_PLAN, cluster=name, **given)
        known = replace(origin, command=command)
        details = plan_with_progress(model, sized.table, clusters[name], options, known, within)
        _refuse_untrainable(details, target)
        return details

    if len(clusters) > 1:
        _plan_each(clusters, plan_on, out, as_json=as_json)
        return
    details = plan_on(cluster.cluster)
    paths = write_all(details, out)
    if as_json:
        print_json(plan_json(details, paths))
    else:
        _print(details, paths)


def _plan_each(clusters: Iterable[str], plan_on: Callable[[str], "PlanDetails"], out: Path, *, as_json: bool) -> None:
    """Write a plan for each cluster, and print what each takes; those that none fits are named."""
    from trimtab.cli.report import print_compared, write_all
    from trimtab.report.plan_tables import device_hours

    made: dict[str, Plan] = {}
    problems = []
    for name in clusters:
        try:
            details = plan_on(name)
        except TrimtabError as error:
            problems.append(f"{name}: {error}")
            continue
        write_all(details, out / re.sub(r"[^\w.-]+", "-", name))
        made[name] = details.plan
    if not made:
        raise PartitionError(join_problems(problems))
    for problem in problems:
        log(problem)
    print_compared(made, {}, as_json=as_json)
    log(f"fewest device-hours: {min(made, key=lambda name: device_hours(made[name]))}; a plan of each is in {out}")


def _print(details: "PlanDetails", paths: Mapping[str, Path]) -> None:
    from trimtab.report.plan_tables import print_plan

    print_plan(details, console())
    print("\n".join(f"{name}: {path}" for name, path in paths.items()))


def replan(
    plan: PlanArgument,
    run: Annotated[
        Path, typer.Option(help="run.jsonl of `trimtab train`, or its folder; or what Megatron's trainer printed.")
    ],
    cluster: Annotated[
        str | None, typer.Option(help="Other devices to go on with, as in 16xH100; default: the plan's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the new plan and its report.")] = Path("replan"),
    target: Annotated[
        Framework | None, typer.Option("--for", help="Only what this target of `export` can run.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say where a run differs from PLAN, refit the costs, and plan the rest of it, with the same batches."""
    from trimtab.cli.output import progress, told_of_compiling
    from trimtab.cli.report import plan_json, write_all
    from trimtab.costs.devices import parse_cluster
    from trimtab.plan.file.reload import reload_plan
    from trimtab.plan.replan import learn_from, open_again, replan_rest
    from trimtab.plan.runs import read_log_of

    found = reload_plan(plan)
    lesson = learn_from(found, read_log_of(found.plan, run / "run.jsonl" if run.is_dir() else run))
    options, within = _narrowed(target, found.case.model, open_again(found))
    with told_of_compiling(), progress("planning") as advance:
        details = replan_rest(
            found,
            lesson,
            cluster=None if cluster is None else parse_cluster(cluster, also=found.case.cluster.device),
            options=options,
            within=within,
            progress=lambda _step, done, total: advance(done, total),
        )
    _refuse_untrainable(details, target)
    paths = write_all(details, out)
    if as_json:
        print_json(plan_json(details, paths) | {"steps_done": lesson.steps_done, "lesson": lesson.sentences()})
        return
    print("\n".join((*lesson.sentences(), "")))
    _print(details, paths)


def _narrowed(target: str | None, model: "ModelSpec", options: PlanOptions) -> tuple[PlanOptions, "Within | None"]:
    """Return what the planner may choose, without what the framework cannot express, and what it may do to a model."""
    if target is None:
        return options, None
    from trimtab.plan.decide.stages import within_choices

    if target == OWN_LOOP:
        from trimtab.plan.layout import can_train, refuse_quantised

        refuse_quantised(options.lora)
        options = replace(options, host="eager") if options.host == PlanOptions().host else options
        return within_choices(options, can_train(model), target), None
    from trimtab.adapters.frameworks import find_target

    framework = find_target(target)
    framework.refuse_lora(options.lora)
    if options.host == PlanOptions().host:  # what the framework does by itself, unless another was named
        options = replace(options, host=framework.host)
    if framework.packs_by_tokens and not options.baselines:  # what the user would run without a plan
        options = replace(options, baselines=("greedy",))
    can = framework.can
    return within_choices(options, can(model, options.pp or 1), target), can


def _refuse_untrainable(details: "PlanDetails", target: str | None) -> None:
    """Refuse, with --for trimtab, decisions that the loop would refuse, before anything is written."""
    if target == OWN_LOOP:
        from trimtab.plan.layout import read_layout

        read_layout(details.plan)


# -- trimtab predict ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOptions:
    """A launcher's flags that say what the run is; options given here override them."""

    from_megatron: Annotated[
        str | None,
        Option("Megatron's flags, in quotes or in a file (Pai-Megatron-Patch's and ms-swift's too).", common=True),
    ] = None

    def completing(self, run: GivenRun, model: "ModelSpec") -> GivenRun:
        """Return `run` with what the flags say of the rest."""
        if self.from_megatron is None:
            return run
        from trimtab.adapters.launch_files import completed, from_megatron

        return completed(run, from_megatron(self.from_megatron, model))


@verb
def predict(
    *,
    config: ConfigArgument,
    data: DataArgument,
    cluster: ClusterOptions,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Predict with the seconds (traced, probed: bytes) of this profile, from `trimtab profile --out`.",
        ),
    ] = None,
    with_plan: Annotated[bool, typer.Option("--with-plan", help="Plan too, and say what it changes.")] = False,
    as_json: JsonOption = False,
    run: GivenRun,
    launcher: LauncherOptions,
    sizing: SizingOptions,
    images: ImageOptions,
) -> None:
    """Predict step time, memory and idle of a run you already have on DATA; nothing is decided."""
    from trimtab.plan.predict import predict_run

    model = images.describe(config)
    run = launcher.completing(run, model)
    if profile is not None:
        from trimtab.costs.profile import load_profile

        run = replace(run, profile=load_profile(profile))
    devices = cluster.parsed()
    sized = size_data(model, data, sizing)
    found = predict_run(model, sized.table, devices, run)
    change = None
    if with_plan:
        from trimtab.cli.report import plan_with_progress
        from trimtab.plan.options import PlanOrigin

        options = run.open_options(global_batch=round(found.num_samples / len(found.variant.step_s)))
        details = plan_with_progress(model, sized.table, devices, options, PlanOrigin())
        change = details.plan.summary, found.variant.epoch_s / details.variants[-1].epoch_s
    if as_json:
        print_json(_figures(found) | ({"plan": change[0], "plan_gain": change[1]} if change else {}))
        return
    from trimtab.report.plan_tables import print_prediction

    print_prediction(found, console())
    if change is not None:
        summary, gain = change
        print(f"\nA plan of trimtab's with the same samples a step: {gain:.2f} x the samples/s. {summary}")


def _figures(found: "Prediction") -> dict[str, object]:
    ran = found.variant
    peak = max(memory.total_bytes for memory in ran.memory)
    return {
        **{axis: getattr(found.dims, axis) for axis in ("dp", "pp", "tp", "cp", "ep")},
        "etp": found.dims.expert_tp,
        "num_microbatches": found.num_microbatches,
        "num_steps": len(ran.step_s),
        **{name: getattr(found, name) for name in ("mean_step_s", "p95_step_s", "samples_per_s")},
        "epoch_s": ran.epoch_s,
        "fits": ran.fits,
        "peak_bytes": [memory.total_bytes for memory in ran.memory],
        "memory_bytes": found.budget.total_bytes,
        "misfit_chance": found.budget.band.misfit_chance(peak / found.budget.total_bytes),
        "stage_forward_s": ran.stage_forward_s.tolist(),
        "stage_backward_s": ran.stage_backward_s.tolist(),
        "stage_layers": [stage.stop - stage.start for stage in ran.stages],
        "idle_share": ran.idle_share,
        "time_error": found.profile.time_error,
        "memory_error": found.budget.band.half_width,
    }
