"""A plan read back with everything it stands on: model, sizes, packs, cost table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.balance.packing import PackResult
from trimtab.costs.devices import find_device
from trimtab.costs.profile import profile_from_bytes
from trimtab.errors import PlanError
from trimtab.files import is_there
from trimtab.models.describe import describe
from trimtab.models.description import find_shipped
from trimtab.options import RecomputedTier, same_fields
from trimtab.plan.decide.case import Case, MemoryBudget, Setting, make_case
from trimtab.plan.decide.compare import compare_variants
from trimtab.plan.decide.epoch import Epoch, draw_epoch
from trimtab.plan.decide.groups import raise_problems
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.decide.sharing import share_vision
from trimtab.plan.decide.stages import ABOUT_SPLIT
from trimtab.plan.file.figures import PlanDetails, assemble_plan, device_fingerprint, plan_details
from trimtab.plan.file.yaml import load_array, open_plan, plan_folder, read_table
from trimtab.plan.options import PlanOptions, PlanOrigin, VisionChoice
from trimtab.plan.plan import PackingDecision, Plan, TableFile
from trimtab.samples.table import table_from_bytes
from trimtab.specs import (
    ClusterSpec,
    DeviceSpec,
    IntArray,
    ModelSpec,
    Packing,
    ParallelDims,
    Profile,
    SampleTable,
    Schedule,
    Stage,
    recomputing,
)
from trimtab.units import unfold_modules

# Packs and schedule as three .npy tables.


def sizes_file(plan: Plan) -> TableFile:
    """The table of sizes next to the plan."""
    return TableFile(file=plan.inputs.data.table, blake2b=plan.inputs.data.table_blake2b)


def read_samples(plan: Plan, folder: Path) -> SampleTable:
    """The sizes that the plan was made from; refused if they are others."""
    table = sizes_file(plan)
    return table_from_bytes(read_table(folder, table), origin=str(folder / table.file))


def cover_problems(plan: Plan, epoch: Epoch, packed: PackResult) -> Iterator[str]:
    """Find samples not packed as often as drawn nor left out as oversize, and packs that are not in one slot."""
    packing, table, mixture = packed.packing, packed.schedule.table, plan.inputs.data.mixture
    often = "more often than the weights draw them" if mixture else "more than once"
    if epoch.sources != mixture:
        yield "the mixture has other counts in the plan than its weights give: run `trimtab plan` again"
    missing_times = epoch.times - np.bincount(packing.indices, minlength=len(epoch.times))
    if (missing_times < 0).any():
        yield f"{int((missing_times < 0).sum())} samples are packed {often}: run `trimtab plan` again"
    missing = int(missing_times[missing_times > 0].sum())
    if missing != plan.decisions.packing.num_oversize:
        yield f"{missing} samples are in no pack, not {plan.decisions.packing.num_oversize}: run `trimtab plan` again"
    runs = np.bincount(table[table >= 0], minlength=packing.num_packs)
    if (runs != 1).any():
        yield f"{int((runs != 1).sum())} packs are not run exactly once: run `trimtab plan` again"


def load_packs(folder: Path, decision: PackingDecision, *, times: IntArray) -> PackResult:
    """The tables a plan names; their hashes and shapes are checked before anything indexes with them.

    `times` is how often each sample of the plan's table is in an epoch.
    """
    num_samples = len(times)
    offsets, indices, table = (load_array(folder, t) for t in (decision.offsets, decision.indices, decision.schedule))
    whole = all(a.dtype == np.int64 for a in (offsets, indices, table))
    if not whole or offsets.ndim != 1 or indices.ndim != 1 or table.ndim != 3 or len(offsets) == 0:
        raise PlanError(f"the packs in {folder} have other shapes than a plan's: run `trimtab plan` again")
    ascending = offsets[0] == 0 and offsets[-1] == len(indices) and bool(np.all(np.diff(offsets) > 0))
    in_range = (len(indices) == 0 or (indices.min() >= 0 and indices.max() < num_samples)) and (
        table.size == 0 or (table.min() >= -1 and table.max() < len(offsets) - 1)
    )
    if not (ascending and in_range):
        raise PlanError(f"the packs in {folder} point outside the sample table: run `trimtab plan` again")
    oversize = np.empty(0, np.int64)
    if decision.num_oversize:
        missing = times - np.bincount(indices, minlength=num_samples)
        oversize = np.repeat(np.arange(num_samples), np.maximum(missing, 0))
    packing = Packing(
        offsets=offsets,
        indices=indices,
        limits=(decision.max_patches, decision.max_tokens),
        oversize=oversize,
        method=decision.method,
        seed=decision.seed,
    )
    return PackResult(packing=packing, schedule=Schedule(table=table, order=decision.order))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReloadedPlan:
    """A plan file, and the case and stages its words stand for."""

    plan: Plan
    case: Case
    stages: tuple[Stage, ...]


def reload_plan(path: Path, *, model: ModelSpec | None = None, cluster: ClusterSpec | None = None) -> ReloadedPlan:
    """Read the plan at `path` (the file or its folder); raises `PlanError` where its parts do not belong together.

    `model` and `cluster` stand in for what the plan says of them, where no file and no published device does.
    """
    plan, folder = open_plan(path)
    inputs, decisions = plan.inputs, plan.decisions
    model = model or find_model(plan, folder)
    forbidden = model.forbidden_cuts | frozenset(c for c in inputs.model.forbidden_cuts if 0 < c < len(model.layers))
    model = replace(model, forbidden_cuts=forbidden)
    saved = load_saved_profile(plan, folder)
    cluster = cluster or find_cluster(plan, also=None if saved is None else saved.device)
    if device_fingerprint(cluster.device) != inputs.cluster.device_blake2b:
        raise PlanError(f"device {inputs.cluster.device} has other figures now: pass cluster=, or plan again")
    samples = read_samples(plan, folder)
    options = replace(options_of(plan), profile=saved)
    epoch = draw_epoch(samples, options.weights, num_drawn=options.num_drawn, seed=options.seed)
    packs = load_packs(folder, decisions.packing, times=epoch.times)
    parallel = decisions.parallel
    dims = ParallelDims(**same_fields(parallel, ParallelDims))
    setting = Setting(
        dims=dims,
        max_patches=decisions.packing.max_patches,
        max_tokens=decisions.packing.max_tokens,
        num_microbatches=decisions.schedule.num_microbatches,
        profile=profile_setting(model, cluster, options, dims),
    )
    case = make_case(model, samples, cluster, options, MemoryBudget.of(cluster, options), setting, packs)
    if decisions.vision_data_parallel is not None:
        raise_problems(decisions.vision_data_parallel, parallel, decisions.schedule, model)
        num_ranks, num_slots = packs.schedule.table.shape[1:]
        if (num_ranks, num_slots) != (parallel.dp, decisions.schedule.num_microbatches):
            raise PlanError(
                f"the schedule has {num_ranks} x {num_slots} slots, not dp {parallel.dp} x "
                f"{decisions.schedule.num_microbatches}"
            )
        case = share_vision(case, decisions.vision_data_parallel)
    return ReloadedPlan(plan=plan, case=case, stages=stages_of(plan, model))


def load_saved_profile(plan: Plan, folder: Path) -> Profile | None:
    """The profile next to the plan that gave its seconds, if one did."""
    table = plan.inputs.training.profile
    return None if table is None else profile_from_bytes(read_table(folder, table), origin=str(folder / table.file))


def find_cluster(plan: Plan, *, also: DeviceSpec | None = None) -> ClusterSpec:
    """The plan's cluster: its device from the plan itself, the table of published ones, or the plan's own profile."""
    given = plan.inputs.cluster
    device = given.device_figures or find_device(given.device, also=also)
    return ClusterSpec(**same_fields(given, ClusterSpec) | {"device": device})


def find_model(plan: Plan, folder: Path) -> ModelSpec:
    """The plan's model: its config as the user named it, from here or from the plan's folder."""
    given = plan.inputs.model
    if given.config is None:
        raise PlanError(f"no file says what {given.name} is: describe it again and pass it as model=")
    source, preprocessor = find_config(given.config, folder), given.preprocessor
    other = None if preprocessor is None else Path(preprocessor)
    if other is not None and not is_there(other, or_folder=True) and is_there(folder / other, or_folder=True):
        other = folder / other
    for what, place in (("model", None if find_shipped(source) else source), ("preprocessor", other)):
        if place is not None and not is_there(Path(place), or_folder=True):
            raise PlanError(f"{what} {place} is neither here nor next to the plan: run this where the plan was made")
    return describe(source, preprocessor=other, name=given.name, max_pixels=given.max_pixels, max_tiles=given.max_tiles)


def find_config(config: str, folder: Path) -> str:
    """The plan's model as its user named it, or what lies next to the plan under that name; it may be nowhere."""
    own = folder / config
    if is_there(Path(config), or_folder=True) or not is_there(own, or_folder=True):
        return config
    return str(own)


