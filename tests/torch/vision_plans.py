"""Ranks that share images as a plan decides: functions that spawned processes call. Needs torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import pytest
import torch.distributed as dist
from plans import small_plan
from rounding import assert_close
from vision_runs import make_case, make_rank_case, sum_over_ranks

from trimtab.balance.images import TowerCost
from trimtab.errors import PlanError, TrimtabError
from trimtab.plan.file.yaml import plan_from_yaml, plan_to_yaml
from trimtab.plan.plan import Plan, VisionDecision
from trimtab.runtime.vision import encode_pooled, vision_dp_from_plan


def plan_that(**change: object) -> Plan:
    """A plan of two tp and two dp ranks that shares images over tp, as read from its file."""
    decision = VisionDecision(
        group="tp", degree=2, exchange="gather", pooling=1, rule="balanced", objective="time", reduction="mean"
    )
    plan = small_plan()
    decided = replace(plan.decisions, vision_data_parallel=replace(decision, **change))  # type: ignore[arg-type]
    return plan_from_yaml(plan_to_yaml(replace(plan, decisions=decided)))


def run_plans(rank: int, _folder: str) -> None:
    run_reductions(rank)
    run_dispatch(rank)
    run_refusals()


def run_reductions(rank: int) -> None:
    """The whole loss on every rank, gradients averaged as the plan says: the gradients of one process."""
    num_ranks = dist.get_world_size()
    case = make_case("qwen3_vl", "images")
    case.loss(case.forward()).backward()
    expected = case.gradients()
    for objective in ("time", "memory"):
        with vision_dp_from_plan(case.model, None, plan_that(objective=objective), timeout_s=60) as handle:
            case.loss(case.forward()).backward()
            assert 0 < handle.load.share < 1
            assert (handle.settings.cost == TowerCost(patch=1.0)) == (objective == "memory")
        found = {name: gradient / num_ranks for name, gradient in sum_over_ranks(case.gradients()).items()}
        assert_close(found, expected, objective, part="visual")
    with vision_dp_from_plan(case.model, None, plan_that(), host_reduces=False, timeout_s=60) as handle:
        case.loss(case.forward()).backward()
        handle.reduce_gradients()
        assert_close(case.gradients(), expected)
        case.model.zero_grad(set_to_none=True)
        with pytest.raises(TrimtabError, match="no vision parameter has one: call this behind the backward"):
            handle.reduce_gradients()


def run_dispatch(rank: int) -> None:
    """Ranks with images of their own: the sum over both is the sum of what each would have alone."""
    case = make_rank_case("qwen3_vl", ("images", "one image")[rank])
    case.loss(case.forward()).backward()
    expected = sum_over_ranks(case.gradients())
    plan = plan_that(group="dp", exchange="dispatch", reduction=None)
    with vision_dp_from_plan(case.model, None, plan, timeout_s=60) as handle:
        case.loss(case.forward()).backward()
        assert handle.settings.exchange == "dispatch"
        assert handle.load.calls == 1
    assert_close(sum_over_ranks(case.gradients()), expected)


def run_refusals() -> None:
    model = make_case("qwen3_vl", "images").model
    assert vision_dp_from_plan(model, None, small_plan()) is None
    with pytest.raises(PlanError, match="shares images among 3 ranks of tp, and the group that was given has 2"):
        vision_dp_from_plan(model, None, plan_that(degree=3))
    dispatch = plan_that(group="dp", exchange="dispatch", reduction=None)
    with pytest.raises(PlanError, match="said to reduce no gradients over dp"):
        vision_dp_from_plan(model, None, dispatch, host_reduces=False)
    with pytest.raises(PlanError, match="plan with --vision-pooling 1 for this host"):
        vision_dp_from_plan(model, None, plan_that(group="dp", exchange="dispatch", reduction=None, pooling=2))
    assert "get_image_features" not in vars(model.model)
    with (
        vision_dp_from_plan(model, None, plan_that(group="dp", exchange="dispatch", reduction=None)) as handle,
        pytest.raises(TrimtabError, match="a pool has no heartbeat that would call the others"),
    ):
        encode_pooled(handle, [])
