"""Tests of balance/metrics.py: the fewest packs that samples need, against every packing of a few of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.metrics import counted_columns, lower_bound_packs, rounded_sizes


def fewest(sizes: list[tuple[int, int]], limits: tuple[int, int]) -> int:
    """By trying everything: each sample into one of the packs so far, or a new one."""
    best = len(sizes)

    def go(i: int, packs: list[tuple[int, int]]) -> None:
        nonlocal best
        if len(packs) >= best:
            return
        if i == len(sizes):
            best = len(packs)
            return
        v, t = sizes[i]
        for p, (pv, pt) in enumerate(packs):
            if pv + v <= limits[0] and pt + t <= limits[1]:
                go(i + 1, [*packs[:p], (pv + v, pt + t), *packs[p + 1 :]])
        go(i + 1, [*packs, (v, t)])

    go(0, [])
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=7))
def test_no_packing_has_fewer(sizes):
    assert lower_bound_packs(np.array(sizes), (9, 60)) <= fewest(sizes, (9, 60))


@pytest.mark.parametrize(
    ("sizes", "limits", "bound"),
    [
        ([[5, 0], [5, 0], [5, 0], [3, 0], [1, 0]], (9, 100), 3),  # fives share no pack
        ([[4, 0], [6, 0], [6, 0], [4, 0], [4, 0]], (10, 100), 3),  # 6 + 4 fills a pack: 24 of 10
        ([[4, 0], [4, 0], [4, 0], [7, 0], [7, 0]], (10, 100), 4),  # beside a 7 no 4 has room
        ([[19, 100]], (9, 1000), 3),  # above a limit: by its volume
        ([[1, 67], [1, 67], [1, 67]], (9, 100), 3),
        ([[8, 0]] + [[2, 0]] * 5, (9, 100), 3),  # an 8 fills a pack: 19 of 9
        ([[0, 0]], (9, 100), 0),
    ],
)
def test_cases_by_hand(sizes, limits, bound):
    assert lower_bound_packs(np.array(sizes), limits) == bound


def test_nothing_needs_no_pack():
    assert lower_bound_packs(np.zeros((0, 2), np.int64), (9, 100)) == 0


def test_sizes_that_share_packs_freely_are_not_rounded():
    assert rounded_sizes(np.array([1, 2, 3, 4]), 9) is None
    assert counted_columns(np.array([[1, 10], [2, 20]]), (9, 100)).shape == (2, 2)


def test_large_sizes_are_sorted_and_not_counted():
    sizes = np.array([5, 5, 5, 3, 1])
    wide = rounded_sizes(sizes * 10**9, 9 * 10**9)
    assert wide is not None
    assert (wide == rounded_sizes(sizes, 9) * 1e9).all()
