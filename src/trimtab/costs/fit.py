"""A profile whose seconds are fitted to logged runs, and what those runs cannot tell.

Three factors: of the host's seconds, of the language model's on the device, and of the tower's with the projector. With
few logged times the host comes first: one run of a host tells how slowly it launches, which no formula knows.
Symbols: R logged times T_r, K factors theta, J the (R, K) derivatives of log predicted by log theta.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from trimtab.costs.logs import LoggedRun, LoggedSchedule
from trimtab.costs.profile import TIME_ERROR
from trimtab.costs.seconds import stage_seconds
from trimtab.errors import TrimtabError
from trimtab.specs import FloatArray, LayerCost, Profile

Term = Literal["host", "language", "vision"]
"""In the order in which logged times are spent on them; a tower without its own takes the language model's factor."""

NOISE = 0.01
"""Relative error taken for one logged time, for want of repeated runs."""
UNSETTLED = 0.25
"""A factor that such noise moves by more than this is called unsettled."""
MIN_TIME_ERROR = 0.02

_STARTS = (1.0, 4.0)
_MAX_ROUNDS, _LEAST_MOVE, _MOST_MOVE = 30, 1e-6, 1.0
_RIDGE = 1e-4  # holds what the runs leave open where it is


class SimulateStep(Protocol):
    def __call__(self, forward_s: FloatArray, backward_s: FloatArray, *, schedule: LoggedSchedule) -> float:
        """Return the seconds of a pipeline step whose stages take these (stages, micro-batches) times."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TermFit:
    """One factor of the fit."""

    name: Term
    value: float
    error: float | None  # relative, for `NOISE` in every logged time; None: the runs do not settle it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """A logged run and what the fit makes of it."""

    name: str
    logged_s: float  # of all that was logged: an iteration, its stages, or both
    fitted_s: float

    @property
    def error(self) -> float:
        return self.fitted_s / self.logged_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a set of runs says of a profile."""

    profile: Profile  # method "logged"
    terms: tuple[TermFit, ...]
    runs: tuple[RunFit, ...]
    warnings: tuple[str, ...]  # what these runs cannot tell, in sentences


def fit_runs(target: Profile, runs: Sequence[LoggedRun], simulate_step: SimulateStep) -> Calibration:
    """Return `target` with its seconds calibrated on `runs`.

    Minimises the sum of (log predicted - log T_r)^2 by Gauss-Newton steps from several starts: a heuristic, for which
    stage is the slowest decides the piece. Of the factors that there are times for, those that explain the runs within
    `NOISE` are taken in the order of `Term`, else those of least misfit. `Calibration.profile.time_error` is the
    largest of: the error at each run when the others alone are fitted, the misfit, 2 %; with warnings at least the
    formulas'.
    Not modelled: sends between stages (they hide behind compute, or end up in the factors), data-parallel waits.
    """
    if not runs:
        raise TrimtabError("no run was given to fit: log one step or more")
    terms, theta = _choose_terms(runs, simulate_step)
    errors = _term_errors(runs, terms, theta, simulate_step)
    found = tuple(
        TermFit(name=name, value=float(value), error=error)
        for name, value, error in zip(terms, theta, errors, strict=True)
    )
    fitted = tuple(
        RunFit(
            name=run.name,
            logged_s=float(logged_times(run).sum()),
            fitted_s=float(_predict(run, found, simulate_step).sum()),
        )
        for run in runs
    )
    warnings = (*_unsettled(found), *_unexplained(fitted))
    calibrated = replace(
        apply_terms(target, found),
        method="logged",
        time_error=_time_error(runs, fitted, warnings, simulate_step),
        assumptions=(*_sentences(found, fitted), *warnings, *_without_formulas(target.assumptions)),
    )
    return Calibration(profile=calibrated, terms=found, runs=fitted, warnings=warnings)


def apply_terms(profile: Profile, terms: Sequence[TermFit]) -> Profile:
    """Return the profile with its seconds times the factors; gradient exchange and optimizer stay the formulas'."""
    value = {term.name: term.value for term in terms}
    language, host = value.get("language", 1.0), value.get("host", 1.0)
    own = {"language": language, "vision": value.get("vision", language)}
    layers = (_scaled(x, own["language" if x.tower == "language" else "vision"], host) for x in profile.layers)
    return replace(profile, layers=tuple(layers))


