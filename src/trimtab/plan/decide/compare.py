"""The same data set run in several ways, from nothing balanced to the plan, simulated step by step.

Each variant has its own micro-batches and stages, and all are priced by the same profile, so what one gains over
another is said in one unit: seconds for the same samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.balance.packing import MOST_LIMIT, pack_samples
from trimtab.balance.schedule import schedule_packs
from trimtab.options import PackMethod, RecomputeMode, ScheduleName, same_fields
from trimtab.partition.assess import DeviceMemory
from trimtab.partition.published import even_stages, full_recompute
from trimtab.partition.schedules import microbatch_unit
from trimtab.partition.simulate import StageTimes, Timeline, simulate, simulate_steps
from trimtab.partition.stages import SplitProblem, split_stages
from trimtab.plan.decide.apart import between_phases
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.decide.stages import PricedSplit, SplitChoice, choose_split, price_splits, uniform_splits
from trimtab.plan.decide.work import (
    PATCHES,
    TOKENS,
    Apart,
    Lanes,
    above_all,
    as_run,
    packed_work,
    padded_work,
    rank_step_s,
    select_rows,
    steps_of,
    timed_steps,
    times_of,
)
from trimtab.plan.options import Baseline, parse_baseline
from trimtab.plan.plan import BASELINE, SettingEstimate
from trimtab.specs import ClusterSpec, FloatArray, IntArray, ParallelDims, SampleTable, Schedule, Stage
from trimtab.units import format_number, format_ratio

# One way to run the whole data set, and what the simulation says of it.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """One way to run the whole data set: its packs, its stages, and what the simulation says of them."""

    name: str  # "baseline", ..., "plan"
    packs: str  # how micro-batches were made, in two or three words
    stages_rule: str
    recompute_rule: str
    pack_patches: FloatArray  # (num_packs,) rows the vision tower computes, padding included
    pack_tokens: FloatArray  # (num_packs,) rows the language model computes, padding included
    stages: tuple[Stage, ...]
    stage_forward_s: FloatArray  # (num_stages,) at the mean pack
    stage_backward_s: FloatArray  # (num_stages,) recompute included
    memory: tuple[DeviceMemory, ...]  # of each pipeline rank, at the largest micro-batch
    step_s: FloatArray  # (num_steps,) slowest rank, gradient exchange and optimizer included
    idle_share: float  # of all devices while pipelines run; padding and recompute count as work
    fits: bool  # no device holds more than the cap
    timeline: Timeline  # of the step whose time is nearest the median, on its slowest rank

    @property
    def epoch_s(self) -> float:
        return float(self.step_s.sum())

    def pack_sizes(self, unit: str) -> FloatArray:
        """Return (num_packs,) "patches" or "tokens"."""
        return self.pack_tokens if unit == "tokens" else self.pack_patches


DEGREES = "the plan's degrees"  # the baseline on them, where it is faster on others
_SLOWER = 1.005  # a row that takes so much longer than the one above is explained
_ESTIMATED_STEPS = 64  # to tell which batch size makes the fastest baseline
_TRIED_SAMPLES = 8192  # to tell on which degrees it is fastest
_BY_THEMSELVES: tuple[PackMethod, ...] = ("random", "length_group")
"""What a trainer offers that does not pack; the faster is the baseline, if no other is asked for."""
_GREEDY_SIZES = (0.25, 0.5, 1.0, 2.0)  # greedy packs, in tokens of the plan's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """What every micro-batch asks of the layers, padding included, when it runs, and on which stages."""

    name: str
    problem: SplitProblem  # `work_max`: term by term the most a micro-batch may ask, which prices memory
    packs: str  # how micro-batches were made, in words
    work: FloatArray  # (num_packs, len(WORK_TERMS))
    schedule: Schedule
    apart: Apart | None = None  # what a tower does outside of the stages
    held: FloatArray | None = None  # as `work`, before ranks share images; None: they do not
    stages: tuple[Stage, ...] = ()
    rules: tuple[str, str] = ("", "")  # how stages and recompute came about, in words

    @property
    def fits(self) -> bool:
        return self.problem.assess(self.stages).peak_bytes <= self.problem.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Balanced:
    """Stages, and how they and their recompute came about, in words."""

    stages: tuple[Stage, ...]
    rules: tuple[str, str]


def compare_variants(
    case: Case,
    stages: Sequence[Stage],
    *,
    without: SplitChoice | None = None,
    elsewhere: Sequence[SettingEstimate] = (),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Variant, ...]:
    """Run the baseline, then with balanced packs, then balanced stages, then the plan: each adds one decision.

    Where ranks share images, that is the last one, and the rows above are those of the case without it; a tower on
    devices of its own follows the baseline, for its pipelines were never meant to hold it.

    The baseline is what a launcher does when nobody decides: padded batches, random or grouped by length, or greedy
    packs where the host packs, of the size that is fastest and fits; as many blocks on every stage; and recompute
    everywhere, or nowhere if that fits. It is the fastest that fits on the plan's degrees and on those of `elsewhere`;
    where others win, the row after it moves to the plan's. Or it is the fastest that fits of those that were asked for,
    the others before it. Steps of all variants hold about equally many samples. `without`: what `choose_split` found
    for the case without sharing, if it ran.
    """
    # 1. the plan's own packs, on the stages that each row is about
    shared, case = case, case.without_vision()
    is_own = isinstance(shared.apart, Lanes)
    if shared.vision is not None and without is None and not is_own:
        without = choose_split(case)
    problem = case.problem
    plain = Compared(
        name="",
        problem=problem,
        packs=f"{case.packing.method}, {case.schedule.order} order",
        work=case.work,
        schedule=case.schedule,
    )
    if is_own:
        balanced = _Balanced(stages=tuple(stages), rules=("balanced", "as needed"))
    else:
        balanced = _balanced_stages(case, None if without is None else without.one_switch)
    recompute = {"auto": "as needed", "none": "none", "full": "full"}[problem.recompute]
    planned = replace(plain, stages=tuple(stages), rules=("balanced", recompute))
    alone = planned if shared.vision is None or without is None else replace(planned, stages=without.split.stages)
    # 2. a row adds one decision to the row above it
    runs = _baselines(case, balanced, elsewhere)
    runs += (
        ()
        if is_own
        else (
            _uniform(replace(plain, name="balanced packs")),
            replace(plain, name="balanced stages", stages=balanced.stages, rules=balanced.rules),
            replace(alone, name="recompute as needed" if problem.recompute == "auto" else "the plan"),
        )
    )
    if shared.vision is not None:
        runs.append(
            replace(
                planned,
                name="tower on devices of its own" if is_own else "images shared",
                problem=shared.problem,
                work=shared.work,
                held=case.work,
                apart=shared.apart,
            )
        )
    # 3. every step of every row through the simulator
    variants = []
    for number, run in enumerate(runs):
        variants.append(simulate_run(run, case.cluster))
        if progress is not None:
            progress(number + 1, len(runs))
    return tuple(variants)


def explain_losses(variants: Sequence[Variant]) -> tuple[str, ...]:
    """Return why a row of the comparison is slower than the one above it, in a sentence each."""
    rows = [x for x in variants if x.name != f"other {BASELINE}"]
    said = []
    for above, row in itertools.pairwise(rows):
        if row.epoch_s > _SLOWER * above.epoch_s:
            why = "its part is in the rows below"
            if row.name == DEGREES:
                why = "these degrees are for balanced packs"
            elif (above.recompute_rule, row.recompute_rule) == ("none", "full"):
                why = (
                    "so large packs fit only with recompute, which is one switch for all layers until the last rows "
                    "choose where it is needed"
                )
            longer = format_ratio(row.epoch_s / above.epoch_s)
            said.append(
                f'The row "{row.name}" takes {longer} as long as the one above it: {why}. '
                "Nothing runs as that row says; the plan is the last."
            )
    return tuple(said)


def _baselines(case: Case, balanced: _Balanced, elsewhere: Sequence[SettingEstimate]) -> list[Compared]:
    """Return what the host does by itself, or those that were asked for: the fastest that fits last.

    On all degrees, then on the plan's where that is another run.
    """
    # what was asked for, or what a trainer offers; the fastest that fits is compared with
    asked = [parse_baseline(text) for text in case.options.baselines] or [Baseline(method=x) for x in _BY_THEMSELVES]
    runs = [_baseline(case, baseline, balanced) for baseline in asked]
    own = _fastest(runs, case.cluster)
    others = [replace(run, name=f"other {BASELINE}") for run in runs if run is not own and case.options.baselines]
    best = asked[runs.index(own)]
    moved = [(_moved(case, to), to) for to in elsewhere if _dims(to) != case.setting.dims]
    # a part of the data says on which degrees it is fast, all of it whether it fits and is faster than ours
    tried = [(_baseline(there, best, balanced, most=_TRIED_SAMPLES), there, to) for there, to in moved]
    tried = [found for found in tried if found[0].fits]
    for _, there, to in sorted(tried, key=lambda found: _estimate_s(found[0], case.cluster)):
        run = _baseline(there, best, balanced)
        if run.fits:
            run = replace(run, name=BASELINE, packs=f"{run.packs}; on {to.label}")
            if _fastest([own, run], case.cluster) is own:
                break
            return [*others, run, replace(own, name=DEGREES)]
    return [*others, replace(own, name=BASELINE)]


def _dims(setting: SettingEstimate) -> ParallelDims:
    return ParallelDims(**same_fields(setting, ParallelDims))


def _moved(case: Case, to: SettingEstimate) -> Case:
    """The same run on other degrees, with as many samples a step."""
    dims = _dims(to)
    options = replace(case.options, pp=to.pp, zero_stage=to.zero_stage, schedule=to.schedule, num_chunks=to.num_chunks)
    # as many samples a step, in whole units of its schedule
    num_microbatches = max(1, round(case.setting.num_microbatches * case.setting.dims.dp / to.dp))
    unit = microbatch_unit(to.schedule, to.pp)
    num_microbatches = -(-num_microbatches // unit) * unit
    profile = profile_setting(case.model, case.cluster, options, dims)
    setting = replace(case.setting, dims=dims, num_microbatches=num_microbatches, profile=profile)
    return replace(case, options=options, setting=setting)


def _baseline(case: Case, baseline: Baseline, balanced: _Balanced, *, most: int | None = None) -> Compared:
    """Return one baseline; where no size is said, the fastest that fits.

    Of padded batches of 1, 2, 4, ... samples up to a pack's mean, of greedy packs of 1/4 to 2 times the plan's tokens.
    `most`: samples, spread over the data set; None: all, where a part of them says which size is fast.
    """
    # sizes that a user may try: doubled up to the pack's mean, for above it padding only grows
    per_pack = max(1.0, len(case.packing.indices) / case.packing.num_packs)
    if baseline.batch is not None or baseline.method in ("isf", "balanced"):
        sizes = [baseline.batch or per_pack]
    elif baseline.method == "greedy":
        sizes = [share * per_pack for share in _GREEDY_SIZES]
    else:
        sizes = [2.0**i for i in range(math.ceil(math.log2(per_pack)))] + [per_pack]
    # a part of the data tells which size is fast, in a tenth of the time; all of it tells what fits
    if len(sizes) > 1:
        part = [_of_size(case, baseline, balanced, size, most or _TRIED_SAMPLES) for size in sizes]
        if most is not None:
            return _fastest(part, case.cluster)
        order = np.argsort([_estimate_s(run, case.cluster) for run in part], kind="stable")
        sizes = [sizes[i] for i in order.tolist() if part[i].fits] + sizes[:1]
    for size in sizes:
        run = _of_size(case, baseline, balanced, size, most)
        if run.fits:
            break
    return run


def _of_size(case: Case, baseline: Baseline, balanced: _Balanced, size: float, most: int | None) -> Compared:
    """The baseline in batches of about `size` samples."""
    samples, samples_work = case.samples, case.samples_work
    # the rows that the plan packs, in the order of the data
    rows = np.sort(case.packing.indices)
    per_pack = max(1.0, len(rows) / case.packing.num_packs)
    if most is not None and len(rows) > most:
        rows = rows[np.linspace(0, len(rows) - 1, num=most).astype(np.int64)]
    if not np.array_equal(rows, np.arange(len(samples))):
        samples, samples_work = select_rows(samples, rows), samples_work[rows]
    run = _batched(case, baseline, per_pack, size, samples, samples_work)
    if baseline.stages == "balanced-stages":
        run = replace(run, stages=balanced.stages, rules=balanced.rules)
    else:
        run = _uniform(run)
    return _switch(run, baseline.recompute)


def _switch(run: Compared, recompute: RecomputeMode) -> Compared:
    """Recompute everything that can be, or nothing, whether it fits or not; "auto": as it is."""
    if recompute == "auto":
        return run
    stages = tuple(replace(stage, recompute=()) for stage in run.stages)
    if recompute == "full":
        stages = full_recompute(run.problem.profile, stages)
    return replace(run, stages=stages, rules=(run.rules[0], recompute))


def _fastest(runs: Sequence[Compared], cluster: ClusterSpec) -> Compared:
    """Return the fastest of those that fit; the first if none does."""
    fitting = [run for run in runs if run.fits]
    return min(fitting, key=lambda run: _estimate_s(run, cluster), default=runs[0]) if len(runs) > 1 else runs[0]


def _estimate_s(run: Compared, cluster: ClusterSpec) -> float:
    """Return the seconds of the whole data set, from up to 64 steps spread over it."""
    table = run.schedule.table
    # 64 steps put baselines in order; whole epochs would take longer than the search
    steps = np.unique(np.linspace(0, len(table) - 1, num=min(_ESTIMATED_STEPS, len(table))).astype(np.int64))
    packs = table[steps]
    slots = np.where(packs >= 0, np.arange(packs.size).reshape(packs.shape), -1)
    work = run.work[np.maximum(packs.reshape(-1), 0)]
    return float(steps_of(work, slots, run.stages, run.problem, cluster).mean()) * len(table)


def _batched(
    case: Case,
    baseline: Baseline,
    per_pack: float,
    size: float,
    samples: SampleTable,
    samples_work: FloatArray,
) -> Compared:
    """Make batches of about `size` samples, so many that a step holds the plan's samples; stages to come."""
    # 1. packs or batches, as the host makes them
    problem, options, dp = case.problem, case.options, case.setting.dims.dp
    limits = (case.setting.max_patches, case.setting.max_tokens)
    if baseline.is_padded:
        limits = above_all(samples)
    elif baseline.method == "greedy":  # by tokens alone
        tokens = max(int(samples.num_tokens.max()), round(case.setting.max_tokens * size / per_pack))
        limits = (MOST_LIMIT, tokens)
    # 2. as many a step as hold the plan's samples
    unit = microbatch_unit(problem.schedule, problem.num_stages)

    def per_step(size: float) -> int:
        return max(1, round(problem.num_microbatches * per_pack / size / unit)) * unit

    made = pack_samples(
        samples,
        limits=limits,
        dp=dp,
        num_microbatches=per_step(size),
        method=baseline.method,
        batch_size=size if baseline.is_padded else 1,
        oversize=options.oversize,
        seed=options.seed,
    )
    # 3. greedy packs hold what they hold: count them, then share them among steps
    packing, schedule, num_microbatches = made.packing, made.schedule, per_step(size)
    if baseline.method == "greedy":  # only now it is known how many samples a pack holds
        size = len(packing.indices) / packing.num_packs
        num_microbatches, none = per_step(size), np.empty((packing.num_packs, 0))
        schedule = schedule_packs(none, dp=dp, num_microbatches=num_microbatches, seed=options.seed)
    work = padded_work(packing, samples_work)
    if not baseline.is_padded:
        work = packed_work(packing, samples_work, options.attention)
    name = baseline.method.replace("_", "-")
    how = {"greedy": f"greedy by tokens, {format_number(size)} a pack"}.get(name, f"{name}, packed")
    return Compared(
        name=BASELINE,
        problem=replace(problem, num_microbatches=num_microbatches, work_max=work.max(axis=0)),
        packs=f"{name}, padded, {format_number(size)} a batch" if baseline.is_padded else how,
        work=work,
        schedule=schedule,
    )


