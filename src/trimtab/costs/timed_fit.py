"""Measured seconds -> coefficients of WORK_TERMS, none of them negative, residuals weighed relative to the time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.specs import FloatArray

# Least squares without negative coefficients, exact for the few that costs have.


def least_squares(J: FloatArray, y: FloatArray, *, prior: FloatArray, unit: FloatArray) -> FloatArray:
    """(K,) theta >= 0 of least |J theta - y|, exact: every choice of coefficients held at 0 is tried (K <= 5).

    Where J (R, K) leaves a direction open, the solution nearest to `prior`, in `unit`s.
    """
    best, best_error = np.zeros(J.shape[1]), np.inf
    for choice in itertools.product((True, False), repeat=J.shape[1]):
        free = np.array(choice)
        theta = np.zeros(J.shape[1])
        if free.any():
            scaled = J[:, free] * unit[free]
            moved, *_ = np.linalg.lstsq(scaled, y - J[:, free] @ prior[free], rcond=1e-9)
            theta[free] = prior[free] + unit[free] * moved
        error = float(np.linalg.norm(J @ theta - y))
        if (theta >= 0).all() and error < best_error - 1e-12:
            best, best_error = theta, error
    return best


_SAME_DIRECTION = 1e-6  # of the largest singular value: what two columns must differ by to be told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients per WORK_TERMS, and how far the measured times lie from them."""

    coefficients: tuple[float, ...]
    error: float  # largest |fitted - measured| / measured


def fit_seconds(work: FloatArray, seconds: FloatArray, formula: Sequence[float]) -> Fit:
    """c >= 0 that minimises sum_i ((work_i . c - t_i) / t_i)^2 over the terms that `formula` has.

    work (n, len(WORK_TERMS)), seconds (n,) all above 0, formula: the analytic coefficients. Terms that the measured
    sizes cannot tell apart keep the formula's proportions: first those other than the constant (towers whose tiles are
    all of one size: rows squared is a multiple of rows), then all of them (one size). Exact: with at most three terms
    every set of active ones is solved.
    """
    shape = np.asarray(formula, np.float64)
    if not shape.any():
        return Fit(coefficients=tuple(shape.tolist()), error=0.0)
    bases = _bases(shape)
    columns = [(work @ basis.T) / seconds[:, None] for basis in bases]
    number = next((i for i, c in enumerate(columns) if _told_apart(c)), len(bases) - 1)
    told = columns[number]
    zero, size = np.zeros(told.shape[1]), np.linalg.norm(told, axis=0)
    coefficients = least_squares(told, np.ones(len(told)), prior=zero, unit=1.0 / size) @ bases[number]
    misses = np.abs(work @ coefficients / seconds - 1.0)
    return Fit(coefficients=tuple(coefficients.tolist()), error=float(misses.max()))


def _bases(shape: FloatArray) -> tuple[FloatArray, ...]:
    """Sets of directions, (k, len(WORK_TERMS)): each term alone; the constant and all others; all together."""
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
