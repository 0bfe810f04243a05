"""The Chrome trace: valid events, no overlap on a track, the simulated times."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import report_fixtures as fixtures

from trimtab.partition.simulate import StageTimes, simulate
from trimtab.report.trace import chrome_trace

MAKERS = [
    *fixtures.MAKERS.values(),
    lambda: fixtures.crowded_details(num_stages=8, num_microbatches=64, num_packs=64),
]
CATEGORIES = {"F": "forward", "B": "backward", "W": "weight gradients"}


def _nanoseconds(microseconds: float) -> int:
    """Exact: every time in the file has at most three decimals."""
    whole = round(microseconds * 1000)
    assert whole / 1000 == microseconds
    return whole


def with_schedule(schedule, chunks):
    """A plan whose step is that of another schedule."""
    seconds = np.random.default_rng(0).uniform(1e-4, 1e-2, (4, 4 * chunks, 8))
    times = StageTimes(
        forward_s=seconds[0],
        backward_s=seconds[1] + seconds[2],
        weight_s=seconds[2],
        send_forward_s=seconds[3],
        send_backward_s=seconds[3],
    )
    details = fixtures.internvl_details()
    line = simulate(times, schedule=schedule, num_devices=4)
    return replace(details, variants=(details.variants[0], replace(details.variants[-1], timeline=line)))


WITH_SCHEDULES = [
    partial(with_schedule, schedule, chunks)
    for schedule, chunks in (("ZBH1", 1), ("ZBVZeroBubble", 2), ("Interleaved1F1B", 2))
]


@pytest.mark.parametrize("make", [*MAKERS, *WITH_SCHEDULES])
def test_blocks_of_one_track_never_overlap(make):
    tracks = defaultdict(list)
    for event in json.loads(chrome_trace(make()))["traceEvents"]:
        if event["ph"] == "X":
            start = _nanoseconds(event["ts"])
            tracks[event["pid"], event["tid"]].append((start, start + _nanoseconds(event["dur"])))
    assert tracks
    for spans in tracks.values():
        spans.sort()
        assert all(spans[i][1] <= spans[i + 1][0] for i in range(len(spans) - 1))
        assert all(start <= end for start, end in spans)


@pytest.mark.parametrize("make", [*MAKERS, *WITH_SCHEDULES])
def test_every_block_is_one_event_with_its_times(make):
    details = make()
    trace = json.loads(chrome_trace(details))
    for process, variant in enumerate((details.variants[0], details.variants[-1]), start=1):
        line = variant.timeline
        want = {
            (f"{'FBW'[k]}{m}", int(s)): (a * 1e6, (b - a) * 1e6)
            for s, m, k, a, b in zip(line.stage, line.microbatch, line.kind, line.start_s, line.end_s, strict=True)
        }
        events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == process]
        assert len(events) == len(line.stage) == len(want)
        for event in events:
            ts, dur = want.pop((event["name"], event["args"]["stage"]))
            assert event["ts"] == pytest.approx(ts, abs=0.002)
            assert event["dur"] == pytest.approx(dur, abs=0.002)
            assert event["tid"] == line.device_of(event["args"]["stage"]) + 1
            assert event["args"]["microbatch"] == int(event["name"][1:])
            assert event["cat"] == CATEGORIES[event["name"][0]]


def test_processes_and_tracks_are_named_once():
    details = fixtures.internvl_details()
    events = json.loads(chrome_trace(details))["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [
        "Baseline: packs random, padded, 1 a batch; stages equal layers",
        "Plan: packs balanced, random order; stages balanced",
    ]
    tracks = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert tracks == [(p, d + 1, f"rank {d}") for p in (1, 2) for d in range(4)]


def test_hostile_names_leave_the_trace_readable():
    text = chrome_trace(fixtures.hostile_details())
    text.encode("ascii")
    assert "\\u001b" not in text
    assert "\\ud800" not in text
