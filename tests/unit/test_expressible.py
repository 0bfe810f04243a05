"""The best plan that a framework can run: never one it cannot, never over the memory, priced against the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import tile_samples

from trimtab.adapters.running import cost_of_running, export_plan, fit_plan
from trimtab.adapters.targets import TARGETS
from trimtab.costs.devices import parse_cluster
from trimtab.errors import PartitionError, UnsupportedPlanError
from trimtab.models.describe import describe
from trimtab.partition.stages import solve
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.check import check_plan
from trimtab.plan.expressible import (
    Expressible,
    as_stages,
    best_expressible,
    overfull_ranks,
    relative_time,
)
from trimtab.plan.options import PlanOptions
from trimtab.plan.reload import ReloadedPlan, reload_plan
from trimtab.plan.split import epoch_s

MODEL = describe("Qwen2.5-VL-7B")
RUN_EVERYTHING = ("deepspeed", "torch-pipelining")
KEEP_THE_TOWER_WHOLE = ("megatron", "megatron-bridge", "ms-swift", "pai-megatron", "torchtitan")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ReloadedPlan:
    """A plan that cuts inside the vision tower."""
    options = PlanOptions(pp=4, tp=2, num_microbatches=8)
    folder = tmp_path_factory.mktemp("made")
    write_plan(make_plan(MODEL, tile_samples(200), parse_cluster("8xA100-80GB"), options), folder)
    plan = reload_plan(folder)
    assert plan.stages[1].start < MODEL.indices("language", "embed")[0]
    return plan


def test_with_no_limits_the_plan_itself_is_the_best(found: ReloadedPlan) -> None:
    best = best_expressible(found.case, Expressible())
    assert best is not None
    assert relative_time(found.case, best, found.stages) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("name", KEEP_THE_TOWER_WHOLE)
def test_a_refusal_quotes_the_price_of_the_plan_that_fit_writes(found: ReloadedPlan, name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    if best_expressible(found.case, target.can(MODEL, 4)) is None:
        with pytest.raises(PartitionError, match=f"no split that {target.title} can run fits 4 pipeline ranks"):
            fit_plan(found, target)
        with pytest.raises(UnsupportedPlanError, match="nothing fits these degrees"):
            export_plan(found, target)
        return
    details = fit_plan(found, target)
    write_plan(details, tmp_path)
    assert check_plan(tmp_path) == []
    fitted = reload_plan(tmp_path)
    ratio = relative_time(found.case, fitted.stages, found.stages)
    assert ratio > 1.0
    with pytest.raises(UnsupportedPlanError, match=rf"takes {ratio:.2f} x as long a step"):
        export_plan(found, target)
    exported = export_plan(fitted, target)
    assert exported.runs == fitted.stages, "the fitted plan is what the framework runs"
    assert cost_of_running(fitted, exported) == []
    assert overfull_ranks(fitted.case, fitted.stages) == ()
    assert fitted.plan.assumptions[-1] == f"Split again, with the same packs, within what {target.title} can run."
    assert fitted.plan.decisions.packing == found.plan.decisions.packing


@pytest.mark.parametrize("name", RUN_EVERYTHING)
def test_others_run_every_cut(found: ReloadedPlan, name: str) -> None:
    exported = export_plan(found, TARGETS[name])
    assert [(s.start, s.stop) for s in exported.runs] == [(s.start, s.stop) for s in found.stages]


def test_full_recompute_alone_is_solved_with_the_split(found: ReloadedPlan) -> None:
    best = best_expressible(found.case, TARGETS["deepspeed"].can(MODEL, 4))
    assert best is not None
    assert {choice.tier for stage in best for choice in stage.recompute} <= {"full"}
    in_full = export_plan(found, TARGETS["deepspeed"]).runs
    assert relative_time(found.case, best, in_full) <= 1.0 + 1e-9


def test_what_recompute_adds_is_said_in_step_time(found: ReloadedPlan) -> None:
    exported = export_plan(found, TARGETS["torch-pipelining"])
    assert cost_of_running(found, exported) == []
    bare = tuple(replace(stage, recompute=()) for stage in found.stages)
    if bare != found.stages:
        sentences = cost_of_running(found, replace(exported, runs=bare))
        assert any("would exceed the plan's memory: export with --fit FOLDER" in s for s in sentences)
        assert any("x as long as planned" in s for s in sentences)


def test_of_given_splits_the_fastest_is_taken(found: ReloadedPlan) -> None:
    case = found.case
    case = replace(case, budget=replace(case.budget, total_bytes=2**50))
    block = MODEL.indices("language", "block")[0]
    splits = tuple((block + a, block + a + 7, block + a + 14) for a in range(1, 13))
    best = best_expressible(case, Expressible(splits=splits))
    assert best is not None
    times = [epoch_s(case, as_stages(cuts, len(MODEL.layers))) for cuts in splits]
    assert epoch_s(case, best) == min(times)
    assert best_expressible(found.case, Expressible(splits=())) is None


def test_too_few_cuts_and_too_little_memory_are_none(found: ReloadedPlan) -> None:
    every = frozenset(range(1, len(MODEL.layers)))
    assert best_expressible(found.case, Expressible(forbidden_cuts=every)) is None
    tight = replace(found.case, budget=replace(found.case.budget, total_bytes=2**33))
    assert best_expressible(tight, Expressible()) is None
    with pytest.raises(PartitionError):
        solve(tight.problem)


def test_a_plan_without_recompute_is_fitted_without(found: ReloadedPlan) -> None:
    case = replace(
        found.case,
        options=replace(found.case.options, recompute="none"),
        budget=replace(found.case.budget, total_bytes=2**50),
    )
    best = best_expressible(case, TARGETS["megatron"].can(MODEL, 4))
    assert best is not None
    assert not any(stage.recompute for stage in best)
