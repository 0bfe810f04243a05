"""A profile whose seconds are fitted to logged runs, and what those runs cannot tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from trimtab.costs.logs import LoggedRun
from trimtab.costs.minima import NOISE, Spread, find_minima, spread_of
from trimtab.costs.observed import FORWARD_SHARE, Observed, SimulateStep, Term, factor_of
from trimtab.costs.profile import TIME_ERROR
from trimtab.errors import TrimtabError
from trimtab.specs import FloatArray, Profile

UNSETTLED = 0.25
"""A coefficient that such noise moves by more than this is called unsettled."""

MIN_TIME_ERROR = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TermFit:
    """One coefficient of the fit."""

    name: Term
    value: float
    error: float | None  # relative, for `NOISE` in every logged time; None: the runs do not settle it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """A logged run beside the fit."""

    name: str
    logged_s: float  # an iteration, or the sum of the stages' seconds where no iteration was logged
    fitted_s: float
    slowest_stage: int
    slowest_kind: str  # towers of that stage: "vision + language"

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


def fit_runs(
    target: Profile,
    runs: Sequence[LoggedRun],
    simulate_step: SimulateStep,
    *,
    terms: Sequence[Term],
) -> Calibration:
    """`target` with its seconds calibrated on `runs`.

    Minimises sum_r (predicted_r / T_r - 1)^2 over theta >= 0. A predicted stage time is linear in theta, a predicted
    step is piecewise linear (which stage is the slowest decides), so linear non-negative least squares are repeated
    from many starts until no piece changes: exact for stage times, heuristic for steps. What the runs leave open keeps
    the formulas' proportions. Other minima that explain the runs within `NOISE` widen a coefficient's band.
    `Calibration.profile.time_error` is the largest of: the error at each run when the others alone are fitted (where
    they suffice), the band of a logged stage's seconds, 2 %; with warnings at least the formulas' own band.
    Not modelled: sends between stages (they hide behind compute, or end up in the coefficients), data-parallel waits.
    """
    seen = [Observed.of(run, terms) for run in runs]
    _check(seen, terms)
    minima = find_minima(seen, terms, simulate_step)
    theta = minima[0]
    spread = spread_of(seen, theta, terms, simulate_step)
    errors = _term_errors(spread, minima)
    fitted = tuple(_fit_of(x, theta, simulate_step) for x in seen)
    found = tuple(
        TermFit(name=name, value=float(value), error=error)
        for name, value, error in zip(terms, theta, errors, strict=True)
    )
    warnings = (*_unbound_kinds(seen, minima), *_unsettled(found), *_unexplained(fitted))
    return Calibration(
        profile=replace(
            apply_terms(target, found),
            method="logged",
            time_error=_time_error(seen, terms, minima, spread, warnings, simulate_step),
            assumptions=(*_sentences(found, fitted), *warnings, *_without_formulas(target.assumptions)),
        ),
        terms=found,
        runs=fitted,
        warnings=warnings,
    )


def apply_terms(profile: Profile, terms: Sequence[TermFit]) -> Profile:
    """The profile's seconds times the factors; a third of the first stage's constant is forward of its first layer."""
    value = {term.name: term.value for term in terms}
    layers = []
    for i, layer in enumerate(profile.layers):
        name = factor_of(layer, list(value))
        factor = 1.0 if name is None else value[name]
        once = value.get("first stage", 0.0) if i == 0 else 0.0
        layers.append(
            replace(
                layer,
                forward_s=_scaled(layer.forward_s, factor, once * FORWARD_SHARE),
                backward_s=_scaled(layer.backward_s, factor, once * (1.0 - FORWARD_SHARE)),
                weight_s=_scaled(layer.weight_s, factor) if layer.weight_s else (),
                tiers=tuple(
                    replace(tier, extra_backward_s=_scaled(tier.extra_backward_s, factor)) for tier in layer.tiers
                ),
            )
        )
    return replace(profile, layers=tuple(layers))


def predict_step(run: LoggedRun, terms: Sequence[TermFit], simulate_step: SimulateStep) -> float:
    """Seconds of a step of `run`, optimizer included, with the coefficients `terms`."""
    observed = Observed.of(run, [term.name for term in terms])
    return observed.step(np.array([term.value for term in terms]), simulate_step)


def _fit_of(seen: Observed, theta: FloatArray, simulate_step: SimulateStep) -> RunFit:
    logged, predicted = seen.logged, seen.predict(theta, simulate_step)
    has_step = seen.run.iteration_s is not None
    slowest = seen.slowest(theta)
    return RunFit(
        name=seen.run.name,
        logged_s=float(logged[0] if has_step else logged.sum()),
        fitted_s=float(predicted[0] if has_step else predicted.sum()),
        slowest_stage=slowest,
        slowest_kind=seen.kinds[slowest],
    )


def _check(seen: Sequence[Observed], terms: Sequence[Term]) -> None:
    known = get_args(Term)
    if not terms or len(set(terms)) < len(terms) or not set(terms) <= set(known):
        raise TrimtabError(
            f"the terms {', '.join(terms) or '(none)'} cannot be fitted: choose one or more of {', '.join(known)}, "
            "each once"
        )
    num_logged = sum(len(x.logged) for x in seen)
    if num_logged < len(terms):
        raise TrimtabError(
            f"{len(terms)} coefficients ({', '.join(terms)}) were to be fitted to {num_logged} logged time"
            f"{'' if num_logged == 1 else 's'}: log more runs, or the seconds of each stage, or fit fewer terms"
        )
    for k, name in enumerate(terms):
        if not any(x.forward[k].any() or x.backward[k].any() for x in seen):
            raise TrimtabError(
                f"{name!r} was to be fitted, and no logged run holds any of it: add a run that does, or fit the others"
            )


def _term_errors(spread: Spread, minima: Sequence[FloatArray]) -> list[float | None]:
    """Relative band of each coefficient of the first minimum: its deviation, or how far other minima lie.

    None for one at 0, and where the runs leave it open, or within nothing better than its own size.
    """
    errors: list[float | None] = []
    for k, value in enumerate(minima[0]):
        if value == 0 or spread.is_open[k]:
            errors.append(None)
            continue
        apart = max((abs(float(other[k]) / value - 1.0) for other in minima[1:]), default=0.0)
        error = max(math.sqrt(float(spread.covariance[k, k])), float(apart))
        errors.append(None if error > 0.99 else error)
    return errors


def _stage_error(seen: Sequence[Observed], minima: Sequence[FloatArray], spread: Spread) -> float:
    """Largest relative band of a logged stage's seconds: errors of coefficients cancel where only their sum is seen."""
    worst, theta = 0.0, minima[0]
    for x in seen:
        per_stage, seconds = x.mean_seconds[:, :-1], x.stage_seconds(theta)
        if (seconds <= 0).any():  # a fit in which a stage takes no time tells nothing
            return 1.0
        parts = per_stage * spread.scale / seconds[:, None]
        worst = max(worst, float(np.sqrt(np.einsum("sk,kl,sl->s", parts, spread.covariance, parts)).max()))
        for other in minima[1:]:
            worst = max(worst, float(np.abs(x.stage_seconds(other) / seconds - 1.0).max()))
    return worst


