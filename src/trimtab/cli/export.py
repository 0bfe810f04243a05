"""`trimtab export`: a plan in another framework's own words."""

from __future__ import annotations

import typer

from trimtab.cli.check import PlanArgument
from trimtab.cli.output import JsonOption, log, print_json

app = typer.Typer(help="Write a plan's decisions as flags of another framework.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Keeps `megatron` a sub-command while it is the only one."""


@app.command("megatron")
def megatron(plan: PlanArgument, as_json: JsonOption = False) -> None:
    """Print Megatron-Core flags for PLAN, or say why Megatron-Core cannot express it and what that costs."""
    from trimtab.adapters.megatron import megatron_flags, unsupported_cuts
    from trimtab.plan.price import price_without_cuts
    from trimtab.plan.reload import reload_plan

    found = reload_plan(plan)
    case = found.case
    export = megatron_flags(
        model=case.model,
        stages=found.stages,
        dims=case.setting.dims,
        schedule=case.options.schedule,
        num_microbatches=case.setting.num_microbatches,
        num_chunks=case.options.num_chunks,
        zero_stage=case.options.zero_stage,
        price=price_without_cuts(case, found.stages, unsupported_cuts(case.model)),
    )
    if as_json:
        print_json(
            {
                "flags": export.flags,
                "simple_flags": export.simple_flags,
                "layout": export.layout,
                "vision_config": dict(export.vision_fields),
                "warnings": export.warnings,
            }
        )
        return
    print(export.shell())
    for warning in export.warnings:
        log(f"warning: {warning}")
    if export.vision_fields:
        log(f"set on the vision tower's config, or it may be truncated:\n{export.vision_python()}")
