"""`trimtab export FRAMEWORK`: a plan's stages and recompute in a training framework's own words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from trimtab.adapters.frameworks import FRAMEWORKS
from trimtab.cli.check import PlanArgument
from trimtab.cli.output import JsonOption, log, print_json

OutOption = Annotated[Path | None, typer.Option(help="File to write, instead of printing.")]
FitOption = Annotated[
    Path | None,
    typer.Option(help="Folder for the best plan that the framework can run, with the same packs; it is exported."),
]


def add_frameworks(app: typer.Typer) -> None:
    """One command a framework."""
    for name, framework in FRAMEWORKS.items():
        app.command(name, help=framework.help)(_command(name))


def _command(name: str) -> Callable[..., None]:
    def command(plan: PlanArgument, out: OutOption = None, fit: FitOption = None, as_json: JsonOption = False) -> None:
        _export(name, plan, out, fit, as_json)

    return command


def _export(name: str, plan: Path, out: Path | None, fit: Path | None, as_json: bool) -> None:
    from trimtab.adapters.frameworks import find_target
    from trimtab.adapters.running import cost_of_running, export_plan, fit_plan
    from trimtab.files import refuse_folder, write_atomically
    from trimtab.plan.build import write_plan
    from trimtab.plan.decide.expressible import relative_time
    from trimtab.plan.file.check import refuse_broken
    from trimtab.plan.file.reload import reload_plan

    if out is not None:
        refuse_folder(out)
    target, found = find_target(name), reload_plan(plan)
    notes: list[str] = []
    if fit is not None:
        _refuse_own_folder(plan, fit)
        write_plan(fit_plan(found, target), fit)
        refuse_broken(fit)
        fitted = reload_plan(fit)
        ratio = relative_time(found.case, fitted.stages, found.stages)
        notes.append(f"the best plan found for {target.title} is in {fit}: a step takes {ratio:.3f} x that of {plan}")
        found = fitted
    exported = export_plan(found, target)
    warnings = [*exported.warnings, *cost_of_running(found, exported)]
    if out is not None:
        write_atomically(out, exported.text + "\n")
    if as_json:
        written = {} if out is None else {"file": str(out)}
        said = {"packs": target.packs, "checked_with": target.checked_with, "warnings": warnings, "notes": notes}
        print_json({**exported.fields, **written, **said})
        return
    for note in (*notes, *(f"warning: {sentence}" for sentence in warnings)):
        log(note)
    log(f"checked with {target.checked_with}")
    if target.packs is not None:
        log(f"the plan's packs: {target.packs}")
    if exported.beside is not None:
        log(exported.beside)
    print(exported.text if out is None else out)


def _refuse_own_folder(plan: Path, fit: Path) -> None:
    from trimtab.errors import PlanError
    from trimtab.plan.file.yaml import plan_folder

    if fit.resolve() == plan_folder(plan).resolve():
        raise PlanError(f"--fit {fit} was asked for, and the plan that it is made from lies there: name another folder")