def options_of(plan: Plan) -> PlanOptions:
    """The options that would make these decisions again."""
    inputs, decisions, vision = plan.inputs, plan.decisions, plan.decisions.vision_data_parallel
    records = (decisions.parallel, decisions.schedule, decisions.packing, inputs.cluster, inputs.training)
    kept: dict[str, Any] = {}
    for record in records:  # what a plan keeps under an option's own name
        kept |= same_fields(record, PlanOptions)
    if kept["risk"] is None:
        del kept["risk"]
    kept |= {
        "profile": None,
        "schedule": decisions.schedule.name,
        "weights": tuple((source.name, source.weight) for source in inputs.data.mixture),
        "num_drawn": sum(source.num_drawn for source in inputs.data.mixture) or None,
        "vision": VisionChoice() if vision is None else VisionChoice(**same_fields(vision, VisionChoice)),
    }
    return PlanOptions(**kept)


def stages_of(plan: Plan, model: ModelSpec) -> tuple[Stage, ...]:
    """The plan's module paths as layer numbers; every layer on one stage, in forward order.

    Devices of a tower's own are a stage of the file: here it is joined with the first one of the pipelines.
    """
    names = [layer.name for layer in model.layers]
    position = {name: i for i, name in enumerate(names)}
    problems: list[str] = []
    stages: list[Stage] = []
    start = 0
    for number, decision in enumerate(plan.decisions.stages):
        modules = unfold_modules(decision.modules)
        if decision.stage != number or list(modules) != names[start : start + len(modules)]:
            problems.append(f"stage {decision.stage} does not hold the model's next layers in forward order")
        stages.append(Stage(index=number, start=start, stop=start + len(modules)))
        start += len(modules)
    if start != len(names):
        problems.append(f"the stages hold {start} of the model's {len(names)} layers")
    vision = plan.decisions.vision_data_parallel
    is_own = vision is not None and vision.group == "own"
    expected = plan.decisions.parallel.pp * plan.decisions.schedule.num_chunks + is_own
    if len(stages) != expected:
        tower = " and the tower's" if is_own else ""
        problems.append(f"there are {len(stages)} stages for pp x chunks{tower} = {expected}")
    elif is_own and stages[0].stop != min(model.indices("language")):
        problems.append("stage 0 is that of the tower's own devices: it holds tower and projector, and nothing else")
    tiers: dict[int, RecomputedTier] = {}
    for entry in plan.decisions.recompute:
        layers = [position.get(name, len(names)) for name in unfold_modules(entry.modules)]
        here = stages[entry.stage] if 0 <= entry.stage < len(stages) else None
        if here is None or not all(here.start <= i < here.stop for i in layers):
            problems.append(f"recompute names layers that stage {entry.stage} does not hold")
        tiers |= dict.fromkeys(layers, entry.granularity)
    if problems:
        raise PlanError("; ".join(problems) + ": run `trimtab plan` again, or correct the modules by hand")
    found = tuple(recomputing(stage, tiers) for stage in stages)
    if not is_own:
        return found
    return tuple(replace(stage, index=i, start=stage.start if i else 0) for i, stage in enumerate(found[1:]))


