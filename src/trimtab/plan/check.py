"""Does a plan still hold: the same inputs, every sample once, no pack over its limits, within the memory?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.files import fingerprint_file
from trimtab.plan.assemble import model_fingerprint
from trimtab.plan.file import load_plan
from trimtab.plan.plan import Plan
from trimtab.plan.reload import ReloadedPlan, reload_plan
from trimtab.plan.split import split_problem
from trimtab.specs import ModelSpec
from trimtab.units import format_bytes


def check_plan(path: Path | str, *, model: ModelSpec | None = None) -> list[str]:
    """What does not hold, a sentence each; empty when all does.

    `model` is needed only for a plan whose model was described from Python and not from a file. Raises `PlanError` only
    where there is no readable plan at `path`.
    """
    path = Path(path)
    plan = load_plan(path)
    folder = path if path.is_dir() else path.parent
    problems = list(_changed_files(plan, folder))
    try:
        found = reload_plan(path, model=model)
    except TrimtabError as error:
        return [*problems, str(error)]
    return [*problems, *_changed_model(found), *_wrong_cover(found), *_over_limits(found), *_over_memory(found)]


def _changed_files(plan: Plan, folder: Path) -> Iterator[str]:
    for file in plan.inputs.data.files:
        places = [Path(file.path), folder / file.path]
        there = next((p for p in places if p.is_file()), None)
        if there is None:
            yield f"data file {file.path} is not where it was: check from the folder the plan was made in"
        elif there.stat().st_size != file.num_bytes or fingerprint_file(there) != file.blake2b:
            yield f"data file {there} has changed since the plan was made: run `trimtab plan` again"


def _changed_model(found: ReloadedPlan) -> Iterator[str]:
    if model_fingerprint(found.model) != found.plan.inputs.model.layers_blake2b:
        yield (
            f"the model {found.plan.inputs.model.name} is described with other layers or image sizes than when the "
            "plan was made: run `trimtab plan` again"
        )
    for stage in found.stages[1:]:
        if stage.start in found.model.forbidden_cuts:
            yield f"stage {stage.index} begins at a forbidden cut: {found.model.forbidden_cut_reason}"


def _wrong_cover(found: ReloadedPlan) -> Iterator[str]:
    """Every sample in one pack or left out as oversize, every pack in one slot."""
    packing, table = found.packing, found.schedule.table
    decision, num_samples = found.plan.decisions, len(found.samples)
    times = np.bincount(packing.indices, minlength=num_samples)
    if (times > 1).any():
        yield f"{int((times > 1).sum())} samples are packed more than once: run `trimtab plan` again"
    missing = int((times == 0).sum())
    if missing != decision.packing.num_oversize:
        yield (
            f"{missing} samples are in no pack, and the plan says that {decision.packing.num_oversize} were left out: "
            "run `trimtab plan` again"
        )
    if num_samples != found.plan.inputs.data.num_samples:
        yield f"the sample table has {num_samples} rows, the plan says {found.plan.inputs.data.num_samples}"
    runs = np.bincount(table[table >= 0], minlength=packing.num_packs)
    if (runs != 1).any():
        yield f"{int((runs != 1).sum())} packs are not run exactly once: run `trimtab plan` again"
    expected = (decision.packing.num_steps, decision.parallel.dp, decision.schedule.num_microbatches)
    if table.shape != expected:
        yield f"the schedule has {table.shape} slots, the plan's steps x dp x micro-batches are {expected}"


def _over_limits(found: ReloadedPlan) -> Iterator[str]:
    packing, decision = found.packing, found.plan.decisions.packing
    for column, limit, unit in (
        (found.samples.num_patches, decision.max_patches, "patches"),
        (found.samples.num_tokens, decision.max_tokens, "tokens"),
    ):
        over = np.asarray(packing.sums(column)) > limit
        if decision.oversize == "alone":
            over &= np.diff(packing.offsets) > 1
        if over.any():
            yield f"{int(over.sum())} packs hold more than {limit} {unit}: run `trimtab plan` again"


def _over_memory(found: ReloadedPlan) -> Iterator[str]:
    work = found.samples.work(token_window=found.model.token_window)
    problem = split_problem(found.model, found.packing, work, found.setting, found.budget, found.options)
    for rank, memory in enumerate(problem.assess(found.stages).memory):
        if memory.total_bytes > problem.memory_bytes:
            yield (
                f"pipeline rank {rank} would hold {format_bytes(memory.total_bytes)} of "
                f"{format_bytes(problem.memory_bytes)}: recompute more of its layers, or run `trimtab plan` again"
            )
