"""A run's log refits the costs of its plan, and a new plan goes on in its place. (plan/replan.py, plan/runs.py)"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import report_fixtures as fixtures
from plan_cases import write_checked

from refusals import refused
from trimtab import PlanOptions, SampleTable, describe, make_plan, parse_cluster, write_plan
from trimtab.costs.measured.fitted import TermFit, apply_terms
from trimtab.errors import PlanError
from trimtab.files import blake2b
from trimtab.plan.decide.work import steps_of
from trimtab.plan.file.reload import ReloadedPlan, reload_plan
from trimtab.plan.replan import learn_from, replan_rest
from trimtab.plan.runs import RunLog, digest_of, read_log_of
from trimtab.runtime.data.tables import Cursor, cursor_from_state, cursor_to_state, make_order, open_tables

FACTORS = {"host": 1.6, "language": 1.25, "vision": 0.8}


def drawn_samples() -> SampleTable:
    rng = np.random.default_rng(3)
    patches = 4 * np.round(np.exp(rng.normal(6.5, 0.9, 160))).astype(np.int64)
    return SampleTable.of(patches, patches // 4 + rng.integers(50, 900, 160))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = PlanOptions(global_batch=16, pp=1, tp=1, dp=4, zero_stage=0, dtype="fp32", host="eager")
    made = make_plan(describe("Qwen2.5-VL-3B"), drawn_samples(), parse_cluster("4xH200"), options)
    path = tmp_path_factory.mktemp("plan")
    write_plan(made, path)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> ReloadedPlan:
    return reload_plan(folder)


def log_of(found: ReloadedPlan, seconds: np.ndarray) -> RunLog:
    case, decisions = found.case, found.plan.decisions
    header = fixtures.make_header(
        plan=digest_of(found.plan),
        device=found.plan.inputs.cluster.device,
        planned_device=found.plan.inputs.cluster.device,
        dp=decisions.parallel.dp,
        pp=decisions.parallel.pp,
        num_microbatches=decisions.schedule.num_microbatches,
        planned_memory_bytes=(int(case.problem.assess(found.stages).peak_bytes),),
    )
    peaks = header.planned_memory_bytes
    steps = [
        fixtures.make_step(i, float(x), data_s=0.0, peak_memory_bytes=peaks) for i, x in enumerate(seconds.tolist(), 1)
    ]
    return RunLog(header=header, steps=tuple(steps), starts=(1,))


def seconds_under(found: ReloadedPlan, **factors: float) -> np.ndarray:
    """Of the plan's own steps, where its layers take so many times as long."""
    case = found.case
    terms = [TermFit(name=name, value=value, error=None) for name, value in factors.items()]  # type: ignore[arg-type]
    problem = replace(case.problem, profile=apply_terms(case.setting.profile, terms))
    return steps_of(case.work, case.schedule.table, found.stages, problem, case.cluster)


def test_a_run_settles_the_factors_that_made_it(found: ReloadedPlan) -> None:
    taken = seconds_under(found, **FACTORS)[:9]
    lesson = learn_from(found, log_of(found, taken))
    assert lesson.steps_done == 9
    assert lesson.num_steps == 10
    assert lesson.memory_ratio == pytest.approx(1.0)
    learnt = replace(found.case.setting, profile=lesson.calibration.profile).profile
    case = found.case
    again = steps_of(case.work, case.schedule.table, found.stages, replace(case.problem, profile=learnt), case.cluster)
    np.testing.assert_allclose(again[1:9], taken[1:], rtol=0.06)
    assert abs(seconds_under(found)[1:9] / taken[1:] - 1).max() > 0.1, "the plan's own costs are far off"


def test_under_zero_3_a_run_that_went_as_planned_teaches_nothing_new(tmp_path):
    options = PlanOptions(global_batch=16, pp=1, tp=1, dp=4, zero_stage=3, host="eager")
    write_plan(make_plan(describe("Qwen2.5-VL-3B"), drawn_samples(), parse_cluster("4xH200"), options), tmp_path)
    own = reload_plan(tmp_path)
    taken = seconds_under(own)
    learnt = learn_from(own, log_of(own, taken)).calibration.profile
    case = own.case
    again = steps_of(case.work, case.schedule.table, own.stages, replace(case.problem, profile=learnt), case.cluster)
    np.testing.assert_allclose(again, taken, rtol=0.005)


def test_noise_is_one_factor_not_three(found: ReloadedPlan) -> None:
    rng = np.random.default_rng(0)
    planned = seconds_under(found)[:8]
    lesson = learn_from(found, log_of(found, planned * 2.0 * np.exp(rng.normal(0, 0.4, 8))))
    assert lesson.calibration.terms == ()
    ratios = [
        b.forward_s[4] / a.forward_s[4]
        for a, b in zip(found.case.setting.profile.layers, lesson.calibration.profile.layers, strict=True)
        if a.forward_s[4]
    ]
    assert np.ptp(ratios) < 1e-9
    assert ratios[0] == pytest.approx(lesson.ratio)


