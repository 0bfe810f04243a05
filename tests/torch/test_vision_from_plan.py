"""What of a plan's decision to share images reaches `vision_dp`, and what no group can carry out. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from plans import small_plan

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


@pytest.mark.parametrize(
    ("change", "host_reduces", "loss", "reduction"),
    [
        ({}, True, "replicated", "mean"),
        ({}, False, "replicated", "none"),
        (DISPATCH, True, None, None),
    ],
)
def test_losses_and_reductions_are_those_that_the_plan_names(given, change, host_reduces, loss, reduction):
    plan = plan_that(**change)
    from_plan.vision_dp_from_plan(torch.nn.Linear(1, 1), None, plan, host_reduces=host_reduces, timeout_s=60)
    exchange = change.get("exchange", "gather")
    assert given == {
        "exchange": exchange,
        "rule": "balanced",
        "cost": None,
        "loss": loss,
        "reduction": reduction,
        "timeout_s": 60,
    }


def test_memory_is_balanced_by_patches_unless_a_cost_is_given(given):
    for cost in (None, LinearCost(patches=3.0)):
        from_plan.vision_dp_from_plan(torch.nn.Linear(1, 1), None, plan_that(objective="memory"), cost=cost)
        assert given["cost"] == (cost or LinearCost(patches=1.0))


@pytest.mark.parametrize(
    ("change", "host_reduces", "message"),
    [
        ({"degree": 3}, True, "shares images among 3 ranks of tp, and the group that was given has 2"),
        (DISPATCH, False, "said to reduce no gradients over dp"),
        ({**DISPATCH, "pooling": 2}, True, "plan with --set vision_pooling=1 for this host"),
    ],
)
def test_what_no_group_can_carry_out_is_refused(given, change, host_reduces, message):
    with pytest.raises(PlanError, match=message):
        from_plan.vision_dp_from_plan(torch.nn.Linear(1, 1), None, plan_that(**change), host_reduces=host_reduces)
    assert from_plan.vision_dp_from_plan(torch.nn.Linear(1, 1), None, small_plan()) is None
    assert given == {}
