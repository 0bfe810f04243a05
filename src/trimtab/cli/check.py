"""`trimtab check`: does a plan still hold, and would a framework run it, or run these flags, as they stand?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from trimtab.adapters.frameworks import FRAMEWORKS
from trimtab.cli.output import JsonOption, print_json

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
    from trimtab.errors import PlanError
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
    from trimtab.errors import PlanError
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
