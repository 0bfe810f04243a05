"""`trimtab check`: does a plan still hold?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import JsonOption, print_json

PlanArgument = Annotated[Path, typer.Argument(help="plan.yaml, or the folder that `trimtab plan` wrote.")]


def check(plan: PlanArgument, as_json: JsonOption = False) -> None:
    """Recompute coverage, limits, memory and input hashes of PLAN; exit code 1 when something does not hold."""
    from trimtab.plan.check import check_plan

    problems = check_plan(plan)
    if as_json:
        print_json({"ok": not problems, "problems": problems})
    elif problems:
        print("\n".join(problems))
    else:
        print(f"{plan}: every sample is packed as the plan says, it fits its memory, and its inputs are unchanged")
    if problems:
        raise typer.Exit(1)
