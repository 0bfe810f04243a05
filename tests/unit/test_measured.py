"""costs/measured/timed_fit.py: a profile of layers whose times are known."""

import numpy as np
import pytest
from cost_models import small_model
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.costs.devices import DEVICES
from trimtab.costs.measured.timed_fit import LayerTimings, TimedProfile, Timing, fit_seconds, timed_profile
from trimtab.costs.profile import profile_model
from trimtab.specs import NUM_WORK_TERMS, WORK_TERMS, Profile

MODEL = small_model()
FORMULAS = profile_model(MODEL, DEVICES["A100-80GB"])
TIMES = {"vision": 2.0, "projector": 5.0, "language": 3.0}


def measure(*, leave_out: str = "", spread: float = 0.0) -> TimedProfile:
    """Every tower as many times slower than its formula as TIMES says, but for layers named `leave_out`."""
    measured, seen = [], set()
    for number, cost in enumerate(FORMULAS.layers):
        if cost.group in seen or cost.name == leave_out:
            continue
        seen.add(cost.group)
        timings = []
        for rows, parts in ((256, 1), (256, 4), (1024, 1), (4096, 1)):
            work = np.zeros(len(WORK_TERMS))
            work[0] = 1.0
            column = WORK_TERMS.index("tokens" if cost.tower == "language" else "patches")
            work[column], work[column + 1] = rows, parts * (rows / parts) ** 2
            factor = TIMES[cost.tower]
            timings.append(
                Timing(
                    work=tuple(work),
                    forward_s=factor * float(work @ cost.forward_s),
                    backward_s=factor * float(work @ cost.backward_s),
                    forward_spread=spread,
                    backward_spread=spread,
                )
            )
        measured.append(LayerTimings(layer=number, timings=tuple(timings)))
    return timed_profile(FORMULAS, measured, how="made up")


def seconds_over_formulas(profile: Profile, name: str) -> np.ndarray:
    return np.array(
        [
            np.divide(getattr(x, name), getattr(y, name), where=np.array(getattr(y, name)) > 0, out=np.ones(7)).max()
            for x, y in zip(profile.layers, FORMULAS.layers, strict=True)
        ]
    )


def test_seconds_are_the_measured_and_bytes_the_formulas() -> None:
    profile = measure().profile
    expected = [TIMES[x.tower] for x in FORMULAS.layers]
    for name in ("forward_s", "backward_s", "weight_s"):
        np.testing.assert_allclose(seconds_over_formulas(profile, name), expected, rtol=1e-6)
    for ours, formula in zip(profile.layers, FORMULAS.layers, strict=True):
        assert [t.saved_bytes for t in ours.tiers] == [t.saved_bytes for t in formula.tiers]
        assert (ours.state_bytes, ours.transient_bytes, ours.step_s) == (
            formula.state_bytes,
            formula.transient_bytes,
            formula.step_s,
        )
    assert profile.method == "timed"
    assert profile.memory_error == FORMULAS.memory_error


def test_recomputing_all_runs_the_measured_forward_and_less_its_share() -> None:
    for ours, formula in zip(measure().profile.layers, FORMULAS.layers, strict=True):
        for tier, by_formula in zip(ours.tiers, formula.tiers, strict=True):
            if tier.name == "full":
                assert tier.extra_backward_s == ours.forward_s
            expected = TIMES[ours.tower] * np.array(by_formula.extra_backward_s)
            if tier.name == "selective":
                np.testing.assert_allclose(tier.extra_backward_s, expected, rtol=1e-6)


def test_what_could_not_be_timed_is_priced_like_its_tower_and_named() -> None:
    profile = measure(leave_out="head").profile
    np.testing.assert_allclose(profile.layers[-1].forward_s, 3.0 * np.array(FORMULAS.layers[-1].forward_s), rtol=1e-6)
    assert any("priced like the rest of its tower: head" in said for said in profile.assumptions)


def test_the_band_is_residual_plus_spread_of_the_repeats() -> None:
    exact, noisy = measure(), measure(spread=0.07)
    assert exact.profile.time_error < 1e-6
    assert noisy.profile.time_error == pytest.approx(0.07, abs=1e-6)
    assert all(kind.error == pytest.approx(0.07, abs=1e-6) for kind in noisy.kinds)


# -- costs/measured/timed_fit.py: coefficients come back from times that were made of them ----------------------------


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