def load_details(path: Path | str) -> PlanDetails:
    """Return a plan on disk with its figures simulated again, for a report."""
    path = Path(path)
    found = reload_plan(path)
    case, plan = found.case, found.plan
    folder = plan_folder(path)
    packing, profile = plan.decisions.packing, plan.inputs.training.profile
    files = [packing.offsets, packing.indices, packing.schedule, sizes_file(plan), *([profile] if profile else [])]
    tables = {table.file: read_table(folder, table) for table in files}
    variants = compare_variants(case, found.stages, elsewhere=plan.estimates.settings)
    return plan_details(plan, case, variants, tables=tables)


def replan(found: ReloadedPlan, stages: Sequence[Stage], *, forbidden_cuts: frozenset[int], note: str) -> PlanDetails:
    """The plan with other stages: packs, degrees and inputs unchanged, new estimates; `write_plan` saves it.

    What the plan assumed is kept, but for how its old split was found; `note` says how the new one was.
    """
    plan = found.plan
    model = replace(found.case.model, forbidden_cuts=found.case.model.forbidden_cuts | forbidden_cuts)
    case = replace(found.case, model=model)
    return assemble_plan(
        case,
        case.problem.assess(stages),
        compare_variants(case, stages, elsewhere=plan.estimates.settings),
        origin=PlanOrigin(
            command=plan.command, data_files=plan.inputs.data.files, num_skipped=plan.inputs.data.num_skipped
        ),
        mixture=plan.inputs.data.mixture,
        settings=plan.estimates.settings,
        setting_error=plan.estimates.setting_error,
        tips=plan.estimates.tips,
        forms=plan.estimates.forms,
        assumptions=(*(said for said in plan.assumptions if not said.startswith(ABOUT_SPLIT)), note),
    )