@pytest.mark.parametrize("devices", ["4xH200", "8xH200", "2xH200"])
def test_the_new_plan_goes_on_with_the_same_batches(folder: Path, found: ReloadedPlan, tmp_path: Path, devices) -> None:
    lesson = learn_from(found, log_of(found, seconds_under(found, **FACTORS)[:6]))
    details = replan_rest(found, lesson, cluster=parse_cluster(devices))
    write_checked(details, tmp_path)
    old, new = open_tables(folder), open_tables(tmp_path)

    def samples_from(order, cursor) -> list[list[int]]:
        """Of each step left in the epoch, sorted."""
        ranks = [list(order.microbatches(rank, cursor)) for rank in range(order.dp)]
        steps = len(ranks[0]) // order.num_microbatches
        M = order.num_microbatches
        batches = [[b for rank in ranks for b in rank[i * M : (i + 1) * M]] for i in range(steps)]
        return [sorted(row for batch in step for row in batch) for step in batches]

    order, other = make_order(old, dp=old.dp), make_order(new, dp=new.dp)
    for epoch, done in ((0, 6), (2, 3)):
        place = Cursor(epoch=epoch, packs_done=done * order.packs_per_step)
        there = cursor_from_state(other, cursor_to_state(order, place))
        assert samples_from(other, there) == samples_from(order, place)
        assert len(samples_from(other, there)) == 10 - done
    inside = cursor_to_state(order, Cursor(packs_done=6 * order.packs_per_step + 1))
    with refused(PlanError, "step"):
        cursor_from_state(other, inside)
    with refused(PlanError, "plan"):
        cursor_from_state(other, cursor_to_state(order, place) | {"plan": blake2b(b"another")})


def test_a_device_that_held_more_is_filled_less(found: ReloadedPlan) -> None:
    log = log_of(found, seconds_under(found)[:5])
    fuller = tuple(int(1.2 * x) for x in log.header.planned_memory_bytes)
    log = replace(log, steps=tuple(replace(x, peak_memory_bytes=fuller) for x in log.steps))
    lesson = learn_from(found, log)
    assert lesson.memory_ratio == pytest.approx(1.2)
    total = found.case.cluster.device.memory_bytes
    assert replan_rest(found, lesson).plan.inputs.cluster.memory_bytes == int(total / lesson.memory_ratio)


def test_lines_that_megatron_prints_are_a_log(found: ReloadedPlan, tmp_path: Path) -> None:
    taken = seconds_under(found, language=1.3, vision=1.3, host=1.3)[:8]
    lines = [
        f" [2026-11-26 10:00:0{i}] iteration {i:8d}/ 100 | consumed samples: {16 * i} | "
        f"elapsed time per iteration (ms): {1e3 * x:.1f} | learning rate: 1.0E-05 |"
        for i, x in enumerate(taken.tolist(), 1)
    ]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(["building model ...", *lines, "done"]))
    lesson = learn_from(found, read_log_of(found.plan, path))
    assert lesson.ratio == pytest.approx(1.3, rel=0.03)  # exchange and optimizer aside
    assert (lesson.steps_done, lesson.memory_ratio) == (8, None)
    path.write_text("nothing of the kind")
    with refused(PlanError, path):
        read_log_of(found.plan, path)


def test_what_teaches_nothing_is_refused(found: ReloadedPlan, tmp_path: Path) -> None:
    seconds = seconds_under(found)[:4]
    with refused(PlanError, "NVIDIA L40S", "H200"):
        own = log_of(found, seconds)
        learn_from(found, replace(own, header=replace(own.header, device="NVIDIA L40S")))
    own = log_of(found, seconds)
    with refused(PlanError, "dp 2"):
        learn_from(found, replace(own, header=replace(own.header, dp=2)))
    late = log_of(found, seconds)
    with refused(PlanError, "10 steps"):
        learn_from(found, replace(late, steps=tuple(replace(x, step=x.step + 10) for x in late.steps)))
    filled = PlanOptions(num_microbatches=2, dp=4, pp=1, tp=1, zero_stage=1)
    write_plan(make_plan(describe("Qwen2.5-VL-3B"), drawn_samples(), parse_cluster("4xH200"), filled), tmp_path)
    other = reload_plan(tmp_path)
    with refused(PlanError, "N samples"):
        replan_rest(other, learn_from(other, log_of(other, seconds_under(other)[:3])))