def predict_step(run: LoggedRun, terms: Sequence[TermFit], simulate_step: SimulateStep) -> float:
    """Return the seconds of one iteration of `run` under these factors."""
    profile = apply_terms(run.profile, terms)
    seconds = [stage_seconds(profile, stage, run.work) for stage in run.stages]
    once = max(sum(layer.step_s for layer in profile.layers[x.start : x.stop]) for x in run.stages)
    forward, backward = (np.array([getattr(x, name) for x in seconds]) for name in ("forward", "backward"))
    return simulate_step(forward, backward, schedule=run.schedule) + once


def logged_times(run: LoggedRun) -> FloatArray:
    """Return what was logged: the step, then the stages."""
    return np.array([*([] if run.iteration_s is None else [run.iteration_s]), *(run.stage_s or ())])


# -- the fit ----------------------------------------------------------------------------------------------------------


def _predict(run: LoggedRun, terms: Sequence[TermFit], simulate_step: SimulateStep) -> FloatArray:
    """In the order of `logged_times`."""
    step = [] if run.iteration_s is None else [predict_step(run, terms, simulate_step)]
    if run.stage_s is None:
        return np.array(step)
    profile = apply_terms(run.profile, terms)
    seconds = (stage_seconds(profile, stage, run.work) for stage in run.stages)
    return np.array([*step, *(float((x.forward + x.backward).mean()) for x in seconds)])


def _misses(
    runs: Sequence[LoggedRun], names: Sequence[Term], theta: FloatArray, simulate_step: SimulateStep
) -> FloatArray:
    """(R,) log predicted - log logged."""
    terms = [TermFit(name=name, value=float(x), error=None) for name, x in zip(names, theta, strict=True)]
    return np.concatenate([np.log(_predict(run, terms, simulate_step) / logged_times(run)) for run in runs])


def _choose_terms(runs: Sequence[LoggedRun], simulate_step: SimulateStep) -> tuple[tuple[Term, ...], FloatArray]:
    """The factors that the runs hold and are enough for, and their values."""
    num_logged = sum(len(logged_times(run)) for run in runs)
    layers = [layer for run in runs for layer in run.profile.layers]
    held: dict[Term, bool] = {
        "host": any(layer.host_forward_s > 0 for layer in layers),
        "language": any(layer.tower == "language" for layer in layers),
        "vision": any(layer.tower != "language" for layer in layers),
    }
    names = [name for name in held if held[name]]
    sets = [s for k in range(1, min(num_logged, len(names)) + 1) for s in itertools.combinations(names, k)]
    sets = [s for s in sets if s != ("vision",) or len(names) == 1]  # the language model's factor covers both
    found = [(_minimum(runs, own, simulate_step), own) for own in sets]
    good = [entry for entry in found if entry[0][0] <= NOISE]
    (_, theta), own = good[0] if good else min(found, key=lambda entry: entry[0][0])
    return own, theta


def _minimum(runs: Sequence[LoggedRun], names: Sequence[Term], simulate_step: SimulateStep) -> tuple[float, FloatArray]:
    """Least misfit (root of the mean square) found, and the factors there."""
    best, where = np.inf, np.ones(len(names))
    for start in itertools.product(_STARTS, repeat=len(names)):
        u = np.log(start)
        missed = _misses(runs, names, np.exp(u), simulate_step)
        for _ in range(_MAX_ROUNDS):
            J = _derivatives(runs, names, u, missed, simulate_step)
            move = np.linalg.solve(J.T @ J + _RIDGE * np.eye(len(u)), -J.T @ missed).clip(-_MOST_MOVE, _MOST_MOVE)
            there = _misses(runs, names, np.exp(u + move), simulate_step)
            while np.square(there).sum() > np.square(missed).sum() and np.abs(move).max() > _LEAST_MOVE:
                move = move / 2
                there = _misses(runs, names, np.exp(u + move), simulate_step)
            if np.square(there).sum() >= np.square(missed).sum() * (1 - 1e-9):
                break
            u, missed = u + move, there
        if (misfit := float(np.sqrt(np.square(missed).mean()))) < best * (1 - 1e-6):
            best, where = misfit, np.exp(u)
    return best, where


