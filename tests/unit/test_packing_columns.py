"""pack_columns: the packs of pack_samples for arrays of any size, in shards, the same for any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.aim import NUMBERS
from trimtab.balance.columns import pack_columns
from trimtab.balance.cost import LinearCost, price_columns
from trimtab.balance.packing import pack_samples
from trimtab.errors import PackingError
from trimtab.specs import SampleTable

LIMITS = (9, 4096)
COST = LinearCost(patches=11.9, tokens=0.0398, tokens_sq=5.9e-7).of


def draw_columns(n: int, seed: int = 0) -> list[np.ndarray]:
    r = np.random.default_rng(seed)
    v = r.integers(0, 10, n).astype(np.int32)
    return [v, np.minimum(4096, r.lognormal(5.5, 1.0, n).astype(np.int32) + 200 * v)]


def assert_sound(packed, columns, *, limits, dp, may_exceed=()) -> None:
    n = len(columns[0])
    seen = np.bincount(np.concatenate([packed.indices, packed.oversize]).astype(np.int64), minlength=n)
    assert (seen == 1).all(), "every sample exactly once"
    assert packed.offsets[0] == 0
    assert (np.diff(packed.offsets) > 0).all(), "no pack is empty"
    for p in range(packed.num_packs):
        rows = packed.pack(p)
        fits = all(column[rows].sum() <= limit for column, limit in zip(columns, limits, strict=True))
        assert fits or (len(rows) == 1 and int(rows[0]) in may_exceed), "a limit is broken"
    whole = -(-packed.num_packs // dp) * dp
    assert packed.num_packs == whole or whole > len(packed.indices), "ranks get equally many packs"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 50), st.integers(0, 30)), max_size=60),
    st.integers(1, 5),
    st.integers(1, 80),
    st.sampled_from(["alone", "skip"]),
    st.sampled_from(["random", "tolerance", "sorted"]),
    st.sampled_from([np.uint8, np.int32, np.int64]),
)
def test_three_columns_in_any_shards_are_packed_once_within_the_limits(sizes, dp, shard, oversize, order, dtype):
    columns = [np.array([row[d] for row in sizes], dtype) for d in range(3)]
    limits = (5, 45, 30)
    large = {i for i, row in enumerate(sizes) if any(s > q for s, q in zip(row, limits, strict=True))}
    packed = pack_columns(columns, limits=limits, dp=dp, oversize=oversize, order=order, shard_samples=shard, seed=7)
    wide = [column.astype(np.int64) for column in columns]
    if shard >= len(sizes):
        assert_sound(packed, wide, limits=limits, dp=dp, may_exceed=large)
    else:  # shards of less than dp samples may end in an incomplete row
        assert_sound(packed, wide, limits=limits, dp=1, may_exceed=large)
    assert set(packed.oversize.tolist()) == (large if oversize == "skip" else set())


def test_one_shard_has_the_packs_of_pack_samples():
    v, t = draw_columns(3000)
    table = SampleTable.of(v, t)
    for order in ("random", "sorted"):
        for fill in (None, 0.985):
            whole = pack_samples(table, limits=LIMITS, dp=8, cost=COST(v, t), seed=3, epoch=2, fill=fill, order=order)
            packed = pack_columns([v, t], limits=LIMITS, dp=8, cost=COST, seed=3, epoch=2, fill=fill, order=order)
            in_order = whole.schedule.table.transpose(0, 2, 1).reshape(-1)
            for p in range(packed.num_packs):
                q = in_order[p]
                first, last = whole.packing.offsets[q : q + 2]
                assert packed.pack(p).tolist() == whole.packing.indices[first:last].tolist()


@pytest.mark.parametrize("order", ["random", "tolerance"])
def test_threads_files_and_ways_to_give_the_cost_change_nothing(order, tmp_path):
    columns = draw_columns(6000)
    arguments = {"limits": LIMITS, "dp": 8, "order": order, "shard_samples": 2000, "fill": 0.98}
    one = pack_columns(columns, cost=COST, **arguments)
    assert_sound(one, columns, limits=LIMITS, dp=8)
    assert one.indices.dtype == np.int32
    for i, column in enumerate(columns):
        np.save(tmp_path / f"{i}.npy", column)
    mapped = [np.load(tmp_path / f"{i}.npy", mmap_mode="r") for i in range(2)]
    others = (
        pack_columns(columns, cost=COST, num_threads=2, **arguments),
        pack_columns(columns, cost=COST(*columns), num_threads=3, **arguments),
        pack_columns(mapped, cost=COST, num_threads=2, **arguments),
    )
    for other in others:
        assert other.indices.tobytes() == one.indices.tobytes()
        assert other.offsets.tobytes() == one.offsets.tobytes()
    again = pack_columns(columns, cost=COST, epoch=1, **arguments)
    assert again.indices.tobytes() != one.indices.tobytes()


def test_shards_cost_little_balance_and_keep_the_shuffle():
    columns = draw_columns(15_000)
    packed = pack_columns(columns, limits=LIMITS, dp=8, cost=COST, shard_samples=5000, fill=0.98)
    whole = pack_columns(columns, limits=LIMITS, dp=8, cost=COST, fill=0.98)
    assert packed.num_packs <= 1.02 * whole.num_packs
    # rows of the data set are spread over the whole run: a third of each third of the packs
    place = np.empty(15_000)
    place[packed.indices] = np.arange(15_000)
    thirds = place.reshape(3, 5000).mean(axis=1) / 15_000
    assert abs(thirds - 0.5).max() < 0.02


def test_the_fill_is_chosen_once_for_all_shards():
    columns = draw_columns(3000)
    arguments = {"limits": (36, 16_384), "dp": 4, "shard_samples": 1000}
    chosen = pack_columns(columns, **arguments)
    assert any(
        pack_columns(columns, fill=fill, **arguments).indices.tobytes() == chosen.indices.tobytes()
        for fill in (NUMBERS.tight_fill, NUMBERS.loose_fill)
    )


def test_packs_lie_in_the_order_in_which_they_run():
    columns = draw_columns(2000)
    packed = pack_columns(columns, limits=LIMITS, dp=4)
    table = packed.schedule(num_microbatches=3).table
    assert table[1, 2].tolist() == [14, 18, 22]
    packing = packed.packing()
    assert packing.num_packs == packed.num_packs
    assert packing.indices.dtype == np.int64


def test_without_a_cost_a_column_counts_as_a_share_of_its_limit():
    assert price_columns(None, [np.array([2, 4]), np.array([6, 3])], (4, 3)).tolist() == [2.5, 2.0]


def test_all_problems_of_columns_are_named_at_once():
    with pytest.raises(PackingError) as error:
        pack_columns([np.array([1.5]), np.array([-1])], limits=(3, 4), dp=0, fill=2.0, cost=lambda v: v)
    text = str(error.value)
    assert "column 0 holds float64: give whole numbers, limits are exact" in text
    assert "column 1 holds a negative size: give sizes from 0" in text
    assert "dp 0 packs nothing: give 1 or more" in text
    assert "fill 2.0 is not a share of the packs' room" in text
    assert "cost is not a function of 2 columns: give one that takes an array for each limit" in text
    with pytest.raises(PackingError, match=r"limits \(3,\) do not suit 2 columns: give one per column"):
        pack_columns([np.array([1]), np.array([1])], limits=(3,))
    with pytest.raises(PackingError, match=r"columns have shapes .*: give one number per sample in each"):
        pack_columns([np.array([1]), np.array([1, 2])], limits=(3, 3))
    with pytest.raises(PackingError, match=r"cost has shape \(3,\) for 1 samples: give one number per sample"):
        pack_columns([np.array([1])], limits=(3,), cost=np.ones(3))
    with pytest.raises(PackingError, match=r"cost gave shape \(\) for 2 samples: give one number per sample"):
        pack_columns([np.array([1, 2])], limits=(3,), cost=lambda v: v.sum())
    with pytest.raises(PackingError, match="oversize 'x' is unknown"):
        pack_columns([np.array([1])], limits=(3,), oversize="x")
    with pytest.raises(PackingError, match="num_threads 0 packs nothing: give 1 or more"):
        pack_columns([np.array([1])], limits=(3,), num_threads=0)


def test_oversize_rows_are_listed_and_counted():
    with pytest.raises(PackingError) as error:
        pack_columns([np.full(99, 5), np.arange(99)], limits=(4, 100))
    text = str(error.value)
    assert text.startswith("99 of 99 samples do not fit a pack of (4, 100): raise the limits, or choose oversize")
    assert "sample 3: (5, 3)" in text
    assert "... and 80 more of the same input" in text
