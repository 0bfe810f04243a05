"""Tests of balance/ (aim, balanced, cost, groups, packing).

pack_samples: every sample once, limits kept, whole steps, the same bits each time; quality on real lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusals import refused
from trimtab import SampleTable, compiled
from trimtab.balance import balanced, packing, stream, window
from trimtab.balance.cost import PATCH_COST, TILE_COST, LinearCost, default_cost
from trimtab.balance.packing import METHODS, PADDED_METHODS, pack_samples, report_packing
from trimtab.balance.schedule import Groups, insert_singles, split_packs
from trimtab.errors import PackingError


def make_table(patches, tokens, *, source=None, unit="tiles", ids=None) -> SampleTable:
    src = np.zeros(len(patches), np.int32) if source is None else np.array(source, np.int32)
    names = tuple(f"set{i}" for i in range(int(src.max(initial=0)) + 1))
    return SampleTable.of(patches, tokens, source=src, source_names=names, patch_unit=unit, ids=ids)


def random_table(n: int, seed: int, max_patches: int = 9, max_tokens: int = 4096) -> SampleTable:
    r = np.random.default_rng(seed)
    v = r.integers(0, max_patches + 1, n)
    t = np.minimum(max_tokens, (r.lognormal(5.5, 1.0, n)).astype(np.int64) + 200 * v)
    return make_table(v, t, source=r.integers(0, 3, n))


def native_table(n: int, seed: int) -> SampleTable:
    """Heavy-tailed sizes without small integers to lean on: text, one image, several, small ones, video."""
    r = np.random.default_rng(seed)
    kind = r.choice(5, n, p=[0.15, 0.5, 0.15, 0.15, 0.05])
    medians = np.array([1.0, 2500, 9000, 700, 15000])[kind]
    patches = np.where(kind == 0, 0, medians * np.exp(r.normal(0, 0.8, n))).astype(np.int64) // 4 * 4
    text = np.exp(r.normal(np.log(250), 1.1, n)).astype(np.int64) + 20
    return make_table(patches, patches // 4 + text, source=kind, unit="patches")


def assert_sound(table: SampleTable, result, *, limits, dp: int, num_microbatches: int = 1, may_exceed=()) -> None:
    packing, schedule = result.packing, result.schedule
    seen = np.bincount(np.concatenate([packing.indices, packing.oversize]), minlength=len(table))
    assert (seen == 1).all(), "every sample exactly once"
    assert (np.diff(packing.offsets) > 0).all(), "no pack is empty"
    for p in range(packing.num_packs):
        rows = packing.indices[packing.offsets[p] : packing.offsets[p + 1]]
        fits = table.num_patches[rows].sum() <= limits[0] and table.num_tokens[rows].sum() <= limits[1]
        assert fits or (len(rows) == 1 and int(rows[0]) in may_exceed), "a limit is broken"
    slots = schedule.table
    assert slots.shape[1:] == (dp, num_microbatches)
    assert sorted(slots[slots >= 0].tolist()) == list(range(packing.num_packs)), "every pack has one slot"
    rows = slots.transpose(0, 2, 1).reshape(-1, dp)
    counts = (rows >= 0).sum(axis=1)
    assert (np.diff(counts) <= 0).all(), "empty slots are at the end"
    assert (counts[counts > 0][:-1] == dp).all(), "only the last row may be short"
    whole = -(-packing.num_packs // dp) * dp
    assert packing.num_packs == whole or whole > len(packing.indices), (
        "ranks get equally many packs where there are samples enough"
    )


sizes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=60)


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 9), st.integers(1, 3), st.sampled_from(["balanced", "isf"]), st.integers(0, 2**40))
def test_any_input_is_packed_once_within_the_limits(pairs, dp, num_microbatches, method, seed):
    table = make_table(*zip(*pairs, strict=True))
    limits = (9, 60)
    result = pack_samples(table, limits=limits, dp=dp, num_microbatches=num_microbatches, method=method, seed=seed)
    assert_sound(table, result, limits=limits, dp=dp, num_microbatches=num_microbatches)
    report = report_packing(table, result)
    assert report.num_packs >= report.lower_bound_packs
    assert report.num_over_limit == 0


@settings(max_examples=20, deadline=None)
@given(sizes, st.integers(1, 5), st.sampled_from(METHODS), st.sampled_from(["alone", "skip"]), st.integers(0, 99))
def test_oversize_samples_are_alone_or_listed(pairs, dp, method, oversize, seed):
    table = make_table(*zip(*pairs, strict=True))
    limits = (5, 40)
    large = {i for i, (v, t) in enumerate(pairs) if v > 5 or t > 40}
    result = pack_samples(table, limits=limits, dp=dp, method=method, oversize=oversize, seed=seed)
    if method in PADDED_METHODS:
        assert sorted(result.packing.indices.tolist()) == list(range(len(pairs)))
        return
    assert_sound(table, result, limits=limits, dp=dp, may_exceed=large)
    assert set(result.packing.oversize.tolist()) == (large if oversize == "skip" else set())


@pytest.mark.parametrize(
    ("patches", "tokens", "limits", "dp"),
    [
        ([3], [10], (9, 90), 1),  # one sample
        ([3], [10], (9, 90), 8),  # fewer samples than ranks
        ([0] * 50, [7] * 50, (9, 90), 4),  # text only
        ([0] * 300, [0] * 300, (9, 90), 4),  # nothing at all in them
        ([9] * 20, [90] * 20, (9, 90), 8),  # every sample fills a pack
        ([2] * 100, [20] * 100, (9, 90), 8),  # all equal
        ([2] * 100, [20] * 100, (10**12, 10**12), 8),  # limits beyond everything
        ([2] * 100, [20] * 100, (2, 20), 8),  # limits equal to the largest sample
        ([5, 4] * 64, [1, 1] * 64, (9, 10**6), 8),
    ],
)
def test_extreme_inputs_are_packed(patches, tokens, limits, dp):
    table = make_table(patches, tokens)
    for method in ("balanced", "isf"):
        for order in ("random", "sorted"):
            result = pack_samples(table, limits=limits, dp=dp, method=method, order=order)
            assert_sound(table, result, limits=limits, dp=dp)


@pytest.mark.parametrize("method", ["balanced", "random"])
def test_no_samples_make_no_packs(method):
    result = pack_samples(make_table([], []), limits=(9, 90), dp=4, method=method)
    assert result.packing.num_packs == 0
    assert result.schedule.num_steps == 0
    assert report_packing(make_table([], []), result).utilisation == 1.0


def test_same_arguments_give_the_same_bits_and_each_argument_matters():
    table = random_table(3000, 1)

    def run(**changes):
        arguments = {"limits": (18, 8192), "dp": 4, "seed": 3} | changes
        return pack_samples(table, **arguments)

    first, again = run(), run()
    assert first.packing.indices.tobytes() == again.packing.indices.tobytes()
    assert first.packing.offsets.tobytes() == again.packing.offsets.tobytes()
    assert first.schedule.table.tobytes() == again.schedule.table.tobytes()
    for change in ({"seed": 4}, {"epoch": 1}, {"method": "isf"}, {"dp": 8}):
        assert run(**change).packing.indices.tobytes() != first.packing.indices.tobytes()
    assert run(seed=2**70 + 3).packing.num_packs > 0  # any integer is a seed


def test_plan_of_a_known_input_stays_what_it_was():
    # a change here is a change of every user's plan: it needs a line in CHANGELOG.md
    i = np.arange(500)
    table = make_table(i * 7 % 6, 256 * (i * 7 % 6) + i * i * 31 % 701 + 20)
    result = pack_samples(table, limits=(18, 8192), dp=4, seed=0, order="sorted")
    assert result.packing.num_packs == 72
    assert result.packing.indices[:8].tolist() == [180, 374, 447, 161, 316, 135, 495, 310]
    assert result.schedule.table[1, :, 0].tolist() == [4, 5, 6, 7]  # packs lie in the order in which they run


def test_packs_are_many_windows_of_whole_steps(monkeypatch):
    monkeypatch.setattr(balanced, "WINDOW_PACKS", 64)
    table = random_table(6000, 5)
    result = pack_samples(table, limits=(18, 8192), dp=8)
    assert_sound(table, result, limits=(18, 8192), dp=8)
    report = report_packing(table, result)
    assert report.num_packs > 5 * 64
    assert report.packs_over_bound < 1.02


@pytest.mark.parametrize("order", ["random", "sorted"])
@pytest.mark.parametrize("oversize", ["alone", "skip"])
def test_large_data_are_packed_in_parts(order, oversize, monkeypatch, tmp_path):
    monkeypatch.setattr(packing, "SHARD_SAMPLES", 2000)
    table = random_table(6000, 7, max_patches=10)
    large = set(np.flatnonzero((table.num_patches > 9) | (table.num_tokens > 4000)).tolist())
    assert large
    how = {"limits": (9, 4000), "dp": 8, "order": order, "oversize": oversize, "fill": 0.98, "cost": TILE_COST}
    parts = pack_samples(table, **how)
    assert_sound(table, parts, limits=(9, 4000), dp=8, may_exceed=large)
    assert set(parts.packing.oversize.tolist()) == (large if oversize == "skip" else set())
    assert parts.packing.indices.dtype == np.int32
    # 1. columns mapped from files, and a cost given as numbers, change nothing
    columns = {"num_patches": table.num_patches, "num_tokens": table.num_tokens, "patches_sq": table.patches_sq}
    for name, column in columns.items():
        np.save(tmp_path / name, column.astype(np.int32))
        columns[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    zeros = np.broadcast_to(np.int32(0), 6000)
    mapped = SampleTable(**columns, num_images=zeros, patches_windowed=columns["patches_sq"], source=zeros)
    again = pack_samples(mapped, **how | {"cost": TILE_COST.of_samples(table)})
    assert again.packing.indices.tobytes() == parts.packing.indices.tobytes()
    # 2. one part alone makes hardly fewer packs, and rows of the data set are spread over the whole run
    monkeypatch.setattr(packing, "SHARD_SAMPLES", 6000)
    assert parts.packing.num_packs <= 1.02 * pack_samples(table, **how).packing.num_packs
    if oversize == "alone":
        place = np.empty(6000)
        place[parts.packing.indices] = np.arange(6000)
        assert abs(place.reshape(3, 2000).mean(axis=1) / 6000 - 0.5).max() < 0.03


def test_small_parts_are_packed_once_within_the_limits(monkeypatch):
    monkeypatch.setattr(packing, "SHARD_SAMPLES", 3)
    table = random_table(20, 1)
    assert_sound(table, pack_samples(table, limits=(9, 4096), dp=1, order="sorted"), limits=(9, 4096), dp=1)


@pytest.mark.parametrize("smallest", [5e-324, 1e-320, 1e-310, 1e-201])
def test_costs_that_vanish_are_refused(smallest):
    table = random_table(200, 1)
    cost = np.full(200, smallest)
    with refused(PackingError, "1e-200"):
        pack_samples(table, limits=(9, 4096), dp=4, cost=cost)
    assert_sound(table, pack_samples(table, limits=(9, 4096), dp=4, cost=0 * cost), limits=(9, 4096), dp=4)
    cost[:100], cost[100:] = 1e-200, 1e200
    assert_sound(table, pack_samples(table, limits=(9, 4096), dp=4, cost=cost), limits=(9, 4096), dp=4)
    with refused(PackingError, "1.7e+308"):
        pack_samples(table, limits=(9, 4096), dp=4, cost=np.full(200, 1.7e308))


def test_limits_hold_to_the_last_unit():
    Q = 2**53 - 1
    samples = SampleTable.of([0] * 6, [Q // 3, Q // 3, Q // 3 + 1, Q // 3, Q // 3, Q // 3])
    packing = pack_samples(samples, limits=(9, Q), cost=np.ones(6)).packing
    assert all(int(total) <= Q for total in packing.sums(samples.num_tokens))


def test_samples_are_not_carried_on_for_ever():
    # 3 + 3 of 5: by the volume alone, no window keeps up with its share
    n = 4000
    columns = np.column_stack([np.full(n, 3.0), np.ones(n), np.ones(n)])
    streamed = stream.pack_stream(
        columns,
        columns[:, :2] / [5.0, 1e9],
        np.array([5.0, 1e9, np.inf]),
        window.Pull(np.ones(3), np.zeros(3)),
        dp=4,
        num_others=0,
        window_packs=64,
        effort=window.Effort(4, 4, 0.004, 3, 8, num_polished=1, tail=0.1, polish_free=8, stuck=0.1),
        fill=0.9955,
        state=compiled.make_stream(1),
    )
    assert sorted(streamed.members.tolist()) == list(range(n))
    assert len(streamed.offsets) - 1 == n
    assert streamed.oldest <= stream.MAX_AGE
    assert streamed.num_grown > 0


def test_packs_added_for_whole_steps_are_halves_at_the_end():
    groups = Groups(np.arange(6), np.array([0, 4, 5, 6]))
    more = split_packs(groups, np.array([[5], [1], [1], [3], [9], [9]]), (10,), 1)
    assert more.offsets.tolist() == [0, 1, 2, 3, 6]
    assert more.members.tolist() == [4, 5, 0, 1, 2, 3]
    assert split_packs(groups, np.array([[4], [3], [1], [4], [9], [9]]), (10,), 1).offsets.tolist() == [0, 1, 2, 4, 6]
    assert split_packs(groups, np.ones((6, 1), int), (1,), 3).offsets.tolist() == list(range(7))
    assert split_packs(groups, np.ones((6, 1), int), (1,), 4) is groups  # six samples make no seven packs


def test_singles_take_the_places_they_are_given():
    groups = insert_singles(Groups(np.array([0, 1, 2]), np.array([0, 2, 3])), np.array([7, 8]), np.array([0, 2]))
    assert groups.members.tolist() == [7, 0, 1, 2, 8]
    assert groups.offsets.tolist() == [0, 1, 3, 4, 5]


def test_fill_trades_packs_for_balance():
    table = native_table(12_000, 3)
    tight = report_packing(table, pack_samples(table, limits=(65536, 16384), dp=8, oversize="skip", fill=0.9955))
    loose = report_packing(table, pack_samples(table, limits=(65536, 16384), dp=8, oversize="skip", fill=0.95))
    assert loose.num_packs > tight.num_packs
    assert loose.dist_ratio_cost < tight.dist_ratio_cost


def test_costs_follow_the_table_unit():
    tiles, patches = make_table([2], [300]), make_table([2050], [300], unit="patches")
    assert default_cost(tiles) is TILE_COST
    assert default_cost(patches) is PATCH_COST
    weights = LinearCost(patches=2.0, patches_sq=3.0, tokens=5.0, tokens_sq=7.0)
    assert weights.of_samples(tiles).tolist() == [2 * 2 + 3 * 4 + 5 * 300 + 7 * 300**2]
    one_tile = SampleTable.of([1025], [0])
    assert PATCH_COST.of_samples(one_tile)[0] == pytest.approx(TILE_COST.patches, rel=0.01)


def test_a_cost_per_sample_does_what_weights_do():
    table = random_table(400, 2)
    by_weights = pack_samples(table, limits=(18, 8192), dp=4, cost=TILE_COST)
    by_column = pack_samples(table, limits=(18, 8192), dp=4, cost=TILE_COST.of_samples(table))
    assert by_weights.packing.indices.tobytes() == by_column.packing.indices.tobytes()


def test_squares_of_the_largest_sizes_do_not_overflow():
    table = make_table([3_037_000_499, 3_037_000_500, 2**62], [1, 1, 1], unit="patches")
    assert table.patches_sq.tolist() == [3_037_000_499**2] * 3
    packed = pack_samples(table, limits=(2**52, 9), oversize="alone")
    assert sorted(packed.packing.indices.tolist()) == [0, 1, 2]


def test_oversize_error_lists_the_samples():
    table = make_table([1, 12, 3], [10, 20, 95], ids=("a", "b", "c"))
    with pytest.raises(PackingError) as error:
        pack_samples(table, limits=(9, 90))
    text = str(error.value)
    assert all(name in text for name in ("9 tiles", "90 tokens", "sample b: 12", "sample c: 3"))
    assert "sample a:" not in text


def best_fit_decreasing(sizes: np.ndarray, limits: tuple[int, int]) -> int:
    """Packs by two-column best fit decreasing, written plainly."""
    shares = sizes / limits
    rooms: list[np.ndarray] = []
    for i in np.argsort(-shares.max(axis=1), kind="stable"):
        rests = [room - shares[i] for room in rooms]
        scores = [rest.sum() if (rest >= -1e-12).all() else np.inf for rest in rests]
        if min(scores, default=np.inf) < np.inf:
            rooms[int(np.argmin(scores))] -= shares[i]
        else:
            rooms.append(1.0 - shares[i])
    return len(rooms)


@pytest.mark.parametrize("seed", range(24))
def test_no_more_packs_than_best_fit_nor_than_isf(seed):
    r = np.random.default_rng(seed)
    n, dp = 500, int(r.choice([1, 8, 32]))
    limits = tuple((np.array([16_380, 8_192]) * r.choice([1.0, 1.0, 1.5, 2.0, 4.0])).astype(int).tolist())
    x, y = r.uniform(0.1, 1.0, (2, n))
    y = {0: y, 1: x * r.uniform(0.8, 1.0, n), 2: 1.1 - x, 3: r.choice(y, 3)[r.integers(0, 3, n)]}[seed % 4]
    sizes = np.column_stack([np.rint(16_380 * x), np.rint(8_192 * y)]).astype(int)
    table = make_table(sizes[:, 0], sizes[:, 1], unit="patches")
    result = pack_samples(table, limits=limits, dp=dp, seed=seed)
    assert_sound(table, result, limits=limits, dp=dp)
    isf = pack_samples(table, limits=limits, dp=dp, seed=seed, method="isf").packing.num_packs
    peers = min(best_fit_decreasing(sizes, limits), isf)
    assert result.packing.num_packs <= -(-peers // dp) * dp


@pytest.mark.parametrize("values", [[3], [9], [1, 2, 6], [1, 2, 3, 4, 5, 9], list(range(1, 10))])
def test_small_whole_numbers_are_packed_perfectly(values):
    """Packs that fill the limit to the last tile exist: random splits of full packs."""
    r = np.random.default_rng(len(values))
    tiles: list[int] = []
    while len(tiles) < 900:
        pack: list[int] = []
        while sum(pack) < 9:
            pack.append(int(r.choice([x for x in values if x <= 9 - sum(pack)])))
        tiles += pack
    table = make_table(tiles, [10] * len(tiles))
    packing = pack_samples(table, limits=(9, 10**6), dp=1).packing
    assert packing.num_packs == sum(tiles) // 9