def _unbound_kinds(seen: Sequence[Observed], minima: Sequence[FloatArray]) -> tuple[str, ...]:
    """A sentence for each stage kind that no run surely makes the slowest."""
    every = sorted({kind for x in seen for kind in x.kinds})
    timed = {kind for x in seen if x.run.stage_s is not None for kind in x.kinds}
    said = []
    for kind in every:
        bound = [any(x.kinds[x.slowest(theta)] == kind for x in seen) for theta in minima]
        if kind in timed or all(bound):
            continue
        what = f"No run is bound by a {kind} stage"
        if any(bound):
            what = f"No run is surely bound by a {kind} stage (the logged times are explained as well without)"
        said.append(
            f"{what}, so the seconds of such a stage are not settled: add a run whose slowest stage holds "
            f"{kind} layers{' alone' if '+' not in kind else ''}, or log the seconds of each stage."
        )
    return tuple(said)


def _unsettled(terms: Sequence[TermFit]) -> tuple[str, ...]:
    said = []
    for term in terms:
        if term.value == 0:  # a constant may well be
            if term.name in ("vision", "language"):
                said.append(
                    f"The fit puts {term.name!r} at 0, as if it took no time: the logged runs do not settle it."
                )
        elif term.error is None or term.error > UNSETTLED:
            moves = "more than its own size" if term.error is None else f"{term.error:.0%}"
            said.append(
                f"The logged runs do not settle {term.name!r}: errors in their times ({NOISE:.0%}, or the fit's own) "
                f"move it by {moves}; add runs with other splits."
            )
    return tuple(said)


def _unexplained(runs: Sequence[RunFit]) -> tuple[str, ...]:
    worst = max(runs, key=lambda run: abs(run.error))
    if abs(worst.error) <= MIN_TIME_ERROR:
        return ()
    return (
        f"Stage times do not explain run {worst.name!r}: the fit is {worst.error:+.1%} off. Something else decides its "
        "step: look for host time, slow links or a noisy neighbour.",
    )


def _time_error(
    seen: Sequence[Observed],
    names: Sequence[Term],
    minima: Sequence[FloatArray],
    spread: Spread,
    warnings: Sequence[str],
    simulate_step: SimulateStep,
) -> float:
    bands = [MIN_TIME_ERROR, _stage_error(seen, minima, spread), TIME_ERROR if warnings else 0.0]
    for i, left_out in enumerate(seen):
        others = [x for j, x in enumerate(seen) if j != i]
        if left_out.run.iteration_s is None or sum(len(x.logged) for x in others) < len(names):
            continue
        theta = find_minima(others, names, simulate_step)[0]
        bands.append(abs(left_out.step(theta, simulate_step) / left_out.run.iteration_s - 1.0))
    return min(1.0, max(bands))


def _sentences(terms: Sequence[TermFit], runs: Sequence[RunFit]) -> tuple[str, ...]:
    parts = []
    for term in terms:
        band = "" if term.error is None else f" (+-{term.error:.0%})"
        if term.name in ("vision", "language"):
            parts.append(f"{term.name} x {term.value:.3g}{band}")
        else:
            parts.append(f"{term.value:.3g} s{band} each micro-batch on the {term.name}")
    worst = max(abs(run.error) for run in runs)
    several = "" if len(runs) == 1 else "s"
    return (
        f"Seconds come from formulas fitted to {len(runs)} logged run{several}: {', '.join(parts)}; the fit is within "
        f"{worst:.1%} of them. Sends between stages are not modelled.",
    )


def _without_formulas(assumptions: Sequence[str]) -> tuple[str, ...]:
    return tuple(x for x in assumptions if not x.startswith("Seconds come from formulas"))


def _scaled(values: tuple[float, ...], factor: float, once: float = 0.0) -> tuple[float, ...]:
    return (values[0] * factor + once, *(value * factor for value in values[1:]))