def _uniform(run: Compared) -> Compared:
    """Put as many blocks on each stage; nothing recomputed if that fits, else everything: one switch for the model."""
    problem = run.problem
    num_stages = problem.num_stages * problem.num_chunks
    even = even_stages(problem.profile, num_stages, forbidden_cuts=problem.forbidden_cuts)
    run = replace(run, stages=even, rules=("equal layers", "none"))
    if problem.recompute != "full" and run.fits:
        return run
    return replace(run, stages=full_recompute(problem.profile, even), rules=("equal layers", "full"))


def _balanced_stages(case: Case, one_switch: Sequence[PricedSplit] | None) -> _Balanced:
    """The exact split while recompute is still one switch for the whole model: the faster of on and off that fits."""
    priced = price_splits(case, uniform_splits(case.problem)) if one_switch is None else one_switch
    if not priced:  # only the choice per layer fits
        return _Balanced(stages=split_stages(case.problem).stages, rules=("balanced", "as needed"))
    best = min(priced, key=lambda x: x.epoch_s).split
    rule = "full" if any(stage.recompute for stage in best.stages) else "none"
    return _Balanced(stages=best.stages, rules=("balanced", rule))


def simulate_plan(case: Case, stages: Sequence[Stage]) -> Variant:
    """The plan's own row, without those it is compared with."""
    held = None if case.vision is None else case.without_vision().work
    run = Compared(name="the plan", problem=case.problem, packs="", work=case.work, schedule=case.schedule, held=held)
    run = replace(run, apart=case.apart)
    return simulate_run(replace(run, stages=tuple(stages)), case.cluster)


