"""Drawing helpers: round ticks, bounded timelines, columns and dots."""

import math
import re

import numpy as np
import pytest
import report_fixtures as fixtures
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.partition.simulate import Timeline
from trimtab.report import html as drawing
from trimtab.report.table import count_scale, memory_scale


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-9, 1e15), st.integers(2, 12))
def test_ticks_are_few_round_and_inside(limit, max_ticks):
    ticks = drawing.nice_ticks(limit, max_ticks=max_ticks)
    assert ticks[0] == 0
    assert 1 <= len(ticks) <= max_ticks
    assert ticks[-1] <= limit * (1 + 1e-9)
    assert np.allclose(np.diff(ticks), ticks[1] if len(ticks) > 1 else 0)
    if len(ticks) > 1:
        mantissa = ticks[1] / 10.0 ** math.floor(math.log10(ticks[1]) + 1e-9)
        assert min(abs(mantissa - m) for m in (1, 2, 2.5, 5, 10)) < 1e-6
    assert max_ticks < 5 or len(ticks) >= 3  # never an almost empty axis


def test_ticks_of_nothing_are_a_single_zero():
    assert drawing.nice_ticks(0.0) == [0.0]
    assert drawing.nice_ticks(float("nan")) == [0.0]


def test_axis_labels_are_round_in_the_unit_that_is_shown():
    span = 93.0 * 2**30
    labels = re.findall(r'class="tick"[^>]*>([^<]+)<', drawing.axis(span, memory_scale([span]), label="GiB", y=0))
    assert labels == ["0", "20", "40", "60", "80", "GiB"]


def test_first_and_last_tick_stay_inside_the_drawing():
    ticks = drawing.axis(100.0, count_scale([100.0]), label="x", y=0)
    assert '<text class="tick" x="0%" y="13" text-anchor="start">0<' in ticks
    assert '<text class="tick" x="100%" y="13" text-anchor="end">100<' in ticks


def test_every_block_is_drawn_where_it_runs():
    line = fixtures.internvl_details().variants[-1].timeline
    span = 2 * line.makespan_s
    drawn = drawing.timeline(line, span_s=span, title="t", description="d")
    boxes = re.findall(r'<rect class="([fb])[012]" x="([\d.]+)%" y="([\d.]+)" width="([\d.]+)%"', drawn)
    assert len(boxes) == len(line.stage)
    row = drawing.timeline_rows(line.num_devices)
    got = sorted((int(float(y) // row), float(x), float(w), kind) for kind, x, y, w in boxes)
    want = sorted(
        (int(s) % line.num_devices, 100 * a / span, 100 * (b - a) / span, "fb"[k])
        for s, a, b, k in zip(line.stage, line.start_s, line.end_s, line.kind, strict=True)
    )
    for one, other in zip(got, want, strict=True):
        assert one[0] == other[0]
        assert one[1:3] == pytest.approx(other[1:3], abs=0.0051)
        assert one[3] == other[3]


def test_numbers_stand_only_in_blocks_with_room_for_them():
    line = fixtures.internvl_details().variants[-1].timeline
    drawn = drawing.timeline(line, span_s=line.makespan_s, title="t", description="d")
    labelled = re.findall(r'width="([\d.]+)%" height="[\d.]+" data-t="([FB])(\d+)[^"]*"/><text[^>]*>(\d+)<', drawn)
    assert labelled
    assert all(number == shown and float(width) >= 1.9 for width, _, number, shown in labelled)


def test_shades_tell_heavy_micro_batches_from_light_ones():
    spent = np.array([1.0, 1.0, 1.0, 2.0, 0.5])
    line = Timeline(
        stage=np.zeros(5, np.int32),
        microbatch=np.arange(5, dtype=np.int32),
        kind=np.array([0, 1, 0, 1, 0], np.int8),
        start_s=np.cumsum(spent) - spent,
        end_s=np.cumsum(spent),
        num_devices=1,
        makespan_s=5.5,
    )
    assert drawing.block_looks(line) == ["f1", "b1", "f1", "b2", "f0"]


@pytest.fixture(scope="module")
def crowded() -> Timeline:
    return fixtures.crowded_details(num_packs=64).variants[0].timeline


def test_a_crowded_timeline_is_bounded_and_hides_no_idle_time(crowded):
    """The area of each device's row is its busy time."""
    drawn = drawing.timeline(crowded, span_s=crowded.makespan_s, title="t", description="d")
    assert len(drawn) < 150_000
    row = drawing.timeline_rows(crowded.num_devices)
    busy = []
    for bottom, steps in re.findall(r'<path class="b1" d="M0 ([\d.]+)([^Z]*)V[\d.]+Z"', drawn):
        heights = float(bottom) - np.array([float(y) for y in re.findall(r"V([\d.]+)h1", steps)])
        busy.append(heights.mean() / (row - 2.0))
    np.testing.assert_allclose(busy, crowded.busy_s() / crowded.makespan_s, atol=0.01)


def test_only_what_passes_the_cap_is_outlined():
    parts = [("state", "weights", 60.0), ("saved", "activations", 30.0)]
    bar = drawing.Bar(name="rank 3", parts=parts, text="90")
    where = {"span": 100.0, "y": 0, "height": 10, "show": lambda value: f"{value:g} GiB"}
    inside, outside = (drawing.stacked_bar(bar, cap=cap, **where) for cap in (95.0, 80.0))
    assert "over" not in inside
    assert '<rect class="over" x="80%" y="0" width="10%"' in outside
    assert 'data-t="rank 3, activations: 30 GiB"' in inside
