"""The terminal tables: they fit, they say what the plan says, and names cannot steer the terminal."""

import io
from dataclasses import replace

import pytest
import report_fixtures as fixtures
from rich.cells import cell_len
from rich.console import Console

import export_cases
from trimtab.report.html import html_report
from trimtab.report.plan_tables import print_plan
from trimtab.report.table import clean, describe_layers, describe_recompute, memory_scale, signed_percent, time_scale
from trimtab.specs import RecomputeChoice, Stage


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("make", fixtures.MAKERS.values())
def test_every_line_fits_the_terminal(make, width):
    text = fixtures.plan_text(make(), width=width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert text.isprintable() or set(text) - {"\n"} == {c for c in text if c.isprintable()}


@pytest.mark.parametrize("make", list(fixtures.MAKERS.values())[:-1])
def test_a_narrow_terminal_shows_rows_as_lists_and_breaks_no_word(make):
    wide, narrow = (fixtures.plan_text(make(), width=width) for width in (160, 60))
    assert max(map(len, narrow.splitlines())) <= 60
    assert "Variant     " in narrow
    assert set(narrow.split()) >= {word for word in wide.split() if word.isalnum() and not word.istitle()}


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_figure_is_cut_off(width):
    details = fixtures.internvl_details()
    text = fixtures.plan_text(details, width=width)
    rows, plan = details.plan.estimates.variants, details.variants[-1]
    step, stage = time_scale(row.step_ms / 1e3 for row in rows), time_scale(plan.stage_backward_s)
    for row in rows:
        assert f" {step.number(row.step_ms / 1e3)} " in text.replace("\n", " ")
        assert f" {row.peak_memory_gib:.1f}" in text
    for i, memory in enumerate(plan.memory):
        assert f" {stage.number(plan.stage_forward_s[i])} " in text.replace("\n", " ")
        assert f" {memory.total_bytes / 2**30:.1f}" in text
    assert "too much" in text
    assert "36,864 patches and 8,192 tokens" in text.replace("\n", " ")


def test_the_summary_is_shown_whole():
    made = fixtures.internvl_details()
    plan = replace(made.plan, summary="word " * 200 + "end.")
    details = replace(made, plan=plan)
    text = " ".join(fixtures.plan_text(details, width=100).split())
    assert plan.summary in text
    assert plan.summary in html_report(details)


def test_colours_are_for_terminals_only():
    details = fixtures.internvl_details()
    assert "\x1b" not in fixtures.plan_text(details)
    stream = io.StringIO()
    print_plan(details, Console(file=stream, width=100, force_terminal=True, color_system="standard"))
    assert "\x1b[" in stream.getvalue()


def test_names_are_neither_markup_nor_escapes():
    details = fixtures.hostile_details()
    stream = io.StringIO()
    print_plan(details, Console(file=stream, width=100, force_terminal=True, color_system="standard"))
    assert "\x1b[31mred" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()
    assert "[bold]" in fixtures.plan_text(details)


def test_of_many_stages_the_first_and_the_last_are_shown():
    text = fixtures.plan_text(fixtures.crowded_details(num_microbatches=2, num_packs=64))
    assert "49 more stages" in text
    assert "language norm, head" in text


def test_layers_of_a_stage_read_as_a_sentence():
    model = export_cases.make_model(4, 3)
    whole = Stage(index=0, start=0, stop=len(model.layers))
    assert describe_layers(model, whole) == (
        "patch embedding, vision blocks 0–3, projector, token embedding, language blocks 0–2, language norm, head"
    )
    assert describe_layers(model, Stage(index=1, start=2, stop=3)) == "vision block 1"
    assert describe_layers(model, Stage(index=1, start=3, stop=9)) == (
        "vision blocks 2–3, projector, token embedding, language blocks 0–1"
    )


def test_recompute_is_counted_by_tier():
    choices = (RecomputeChoice(tier="full", layers=(0, 1, 2)), RecomputeChoice(tier="selective", layers=(3,)))
    assert describe_recompute(Stage(index=0, start=0, stop=10, recompute=choices)) == "full 3, selective 1 of 10"
    assert describe_recompute(Stage(index=0, start=0, stop=10)) == "none"


def test_a_column_has_one_unit_and_one_number_of_digits():
    scale = time_scale([0.703, 0.0124])
    assert [scale.text(x) for x in (0.703, 0.0124)] == ["703 ms", "12 ms"]
    assert memory_scale([2**30 * 9.5]).text(2**30 * 1.25) == "1.25 GiB"
    assert time_scale([0.0]).text(-0.0) == "0 µs"
    assert [signed_percent(x) for x in (0.02, -0.007, -0.0001)] == ["+2.0 %", "−0.7 %", "0.0 %"]


def test_data_of_one_source_has_no_shuffle_figure():
    details = fixtures.internvl_details()
    balance = replace(details.plan.estimates.balance, shuffle_chi2=None)
    plan = replace(details.plan, estimates=replace(details.plan.estimates, balance=balance))
    assert "shuffle chi2" in fixtures.plan_text(details)
    assert "shuffle chi2" not in fixtures.plan_text(replace(details, plan=plan))
    assert "shuffle chi2" not in html_report(replace(details, plan=plan))
    assert f"{details.plan.estimates.balance.shuffle_chi2:.3f}" in fixtures.plan_text(details)


def test_cleaning_keeps_one_printable_line():
    assert clean("a\n\tb  c") == "a b c"
    assert clean("\x1b[2J\x07\u202ex\ud800\x85") == "\ufffd[2J\ufffd\ufffdx\ufffd"
    assert clean("x" * 500, limit=10) == "x" * 9 + "…"
    assert clean("x" * 10, limit=10) == "x" * 10
    assert clean("日本語 é") == "日本語 é"
    assert len(clean(" " * 10_000 + "x", limit=10)) <= 10
