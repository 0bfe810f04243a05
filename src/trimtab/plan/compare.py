"""The same data set run in several ways, from nothing balanced to the plan, simulated step by step.

Each variant has its own micro-batches and stages, and all are priced by the same profile, so what one gains over
another is said in one unit: seconds for the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.balance.packing import pack_samples
from trimtab.errors import PartitionError
from trimtab.partition.baselines import even_stages
from trimtab.partition.simulate import StageTimes, simulate, simulate_steps, stage_times
from trimtab.partition.stages import RecomputeMode, SplitProblem, solve
from trimtab.plan.details import Variant
from trimtab.plan.exchange import step_overhead_s
from trimtab.plan.options import PlanOptions
from trimtab.plan.work import PATCHES, TOKENS, packed_work, padded_work, select_rows
from trimtab.specs import (
    ClusterSpec,
    FloatArray,
    IntArray,
    Packing,
    RecomputeChoice,
    SampleTable,
    Schedule,
    Stage,
    Timeline,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatches:
    """What every micro-batch asks of the layers, padding included, and when it runs."""

    label: str
    work: FloatArray  # (num_packs, len(WORK_TERMS))
    largest: FloatArray  # (len(WORK_TERMS),) term by term the most a micro-batch may ask: prices memory
    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staging:
    """Stages with their recompute, and the words that say how they came about."""

    stages_rule: str
    recompute_rule: str
    stages: tuple[Stage, ...]


def compare_variants(
    samples: SampleTable,
    samples_work: FloatArray,
    problem: SplitProblem,
    stages: Sequence[Stage],
    packing: Packing,
    schedule: Schedule,
    cluster: ClusterSpec,
    options: PlanOptions,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Variant, ...]:
    """Baseline, then with balanced packs, then balanced stages, then the plan: each adds one decision.

    The baseline is what a launcher does when nobody decides: random batches padded to their longest, with as many
    samples as a pack holds on average, or as fit the memory if those are fewer; as many blocks on every stage; and
    recompute everywhere, or nowhere if that fits. Steps of all variants hold about equally many samples.
    """
    packs = MicroBatches(
        label=f"{packing.method}, {schedule.order} order",
        work=packed_work(packing, samples_work),
        largest=problem.work_max,
        schedule=schedule,
    )
    num_stages = problem.num_stages * problem.num_chunks
    even = even_stages(problem.profile, num_stages, forbidden_cuts=problem.forbidden_cuts)
    planned = Staging(stages_rule="balanced", recompute_rule="as needed", stages=tuple(stages))
    runs = [
        _baseline(samples, samples_work, packing, problem, even, options),
        _Run(name="balanced packs", problem=problem, batches=packs, staging=_uniform(problem, even, packs)),
        _Run(name="balanced stages", problem=problem, batches=packs, staging=_balanced_stages(problem)),
        _Run(name="recompute as needed", problem=problem, batches=packs, staging=planned),
    ]
    variants = []
    for number, run in enumerate(runs):
        variants.append(_simulate_run(run, cluster, options))
        if progress is not None:
            progress(number + 1, len(runs))
    return tuple(variants)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    name: str
    problem: SplitProblem
    batches: MicroBatches
    staging: Staging


def _baseline(
    samples: SampleTable,
    samples_work: FloatArray,
    packing: Packing,
    problem: SplitProblem,
    even: Sequence[Stage],
    options: PlanOptions,
) -> _Run:
    """The largest batches, from a pack's mean downwards, that fit with full recompute; else single samples."""
    if len(packing.oversize):
        rows = np.sort(packing.indices)
        samples, samples_work = select_rows(samples, rows), samples_work[rows]
    per_pack = len(samples) / packing.num_packs
    sizes = [per_pack, *range(math.ceil(per_pack) - 1, 0, -1)]
    for size in sizes:
        wanted = problem.num_microbatches * per_pack / max(1.0, size)
        # interleaved schedules take micro-batches in multiples of the pipeline's devices
        unit = problem.num_stages if problem.num_chunks > 1 else 1
        own = replace(problem, num_microbatches=max(1, round(wanted / unit)) * unit)
        batches = _random_batches(samples, samples_work, own, max(1.0, size), options.seed)
        staging = _uniform(own, even, batches)
        run = _Run(name="baseline", problem=own, batches=batches, staging=staging)
        if _fits(own, staging.stages, batches):
            break
    return run


def _random_batches(
    samples: SampleTable, samples_work: FloatArray, problem: SplitProblem, batch_size: float, seed: int
) -> MicroBatches:
    random = pack_samples(
        samples,
        limits=(int(samples.num_patches.max()) + 1, int(samples.num_tokens.max()) + 1),
        dp=problem.profile.dims.dp,
        num_microbatches=problem.num_microbatches,
        method="random",
        batch_size=batch_size,
        seed=seed,
    )
    work = padded_work(random.packing, samples_work)
    label = f"random, {batch_size:.3g} padded"
    return MicroBatches(label=label, work=work, largest=work.max(axis=0), schedule=random.schedule)


def _fits(problem: SplitProblem, stages: Sequence[Stage], batches: MicroBatches) -> bool:
    memory = replace(problem, work_max=batches.largest).assess(stages).memory
    return max(device.total_bytes for device in memory) <= problem.memory_bytes


