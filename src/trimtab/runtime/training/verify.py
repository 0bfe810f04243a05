"""Is the plan on disk the one that was made? What a run checks before it loads anything large."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trimtab.errors import PlanError, TrimtabError, join_problems
from trimtab.files import fingerprint_file
from trimtab.plan.decide.mixture import draw_epoch
from trimtab.plan.decide.packs import load_packs
from trimtab.plan.file.reload import options_of, stages_of
from trimtab.plan.file.yaml import load_plan, read_table
from trimtab.plan.plan import Plan, TableFile
from trimtab.plan.sharing.choice import raise_problems
from trimtab.samples.table import table_from_bytes
from trimtab.specs import ModelSpec


def verify_plan(path: Path, model: ModelSpec) -> None:
    """Raises `PlanError` with all that changed since planning: data files, tables, packs, stages, recompute.

    Reads the tables once, whole. Memory, limits and the cost table are `trimtab check`'s business: a run on another
    device than the plan's is none the worse for them.
    """
    plan, folder = load_plan(path), path if path.is_dir() else path.parent
    problems = _changed_data(plan, folder)
    for check in (_check_packs, _check_stages, _check_images):
        try:
            check(plan, folder, model)
        except TrimtabError as problem:
            problems.append(str(problem))
    if problems:
        raise PlanError(join_problems(problems))


def _changed_data(plan: Plan, folder: Path) -> list[str]:
    """Files that are not there are named where records are opened."""
    problems = []
    for file in plan.inputs.data.files:
        there = next((place for place in (Path(file.path), folder / file.path) if place.is_file()), None)
        if there is not None and (there.stat().st_size != file.num_bytes or fingerprint_file(there) != file.blake2b):
            problems.append(f"data file {there} has changed since the plan was made: run `trimtab plan` again")
    return problems


def _check_packs(plan: Plan, folder: Path, _: ModelSpec) -> None:
    data, packing = plan.inputs.data, plan.decisions.packing
    table = TableFile(file=data.table, blake2b=data.table_blake2b)
    samples = table_from_bytes(read_table(folder, table), origin=str(folder / table.file))
    options = options_of(plan)
    times = draw_epoch(samples, options.weights, num_drawn=options.num_drawn, seed=options.seed).times
    packs = load_packs(folder, packing, times=times)
    missing = times - np.bincount(packs.packing.indices, minlength=len(samples))
    if (missing < 0).any() or int(missing.sum()) != packing.num_oversize:
        raise PlanError(
            f"the packs in {folder} do not hold every sample as often as it is drawn: run `trimtab plan` again"
        )
    slots = packs.schedule.table
    runs = np.bincount(slots[slots >= 0], minlength=packs.packing.num_packs)
    if (runs != 1).any():
        raise PlanError(
            f"{int((runs != 1).sum())} packs in {folder} are not run exactly once: run `trimtab plan` again"
        )


def _check_stages(plan: Plan, _: Path, model: ModelSpec) -> None:
    stages_of(plan, model)


def _check_images(plan: Plan, _: Path, model: ModelSpec) -> None:
    decisions = plan.decisions
    if decisions.vision_data_parallel is not None:
        raise_problems(decisions.vision_data_parallel, decisions.parallel, decisions.schedule, model)
