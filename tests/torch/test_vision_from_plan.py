"""What of a plan's decision to share images reaches `vision_dp`, and what no group can carry out. Needs torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from plans import small_plan

from refusals import refused
from trimtab.balance.cost import LinearCost
from trimtab.errors import PlanError
from trimtab.plan.file.yaml import plan_from_yaml, plan_to_yaml
from trimtab.plan.plan import Plan, VisionDecision
from trimtab.runtime.vision import apply as from_plan

DISPATCH = {"group": "dp", "exchange": "dispatch", "reduction": None}


def plan_that(**change: Any) -> Plan:
    """A plan of two tp and two dp ranks that shares images over tp, as read from its file."""
    decision = VisionDecision(
        group="tp", degree=2, exchange="gather", pooling=1, rule="balanced", objective="time", reduction="mean"
    )
    plan = small_plan()
    decided = replace(plan.decisions, vision_data_parallel=replace(decision, **change))
    return plan_from_yaml(plan_to_yaml(replace(plan, decisions=decided)))


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `vision_dp` is called with, on two ranks."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(from_plan.dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(from_plan, "vision_dp", lambda model, group, **arguments: seen.update(arguments))
    return seen


@pytest.mark.parametrize("change", [{}, DISPATCH])
def test_the_exchange_is_the_plans(given, change):
    from_plan.vision_dp_from_plan(torch.nn.Linear(1, 1), None, plan_that(**change), timeout_s=60)
    exchange = change.get("exchange", "gather")
    assert given == {"exchange": exchange, "rule": "balanced", "cost": None, "timeout_s": 60}


def test_memory_is_balanced_by_patches_unless_a_cost_is_given(given):
    for cost in (None, LinearCost(patches=3.0)):
        from_plan.vision_dp_from_plan(torch.nn.Linear(1, 1), None, plan_that(objective="memory"), cost=cost)
        assert given["cost"] == (cost or LinearCost(patches=1.0))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"group": "replica", "reduction": None}, ("replica",)),
        ({"degree": 3}, ("3", "2")),
        ({**DISPATCH, "pooling": 2}, ("vision_pooling=1",)),
    ],
)
def test_what_no_group_can_carry_out_is_refused(given, change, names):
    with refused(PlanError, names):
        from_plan.vision_dp_from_plan(torch.nn.Linear(1, 1), None, plan_that(**change))
    assert from_plan.vision_dp_from_plan(torch.nn.Linear(1, 1), None, small_plan()) is None
    assert given == {}