def _uniform(problem: SplitProblem, stages: Sequence[Stage], batches: MicroBatches) -> Staging:
    """Nothing recomputed if that fits, else everything that can be: one switch for the whole model."""
    plain = tuple(replace(stage, recompute=()) for stage in stages)
    if problem.recompute != "full" and _fits(problem, plain, batches):
        return Staging(stages_rule="equal layers", recompute_rule="none", stages=plain)
    full = tuple(_recompute_all(problem, stage) for stage in stages)
    return Staging(stages_rule="equal layers", recompute_rule="full", stages=full)


def _balanced_stages(problem: SplitProblem) -> Staging:
    """The exact split while recompute is still one switch for the whole model: the faster of on and off that fits."""
    modes: tuple[RecomputeMode, ...] = ("none", "full")
    found: list[tuple[float, RecomputeMode, tuple[Stage, ...]]] = []
    for mode in modes:
        try:
            split = solve(replace(problem, recompute=mode))
        except PartitionError:
            continue
        found.append((split.bottleneck_s, mode, split.stages))
    if not found:
        # a layer may keep more when recomputed in full than in part: then only the choice per layer fits
        return Staging(stages_rule="balanced", recompute_rule="as needed", stages=solve(problem).stages)
    _, mode, stages = min(found, key=lambda entry: entry[0])
    return Staging(stages_rule="balanced", recompute_rule=mode, stages=stages)


def _recompute_all(problem: SplitProblem, stage: Stage) -> Stage:
    offered = problem.profile.layers
    layers = tuple(i for i in range(stage.start, stage.stop) if any(t.name == "full" for t in offered[i].tiers))
    return replace(stage, recompute=(RecomputeChoice(tier="full", layers=layers),) if layers else ())


def _simulate_run(run: _Run, cluster: ClusterSpec, options: PlanOptions) -> Variant:
    """Every step of the data set through the pipeline simulator."""
    problem, batches, staging = run.problem, run.batches, run.staging
    profile, table = problem.profile, batches.schedule.table
    dims = profile.dims
    times = times_of(batches.work, staging.stages, problem, cluster)
    step_s = steps_of(times, table, staging.stages, problem, cluster, options)
    assessed = replace(problem, work_mean=batches.work.mean(axis=0), work_max=batches.largest).assess(staging.stages)
    busy_s = float((times.forward_s + times.backward_s)[:, table[table >= 0]].sum())
    return Variant(
        name=run.name,
        packs=batches.label,
        stages_rule=staging.stages_rule,
        recompute_rule=staging.recompute_rule,
        pack_patches=batches.work[:, PATCHES],
        pack_tokens=batches.work[:, TOKENS],
        stages=staging.stages,
        stage_forward_s=np.array(assessed.forward_s),
        stage_backward_s=np.array(assessed.backward_s),
        memory=assessed.memory,
        step_s=step_s,
        idle_share=1.0 - busy_s / (float(step_s.sum()) * dims.pp * dims.dp),
        fits=_fits(problem, staging.stages, batches),
        timeline=_typical_timeline(times, table, step_s, problem),
    )


def times_of(work: FloatArray, stages: Sequence[Stage], problem: SplitProblem, cluster: ClusterSpec) -> StageTimes:
    """Seconds of every pack on every stage, sends included."""
    link = pipeline_link(cluster)
    return stage_times(problem.profile, stages, work, link_bytes_per_s=link, latency_s=cluster.latency_s)


def steps_of(
    times: StageTimes,
    table: IntArray,
    stages: Sequence[Stage],
    problem: SplitProblem,
    cluster: ClusterSpec,
    options: PlanOptions,
) -> FloatArray:
    """(num_steps,) seconds: the slowest rank's pipeline, then gradient exchange and optimizer."""
    overhead_s = step_overhead_s(problem.profile, stages, cluster, options.zero_stage)
    return simulate_steps(
        times, table, schedule=problem.schedule, num_devices=problem.num_stages, all_reduce_s=overhead_s
    )


def _typical_timeline(times: StageTimes, table: IntArray, step_s: FloatArray, problem: SplitProblem) -> Timeline:
    """The slowest rank of the step of median length."""
    step = int(np.argsort(step_s, kind="stable")[len(step_s) // 2])
    ranks = [_columns(times, table[step, rank]) for rank in range(table.shape[1])]
    timelines = [simulate(t, schedule=problem.schedule, num_devices=problem.num_stages) for t in ranks]
    return max(timelines, key=lambda timeline: timeline.makespan_s)


def _columns(times: StageTimes, packs: IntArray) -> StageTimes:
    """The times of these packs; an empty slot (-1) takes none."""
    there = (packs >= 0).astype(np.float64)
    index = np.maximum(packs, 0)
    return StageTimes(
        forward_s=times.forward_s[:, index] * there,
        backward_s=times.backward_s[:, index] * there,
        send_forward_s=times.send_forward_s[:, index] * there,
        send_backward_s=times.send_backward_s[:, index] * there,
    )


def pipeline_link(cluster: ClusterSpec) -> float:
    """Bytes per second between stages: where there are several nodes, neighbours are taken to lie on different ones."""
    return cluster.device.link_bytes_per_s if cluster.num_nodes == 1 else cluster.node_link_bytes_per_s
