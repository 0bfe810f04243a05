"""The log of a run: read while it is written, resumed, compared with the plan."""

import json
from dataclasses import replace

import numpy as np
import pytest
import report_fixtures as fixtures

from refusals import refused
from trimtab.errors import PlanError
from trimtab.plan.runs import compare_times, digest_of, line_of, read_run_log, read_run_of


def write(path, records):
    path.write_text("".join(map(line_of, records)))
    return path


def test_a_log_comes_back_as_it_was_written(tmp_path):
    run = fixtures.make_run(5)
    assert read_run_log(write(tmp_path / "run.jsonl", (run.header, *run.steps))) == run


def test_steps_of_a_resumed_run_count_as_they_were_run_last(tmp_path):
    header, later = fixtures.make_header(), fixtures.make_header(dp=2)
    first = [fixtures.make_step(i, 1.0) for i in (1, 2, 3)]
    again = [fixtures.make_step(i, 2.0) for i in (3, 4)]
    log = read_run_log(write(tmp_path / "run.jsonl", (header, *first, later, *again)))
    assert [record.step_s for record in log.steps] == [1.0, 1.0, 2.0, 2.0]
    assert log.header.dp == 2
    assert log.starts == (1, 3)


def test_steps_of_another_split_are_compared_with_nothing(tmp_path):
    """Three steps on two devices, resumed on one behind the second and killed before the third's end, then again."""
    header, later = fixtures.make_header(), fixtures.make_header(pp=1, planned_memory_bytes=(9,))
    first = [fixtures.make_step(i, 1.0) for i in (1, 2, 3)]
    again = [fixtures.make_step(i, 2.0, peak_memory_bytes=(8,)) for i in (3, 4, 5)]
    path = write(tmp_path / "run.jsonl", (header, *first, later, *again))
    log = read_run_log(path)
    assert (log.header, log.others) == (later, (1, 2))
    assert [record.step for record in log.own] == [3, 4, 5]
    assert [record.step for record in log.warm] == [4, 5]
    assert log.median_step_s() == 2.0
    found = compare_times(log, band=0.1)
    assert found.ratio == 2.0
    one = read_run_log(write(path, (header, *first, later, again[0])))
    assert one.warm == (again[0],), "the only step of its kind, though it warms up"
    none = read_run_log(write(path, (header, *first, later)))
    assert (none.header, none.others) == (header, ()), "no step has run as the last header says"
    upgraded = replace(header, versions="another")
    assert read_run_log(write(path, (header, *first, upgraded, fixtures.make_step(4, 1.0)))).others == ()


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_line_cut_by_a_kill_is_left_out_wherever_it_stands(tmp_path, cut):
    run = fixtures.make_run(3)
    path = write(tmp_path / "run.jsonl", (run.header, *run.steps))
    path.write_text(path.read_text()[:-cut])
    kept = read_run_log(path)
    assert [record.step for record in kept.steps] == ([1, 2, 3] if cut == 1 else [1, 2])
    with path.open("a") as file:  # a resumed run goes on behind it
        file.write("\n" + line_of(run.header) + line_of(run.steps[2]))
    assert [record.step for record in read_run_log(path).steps] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("loss", value) for value in (None, "a", 10**400, True)),
        *(("step", value) for value in (0, 1.5, "1", None)),
        *(("step_s", value) for value in (0, -1.0, None, float("nan"))),
        *(("data_s", -0.5), ("num_tokens", 1e3), ("num_tokens", 2**70), ("grad_norm", [])),
        *(("peak_memory_bytes", value) for value in (None, [1.5, 2], ["a", 1], [1], [1, -2])),
    ],
)
def test_values_that_no_run_logs_are_refused(tmp_path, name, value):
    run = fixtures.make_run(2)
    path = write(tmp_path / "run.jsonl", (run.header, *run.steps))
    wrong = {"kind": "step", **json.loads(line_of(run.steps[1])), name: value}
    path.write_text(line_of(run.header) + json.dumps(wrong) + "\n")
    with refused(PlanError, "2", name):
        read_run_log(path)


def test_a_log_without_fillers_and_with_a_loss_that_is_no_number_is_read(tmp_path):
    run = fixtures.make_run(2)
    line = json.loads(line_of(replace(run.steps[1], loss=float("nan"), grad_norm=float("inf"))))
    del line["num_fillers"]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(map(line_of, (run.header, run.steps[0]))) + json.dumps(line) + "\n")
    record = read_run_log(path).steps[1]
    assert record.num_fillers == 0
    assert np.isnan(record.loss)
    assert record.grad_norm == float("inf")
    path.write_text(line_of(run.steps[0]))
    with refused(PlanError, "1"):
        read_run_log(path)


def test_a_run_of_another_plan_is_refused(tmp_path):
    plan = fixtures.tiny_details().plan
    run = fixtures.make_run(3, plan=digest_of(plan))
    path = write(tmp_path / "run.jsonl", (run.header, *run.steps))
    assert read_run_of(plan, path) == run
    other = replace(plan, decisions=replace(plan.decisions, stages=plan.decisions.stages[:-1]))
    with refused(PlanError):
        read_run_of(other, path)


@pytest.mark.parametrize(
    ("device", "planned", "same"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", True),
        ("NVIDIA H200", "H200", True),
        ("CPU, x86_64", "A100-80GB", False),
        ("CPU, x86_64", "cpu", True),
        ("NVIDIA H20", "H200", False),
        ("NVIDIA H200", "H20", False),
        ("NVIDIA A100-SXM4-40GB", "A100-80GB", False),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", True),
    ],
)
def test_times_are_compared_on_the_planned_device_alone(device, planned, same):
    assert fixtures.make_run(3, device=device, planned_device=planned).comparable == same


def test_steps_are_compared_with_the_plans_mean_and_the_first_left_out():
    found = compare_times(fixtures.make_run(40), band=0.2)
    assert found.ratio == pytest.approx(1.05, rel=0.02)
    assert found.share_inside == 1.0
    assert compare_times(fixtures.make_run(40), band=0.0).share_inside == 0.0
