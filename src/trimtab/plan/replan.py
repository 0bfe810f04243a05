"""What a run teaches: where it differs from its plan, refitted costs, and a plan for the rest of its epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from trimtab.balance.packing import PackResult
from trimtab.costs.measured.fitted import Calibration, LoggedRun, Term, TermFit, apply_terms, fit_runs
from trimtab.errors import PlanError
from trimtab.plan.build import Progress, Within, make_plan
from trimtab.plan.decide.work import Lanes, as_run, timed_steps, times_of
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.file.reload import ReloadedPlan
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.plan.plan import ContinuedPlan
from trimtab.plan.runs import RunLog, simulate_logged
from trimtab.specs import ClusterSpec, FloatArray, IntArray, Profile
from trimtab.units import format_bytes, format_ratio, format_seconds

_MOST_FITTED = 8  # steps, spread over the run
_UNSETTLED = 0.5  # relative error of a factor, above which the parts cannot be separated
_OPEN = ("dp", "pp", "tp", "cp", "ep", "etp", "zero_stage", "num_microbatches", "max_patches", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the steps of a run say of the plan that it ran."""

    calibration: Calibration
    steps_done: int
    num_steps: int  # of an epoch
    measured_s: float  # median warm step
    planned_s: float  # of the same steps
    ratio: float  # median of the steps' measured over planned
    memory_ratio: float | None  # measured over planned peak of the fullest device; None: nothing was logged to compare
    spread: tuple[float, float]  # standard deviation over mean of the steps' seconds: measured, planned

    def sentences(self) -> tuple[str, ...]:
        """Say where the run differs from its plan."""
        place = f"{self.steps_done:,} steps are done, {self.steps_done % self.num_steps:,} of {self.num_steps:,} of "
        said = [
            f"{place}epoch {self.steps_done // self.num_steps + 1}.",
            f"A step takes {format_seconds(self.measured_s)}, planned were {format_seconds(self.planned_s)}: "
            f"a step is {format_ratio(self.ratio)} of its plan.",
            f"Steps differ by {self.spread[0]:.1%} of their mean, planned were {self.spread[1]:.1%}.",
        ]
        for term in self.calibration.terms:
            name = {"host": "the host", "language": "the language model", "vision": "the vision tower"}[term.name]
            error = "which these steps do not settle" if term.error is None else f"± {term.error:.0%}"
            said.append(f"Seconds of {name} are {term.value:.2f} of the formula's ({error}).")
        if self.memory_ratio is not None:
            said.append(f"The fullest device holds {self.memory_ratio:.2f} of its planned peak.")
        return (*said, *self.calibration.warnings)


def learn_from(found: ReloadedPlan, log: RunLog) -> Lesson:
    """Refit the plan's costs to the seconds of a run's own steps.

    Use it before `replan_rest`. Fitted are the host's seconds, the language model's and the tower's, as far as the
    steps hold them, on up to 8 warm steps of the first epoch; each is the plan's packs on the rank that is expected to
    be slowest. Raises `PlanError` for a run on another device than the plan's, and for one without such a step.
    """
    case, header = found.case, log.header
    if not log.comparable:
        raise PlanError(f"the run was on {header.device}, the plan is for {header.planned_device}: plan for that")
    table, dims = case.schedule.table, case.setting.dims
    if isinstance(case.apart, Lanes):
        raise PlanError("a tower on devices of its own was planned, whose runs no fit knows: plan again instead")
    if (header.dp, header.num_microbatches) != table.shape[1:]:
        raise PlanError(
            f"the run had dp {header.dp} x {header.num_microbatches}, the plan {table.shape[1]} x {table.shape[2]}: "
            "name the plan that was run"
        )
    records = [x for x in log.warm if x.step <= len(table)]
    if not records:
        raise PlanError(f"no step of the first epoch ({len(table)} steps) ran as the last one: log more of it")
    # 1. what the plan expects of each of these steps, and which rank it waits for
    steps = np.array([x.step - 1 for x in records])
    problem = case.problem
    apart = None if case.apart is None else case.apart.of_steps(steps)
    work, rows = as_run(case.work, table[steps], problem, apart)
    times = times_of(work, found.stages, problem.profile, case.cluster, apart=apart)
    planned_s = timed_steps(times, rows, found.stages, problem, apart=apart)
    measured_s = np.array([x.step_s - x.data_s for x in records])
    # 2. the fit, on steps spread over the run
    chosen = np.unique(np.linspace(0, len(records) - 1, num=min(_MOST_FITTED, len(records))).astype(np.int64))
    pack_s = np.append(times.forward_s.sum(axis=0) + times.backward_s.sum(axis=0), 0.0)
    runs = []
    for i in chosen.tolist():
        packs = rows[i][int(pack_s[rows[i]].sum(axis=1).argmax())]
        runs.append(
            LoggedRun(
                name=f"step {records[i].step}",
                profile=case.setting.profile,
                stages=found.stages,
                work=work[packs[packs >= 0]],
                iteration_s=float(measured_s[i]),
                schedule=problem.schedule,
            )
        )
    calibration = fit_runs(case.setting.profile, runs, simulate_logged)
    if any(term.error is None or term.error > _UNSETTLED for term in calibration.terms):
        calibration = _one_factor(case.setting.profile, measured_s / planned_s)
    # 3. memory, where run and plan hold the same state
    memory = None
    peaks, planned = log.warm[-1].peak_memory_bytes, header.planned_memory_bytes
    alike = case.options.dtype == "fp32" and (case.options.sharding == 0 or dims.dp == 1)
    if alike and peaks and max(planned, default=0) > 0:
        memory = max(peaks) / max(planned)
    return Lesson(
        calibration=calibration,
        steps_done=log.steps[-1].step,
        num_steps=len(table),
        measured_s=float(np.median(measured_s)),
        planned_s=float(np.median(planned_s)),
        ratio=float(np.median(measured_s / planned_s)),
        memory_ratio=memory,
        spread=(_spread(measured_s), _spread(planned_s)),
    )


