"""Timed layers -> a Profile: measured seconds as coefficients of WORK_TERMS, bytes as the formulas give them.

No coefficient is negative; residuals are relative to the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.options import Tower
from trimtab.specs import FloatArray, LayerCost, Profile, evaluate

# -- least squares, exact for the few coefficients that costs have ----------------------------------------------------


def least_squares(J: FloatArray, y: FloatArray, *, prior: FloatArray, unit: FloatArray) -> FloatArray:
    """Return (K,) theta >= 0 of least |J theta - y|, exact: every set of coefficients held at 0 is tried (K <= 5).

    Where J (R, K) leaves a direction open, the solution nearest to `prior`, in `unit`s.
    """
    best, best_error = np.zeros(J.shape[1]), np.inf
    for choice in itertools.product((True, False), repeat=J.shape[1]):
        # the free ones by least squares, the others at 0
        free = np.array(choice)
        theta = np.zeros(J.shape[1])
        if free.any():
            scaled = J[:, free] * unit[free]
            moved, *_ = np.linalg.lstsq(scaled, y - J[:, free] @ prior[free], rcond=1e-9)
            theta[free] = prior[free] + unit[free] * moved
        # only solutions without negative seconds count
        error = float(np.linalg.norm(J @ theta - y))
        if (theta >= 0).all() and error < best_error - 1e-12:
            best, best_error = theta, error
    return best


_SAME_DIRECTION = 1e-6  # of the largest singular value: what two columns must differ by to count as two


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients per WORK_TERMS, and how far the measured times lie from them."""

    coefficients: tuple[float, ...]
    error: float  # largest |fitted - measured| / measured


def fit_seconds(work: FloatArray, seconds: FloatArray, formula: Sequence[float]) -> Fit:
    """Return c >= 0 that minimises sum_i ((work_i . c - t_i) / t_i)^2 over the terms that `formula` has.

    work (n, len(WORK_TERMS)), seconds (n,) all above 0, formula: the analytic coefficients. Terms that the measured
    sizes cannot tell apart keep the formula's proportions: first those other than the constant (towers whose tiles are
    all of one size: rows squared is a multiple of rows), then all of them (one size). Exact: with at most three terms
    every set of active ones is solved.
    """
    shape = np.asarray(formula, np.float64)
    if not shape.any():
        return Fit(coefficients=tuple(shape.tolist()), error=0.0)
    # the finest set of terms that the sizes can tell apart
    bases = _bases(shape)
    columns = [(work @ basis.T) / seconds[:, None] for basis in bases]
    number = next((i for i, c in enumerate(columns) if _told_apart(c)), len(bases) - 1)
    own = columns[number]
    zero, size = np.zeros(own.shape[1]), np.linalg.norm(own, axis=0)
    coefficients = least_squares(own, np.ones(len(own)), prior=zero, unit=1.0 / size) @ bases[number]
    # the band is what the worst size misses
    misses = np.abs(work @ coefficients / seconds - 1.0)
    return Fit(coefficients=tuple(coefficients.tolist()), error=float(misses.max()))


def _bases(shape: FloatArray) -> tuple[FloatArray, ...]:
    """Return sets of directions, (k, len(WORK_TERMS)): each term alone; the constant and all others; all together."""
    alone = np.diag(shape)[shape > 0]
    once = np.zeros_like(shape)
    once[0] = shape[0]
    grouped = np.array([direction for direction in (once, shape - once) if direction.any()])
    return alone, grouped, shape[None, :]


def _told_apart(columns: FloatArray) -> bool:
    norms = np.linalg.norm(columns, axis=0)
    if (norms == 0).any() or columns.shape[0] < columns.shape[1]:
        return False
    values = np.linalg.svd(columns / norms, compute_uv=False)
    return bool(values[-1] > _SAME_DIRECTION * values[0])


