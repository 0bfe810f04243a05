"""Does a plan still hold: the same inputs, every sample once, no pack over its limits, within the memory?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab import __version__
from trimtab.address import Address, place_of
from trimtab.balance.packing import PackResult
from trimtab.errors import PlanError, TrimtabError, join_problems
from trimtab.files import fingerprint_file, is_there
from trimtab.models.describe import describe, read_config
from trimtab.models.shipped import find_shipped
from trimtab.partition.assess import DeviceMemory, ReplayedPeak, replay_peaks
from trimtab.plan.decide.case import MemoryBudget, tower_cuts
from trimtab.plan.decide.compare import simulate_plan
from trimtab.plan.decide.epoch import draw_epoch
from trimtab.plan.decide.groups import decision_problems
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.decide.sharing import share_vision
from trimtab.plan.file.figures import describe_estimates, model_fingerprint, say_trained, summarise
from trimtab.plan.file.reload import (
    ReloadedPlan,
    cover_problems,
    find_config,
    load_packs,
    options_of,
    read_samples,
    reload_plan,
    stages_of,
)
from trimtab.plan.file.yaml import open_plan, unknown_keys
from trimtab.plan.plan import Plan
from trimtab.specs import ClusterSpec, ModelSpec, Stage
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from trimtab.costs.measured.traced_fit import TracedProfile


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
        raise PlanError(
            f"a plan was written to {path}, and it does not hold: make it again from a plan that `trimtab check` "
            f"passes\n{join_problems(problems)}"
        )


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
        yield (
            f"the model {found.plan.inputs.model.name} is described with other layers or image sizes than when the "
            "plan was made: run `trimtab plan` again"
        )
    for stage in found.stages[1:]:
        if stage.start in model.forbidden_cuts:
            reason = model.forbidden_cut_reason or "the framework that the plan is for cannot make it"
            yield f"stage {stage.index} begins at a forbidden cut: {reason}"


def _wrong_counts(found: ReloadedPlan) -> Iterator[str]:
    """Numbers of the file that other parts of it, or the model, say otherwise."""
    inputs, decisions, case = found.plan.inputs, found.plan.decisions, found.case
    parallel, given = decisions.parallel, inputs.cluster
    used, there = parallel.dp * parallel.pp * parallel.tp * parallel.cp, given.num_nodes * given.devices_per_node
    if used != there:
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
        yield f"num_skipped is {inputs.data.num_skipped}, and it counts samples: run `trimtab plan` again"


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
            yield f"step {step} holds {int(held[step])} samples, and the plan's steps {N}: run `trimtab plan` again"
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
                f"pipeline rank {rank} would hold {format_bytes(memory.total_bytes)} of "
                f"{format_bytes(problem.memory_bytes)} that may be expected: recompute more of its layers, or "
                "run `trimtab plan` again"
            )


def _old_claims(found: ReloadedPlan) -> Iterator[str]:
    """Figures and summary of other decisions than the plan's; not looked at where another version computed them."""
    plan, case = found.plan, found.case
    if plan.created_by != f"trimtab {__version__}":
        return
    ours, said = simulate_plan(case, found.stages), plan.estimates
    true = describe_estimates(case, case.problem.assess(found.stages), (ours, ours))
    own = ("step_ms", "epoch_s", "samples_per_s", "stage_imbalance", "stages", "balance")
    other = [told for name in own for told in _differences(name, getattr(said, name), getattr(true, name))]
    row, true_row = said.variants[-1], true.variants[-1]
    for name in ("step_ms", "epoch_s", "samples_per_s", "peak_memory_gib", "fits"):
        other += _differences(f"variants[-1].{name}", getattr(row, name), getattr(true_row, name))
    if other:
        yield (
            f"the estimates are of other decisions than the plan's ({'; '.join(other[:3])}): run `trimtab plan` again, "
            "or `trimtab report` for the figures of a plan that was changed by hand"
        )
    if plan.summary != summarise(plan.inputs, plan.decisions, said, trained=say_trained(case)):
        yield "the summary is not that of the plan's decisions and estimates: run `trimtab plan` again"


def _differences(place: str, said: Any, true: Any) -> Iterator[str]:
    """Figures that are not the same but for rounding."""
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
    """Ranks that share images encode with the whole tower, which a plan then keeps on its first stage."""
    vision = found.case.vision
    if vision is None or len(found.stages) == 1:
        return
    if found.stages[0].stop in tower_cuts(found.case.model):
        yield (
            f"ranks of {vision.decision.group} share images, and stage 0 ends inside the vision tower or its "
            "projector: keep both on stage 0, or leave vision_data_parallel out"
        )