def simulate_run(run: Compared, cluster: ClusterSpec) -> Variant:
    """Return every step of the data set through the pipeline simulator."""
    problem, table = run.problem, run.schedule.table
    dims, busy = problem.profile.dims, table[table >= 0]
    # seconds of all steps; idle is what is left of the pipelines' part, exchange and optimizer aside
    work, table = as_run(run.work, table, problem, run.apart)
    times = times_of(work, run.stages, problem.profile, cluster, apart=run.apart)
    is_other = problem.lockstep or isinstance(run.apart, Lanes)  # packs that were simulated are not the run's own
    own = times_of(run.work, run.stages, problem.profile, cluster) if is_other else times
    step_s = timed_steps(times, table, run.stages, problem, apart=run.apart)
    lanes = run.apart if isinstance(run.apart, Lanes) else None
    alone_s = step_s if lanes or run.apart is None else timed_steps(times, table, run.stages, problem)
    update_s = max(rank_step_s(problem, run.stages), lanes.update_s if lanes else 0.0)
    pipeline_s = float(alone_s.sum()) - len(step_s) * update_s
    busy_s, num_ranks = float((own.forward_s + own.backward_s)[:, busy].sum()), float(dims.pp * dims.dp)
    if lanes:  # a rank of the pipelines is tp x cp devices
        encoders = lanes.num_devices / (dims.tp * dims.cp)
        busy_s += float((lanes.forward_s + lanes.backward_s).sum()) * encoders / lanes.forward_s.shape[1]
        num_ranks += encoders
    idle_share = 1.0 - busy_s / (pipeline_s * num_ranks)
    # memory at the largest pack, stages at the mean one
    assessed = replace(problem, work_mean=run.work.mean(axis=0)).assess(run.stages)
    held = run.work if run.held is None else run.held
    stages, memory = run.stages, assessed.memory
    forward_s, backward_s = assessed.forward_s, assessed.backward_s
    if lanes:
        stages = lanes.with_own(stages, problem.profile)
        memory = (lanes.memory(problem), *memory)
        forward_s = (float(lanes.forward_s.mean()), *forward_s)
        backward_s = (float(lanes.backward_s.mean()), *backward_s)
    return Variant(
        name=run.name,
        packs=run.packs,
        stages_rule=run.rules[0],
        recompute_rule=run.rules[1],
        pack_patches=held[:, PATCHES],
        pack_tokens=held[:, TOKENS],
        stages=stages,
        stage_forward_s=np.array(forward_s),
        stage_backward_s=np.array(backward_s),
        memory=memory,
        step_s=step_s,
        idle_share=idle_share,
        fits=run.fits,
        timeline=_typical_timeline(
            times, table, step_s, problem.schedule, problem.num_stages + (lanes is not None), run
        ),
    )


def _typical_timeline(
    times: StageTimes, table: IntArray, step_s: FloatArray, schedule: ScheduleName, num_devices: int, run: Compared
) -> Timeline:
    """The slowest rank of the step of median length; phases around its pipeline are one more micro-batch."""
    step = int(np.argsort(step_s, kind="stable")[len(step_s) // 2])
    makespan_s = simulate_steps(times, table[step][:, None], schedule=schedule, num_devices=num_devices)
    rank = int(makespan_s.argmax())
    found = simulate(_columns(times, table[step, rank]), schedule=schedule, num_devices=num_devices)
    return between_phases(found, run.apart, step, rank)


def _columns(times: StageTimes, packs: IntArray) -> StageTimes:
    """The times of these packs; an empty slot (-1) takes none."""
    there = (packs >= 0).astype(np.float64)
    index = np.maximum(packs, 0)
    return StageTimes(
        forward_s=times.forward_s[:, index] * there,
        backward_s=times.backward_s[:, index] * there,
        weight_s=None if times.weight_s is None else times.weight_s[:, index] * there,
        send_forward_s=times.send_forward_s[:, index] * there,
        send_backward_s=times.send_backward_s[:, index] * there,
    )
