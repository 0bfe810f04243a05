"""From a model, sample sizes and a cluster to a plan: start reading here, `make_plan` is the whole program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from trimtab.balance.packing import pack_samples, report_packing
from trimtab.costs.profile import profile_bytes
from trimtab.errors import PlanError
from trimtab.files import write_atomically
from trimtab.plan.case import Case
from trimtab.plan.decide.assemble import assemble_plan, describe_decisions, describe_estimates, describe_inputs
from trimtab.plan.decide.budget import MemoryBudget
from trimtab.plan.decide.compare import compare_variants
from trimtab.plan.decide.mixture import describe_draw, draw_sources, packed_rows
from trimtab.plan.decide.packs import even_steps, pack_contents
from trimtab.plan.decide.setting import choose_setting, default_global_batch
from trimtab.plan.decide.stages import choose_split
from trimtab.plan.decide.work import in_patches, packed_work, price_samples, select_rows
from trimtab.plan.file.details import PlanDetails
from trimtab.plan.file.yaml import name_table, plan_to_yaml
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.plan.sharing.search import choose_vision
from trimtab.samples.table import table_bytes
from trimtab.specs import ClusterSpec, ModelSpec, SampleTable

Progress = Callable[[str, int, int], None]
"""Called with a step's name, what is done of it, and how much there is."""

SAMPLES_FILE = "samples.npz"
PROFILE_FILE = "profile.json"
TILES_ASSUMPTION = ("The data gives tiles: each is taken as one tile of the model's own image rule.",)


def make_plan(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions | None = None,
    *,
    origin: PlanOrigin | None = None,
    progress: Progress | None = None,
) -> PlanDetails:
    """Decide packs, stages and recompute; say what they are expected to cost beside the unbalanced baseline.

    The same inputs and options give the same plan, byte for byte. Raises `PackingError` for samples over the limits,
    `PartitionError` when no split fits the memory, `PlanError` for options that contradict the cluster or the data.
    """
    options, origin = options or PlanOptions(), origin or PlanOrigin()
    if len(samples) == 0:
        raise PlanError("there is no sample to plan: give a data set that holds some")
    draw = (
        draw_sources(samples, options.weights, num_drawn=options.num_drawn, seed=options.seed)
        if options.weights
        else None
    )
    rows = np.arange(len(samples)) if draw is None else draw.rows  # of one epoch
    if options.global_batch is not None and options.global_batch > len(rows):
        raise PlanError(
            f"global_batch {options.global_batch} was asked for, and the data holds {len(rows)} samples: "
            "ask for that or fewer"
        )
    tiles = TILES_ASSUMPTION if samples.patch_unit == "tiles" else ()
    samples = in_patches(samples, model)
    epoch = samples if draw is None else select_rows(samples, rows)
    samples_work = samples.work(token_window=model.token_window)
    budget = MemoryBudget.of(cluster, options)
    refuse_oversize(samples if draw is None else select_rows(samples, np.flatnonzero(draw.times)), options)

    chosen = choose_setting(
        model, epoch, samples_work[rows], cluster, options, budget, progress=_step(progress, "settings")
    )
    setting, options = chosen.setting, chosen.options
    cost = price_samples(setting.profile, samples_work)
    packed = pack_samples(
        epoch,
        limits=(setting.max_patches, setting.max_tokens),
        dp=setting.dims.dp,
        num_microbatches=setting.num_microbatches,
        method=options.method,
        order=options.order,
        cost=cost[rows],
        seed=options.seed,
        oversize=options.oversize,
    )
    if draw is not None:
        packed = packed_rows(packed, rows)
    if packed.packing.num_packs == 0:
        raise PlanError("every sample exceeds the limits and was to be skipped: raise max_patches or max_tokens")
    if options.leaves_steps_open:
        packed = replace(packed, schedule=even_steps(packed.schedule, setting.num_microbatches))
        setting = replace(setting, num_microbatches=packed.schedule.table.shape[2])
    case = Case(
        model=model,
        samples=samples,
        samples_work=samples_work,
        cluster=cluster,
        options=options,
        budget=budget,
        setting=setting,
        packing=packed.packing,
        schedule=packed.schedule,
        work=packed_work(packed.packing, samples_work),
    )
    without = choose_split(case)
    vision = choose_vision(case, without)
    case, found = vision.best.case, vision.best.found
    split = found.split
    variants = compare_variants(case, split.stages, without=without, progress=_step(progress, "simulation"))

    tables = {SAMPLES_FILE: table_bytes(samples), **pack_contents(packed.packing, packed.schedule)}
    if options.profile is not None:
        tables[PROFILE_FILE] = profile_bytes(options.profile)
    files = {name: name_table(name, content) for name, content in tables.items()}
    plan = assemble_plan(
        inputs=describe_inputs(
            case,
            origin,
            table=files[SAMPLES_FILE],
            profile=files.get(PROFILE_FILE),
            mixture=() if draw is None else draw.sources,
        ),
        decisions=describe_decisions(case, split.stages, files=files),
        estimates=describe_estimates(case, report_packing(samples, packed, cost=cost), split, variants),
        origin=origin,
        assumptions=(
            *tiles,
            *batch_assumption(cluster, options, len(rows)),
            *(() if draw is None else describe_draw(draw.sources)),
            *chosen.sentences(),
            *found.sentences(),
            *vision.sentences(),
            *model.notes,
            *setting.profile.assumptions,
        ),
    )
    return PlanDetails(
        plan=plan,
        model=model,
        samples=samples,
        packing=packed.packing,
        schedule=packed.schedule,
        profile=case.setting.profile,
        saved_profile=options.profile,
        memory_cap_bytes=budget.total_bytes,
        variants=variants,
    )


def refuse_oversize(samples: SampleTable, options: PlanOptions) -> None:
    """Name the samples above limits that were given, before anything is chosen for them."""
    if options.oversize != "error" or options.max_patches is None or options.max_tokens is None:
        return
    over = (samples.num_patches > options.max_patches) | (samples.num_tokens > options.max_tokens)
    if over.any():
        pack_samples(select_rows(samples, np.flatnonzero(over)), limits=(options.max_patches, options.max_tokens))


def batch_assumption(cluster: ClusterSpec, options: PlanOptions, num_samples: int) -> tuple[str, ...]:
    """A sentence, where the planner chose the global batch."""
    if options.global_batch is not None or options.num_microbatches is not None:
        return ()
    return (
        f"No global batch was given: about {default_global_batch(cluster, options, num_samples)} samples a step were "
        "aimed at.",
    )


def write_plan(details: PlanDetails, folder: Path | str) -> Path:
    """Write plan.yaml and the tables it names into `folder`; the plan last, so that it never names a missing table."""
    folder = Path(folder)
    contents = {SAMPLES_FILE: table_bytes(details.samples), **pack_contents(details.packing, details.schedule)}
    if details.saved_profile is not None:
        contents[PROFILE_FILE] = profile_bytes(details.saved_profile)
    for name, content in contents.items():
        write_atomically(folder / name, content)
    path = folder / "plan.yaml"
    write_atomically(path, plan_to_yaml(details.plan))
    return path


def _step(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
