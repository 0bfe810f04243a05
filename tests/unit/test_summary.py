"""The headline of a plan: what is said first, and against which run a gain is quoted."""

from dataclasses import replace
from typing import Any

import pytest
from plans import small_plan

from trimtab.plan.file.figures import summarise
from trimtab.plan.plan import BASELINE, Plan, SettingEstimate


def headline(plan: Plan, **changed: dict[str, Any]) -> str:
    """The summary after fields of rows were changed, each named by its place: first, second or last."""
    rows = list(plan.estimates.variants)
    for place, number in (("first", 0), ("second", 1), ("last", -1)):
        rows[number] = replace(rows[number], **changed.get(place, {}))
    return summarise(plan.inputs, plan.decisions, replace(plan.estimates, variants=tuple(rows)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = small_plan()
    row = replace(made.estimates.variants[0], name=BASELINE)
    rows = (row, replace(row, name="balanced packs"), replace(row, name="recompute as needed"))
    return replace(made, estimates=replace(made.estimates, variants=rows))


def test_a_longer_step_is_named(plan: Plan) -> None:
    step_ms = plan.estimates.compared[0].step_ms
    first = {"fits": True, "epoch_s": 30.0}
    slow = headline(plan, first=first, last={"step_ms": 1.2 * step_ms, "epoch_s": 20.0})
    assert "1.50x" in slow
    assert "1.20x" in slow
    assert "0.80x" not in headline(plan, first=first, last={"step_ms": 0.8 * step_ms})


def test_a_gain_is_quoted_against_a_run_that_fits(plan: Plan) -> None:
    ours, second = plan.estimates.compared[-1], plan.estimates.compared[1]
    against = headline(plan, first={"fits": False}, second={"fits": True})
    assert f"{second.epoch_s / ours.epoch_s:.2f}x" in against
    assert second.name in against
    assert second.name not in headline(plan, first={"fits": True})


def test_the_fastest_setting_is_named_where_a_simpler_one_was_taken(plan: Plan) -> None:
    given = {"zero_stage": 1, "schedule": "1F1B", "num_chunks": 1, "num_microbatches": 8, "step_ms": 1.0}
    ours = SettingEstimate(kind="", dp=8, pp=1, tp=1, samples_per_s=10.0, peak_memory_gib=70.0, **given)
    divided = replace(ours, dp=4, pp=2, samples_per_s=10.3)
    estimates = replace(plan.estimates, settings=(ours, divided), setting_error=0.05)
    told = summarise(plan.inputs, plan.decisions, estimates)
    assert (
        "Fastest: dp 4 x pp 2 x tp 1, ZeRO-1, 1F1B, 3.0 % faster by prediction, within the error band of 5 %; this "
        "plan is simpler." in told
    )
    # the fastest was taken; or one that the price at mean packs does not know to be: it won on the epoch's own steps
    for changed in ({"settings": (divided, ours)}, {"setting_error": 0.01}):
        assert "Fastest" not in summarise(plan.inputs, plan.decisions, replace(estimates, **changed))


def test_the_batch_is_the_one_that_was_asked_for_or_the_mean(plan: Plan) -> None:
    many = replace(plan.inputs, data=replace(plan.inputs.data, num_samples=2050, mixture=()))
    packing = replace(plan.decisions.packing, num_steps=1, global_batch=None)
    varying = summarise(many, replace(plan.decisions, packing=packing), plan.estimates)
    assert "about 2,050 samples" in varying
    exact = replace(plan.decisions, packing=replace(packing, num_steps=2, global_batch=2048))
    assert " 2,048 samples" in summarise(many, exact, plan.estimates)
