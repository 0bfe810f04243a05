"""Does a plan still hold: the same inputs, every sample once, no pack over its limits, within the memory?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab import __version__
from trimtab.address import Address, place_of
from trimtab.balance.packing import PackResult
from trimtab.errors import PlanError, TrimtabError, join_problems
from trimtab.files import fingerprint_file, is_there
from trimtab.plan.decide.case import tower_cuts
from trimtab.plan.decide.compare import simulate_plan
from trimtab.plan.decide.epoch import draw_epoch
from trimtab.plan.decide.groups import decision_problems
from trimtab.plan.decide.work import Lanes
from trimtab.plan.file.figures import describe_estimates, model_fingerprint, say_trained, summarise
from trimtab.plan.file.reload import (
    ReloadedPlan,
    cover_problems,
    load_packs,
    options_of,
    read_samples,
    reload_plan,
    stages_of,
)
from trimtab.plan.file.yaml import open_plan, unknown_keys
from trimtab.plan.plan import Plan
from trimtab.specs import ClusterSpec, ModelSpec
from trimtab.units import format_bytes

_ROUNDING = 0.011  # of a figure in GiB or ms


def check_plan(path: Path | str, *, model: ModelSpec | None = None, cluster: ClusterSpec | None = None) -> list[str]:
    """Return what of the plan at `path` does not hold, a sentence each; empty when all does.

    Use it before a run, as `trimtab check` does: a list of sentences, empty where the plan still holds.

    `model` and `cluster` are needed only for a plan whose model was described from Python and not from a file, or whose
    devices are not in the table of published ones. Raises `PlanError` only where there is no readable plan at `path`.
    """
    plan, folder = open_plan(path)
    problems = [f"key {key} is unknown, and nothing reads it: correct or remove it" for key in unknown_keys(path)]
    problems += _changed_files(plan, folder)
    try:
        found = reload_plan(Path(path), model=model, cluster=cluster)
    except TrimtabError as error:
        return [*problems, str(error)]
    return [*problems, *reloaded_problems(found)]


def verify_plan(path: Path, model: ModelSpec) -> None:
    """Raises `PlanError` with all that changed since planning: data files, tables, packs, stages, recompute.

    Reads the tables once, whole. Memory, limits and the cost table are left out: a run on another device than the
    plan's is none the worse for them; and so are files that are not there, which are named where records are opened.
    """
    plan, folder = open_plan(path)
    problems = list(_changed_files(plan, folder, missing=False))
    for check in (_packs_problems, _stages_problems):
        try:
            problems += check(plan, folder, model)
        except TrimtabError as problem:
            problems.append(str(problem))
    if problems:
        raise PlanError(join_problems(problems))


def _packs_problems(plan: Plan, folder: Path, _model: ModelSpec) -> Iterator[str]:
    samples, options = read_samples(plan, folder), options_of(plan)
    epoch = draw_epoch(samples, options.weights, num_drawn=options.num_drawn, seed=options.seed)
    yield from cover_problems(plan, epoch, load_packs(folder, plan.decisions.packing, times=epoch.times))


def _stages_problems(plan: Plan, _folder: Path, model: ModelSpec) -> Iterator[str]:
    decisions = plan.decisions
    if decisions.vision_data_parallel is not None:
        yield from decision_problems(decisions.vision_data_parallel, decisions.parallel, decisions.schedule, model)
    stages_of(plan, model)


def refuse_broken(path: Path) -> None:
    """Raises `PlanError` where a plan that was just written into the folder `path` does not hold.

    Data files are left out: the plan that it was made from names the same ones.
    """
    problems = reloaded_problems(reload_plan(path))
    if problems:
        raise PlanError(f"the plan in {path} does not hold: make it again\n{join_problems(problems)}")


def reloaded_problems(found: ReloadedPlan) -> list[str]:
    """Return what does not hold of a plan whose tables are the ones that it was made with, a sentence each."""
    problems: list[str] = []
    for check in (_changed_model, _wrong_counts, _wrong_cover, _over_limits, _over_memory, _divided_tower, _old_claims):
        try:
            problems += check(found)
        except TrimtabError as error:
            problems.append(str(error))
    return problems


def _changed_files(plan: Plan, folder: Path, *, missing: bool = True) -> Iterator[str]:
    for file in plan.inputs.data.files:
        place = place_of(file.path)
        if isinstance(place, Address):  # a check opens nothing that a plan's author chose, elsewhere
            continue
        places = [place, folder / file.path]
        there = next((p for p in places if is_there(p)), None)
        if there is None and missing:
            yield f"data file {file.path} is not where it was: check from the folder the plan was made in"
        if there and (there.stat().st_size != file.num_bytes or fingerprint_file(there) != file.blake2b):
            yield f"data file {there} has changed since the plan was made: run `trimtab plan` again"


def _changed_model(found: ReloadedPlan) -> Iterator[str]:
    model = found.case.model
    if model_fingerprint(model) != found.plan.inputs.model.layers_blake2b:
        yield f"{found.plan.inputs.model.name} has other layers or image sizes now: run `trimtab plan` again"
    for stage in found.stages[1:]:
        if stage.start in model.forbidden_cuts:
            reason = model.forbidden_cut_reason or "the framework that the plan is for cannot make it"
            yield f"stage {stage.index} begins at a forbidden cut: {reason}"


def _wrong_counts(found: ReloadedPlan) -> Iterator[str]:
    """Yield the numbers of the file that other parts of it, or the model, say otherwise."""
    inputs, decisions, case = found.plan.inputs, found.plan.decisions, found.case
    parallel, given = decisions.parallel, inputs.cluster
    used, there = decisions.num_devices, given.num_nodes * given.devices_per_node
    if isinstance(case.apart, Lanes):  # others may be idle
        if used > there:
            yield f"dp x pp x tp x cp and the tower's own make {used}, and the cluster has {there} devices"
    elif used != there:
        yield f"dp x pp x tp x cp is {used}, and the cluster has {there} devices: make them equal"
    if given.devices_per_node % (parallel.etp or 1):
        yield f"etp {parallel.etp} does not divide a node of {given.devices_per_node} devices"
    if given.devices_per_node % parallel.tp:
        yield f"tp {parallel.tp} does not divide a node of {given.devices_per_node} devices"
    for name, said, true in (
        ("num_layers", inputs.model.num_layers, len(case.model.layers)),
        ("num_params", inputs.model.num_params, case.model.num_params),
        ("num_packs", decisions.packing.num_packs, case.packing.num_packs),
        ("num_samples", inputs.data.num_samples, len(case.samples)),
        ("tokens_exact", inputs.data.tokens_exact, case.samples.tokens_exact),
    ):
        if said != true:
            yield f"{name} is {said} in the plan and {true} in what it stands on: run `trimtab plan` again"
    if inputs.data.num_skipped < 0:
        yield f"num_skipped must be at least 0, not {inputs.data.num_skipped}: run `trimtab plan` again"


def _wrong_cover(found: ReloadedPlan) -> Iterator[str]:
    """Yield every sample in one pack, or in as many as it is drawn, or left out as oversize; every pack in one slot."""
    case, decision, table = found.case, found.plan.decisions, found.case.schedule.table
    options = case.options
    epoch = draw_epoch(case.samples, options.weights, num_drawn=options.num_drawn, seed=options.seed)
    yield from cover_problems(found.plan, epoch, PackResult(packing=case.packing, schedule=case.schedule))
    if (N := decision.packing.global_batch) is not None:
        held = np.append(np.diff(case.packing.offsets), 0)[table].sum(axis=(1, 2))
        wrong = np.flatnonzero(held[:-1] != N)
        if len(wrong) or (len(held) and held[-1] > N):
            step = int(wrong[0]) if len(wrong) else len(held) - 1
            yield f"step {step} holds {int(held[step])} samples, not {N}: run `trimtab plan` again"
    expected = (decision.packing.num_steps, decision.parallel.dp, decision.schedule.num_microbatches)
    if table.shape != expected:
        yield f"the schedule has {table.shape} slots, the plan's steps x dp x micro-batches are {expected}"


def _over_limits(found: ReloadedPlan) -> Iterator[str]:
    packing, decision = found.case.packing, found.plan.decisions.packing
    for column, limit, unit in (
        (found.case.samples.num_patches, decision.max_patches, "patches"),
        (found.case.samples.num_tokens, decision.max_tokens, "tokens"),
    ):
        over = np.asarray(packing.sums(column)) > limit
        if decision.oversize == "alone":
            over &= np.diff(packing.offsets) > 1
        if over.any():
            yield f"{int(over.sum())} packs hold more than {limit} {unit}: run `trimtab plan` again"


def _over_memory(found: ReloadedPlan) -> Iterator[str]:
    problem = found.case.problem
    for rank, memory in enumerate(problem.assess(found.stages).memory):
        if memory.total_bytes > problem.memory_bytes:
            yield (
                f"pipeline rank {rank} holds {format_bytes(memory.total_bytes)} of {format_bytes(problem.memory_bytes)}"
            )
    if isinstance(found.case.apart, Lanes):
        held = found.case.apart.memory(problem).total_bytes
        if held > problem.memory_bytes:
            yield f"a device of the tower's own holds {format_bytes(held)} of {format_bytes(problem.memory_bytes)}"


def _old_claims(found: ReloadedPlan) -> Iterator[str]:
    """Yield figures and summary of other decisions than the plan's; not looked at where another version made them."""
    plan, case = found.plan, found.case
    if plan.created_by != f"trimtab {__version__}":
        return
    ours, said = simulate_plan(case, found.stages), plan.estimates
    true = describe_estimates(case, case.problem.assess(found.stages), (ours, ours))
    own = ("step_ms", "epoch_s", "samples_per_s", "stage_imbalance", "stages", "balance")
    other = [problem for name in own for problem in _differences(name, getattr(said, name), getattr(true, name))]
    row, true_row = said.variants[-1], true.variants[-1]
    for name in ("step_ms", "epoch_s", "samples_per_s", "peak_memory_gib", "fits"):
        other += _differences(f"variants[-1].{name}", getattr(row, name), getattr(true_row, name))
    if other:
        yield f"the estimates are not the decisions' ({'; '.join(other[:3])}): run `trimtab plan` again"
    if plan.summary != summarise(plan.inputs, plan.decisions, said, trained=say_trained(case)):
        yield "the summary is not that of the plan's decisions and estimates: run `trimtab plan` again"


def _differences(place: str, said: Any, true: Any) -> Iterator[str]:
    """Yield the figures that are not the same but for rounding."""
    if is_dataclass(true):
        for field in fields(true):
            yield from _differences(f"{place}.{field.name}", getattr(said, field.name), getattr(true, field.name))
    elif isinstance(true, tuple) and len(said) == len(true):
        for number, (one, two) in enumerate(zip(said, true, strict=True)):
            yield from _differences(f"{place}[{number}]", one, two)
    elif isinstance(true, float) and said is not None:
        if abs(said - true) > max(_ROUNDING, 0.005 * abs(true)):
            yield f"{place} is {said} and by its decisions {true}"
    elif said != true:
        yield f"{place} is {said} and by its decisions {true}"


def _divided_tower(found: ReloadedPlan) -> Iterator[str]:
    """Refuse a divided tower: ranks that share images need it whole, on the plan's first stage."""
    vision = found.case.vision
    if vision is None or len(found.stages) == 1:
        return
    if found.stages[0].stop in tower_cuts(found.case.model):
        yield f"{vision.decision.group} ranks share images: keep tower and projector on stage 0, or plan without"
