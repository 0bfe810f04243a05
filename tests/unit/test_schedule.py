"""schedule_packs: every pack in one slot, the shuffle kept by random order, alike packs together when asked."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.metrics import dist_ratio
from trimtab.balance.schedule import BLOCK_STEPS, group_alike, schedule_packs


def make_columns(n: int, seed: int = 0) -> np.ndarray:
    r = np.random.default_rng(seed)
    v = r.integers(15, 19, n).astype(float)
    t = 256 * v + r.normal(500, 60, n)
    return np.column_stack([v, t, 11.9 * v + 0.04 * t])


def rows_of(schedule) -> np.ndarray:
    return schedule.table.transpose(0, 2, 1).reshape(-1, schedule.table.shape[1])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 90), st.integers(1, 9), st.integers(1, 4), st.sampled_from(["random", "sorted"]), st.integers(1, 4)
)
def test_every_pack_has_one_slot_and_empty_ones_come_last(n, dp, num_microbatches, order, block_steps):
    schedule = schedule_packs(
        make_columns(n), dp=dp, num_microbatches=num_microbatches, order=order, block_steps=block_steps
    )
    assert schedule.order == order
    assert schedule.table.shape == (-(-n // (dp * num_microbatches)), dp, num_microbatches)
    flat = rows_of(schedule).reshape(-1)
    assert sorted(flat[flat >= 0].tolist()) == list(range(n))
    assert (flat[:n] >= 0).all()


def test_random_order_leaves_the_shuffle_as_it_is():
    assert rows_of(schedule_packs(make_columns(22), dp=4)).reshape(-1)[:22].tolist() == list(range(22))
    schedule = schedule_packs(np.empty((22, 0)), dp=4, num_microbatches=2)  # nothing to tell packs apart by
    assert schedule.table[0].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert rows_of(schedule).reshape(-1)[:22].tolist() == list(range(22))
    assert schedule.table[-1].tolist() == [[16, 20], [17, 21], [18, -1], [19, -1]]


def test_sorted_is_more_even_than_random_in_every_column():
    columns = make_columns(4096)
    random, ordered = (rows_of(schedule_packs(columns, dp=8, order=order)) for order in ("random", "sorted"))
    for d in range(3):
        assert dist_ratio(columns[:, d][ordered]) < 0.1 * dist_ratio(columns[:, d][random])


def test_packs_stay_within_their_block():
    dp, block_steps = 4, 8
    rows = rows_of(schedule_packs(make_columns(320), dp=dp, order="sorted", block_steps=block_steps))
    for start in range(0, len(rows), block_steps):
        assert sorted(rows[start : start + block_steps].reshape(-1)) == list(
            range(start * dp, (start + block_steps) * dp)
        )


def test_ranks_and_rows_of_grouped_packs_are_shuffled():
    # without it rank 0 would always get the lightest pack, and training would go from light to heavy
    columns = make_columns(8 * BLOCK_STEPS)
    rows = rows_of(schedule_packs(columns, dp=8, order="sorted", seed=1))
    cost = columns[:, 2][rows]
    assert abs(cost.mean(axis=0) / cost.mean() - 1).max() < 0.002
    means = cost.mean(axis=1)
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.12
    other = rows_of(schedule_packs(columns, dp=8, order="sorted", seed=2))
    assert (other != rows).any()


def test_ranks_of_alike_packs_are_shuffled_within_steps_of_random_order():
    """Rows are made of neighbours by size: in that order rank 0 would get the lightest pack of nearly every row."""
    columns = make_columns(8 * BLOCK_STEPS)
    schedule = schedule_packs(columns, dp=8, num_microbatches=4, seed=1)
    # every step keeps its packs of the shuffle
    assert np.array_equal(np.sort(schedule.table.reshape(-1, 32)), np.arange(len(columns)).reshape(-1, 32))
    cost = columns[:, 2][rows_of(schedule)]
    # spread of the mean place, were every pack of a row as likely on any rank: 2.29 / sqrt(512) = 0.10
    place = cost.argsort(axis=1).argsort(axis=1).mean(axis=0)
    assert abs(place - 3.5).max() < 0.35
    assert (rows_of(schedule_packs(columns, dp=8, num_microbatches=4, seed=2)) != rows_of(schedule)).any()


def test_group_alike_finds_rows_of_equal_packs():
    r = np.random.default_rng(3)
    kinds = np.repeat(np.arange(16), 8)
    values = np.column_stack([kinds % 4 + 1.0, kinds // 4 + 1.0])
    packs = r.permutation(128)
    group_alike(values, packs, 8)
    assert (kinds[packs].reshape(-1, 8) == kinds[packs].reshape(-1, 8)[:, :1]).all()


def test_rows_of_a_random_step_are_alike_and_the_step_is_the_shuffles():
    columns = make_columns(512)
    schedule = schedule_packs(columns, dp=8, num_microbatches=8)
    assert [sorted(step.reshape(-1).tolist()) for step in schedule.table] == np.arange(512).reshape(8, 64).tolist()
    plain = np.arange(512).reshape(-1, 8)
    for d in range(3):
        assert dist_ratio(columns[:, d][rows_of(schedule)]) < 0.7 * dist_ratio(columns[:, d][plain])


def test_equal_blocks_are_not_shuffled_alike():
    packs = np.tile(np.random.default_rng(0).random((64, 3)), (4, 1))
    table = schedule_packs(packs, dp=4, order="sorted", block_steps=16).table
    blocks = table.reshape(4, 64) - 64 * np.arange(4)[:, None]
    assert [sorted(block) for block in blocks.tolist()] == [list(range(64))] * 4
    assert len({tuple(block) for block in blocks.tolist()}) == 4
