"""`trimtab plan`: from a model, a data set and a cluster to one reviewable plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.check import OWN_LOOP, Framework
from trimtab.cli.data import ClusterOptions, ConfigArgument, DataArgument, ImageOptions, SizingOptions, size_data
from trimtab.cli.output import JsonOption, console, given_command, print_json
from trimtab.cli.settings import verb
from trimtab.plan.options import PlanOptions

if TYPE_CHECKING:
    from trimtab.plan.build import Within
    from trimtab.plan.file.figures import PlanDetails
    from trimtab.specs import ModelSpec

_NOT_IN_THE_PLAN = {"out", "workers", "resume", "as_json"}


@verb
def plan(
    *,
    context: typer.Context,
    config: ConfigArgument,
    data: DataArgument,
    cluster: ClusterOptions,
    out: Annotated[Path, typer.Option(help="Folder for the plan and its report.")] = Path("plan"),
    target: Annotated[
        Framework | None,
        typer.Option("--for", help="Decide only what this framework can run."),
    ] = None,
    as_json: JsonOption = False,
    options: PlanOptions,
    profile: Annotated[
        Path | None,
        typer.Option(help="Plan with this profile of `trimtab profile`."),
    ] = None,
    sizing: SizingOptions,
    images: ImageOptions,
) -> None:
    """Plan the training of CONFIG on DATA: packs, stages and recompute, compared with the unbalanced baseline."""
    from trimtab.cli.show import data_files, plan_json, plan_with_progress, write_all
    from trimtab.costs.profile import load_profile
    from trimtab.plan.options import PlanOrigin
    from trimtab.samples.sources import find_sources

    model = images.describe(config)
    narrowed = _Narrowed(options=options) if target is None else _narrowed(target, model, options)
    saved = None if profile is None else load_profile(profile)
    devices = cluster.parsed(beside=None if saved is None else saved.device)
    sized = size_data(model, data, sizing)
    sources = find_sources(data, sizing.reading.media_root, sizing.reading.allowed)
    if target == OWN_LOOP:
        from trimtab.runtime.training.settings import refuse_data

        refuse_data(sized.table, [source.file for source in sources])
    origin = PlanOrigin(
        command=given_command(context, without=_NOT_IN_THE_PLAN),
        data_files=data_files(sources),
        num_skipped=len(sized.bad),
        assumptions=sized.assumptions,
    )
    details = plan_with_progress(
        model,
        sized.table,
        devices,
        options=replace(narrowed.options, profile=saved),
        origin=origin,
        within=narrowed.within,
    )
    _refuse_untrainable(details, target)
    paths = write_all(details, out)
    if as_json:
        print_json(plan_json(details, paths))
    else:
        _print(details, paths)


def _print(details: "PlanDetails", paths: Mapping[str, Path]) -> None:
    from trimtab.plan.decide.epoch import describe_draw
    from trimtab.report.text import print_plan

    for sentence in describe_draw(details.plan.inputs.data.mixture):
        print(sentence)
    print_plan(details, console())
    print("\n".join(f"{name}: {path}" for name, path in paths.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Narrowed:
    """What the planner may choose, and what may be decided of the model."""

    options: PlanOptions
    within: "Within | None" = None


def _narrowed(target: str, model: "ModelSpec", options: PlanOptions) -> _Narrowed:
    """Without what the framework cannot express."""
    from trimtab.plan.decide.expressible import within_choices

    if target == OWN_LOOP:
        from trimtab.runtime.training.settings import can_train, refuse_quantised

        refuse_quantised(options.lora)
        return _Narrowed(options=within_choices(options, can_train(model), target))
    from trimtab.adapters.frameworks import find_target

    framework = find_target(target)
    framework.refuse_lora(options.lora)
    can = framework.can
    return _Narrowed(options=within_choices(options, can(model, options.pp or 1), target), within=can)


def _refuse_untrainable(details: "PlanDetails", target: str | None) -> None:
    """With --for trimtab, before anything is written: what the loop would refuse of the decisions."""
    if target == OWN_LOOP:
        from trimtab.runtime.layout import read_layout

        read_layout(details.plan)
