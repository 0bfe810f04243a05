"""Least squares without negative coefficients, exact for the few that costs have."""

from __future__ import annotations

import itertools

import numpy as np

from trimtab.specs import FloatArray


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