# A plan's memory, replayed without a device: bytes counted on the real layers, at the packs that each rank runs.
#
# The layers are traced where they are asked for: that needs torch and Transformers.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One pipeline rank at its worst moment of the whole run."""

    rank: int
    stages: tuple[Stage, ...]
    peak: ReplayedPeak  # by counted bytes, at the packs that run
    planned: DeviceMemory  # by the plan's own costs, at its limits
    problem: str | None  # a sentence, where the peak exceeds the cap


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheck:
    """Every pipeline rank beside the cap."""

    ranks: tuple[RankMemory, ...]
    budget: MemoryBudget  # of the counted bytes: their band is narrower than the plan's
    assumptions: tuple[str, ...]  # how the bytes were counted

    @property
    def problems(self) -> list[str]:
        return [rank.problem for rank in self.ranks if rank.problem is not None]


def check_memory(path: Path | str, *, config: Path | str | None = None) -> MemoryCheck:
    """Peak bytes of every pipeline rank of the plan at `path`, counted again.

    `config` is the model's config.json (or its folder) where the plan does not say, or no longer finds, what its model
    is. Nothing of the plan's estimates is used, and what was changed by hand counts.
    Raises `PlanError` where the plan cannot be read back or `config` is of another model.
    """
    source, model = find_traced_model(path, config)
    found = reload_plan(Path(path), model=model)
    return replay_plan(found, trace_plan(found, source))


def find_traced_model(path: Path | str, config: Path | str | None = None) -> tuple[str, ModelSpec | None]:
    """`config`, or where none is given the plan's own; and its model, where the plan cannot find that itself.

    Raises `PlanError` where there is none, or another model's.
    """
    plan, folder = open_plan(path)
    given = plan.inputs.model
    own = None if given.config is None else find_config(given.config, folder)
    there = own is not None and (find_shipped(own) is not None or Path(own).exists())
    if config is None:
        if own is None or not there:
            where = "was described from Python" if own is None else f"is to be at {own}, and nothing is there"
            raise PlanError(
                f"bytes were to be counted on the layers of {given.name}, whose configuration {where}: give --config, "
                "the model's config.json or its folder"
            )
        return own, None
    model = describe(config, name=given.name, max_pixels=given.max_pixels, max_tiles=given.max_tiles)
    if (len(model.layers), model.num_params) != (given.num_layers, given.num_params):
        raise PlanError(
            f"--config {config} describes {len(model.layers)} layers with {model.num_params} parameters, and the "
            f"plan's {given.name} has {given.num_layers} with {given.num_params}: give the configuration of that model"
        )
    return str(config), None if there else model


def trace_plan(found: ReloadedPlan, config: str) -> TracedProfile:
    """The plan's model, counted with the plan's own dtype, attention, kernels and frozen towers."""
    from trimtab.costs.measured.traced import profile_traced  # torch and Transformers

    options, case = found.case.options, found.case
    return profile_traced(
        read_config(config),
        case.model,
        case.cluster.device,
        dtype=options.dtype,
        attention=options.attention,
        fused_kernels=options.of_host().fused_kernels,
        frozen_towers=frozenset(options.frozen_towers),
        lora=options.lora,
    )


def replay_plan(found: ReloadedPlan, traced: TracedProfile) -> MemoryCheck:
    """The plan's stages and packs with the bytes of `traced`."""
    case, stages = found.case, found.stages
    options = replace(case.options, profile=traced.profile)
    plain = case.without_vision()
    profile = profile_setting(case.model, case.cluster, options, case.setting.dims)
    budget = MemoryBudget.of(case.cluster, options)
    counted = replace(plain, options=options, budget=budget, setting=replace(plain.setting, profile=profile))
    if case.vision is not None:
        counted = share_vision(counted, case.vision.decision)
    peaks = replay_peaks(counted.problem, stages, counted.held_work, case.schedule.table)
    planned = case.problem.assess(stages)
    ranks = []
    for rank, peak in enumerate(peaks):
        own = tuple(stage for stage, device in zip(stages, planned.devices, strict=True) if device == rank)
        ranks.append(
            RankMemory(
                rank=rank,
                stages=own,
                peak=peak,
                planned=planned.memory[rank],
                problem=_problem(rank, own, peak, case.model, budget),
            )
        )
    said = [sentence for sentence in profile.assumptions if sentence in traced.profile.assumptions[1:]]
    return MemoryCheck(ranks=tuple(ranks), budget=budget, assumptions=tuple(said))


def _problem(
    rank: int, stages: tuple[Stage, ...], peak: ReplayedPeak, model: ModelSpec, budget: MemoryBudget
) -> str | None:
    need, cap = peak.memory.total_bytes, budget.fill_bytes
    if need <= cap:
        return None
    blocks = sum(model.layers[i].kind == "block" for stage in stages for i in range(stage.start, stage.stop))
    whole = blocks - sum(stage.num_recomputed() for stage in stages)
    cure = (
        f"recompute more of its layers ({whole} of {blocks} blocks keep everything)"
        if whole > 0
        else "plan with more stages or a larger tp"
    )
    return (
        f"pipeline rank {rank} needs {format_bytes(need)} by counted bytes, of {format_bytes(cap)} that may be "
        f"expected of its {format_bytes(budget.total_bytes)}, in step {peak.step} "
        f"of data-parallel rank {peak.dp_rank} ({math.ceil(need - cap)} bytes too many): {cure}, or pack less into a "
        "micro-batch"
    )