def _one_factor(profile: Profile, ratios: FloatArray) -> Calibration:
    """Return all seconds times the median of measured over planned, where the steps do not tell their parts apart."""
    ratio, error = float(np.median(ratios)), float(np.median(np.abs(ratios / np.median(ratios) - 1)))
    terms = tuple(TermFit(name=name, value=ratio, error=error) for name in get_args(Term))
    said = f"The steps do not tell host, tower and language model apart: all seconds are taken {ratio:.2f} times."
    scaled = replace(
        apply_terms(profile, terms),
        method="logged",
        time_error=max(error, 0.02),
        assumptions=(said, *profile.assumptions),
    )
    return Calibration(profile=scaled, terms=(), runs=(), warnings=(said,))


def replan_rest(
    found: ReloadedPlan,
    lesson: Lesson,
    *,
    cluster: ClusterSpec | None = None,
    options: PlanOptions | None = None,
    within: Within | None = None,
    progress: Progress | None = None,
) -> PlanDetails:
    """Plan the same data and batches again, by the seconds that the run taught, for the same devices or others.

    Use it in the middle of a run, and go on with `trimtab train NEW MODEL --out RUN --resume`. `options`: what is
    decided; without them everything is left open but the training itself. Every step holds the same samples as in the
    old plan, so the place in the data is kept; a plan whose steps would differ is refused with `PlanError`. Where a
    device held more than planned, so much less of its memory may be filled.
    """
    case, plan = found.case, found.plan
    batch = plan.decisions.packing.global_batch
    if batch is None:
        raise PlanError("the plan's steps are filled packs: only steps of exactly N samples go on under another plan")
    profile = replace(lesson.calibration.profile, layers_blake2b=case.setting.profile.layers_blake2b)
    options = options or open_again(found)
    total = options.memory_bytes or (cluster or case.cluster).device.memory_bytes
    if lesson.memory_ratio is not None and lesson.memory_ratio > 1:
        options = replace(options, memory_bytes=int(total / lesson.memory_ratio))
    details = make_plan(
        case.model,
        case.samples,
        cluster or case.cluster,
        replace(options, global_batch=batch, seed=plan.decisions.packing.seed, profile=profile),
        origin=PlanOrigin(
            command=plan.command,
            data_files=plan.inputs.data.files,
            num_skipped=plan.inputs.data.num_skipped,
            assumptions=(*lesson.sentences(), *_memory_sentences(lesson, total)),
        ),
        within=within,
        progress=progress,
    )
    _refuse_other_steps(found, details)
    old, decisions = plan.decisions.packing, details.plan.decisions
    continued = ContinuedPlan(
        tables_blake2b=old.offsets.blake2b + old.indices.blake2b + old.schedule.blake2b,
        packs_per_step=int(case.schedule.table[0].size),
    )
    decisions = replace(decisions, packing=replace(decisions.packing, continues=continued))
    return replace(details, plan=replace(details.plan, decisions=decisions))


def open_again(found: ReloadedPlan) -> PlanOptions:
    """The training of the plan, and all that a plan decides left open."""
    own = found.case.options
    opened = replace(own, **dict.fromkeys(_OPEN), schedule="auto", num_chunks=1)  # type: ignore[arg-type]
    return replace(opened, profile=None, baselines=())


def _memory_sentences(lesson: Lesson, total: int) -> tuple[str, ...]:
    if lesson.memory_ratio is None or lesson.memory_ratio <= 1:
        return ()
    return (f"Only {format_bytes(total / lesson.memory_ratio)} of {format_bytes(total)} are planned with therefore.",)


def _spread(seconds: FloatArray) -> float:
    return float(seconds.std() / seconds.mean())


def _refuse_other_steps(found: ReloadedPlan, details: PlanDetails) -> None:
    """Refuse a new plan whose steps hold other samples than the old one's."""
    old = PackResult(packing=found.case.packing, schedule=found.case.schedule)
    new = PackResult(packing=details.packing, schedule=details.schedule)
    if len(old.schedule.table) == len(new.schedule.table) and np.array_equal(_steps_of(old), _steps_of(new)):
        return
    raise PlanError("the new plan's steps hold other samples: skip as the old one did (--set oversize, max_tokens)")


def _steps_of(packed: PackResult) -> IntArray:
    """Return (num_samples + steps,) the samples of each step, sorted, with -1 after each step."""
    packing, found = packed.packing, list[IntArray]()
    for slots in packed.schedule.table.reshape(len(packed.schedule.table), -1):
        packs = slots[slots >= 0]
        rows = [packing.indices[packing.offsets[p] : packing.offsets[p + 1]] for p in packs.tolist()]
        found += [np.sort(np.concatenate(rows)), np.full(1, -1, np.int64)]
    return np.concatenate(found)
