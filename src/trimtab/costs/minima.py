"""Coefficients of least misfit to logged times: non-negative least squares, repeated until no piece changes.

Symbols: R logged times T_r, K coefficients theta >= 0, J the (R, K) derivatives of predicted / T_r.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from trimtab.costs.least_squares import least_squares
from trimtab.costs.observed import Observed, SimulateStep, Term
from trimtab.specs import FloatArray

NOISE = 0.01
"""Relative error taken for one logged time, for want of repeated runs."""

_STARTS = (0.2, 1.0, 5.0)
_MAX_ROUNDS = 40


def find_minima(seen: Sequence[Observed], terms: Sequence[Term], simulate_step: SimulateStep) -> tuple[FloatArray, ...]:
    """Local minima within `NOISE` of the best, the best first; of those alike only one."""
    predict = partial(_predict, seen, simulate_step)

    def misfit(predicted: FloatArray) -> float:
        return float(np.sqrt(np.mean((predicted - 1.0) ** 2)))

    prior, unit = _scales(seen, terms, simulate_step)
    found: list[tuple[float, FloatArray]] = []
    for start in itertools.product(_STARTS, repeat=len(terms)):
        theta = unit * np.array(start)
        predicted = predict(theta)
        for _ in range(_MAX_ROUNDS):
            J = _derivatives(predict, theta, predicted, unit)
            aim = least_squares(J, 1.0 - predicted + J @ theta, prior=prior, unit=unit)
            step, better = 1.0, False
            while step > 1e-3 and not better:
                moved = theta + step * (aim - theta)
                there = predict(moved)
                better = misfit(there) < misfit(predicted) * (1.0 - 1e-6) - 1e-12
                step /= 2
            if not better:
                break
            theta, predicted = moved, there
        found.append((misfit(predicted), theta))
    found.sort(key=lambda entry: entry[0])
    least = found[0][0]
    minima: list[FloatArray] = []
    for error, theta in found:
        if error > max(least * 1.5, least + NOISE / 2):
            break
        if not any(np.allclose(theta / unit, other / unit, rtol=NOISE, atol=NOISE) for other in minima):
            minima.append(theta)
    return tuple(minima)


def _predict(seen: Sequence[Observed], simulate_step: SimulateStep, theta: FloatArray) -> FloatArray:
    """(R,) predicted / logged."""
    result: FloatArray = np.concatenate([x.predict(theta, simulate_step) / x.logged for x in seen])
    return result


def _scales(
    seen: Sequence[Observed], terms: Sequence[Term], simulate_step: SimulateStep
) -> tuple[FloatArray, FloatArray]:
    """(K,) coefficients to stay near where the runs leave a choice, and (K,) typical sizes.

    Factors: the one that fits the formulas' steps to the logged ones. A constant: 0, and a quarter of a micro-batch's
    time.
    """
    is_factor = np.array([name in ("vision", "language") for name in terms])
    only = is_factor.astype(float)
    factor = 1.0
    if is_factor.any():
        factor = float(np.median(np.concatenate([x.logged / x.predict(only, simulate_step) for x in seen])))
    microbatch = np.median([x.logged[0] / (1 if x.run.iteration_s is None else len(x.run.work)) for x in seen])
    return factor * only, np.where(is_factor, factor, 0.25 * microbatch)


def _derivatives(
    predict: Callable[[FloatArray], FloatArray], theta: FloatArray, predicted: FloatArray, unit: FloatArray
) -> FloatArray:
    """(R, K) by differences: exact but for rounding, within a piece."""
    columns = []
    for k in range(len(theta)):
        step = 1e-6 * max(theta[k], unit[k])
        moved = theta.copy()
        moved[k] += step
        columns.append((predict(moved) - predicted) / step)
    return np.array(columns).T


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """How far errors in the logged times move the coefficients."""

    scale: FloatArray  # (K,) the coefficients, or typical sizes of those that are 0
    covariance: FloatArray  # (K, K) in units of `scale`
    is_open: npt.NDArray[np.bool_]  # (K,) whether the runs leave the coefficient free


def spread_of(
    seen: Sequence[Observed], theta: FloatArray, terms: Sequence[Term], simulate_step: SimulateStep
) -> Spread:
    """noise^2 (J^T J)^-1: noise is `NOISE` in every logged time, or the fit's own misfit where that is larger.

    A coefficient at 0 counts as one that could have come out above it: others trade with it.
    """
    predict = partial(_predict, seen, simulate_step)
    scale = np.where(theta > 0, theta, _scales(seen, terms, simulate_step)[1])
    predicted = predict(theta)
    J = _derivatives(predict, theta, predicted, scale) * scale
    spare = len(predicted) - len(theta)
    misfit = math.sqrt(float(((predicted - 1.0) ** 2).sum()) / spare) if spare > 0 else 0.0
    _, singular, rows = np.linalg.svd(J, full_matrices=True)
    strength = np.zeros(len(theta))
    strength[: len(singular)] = singular
    null = rows[strength < 1e-6 * strength.max()]
    covariance = np.asarray(max(NOISE, misfit) ** 2 * np.linalg.pinv(J.T @ J), np.float64)
    return Spread(scale=scale, covariance=covariance, is_open=(np.abs(null) > 1e-3).any(axis=0))
