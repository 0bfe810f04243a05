"""A run's section of the page and its lines: what is compared where, and drawings of a bounded size."""

from dataclasses import replace

import pytest
import report_fixtures as fixtures
from test_report_html import Page

from trimtab.report.html import html_report
from trimtab.report.run import run_lines


def page_of(run):
    return Page(html_report(fixtures.tiny_details(), run=run))


def test_the_run_comes_first_and_pages_without_one_are_as_before():
    details = fixtures.tiny_details()
    assert Page(html_report(details, run=fixtures.make_run())).headings[0] == "Training run"
    assert "Training run" not in Page(html_report(details)).headings
    assert html_report(details, run=None) == html_report(details)


def test_a_page_with_a_run_does_not_say_that_nothing_was_measured():
    text = " ".join(page_of(fixtures.make_run()).text)
    assert "Nothing here but the training run below was measured:" in text


def test_times_and_memory_are_compared_on_the_plans_device():
    text = " ".join(page_of(fixtures.make_run()).text)
    assert "1.05x" in text
    assert "% of steps within" in text
    assert "rank 0 27.0 of 30.0 GiB; rank 1 22.0 of 20.0 GiB" in text
    lines = "\n".join(run_lines(fixtures.tiny_details(), fixtures.make_run()))
    assert "Measured against planned: 1.05x" in lines
    assert "rank 0 27.0 of 30.0 GiB; rank 1 22.0 of 20.0 GiB" in lines
    assert "10.0 % of the time waiting for samples" in lines


def test_on_another_device_nothing_is_compared():
    run = fixtures.make_run(device="CPU, x86_64")
    text, lines = " ".join(page_of(run).text), "\n".join(run_lines(fixtures.tiny_details(), run))
    for told in (text, lines):
        assert "so nothing is compared" in told
        assert "Measured against planned" not in told
        assert "of 30.0 GiB" not in told
    assert "1.05x" not in text


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_short_runs_are_drawn_too(num_steps):
    page = page_of(fixtures.make_run(num_steps))
    assert page.headings[0] == "Training run"
    assert run_lines(fixtures.tiny_details(), fixtures.make_run(num_steps))


def test_another_dp_than_planned_is_told():
    lines = run_lines(fixtures.tiny_details(), fixtures.make_run(dp=7))
    assert "dp 7" in lines[1]


def test_what_the_run_held_otherwise_than_planned_is_told():
    details = fixtures.tiny_details()
    training = details.plan.inputs.training

    def told(dtype_of_run, **change):
        plan = replace(details.plan, inputs=replace(details.plan.inputs, training=replace(training, **change)))
        return "\n".join(run_lines(replace(details, plan=plan), fixtures.make_run(dtype=dtype_of_run)))

    assert "The plan's times are for bf16, the run was in float32." in told("float32", dtype="bf16")
    assert "The plan's times are for" not in told("bfloat16", dtype="bf16")
    assert "The plan's memory is for bf16 weights and ZeRO 1" in told("bfloat16", dtype="bf16", zero_stage=1)
    assert "The plan's memory is for" not in told("float32", dtype="fp32", zero_stage=0)


def test_losses_that_are_no_numbers_are_told():
    run = fixtures.make_run(5)
    bad = replace(run, steps=tuple(replace(x, loss=float("nan")) if x.step in (2, 3) else x for x in run.steps))
    for told in (" ".join(page_of(bad).text), "\n".join(run_lines(fixtures.tiny_details(), bad))):
        assert "2 steps had a loss that is no finite number." in told
    assert "no finite number" not in " ".join(page_of(run).text)


def test_steps_of_another_split_are_told_and_not_compared():
    """On two devices at first, then on one: tables and lines are of the one."""
    run = fixtures.make_run(6, pp=1, planned_memory_bytes=(10 * 2**30,))
    steps = [replace(x, peak_memory_bytes=(9 * 2**30,)) if x.step > 4 else x for x in run.steps]
    mixed = replace(run, steps=tuple(steps), starts=(1, 5), others=(1, 2, 3, 4))
    lines = "\n".join(run_lines(fixtures.tiny_details(), mixed))
    assert lines.startswith("2 steps on NVIDIA A100-SXM4-80GB as dp 1 x pp 1")
    assert "4 other steps" in lines
    assert "rank 0 9.0 of 10.0 GiB" in lines
    assert "rank 1" not in lines
    assert "4 other steps" in " ".join(page_of(mixed).text)


def test_fillers_are_told_where_there_are_any():
    run = fixtures.make_run(5)
    filled = replace(run, steps=tuple(replace(x, num_fillers=2 * (x.step in (2, 4))) for x in run.steps))
    sentence = "4 fillers in 2 steps stood for samples that could not be read"
    assert sentence in "\n".join(run_lines(fixtures.tiny_details(), filled))
    assert sentence in " ".join(page_of(filled).text)
    assert "filler" not in "\n".join(run_lines(fixtures.tiny_details(), run))


def test_hostile_device_names_are_text():
    html = html_report(fixtures.tiny_details(), run=fixtures.make_run(device="<script>alert('x')</script> A100"))
    assert "<script>alert" not in html