# -- a profile --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians over the repeats of one layer at one size; spreads are half the middle 68 %, relative to the median."""

    work: tuple[float, ...]  # per WORK_TERMS, only those of the layer's own tower
    forward_s: float
    backward_s: float  # 0 where there is no backward
    forward_spread: float
    backward_spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimings:
    """One layer, which stands for all of its group, at several sizes."""

    layer: int  # number in the model
    timings: tuple[Timing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFit:
    """How well one group's seconds are known."""

    layer: int  # the layer that was timed
    group: int
    work: tuple[float, ...]  # of the largest size
    forward: Fit
    backward: Fit
    forward_spread: float  # median over the sizes
    backward_spread: float

    @property
    def error(self) -> float:
        """Return the half-width of the band: largest residual plus spread of repeats, forward or backward."""
        forward = self.forward.error + self.forward_spread
        return max(forward, self.backward.error + self.backward_spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedProfile:
    """A profile whose seconds were measured, and the fits behind it."""

    profile: Profile
    kinds: tuple[KindFit, ...]


def timed_profile(analytic: Profile, measured: Sequence[LayerTimings], *, how: str) -> TimedProfile:
    """Return `analytic` with the seconds that were measured; `how` names dtype, attention and sizes in a sentence.

    The tier "full" runs the whole measured forward again, "selective" the formula's extra times the layer's ratio of
    measured to formula (forward, largest size); `weight_s` keeps its share of each term. A group that could not be
    timed (a bare parameter) takes its formula times the ratio of its tower. Once-a-step work and all bytes stay the
    formulas'. The error band is the mean of the groups' bands, weighed by their seconds in one pass of the largest
    size: as if all groups erred the same way.
    """
    fits = {analytic.layers[m.layer].group: _fit(analytic.layers[m.layer], m) for m in measured}
    # layers of kinds that were timed; others by the mean ratio of their tower
    largest = np.max([t.work for m in measured for t in m.timings], axis=0)[None, :]
    ratios = _tower_ratios(analytic, fits, largest)
    layers = tuple(_with_seconds(x, fits.get(x.group), ratios, largest) for x in analytic.layers)
    untimed = sorted({x.name for x in analytic.layers if x.group not in fits})
    # the band: each group's, weighed by its seconds
    seconds = {x.group: 0.0 for x in layers if x.group in fits}
    for x in layers:
        if x.group in fits:
            seconds[x.group] += float(evaluate(np.add(x.forward_s, x.backward_s), largest)[0])
    total = sum(seconds.values())
    error = sum(seconds[group] * fit.error for group, fit in fits.items()) / total
    # what was timed, and what was not
    said = [
        f"Seconds were measured layer by layer on {analytic.device.name}: {how}.",
        "Not timed: the model's code between its layers (positions, masks, images put among tokens), gradient "
        "exchange and optimizer, both by formula.",
    ]
    if untimed:
        said.append(f"No step ran it as a module, so priced like the rest of its tower: {', '.join(untimed)}.")
    return TimedProfile(
        profile=replace(
            analytic,
            layers=layers,
            method="timed",
            time_error=float(f"{error:.4g}"),
            assumptions=(*said, *analytic.assumptions[1:]),  # the first is the formulas' own, on their seconds
        ),
        kinds=tuple(fits.values()),
    )


def _fit(formula: LayerCost, measured: LayerTimings) -> KindFit:
    work = np.array([t.work for t in measured.timings])
    backward = np.array([t.backward_s for t in measured.timings])
    ran = bool((backward > 0).all())
    return KindFit(
        layer=measured.layer,
        group=formula.group,
        work=tuple(work.max(axis=0).tolist()),
        forward=fit_seconds(work, np.array([t.forward_s for t in measured.timings]), formula.forward_s),
        backward=fit_seconds(work, backward, formula.backward_s) if ran else _nothing(len(formula.backward_s)),
        forward_spread=float(np.median([t.forward_spread for t in measured.timings])),
        backward_spread=float(np.median([t.backward_spread for t in measured.timings])),
    )


def _nothing(num_terms: int) -> Fit:
    return Fit(coefficients=(0.0,) * num_terms, error=0.0)


def _tower_ratios(analytic: Profile, fits: dict[int, KindFit], work: FloatArray) -> dict[Tower, float]:
    """Return the ratio of measured to formula for the forward seconds of each tower's timed layers at `work`."""
    measured: dict[Tower, float] = {}
    formula: dict[Tower, float] = {}
    for x in analytic.layers:
        if (fit := fits.get(x.group)) is not None:
            measured[x.tower] = measured.get(x.tower, 0.0) + float(evaluate(fit.forward.coefficients, work)[0])
            formula[x.tower] = formula.get(x.tower, 0.0) + float(evaluate(x.forward_s, work)[0])
    return {tower: measured[tower] / formula[tower] for tower in measured if formula[tower] > 0}


def _with_seconds(x: LayerCost, fit: KindFit | None, ratios: dict[Tower, float], work: FloatArray) -> LayerCost:
    if fit is None:
        ratio = ratios.get(x.tower, 1.0)
        forward, backward = _times(x.forward_s, ratio), _times(x.backward_s, ratio)
    else:
        forward, backward = fit.forward.coefficients, fit.backward.coefficients
        formula = float(evaluate(x.forward_s, work)[0])
        ratio = float(evaluate(forward, work)[0]) / formula if formula > 0 else 1.0
    # the weights' part keeps its share of backward
    weight = tuple(
        w * m / b if b > 0 else 0.0
        for w, m, b in zip(x.weight_s, backward, x.backward_s, strict=False)  # empty: not known
    )
    tiers = (
        replace(tier, extra_backward_s=forward if tier.name == "full" else _times(tier.extra_backward_s, ratio))
        for tier in x.tiers
    )
    alone = replace(x, host_forward_s=0.0, host_backward_s=0.0)  # the host's were measured with the device's
    return replace(alone, forward_s=forward, backward_s=backward, weight_s=weight, tiers=tuple(tiers))


def _times(terms: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * term for term in terms)