def _derivatives(
    runs: Sequence[LoggedRun], names: Sequence[Term], u: FloatArray, missed: FloatArray, simulate_step: SimulateStep
) -> FloatArray:
    """(R, K) by differences: exact but for rounding, within a piece."""
    moved = (u + 1e-5 * np.eye(len(u))[k] for k in range(len(u)))
    return np.array([(_misses(runs, names, np.exp(x), simulate_step) - missed) / 1e-5 for x in moved]).T


def _term_errors(
    runs: Sequence[LoggedRun], names: Sequence[Term], theta: FloatArray, simulate_step: SimulateStep
) -> list[float | None]:
    """How far errors in the logged times move each factor: noise^2 (J^T J)^-1, or the misfit where that is larger."""
    missed = _misses(runs, names, theta, simulate_step)
    J = _derivatives(runs, names, np.log(theta), missed, simulate_step)
    spare = len(missed) - len(theta)
    noise = max(NOISE, float(np.sqrt(np.square(missed).sum() / spare)) if spare > 0 else 0.0)
    _, strength, rows = np.linalg.svd(J, full_matrices=True)
    weak = rows[np.append(strength, np.zeros(len(theta)))[: len(theta)] < 1e-6 * max(1.0, strength.max())]
    covariance = noise**2 * np.linalg.pinv(J.T @ J, rcond=1e-10)
    is_open = (np.abs(weak) > 1e-3).any(axis=0) if len(weak) else np.zeros(len(theta), bool)
    return [None if is_open[k] else float(np.sqrt(covariance[k, k])) for k in range(len(theta))]


def _time_error(
    runs: Sequence[LoggedRun], fitted: Sequence[RunFit], warnings: Sequence[str], simulate_step: SimulateStep
) -> float:
    bands = [MIN_TIME_ERROR, *(abs(run.error) for run in fitted), TIME_ERROR if warnings else 0.0]
    for i, left in enumerate(runs):
        others = [x for j, x in enumerate(runs) if j != i]
        if left.iteration_s is None or not others:
            continue
        names, theta = _choose_terms(others, simulate_step)
        bands.append(float(np.abs(_misses([left], names, theta, simulate_step)).max()))
    return min(1.0, max(bands))


def _scaled(layer: LayerCost, factor: float, host: float) -> LayerCost:
    def times(terms: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factor * x for x in terms)

    return replace(
        layer,
        forward_s=times(layer.forward_s),
        backward_s=times(layer.backward_s),
        weight_s=times(layer.weight_s),
        tiers=tuple(replace(tier, extra_backward_s=times(tier.extra_backward_s)) for tier in layer.tiers),
        host_forward_s=host * layer.host_forward_s,
        host_backward_s=host * layer.host_backward_s,
    )


# -- what is said -----------------------------------------------------------------------------------------------------


def _unsettled(terms: Sequence[TermFit]) -> tuple[str, ...]:
    return tuple(
        f"The logged runs do not settle {term.name!r}: errors in their times ({NOISE:.0%}, or the fit's own) move it "
        f"by {'more than its own size' if term.error is None else format(term.error, '.0%')}; add runs with other "
        "splits, or log the seconds of each stage."
        for term in terms
        if term.error is None or term.error > UNSETTLED
    )


def _unexplained(runs: Sequence[RunFit]) -> tuple[str, ...]:
    worst = max(runs, key=lambda run: abs(run.error))
    if abs(worst.error) <= MIN_TIME_ERROR:
        return ()
    return (
        f"Stage times do not explain run {worst.name!r}: the fit is {worst.error:+.1%} off. Something else decides its "
        "step: look for slow links, images that were not counted, or a noisy neighbour.",
    )


def _sentences(terms: Sequence[TermFit], runs: Sequence[RunFit]) -> tuple[str, ...]:
    bands = {term.name: "" if term.error is None else f" (+-{term.error:.0%})" for term in terms}
    parts = [f"{term.name} x {term.value:.3g}{bands[term.name]}" for term in terms]
    worst = max(abs(run.error) for run in runs)
    several = "" if len(runs) == 1 else "s"
    return (
        f"Seconds come from formulas fitted to {len(runs)} logged run{several}: {', '.join(parts)}; the fit is within "
        f"{worst:.1%} of them. Sends between stages are not modelled.",
    )


def _without_formulas(assumptions: Sequence[str]) -> tuple[str, ...]:
    return tuple(x for x in assumptions if not x.startswith("Seconds come from formulas"))
