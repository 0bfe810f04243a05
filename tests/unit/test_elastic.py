"""redispatch: the same packs for another number of ranks, none lost or twice, steps kept where they can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.dispatch import dispatch_packs, redispatch
from trimtab.balance.metrics import dist_ratio
from trimtab.errors import PackingError

ORDERS = ["random", "tolerance", "sorted"]


def make_columns(n: int, seed: int = 0) -> np.ndarray:
    r = np.random.default_rng(seed)
    v = r.integers(15, 19, n).astype(float)
    t = 256 * v + r.normal(500, 60, n)
    return np.column_stack([v, t, 11.9 * v + 0.04 * t])


def rows_of(schedule) -> np.ndarray:
    return schedule.table.transpose(0, 2, 1).reshape(-1, schedule.table.shape[1])


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 90),
    st.sampled_from(ORDERS),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_what_is_left_is_run_once_by_any_ranks(n, order, dp, M, new_dp, new_M, first, given_columns, keep_steps):
    columns = make_columns(n)
    schedule = dispatch_packs(columns, dp=dp, num_microbatches=M, order=order)
    first = min(first, schedule.num_steps)
    other = redispatch(
        schedule,
        new_dp,
        num_microbatches=new_M,
        first_step=first,
        columns=columns if given_columns else None,
        keep_steps=keep_steps,
    )
    left = schedule.table[first:]
    flat = rows_of(other).reshape(-1)
    assert sorted(flat[flat >= 0].tolist()) == sorted(left[left >= 0].tolist())
    assert (flat[: (left >= 0).sum()] >= 0).all(), "empty slots come last"
    assert other.table.shape[1] == new_dp
    if keep_steps and other.table.shape[1] * other.table.shape[2] == dp * M and order != "random":
        for before, after in zip(left, other.table, strict=True):
            assert sorted(before.reshape(-1).tolist()) == sorted(after.reshape(-1).tolist())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dp", [1, 2, 4, 8, 16])
def test_steps_keep_their_packs_when_the_ranks_divide_them(order, dp):
    columns = make_columns(800)
    schedule = dispatch_packs(columns, dp=8, num_microbatches=2, order=order)
    other = redispatch(schedule, dp, columns=columns)
    assert other.table.shape == (50, dp, 16 // dp)
    for before, after in zip(schedule.table, other.table, strict=True):
        assert set(before.reshape(-1).tolist()) == set(after.reshape(-1).tolist())
    back = redispatch(other, 8, columns=columns)
    assert [set(step.reshape(-1).tolist()) for step in back.table] == [
        set(step.reshape(-1).tolist()) for step in schedule.table
    ]


@pytest.mark.parametrize("dp", [4, 16, 32, 64])
def test_another_number_of_ranks_is_as_even_as_a_plan_made_for_it(dp):
    columns = make_columns(8192)
    schedule = dispatch_packs(columns, dp=8, order="sorted")
    moved = rows_of(redispatch(schedule, dp, columns=columns))
    fresh = rows_of(dispatch_packs(columns, dp=dp, order="sorted"))
    for d in range(3):
        assert dist_ratio(columns[:, d][moved]) <= 1.1 * dist_ratio(columns[:, d][fresh]) + 1e-4


def test_redispatch_is_deterministic_and_needs_no_columns_to_close_up():
    columns = make_columns(100)
    schedule = dispatch_packs(columns, dp=4, order="tolerance")
    assert (
        redispatch(schedule, 8, columns=columns).table.tobytes()
        == redispatch(schedule, 8, columns=columns).table.tobytes()
    )
    assert rows_of(redispatch(schedule, 8)).reshape(-1)[:100].tolist() == rows_of(schedule).reshape(-1).tolist()


def test_rows_of_a_random_step_are_alike_and_the_step_is_the_shuffles():
    columns = make_columns(512)
    schedule = dispatch_packs(columns, dp=8, num_microbatches=8)
    assert [sorted(step.reshape(-1).tolist()) for step in schedule.table] == np.arange(512).reshape(8, 64).tolist()
    plain = np.arange(512).reshape(-1, 8)
    for d in range(3):
        assert dist_ratio(columns[:, d][rows_of(schedule)]) < 0.7 * dist_ratio(columns[:, d][plain])


def test_ranks_and_steps_that_do_not_exist_are_refused():
    schedule = dispatch_packs(make_columns(16), dp=4)
    with pytest.raises(PackingError, match="dp 0 x None micro-batches leaves no place for a pack: give 1 or more"):
        redispatch(schedule, 0)
    with pytest.raises(
        PackingError, match=r"first_step 5 is not a step of 4: give 0 \(all of them\) to 4 \(none left\)"
    ):
        redispatch(schedule, 2, first_step=5)
