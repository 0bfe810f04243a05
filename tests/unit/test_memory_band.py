"""The memory band: what may be filled at a risk, how likely a device fits, and which evidence it holds."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from plan_cases import tile_samples

from trimtab import PlanOptions, Profile, describe, make_plan, parse_cluster, profile_model
from trimtab.costs.bands import COUNTED_ERROR, FORMULAS_ERROR, OUTSIDE, SLACK, memory_band
from trimtab.plan.decide.case import MemoryBudget

CLUSTER = parse_cluster("16xA100-80GB")


def profile_of(method: Literal["traced", "probed"], error: float) -> Profile:
    formulas = profile_model(describe("Qwen2.5-VL-7B"), CLUSTER.device)
    return replace(formulas, method=method, memory_error=error)


@pytest.mark.parametrize("risk", [0.001, 0.05, 0.3, 0.5, 0.9])
def test_the_chance_that_a_full_plan_does_not_fit_is_the_risk(risk: float) -> None:
    band = memory_band(None)
    assert band.misfit_chance(band.largest_share(risk)) == pytest.approx(risk, rel=1e-6)


def test_the_chance_is_that_of_drawn_devices() -> None:
    band = memory_band(None)
    truth = 0.93 * (1 + band.half_width / 1.644854 * np.random.default_rng(0).standard_normal(400_000))
    assert np.mean(truth > 1) == pytest.approx(band.misfit_chance(0.93), abs=1e-3)
    inside = np.abs(truth / 0.93 - 1) <= band.half_width
    assert np.mean(inside) == pytest.approx(0.9, abs=2e-3)


def test_a_narrower_band_and_a_larger_risk_fill_more() -> None:
    formulas, traced = memory_band(None), memory_band(profile_of("traced", COUNTED_ERROR))
    probed = memory_band(profile_of("probed", COUNTED_ERROR))
    assert formulas.half_width > FORMULAS_ERROR
    assert formulas.largest_share(0.05) < traced.largest_share(0.05) == probed.largest_share(0.05) < 1
    assert formulas.largest_share(0.5) == pytest.approx(1)
    assert formulas.largest_share(0.7) > 1
    assert (traced.outside, probed.outside) == (OUTSIDE, 0.0), "a probe sees what lies outside"


@pytest.mark.parametrize("risk", [0.01, 0.2])
def test_a_plan_expects_to_fill_no_more_than_the_risk_allows(risk: float) -> None:
    options = PlanOptions(
        pp=4,
        tp=2,
        num_microbatches=8,
        memory_bytes=57 * 2**30,
        max_patches=9225,
        max_tokens=4352,
        risk=risk,
        schedule="1F1B",
        zero_stage=1,
    )
    made = make_plan(describe("InternVL-Chat-V1-5"), tile_samples(), CLUSTER, options)
    budget, estimates = MemoryBudget.of(CLUSTER, options), made.plan.estimates
    held = made.variants[-1].memory
    for device in held:
        beside = SLACK * device.counted_bytes + OUTSIDE * 57 * 2**30
        assert device.overhead_bytes == pytest.approx(beside)
        assert device.total_bytes <= budget.fill_bytes
    assert estimates.memory_share is not None
    assert estimates.misfit_chance is not None
    assert estimates.misfit_chance <= risk
    assert estimates.memory_share == pytest.approx(max(x.total_bytes for x in held) / (57 * 2**30), abs=1e-4)
    assert estimates.memory_share > budget.fill_bytes / budget.total_bytes - 0.04, "what recompute can free is used"
    low, high = (100 * (estimates.memory_share * (1 + s * estimates.memory_error) - 1) for s in (-1, 1))
    assert f"({round(low):+d} % / {round(high):+d} %)" in made.plan.summary


def test_what_keeps_bytes_free_by_number_fills_the_rest() -> None:
    budget = MemoryBudget.of(CLUSTER, PlanOptions(memory_bytes=60 * 2**30, reserve_bytes=2**30))
    assert (budget.fill_bytes, budget.slack, budget.outside_bytes) == (59 * 2**30, 0, 0)
