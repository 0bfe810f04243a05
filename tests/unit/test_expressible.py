"""plan/decide/expressible.py: the best plan that a framework can run, within memory, priced against the plan."""

from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import tile_samples, write_checked

from refusals import refused
from trimtab import PlanOptions, describe, make_plan, parse_cluster, split_stages, write_plan
from trimtab.adapters.deepspeed import deepspeed_runs
from trimtab.adapters.frameworks import find_target
from trimtab.adapters.running import Exported, cost_of_running, export_plan, fit_plan
from trimtab.errors import PartitionError, UnsupportedPlanError
from trimtab.plan.decide.stages import Expressible, best_expressible, epoch_s, overfull_ranks, relative_time
from trimtab.plan.file.reload import ReloadedPlan, reload_plan
from trimtab.specs import stages_between
from trimtab.units import format_bytes

MODEL = describe("Qwen2.5-VL-7B")
KEEP_THE_TOWER_WHOLE = ("megatron", "megatron-bridge", "ms-swift", "pai-megatron")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ReloadedPlan:
    """A plan that cuts inside the vision tower."""
    options = PlanOptions(pp=4, tp=2, num_microbatches=8, schedule="1F1B")
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
def test_what_is_refused_is_fitted_into_a_plan_that_runs(found: ReloadedPlan, name: str, tmp_path: Path) -> None:
    target = find_target(name)
    if best_expressible(found.case, target.can(MODEL, 4)) is None:
        with refused(PartitionError, "4", target.title):
            fit_plan(found, target)
        with refused(UnsupportedPlanError):
            export_plan(found, target)
        return
    details = fit_plan(found, target)
    fitted = write_checked(details, tmp_path)
    ratio = relative_time(found.case, fitted.stages, found.stages)
    assert ratio > 1.0
    with refused(UnsupportedPlanError):
        export_plan(found, target)
    exported = export_plan(fitted, target)
    assert exported.runs == fitted.stages, "the fitted plan is what the framework runs"
    assert cost_of_running(fitted, exported) == []
    assert overfull_ranks(fitted.case, fitted.stages) == ()
    assert fitted.plan.assumptions[-1] == f"Split again, with the same packs, within what {target.title} can run."
    assert fitted.plan.decisions.packing == found.plan.decisions.packing


def test_the_next_degrees_are_taken_where_nothing_fits_that_can_be_run() -> None:
    samples, cluster = tile_samples(60), parse_cluster("4xA100-80GB")
    options = PlanOptions(tp=2, num_microbatches=4)
    fastest = make_plan(MODEL, samples, cluster, options).plan.decisions.parallel.pp
    runs = {pp: Expressible(splits=()) if pp == fastest else Expressible() for pp in (1, 2)}
    found = make_plan(MODEL, samples, cluster, options, within=lambda _model, pp: runs[pp])
    assert {fastest, found.plan.decisions.parallel.pp} == {1, 2}
    with refused(PartitionError, "2"):
        make_plan(MODEL, samples, cluster, options, within=lambda _model, _pp: Expressible(splits=()))


def test_a_pipeline_is_refused_where_there_are_no_stages(found: ReloadedPlan) -> None:
    with refused(UnsupportedPlanError, "1"):
        export_plan(found, find_target("transformers"))
    with refused(PartitionError, "4"):
        fit_plan(found, find_target("transformers"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> ReloadedPlan:
    """A plan without pipeline whose memory takes recompute of several tiers."""
    options = PlanOptions(pp=1, dp=8, global_batch=60, num_microbatches=2, zero_stage=3)
    folder = tmp_path_factory.mktemp("alone")
    model = describe("InternVL-Chat-V1-5")
    write_plan(make_plan(model, tile_samples(60), parse_cluster("8xA100-80GB"), options), folder)
    plan = reload_plan(folder)
    assert {choice.tier for choice in plan.stages[0].recompute} >= {"selective", "full"}
    return plan


def test_a_framework_of_one_tier_is_priced_in_seconds_and_bytes(alone: ReloadedPlan) -> None:
    case, runs = alone.case, deepspeed_runs(alone.stages)  # selective becomes full
    (said,) = cost_of_running(alone, Exported(text="", fields={}, runs=runs))
    ratio = relative_time(case, runs, alone.stages)
    assert ratio > 1.0
    held, planned = (case.problem.assess(x).memory[0].total_bytes for x in (runs, alone.stages))
    for name in (f"{ratio:.3f} x", format_bytes(held), format_bytes(planned), "--fit"):
        assert name in said


@pytest.mark.parametrize("name", KEEP_THE_TOWER_WHOLE)
def test_a_schedule_that_the_framework_has_not_is_not_fitted(name: str, tmp_path: Path) -> None:
    options = PlanOptions(pp=2, tp=2, num_microbatches=4, schedule="ZBVZeroBubble", num_chunks=2)
    write_plan(make_plan(MODEL, tile_samples(60), parse_cluster("8xA100-80GB"), options), tmp_path)
    with refused(PartitionError, "ZBVZeroBubble", "1F1B"):
        fit_plan(reload_plan(tmp_path), find_target(name))


def test_full_recompute_alone_is_solved_with_the_split(found: ReloadedPlan) -> None:
    best = best_expressible(found.case, find_target("deepspeed").can(MODEL, 4))
    assert best is not None
    assert {choice.tier for stage in best for choice in stage.recompute} <= {"full"}
    in_full = export_plan(found, find_target("deepspeed")).runs
    assert relative_time(found.case, best, in_full) <= 1.0 + 1e-9


def test_of_given_splits_the_fastest_is_taken(found: ReloadedPlan) -> None:
    case = found.case
    case = replace(case, budget=replace(case.budget, fill_bytes=2**50))
    block = MODEL.indices("language", "block")[0]
    splits = tuple((block + a, block + a + 7, block + a + 14) for a in range(1, 13))
    best = best_expressible(case, Expressible(splits=splits))
    assert best is not None
    times = [epoch_s(case, stages_between((0, *cuts, len(MODEL.layers)))) for cuts in splits]
    assert epoch_s(case, best) == min(times)
    assert best_expressible(found.case, Expressible(splits=())) is None


def test_too_few_cuts_and_too_little_memory_are_none(found: ReloadedPlan) -> None:
    every = frozenset(range(1, len(MODEL.layers)))
    assert best_expressible(found.case, Expressible(forbidden_cuts=every)) is None
    tight = replace(found.case, budget=replace(found.case.budget, fill_bytes=2**33))
    assert best_expressible(tight, Expressible()) is None
    with pytest.raises(PartitionError):
        split_stages(tight.problem)


def test_a_plan_without_recompute_is_fitted_without(found: ReloadedPlan) -> None:
    case = replace(
        found.case,
        options=replace(found.case.options, recompute="none"),
        budget=replace(found.case.budget, fill_bytes=2**50),
    )
    best = best_expressible(case, find_target("megatron").can(MODEL, 4))
    assert best is not None
    assert not any(stage.recompute for stage in best)
