"""units.py: sizes, times and counts, read and printed."""

import functools

import numpy as np
import pytest

import trimtab
import trimtab.placement
from trimtab import PlanDetails, SizingResult
from trimtab.units import GIB, format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GiB", 80 * GIB), ("80 GB", 80 * 10**9), ("1.5TiB", 1536 * GIB), ("123", 123), ("7b", 7), (" 2 mib ", 2**21)],
)
def test_sizes_are_read_with_their_unit(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.52 * GIB, "1.52 GiB"), (80 * GIB, "80.0 GiB"), (-3 * 2**20, "-3.00 MiB"), (0, "0 B"), (999, "999 B")],
)
def test_bytes_have_three_digits(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.703, "703 ms"), (12.4, "12.4 s"), (3.5e-5, "35.0 us"), (0, "0 s"), (46850, "13.0 h"), (2e-9, "2 ns")],
)
def test_seconds_have_three_digits(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_counts_are_short() -> None:
    assert [format_count(v) for v in (8_292_166_656, 1_238_054, 512, 40_941)] == ["8.29 B", "1.24 M", "512", "40.9 k"]


# -- specs and results at a prompt -------------------------------------------------------------------------------------


@functools.cache
def details() -> PlanDetails:
    samples = trimtab.SampleTable.of(np.full(64, 1025), np.full(64, 400))
    model, cluster = trimtab.describe("InternVL-Chat-V1-5"), trimtab.parse_cluster("8xA100-80GB")
    return trimtab.make_plan(model, samples, cluster, trimtab.PlanOptions(pp=4, tp=2))


def test_specs_and_results_are_three_lines() -> None:
    made = details()
    packed = trimtab.pack_samples(made.samples, limits=made.packing.limits, oversize="skip")
    placed = trimtab.place(made.model, trimtab.placement.parse_machine("2x80GiB"), trimtab.placement.Workload())
    shown = (made.model, made.samples, made.profile, made.packing, made.schedule, made, packed)
    shown += (made.plan, placed)
    for value in (*shown, SizingResult(table=made.samples)):
        lines = repr(value).splitlines()
        assert len(lines) == 3, lines
        assert max(map(len, lines)) < 500
    assert f"{len(made.model.layers)} layers" in repr(made.model)
    assert f"{made.packing.num_packs:,} packs" in repr(made.packing)


def test_numbers_of_numpy_are_numbers() -> None:
    assert trimtab.PlanOptions(pp=np.int64(2), risk=np.float64(0.1)).pp == 2
