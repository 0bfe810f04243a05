"""From a model, sample sizes and a cluster to a plan: start reading here, `make_plan` is the whole program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trimtab.balance.packing import pack_samples, report_packing
from trimtab.files import write_atomically
from trimtab.partition.stages import solve
from trimtab.plan.assemble import assemble_plan, describe_decisions, describe_estimates, describe_inputs
from trimtab.plan.budget import MemoryBudget
from trimtab.plan.compare import compare_variants
from trimtab.plan.details import PlanDetails
from trimtab.plan.file import name_table, plan_to_yaml
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.plan.packs import even_steps, pack_contents
from trimtab.plan.setting import choose_setting
from trimtab.plan.split import refine_split, split_problem
from trimtab.plan.work import in_patches, price_samples
from trimtab.samples.table import table_bytes
from trimtab.specs import ClusterSpec, ModelSpec, SampleTable

Progress = Callable[[str, int, int], None]
"""Called with a step's name, what is done of it, and how much there is."""

SAMPLES_FILE = "samples.npz"
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
    tiles = TILES_ASSUMPTION if samples.patch_unit == "tiles" else ()
    samples = in_patches(samples, model)
    samples_work = samples.work(token_window=model.token_window)
    budget = MemoryBudget.of(cluster, options)

    setting = choose_setting(
        model, samples, samples_work, cluster, options, budget, progress=_step(progress, "settings")
    )
    cost = price_samples(setting.profile, samples_work)
    packed = pack_samples(
        samples,
        limits=(setting.max_patches, setting.max_tokens),
        dp=setting.dims.dp,
        num_microbatches=setting.num_microbatches,
        method=options.method,
        order=options.order,
        cost=cost,
        seed=options.seed,
        oversize=options.oversize,
    )
    if options.leaves_steps_open:
        packed = replace(packed, schedule=even_steps(packed.schedule, setting.num_microbatches))
        setting = replace(setting, num_microbatches=packed.schedule.table.shape[2])
    problem = split_problem(model, packed.packing, samples_work, setting, budget, options)
    split = refine_split(problem, solve(problem), packed.packing, packed.schedule, samples_work, cluster)
    variants = compare_variants(
        samples,
        samples_work,
        problem,
        split.stages,
        packed.packing,
        packed.schedule,
        cluster,
        options,
        progress=_step(progress, "simulation"),
    )

    tables = {SAMPLES_FILE: table_bytes(samples), **pack_contents(packed.packing, packed.schedule)}
    files = {name: name_table(name, content) for name, content in tables.items()}
    plan = assemble_plan(
        inputs=describe_inputs(model, samples, cluster, options, origin, budget=budget, table=files[SAMPLES_FILE]),
        decisions=describe_decisions(
            model, options, setting, packed.packing, packed.schedule, split.stages, files=files
        ),
        estimates=describe_estimates(setting, report_packing(samples, packed, cost=cost), split, variants),
        origin=origin,
        assumptions=(*tiles, *model.notes, *setting.profile.assumptions),
    )
    return PlanDetails(
        plan=plan,
        model=model,
        samples=samples,
        packing=packed.packing,
        schedule=packed.schedule,
        profile=setting.profile,
        memory_cap_bytes=budget.total_bytes,
        variants=variants,
    )


def write_plan(details: PlanDetails, folder: Path | str) -> Path:
    """Write plan.yaml and the tables it names into `folder`; the plan last, so that it never names a missing table."""
    folder = Path(folder)
    contents = {SAMPLES_FILE: table_bytes(details.samples), **pack_contents(details.packing, details.schedule)}
    for name, content in contents.items():
        write_atomically(folder / name, content)
    path = folder / "plan.yaml"
    write_atomically(path, plan_to_yaml(details.plan))
    return path


def _step(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
