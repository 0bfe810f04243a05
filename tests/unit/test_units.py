"""units.py: sizes, times and counts, read and printed."""

import pytest

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
