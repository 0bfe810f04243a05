"""costs/measured/timed_fit.py: coefficients come back from times that were made of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.costs.measured.timed_fit import fit_seconds
from trimtab.specs import NUM_WORK_TERMS

FORMULA = (1e-5, 2e-8, 3e-12, 0, 0, 0, 0)
seconds = st.floats(0.01, 100.0)


def work_of(rows: list[float], pairs: list[float]) -> np.ndarray:
    work = np.zeros((len(rows), NUM_WORK_TERMS))
    work[:, 0], work[:, 1], work[:, 2] = 1.0, rows, pairs
    return work


SIZES = [256.0, 256.0, 1024.0, 1024.0, 4096.0]
WORK = work_of(SIZES, [256.0**2, 4 * 64.0**2, 1024.0**2, 4 * 256.0**2, 4096.0**2])


@settings(max_examples=60, deadline=None)
@given(seconds, seconds, seconds)
def test_known_coefficients_are_recovered(once: float, rows: float, pairs: float) -> None:
    known = np.array([once * 1e-5, rows * 1e-8, pairs * 1e-12, 0, 0, 0, 0])
    fit = fit_seconds(WORK, WORK @ known, FORMULA)
    np.testing.assert_allclose(fit.coefficients, known, rtol=1e-6)
    assert fit.error < 1e-9


def test_what_least_squares_would_make_negative_is_none() -> None:
    known = np.array([1e-4, 2e-8, -1e-13, 0, 0, 0, 0])
    times = WORK @ known
    fit = fit_seconds(WORK, times, FORMULA)
    assert fit.coefficients[2] == 0.0
    assert min(fit.coefficients) >= 0.0

    # the best of the other two terms: no neighbour does better
    def residual(c: np.ndarray) -> float:
        return float((((WORK @ c) / times - 1) ** 2).sum())

    found = np.array(fit.coefficients)
    for term in (0, 1):
        for change in (0.999, 1.001):
            other = found.copy()
            other[term] *= change
            assert residual(other) > residual(found)
    assert fit.error == pytest.approx(np.abs(WORK @ found / times - 1).max())


def test_short_and_long_times_weigh_alike() -> None:
    times = WORK @ np.array([1e-4, 2e-8, 3e-12, 0, 0, 0, 0])
    times[0] *= 1.1
    low = fit_seconds(WORK, times, FORMULA)
    times = WORK @ np.array([1e-4, 2e-8, 3e-12, 0, 0, 0, 0])
    times[-1] *= 1.1
    high = fit_seconds(WORK, times, FORMULA)
    assert 0.03 < low.error < 0.1
    assert high.error < 0.1


def test_rows_and_pairs_of_equal_tiles_keep_the_formula_s_proportion() -> None:
    tiles = np.array([1.0, 2.0, 4.0, 8.0])
    work = work_of(list(1025 * tiles), list(1025**2 * tiles))
    fit = fit_seconds(work, 1e-4 + 1e-3 * tiles, FORMULA)
    assert fit.coefficients[1] / fit.coefficients[2] == pytest.approx(FORMULA[1] / FORMULA[2])
    assert fit.coefficients[0] == pytest.approx(1e-4)
    np.testing.assert_allclose(work @ np.array(fit.coefficients), 1e-4 + 1e-3 * tiles)


def test_one_size_scales_the_formula() -> None:
    work = work_of([1000.0], [1e6])
    fit = fit_seconds(work, 3 * (work @ np.array(FORMULA)), FORMULA)
    np.testing.assert_allclose(fit.coefficients, 3 * np.array(FORMULA))


def test_a_layer_without_cost_has_none() -> None:
    assert fit_seconds(WORK, np.ones(5), (0.0,) * NUM_WORK_TERMS).coefficients == (0.0,) * NUM_WORK_TERMS
