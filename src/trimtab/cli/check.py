"""`trimtab check`: does a plan still hold, and would a framework run it, or run these flags, as they stand?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from trimtab.adapters.frameworks import FRAMEWORKS
from trimtab.cli.output import JsonOption, console, print_json

if TYPE_CHECKING:
    from trimtab.adapters.megatron_check import Finding, Launcher
    from trimtab.plan.file.check import MemoryCheck

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
        str | None, typer.Option(help="The model of --flags or --memory: config.json, its folder, or a name.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also replay it with bytes counted on the model's real layers.")
    ] = False,
    vision_cleared: Annotated[
        bool,
        typer.Option("--vision-cleared", help="Your launcher clears the pipeline split in the vision tower's config."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check coverage, limits, memory and input hashes of PLAN; exit code 1 when something does not hold.

    With --for, also what keeps a framework from running the plan, or the given --flags, as they stand. With --memory,
    also the counted peak of every pipeline rank, at the packs it runs.
    """
    from trimtab.errors import PlanError

    if (plan is None) == (flags is None):
        raise PlanError("a check was asked for, and it takes either a plan or --flags: give one of them")
    if flags is not None and memory:
        raise PlanError("--memory was asked for with --flags, and it is a plan's packs that are replayed: give a plan")
    warnings: list[str] = []
    counted: MemoryCheck | None = None
    if plan is None:
        problems, warnings = _check_flags(flags or "", framework, config, vision_cleared)
    else:
        problems, counted = _check_plan(plan, config, memory)
        if framework is not None and not problems:
            problems, warnings = _check_for(plan, framework, vision_cleared)
    if as_json:
        content = {"ok": not problems, "problems": problems}
        content |= {} if framework is None else {"warnings": warnings}
        print_json(content if counted is None else {**content, "memory": _memory_json(counted)})
    else:
        if counted is not None:
            from trimtab.report.plan_tables import print_memory

            print_memory(counted, console())
        for problem in problems:
            print(problem)
        for warning in warnings:
            print(f"warning: {warning}")
        if not problems:
            print(_praise(plan, framework, memory))
    if problems:
        raise typer.Exit(1)


def _praise(plan: Path | None, framework: str | None, memory: bool) -> str:
    if plan is None:
        return f"{framework}: these flags build every layer of the model once"
    fits = "it fits its memory by counted bytes too" if memory else "it fits its memory"
    holds = f"{plan}: every sample is packed as the plan says, {fits}, and its inputs are unchanged"
    return holds if framework is None else f"{holds}; {framework} can run it"


def _check_plan(plan: Path, config: str | None, memory: bool) -> tuple[list[str], MemoryCheck | None]:
    """Return what does not hold; and the count of bytes, where it was asked for and the plan can be read back."""
    from trimtab.errors import PlanError, TrimtabError
    from trimtab.plan.file.check import check_memory, check_plan, find_traced_model

    if not memory:
        if config is not None:
            raise PlanError(
                f"--config {config} was given with a plan, which names its model itself: leave it out, or give "
                "--memory too"
            )
        return check_plan(plan), None
    problems = check_plan(plan, model=find_traced_model(plan, config)[1])
    try:
        counted = check_memory(plan, config=config)
    except TrimtabError as error:
        if str(error) not in problems:
            raise
        return problems, None
    return [*problems, *counted.problems], counted


def _memory_json(counted: MemoryCheck) -> dict[str, Any]:
    return {
        "memory_bytes": counted.budget.total_bytes,
        "cap_bytes": counted.budget.fill_bytes,
        "memory_error": counted.budget.band.half_width,
        "ranks": [
            {
                "rank": rank.rank,
                "stages": [stage.index for stage in rank.stages],
                "counted_bytes": rank.peak.memory.total_bytes,
                "counted": rank.peak.memory,
                "step": rank.peak.step,
                "dp_rank": rank.peak.dp_rank,
                "planned_bytes": rank.planned.total_bytes,
                "planned": rank.planned,
                "fits": rank.problem is None,
            }
            for rank in counted.ranks
        ],
        "assumptions": counted.assumptions,
    }


def _check_flags(
    flags: str, framework: Framework | None, config: str | None, vision_cleared: bool
) -> tuple[list[str], list[str]]:
    from trimtab.adapters.megatron_check import LAUNCHERS, check_megatron, parse_megatron_flags
    from trimtab.errors import PlanError
    from trimtab.models.describe import describe

    launcher = next((name for name in LAUNCHERS if name == framework), None)
    if launcher is None:
        raise PlanError(f"--flags were given, and they are Megatron-LM's: give --for one of {', '.join(LAUNCHERS)}")
    if config is None:
        raise PlanError("--flags were given without the model they are for: give --config")
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
