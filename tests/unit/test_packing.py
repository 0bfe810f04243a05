"""Tests of balance/ (aim, balanced, cost, groups, packing, pair, stream, window).

pack_samples: every sample once, limits kept, whole steps, the same bits each time; quality on real lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance import balanced, pair, rng, stream, window
from trimtab.balance.aim import Pull
from trimtab.balance.cost import PATCH_COST, TILE_COST, LinearCost, default_cost
from trimtab.balance.groups import Groups, insert_singles, split_packs
from trimtab.balance.packing import METHODS, PADDED_METHODS, pack_samples, report_packing
from trimtab.errors import PackingError
from trimtab.specs import SampleTable


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
        for order in ("random", "tolerance", "sorted"):
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
    result = pack_samples(table, limits=(18, 8192), dp=4, seed=0, order="tolerance")
    assert result.packing.num_packs == 72
    assert result.packing.indices[:8].tolist() == [450, 383, 378, 365, 402, 342, 141, 34]
    assert result.schedule.table[0, :, 0].tolist() == [0, 2, 4, 5]


def test_packs_are_many_windows_of_whole_steps(monkeypatch):
    monkeypatch.setattr(balanced, "WINDOW_PACKS", 64)
    table = random_table(6000, 5)
    result = pack_samples(table, limits=(18, 8192), dp=8)
    assert_sound(table, result, limits=(18, 8192), dp=8)
    report = report_packing(table, result)
    assert report.num_packs > 5 * 64
    assert report.packs_over_bound < 1.02


def test_samples_are_not_carried_on_for_ever():
    # 3 + 3 of 5: by the volume alone, no window keeps up with its share
    n = 4000
    columns = np.column_stack([np.full(n, 3.0), np.ones(n), np.ones(n)])
    streamed = stream.pack_stream(
        columns,
        columns[:, :2] / [5.0, 1e9],
        np.array([5.0, 1e9, np.inf]),
        Pull(np.ones(3), np.zeros(3)),
        dp=4,
        num_others=0,
        window_packs=64,
        effort=window.Effort(4, 4, 0.004, 3, 8, num_polished=1, tail=0.1, polish_free=8, stuck=0.1),
        fill=0.9955,
        state=rng.make_stream(1),
    )
    assert sorted(streamed.members.tolist()) == list(range(n))
    assert len(streamed.offsets) - 1 == n
    assert streamed.oldest <= stream.MAX_AGE
    assert streamed.num_grown > 0


def test_sharing_a_pair_matches_brute_force():
    r = np.random.default_rng(0)
    scratch = pair.make_scratch(2, 64, 3)
    scratch.pairs[0] = 0, 1
    for _ in range(300):
        n, num_a = int(r.integers(2, 11)), 0
        columns = np.column_stack([r.integers(0, 20, n), r.integers(0, 300, n), r.random(n)]).astype(float)
        num_a = int(r.integers(0, n + 1))
        half = columns.sum(axis=0) / 2
        limits = np.array([np.ceil(half[0]) + r.integers(0, 4), np.ceil(half[1]) + r.integers(0, 40), np.inf])
        means = half * r.uniform(0.8, 1.1, 3)
        slopes = r.choice([0.0, 0.3, 9.0], 3) / np.maximum(half, 1e-3)
        level, goal = (
            pair.make_goal(limits, 1 / np.maximum(half, 1e-3) ** 2, 1e3 / limits, means, own)
            for own in (np.zeros(3), slopes)
        )
        packs = pair.make_packs(2, n, 3)
        for i in range(n):
            p = 0 if i < num_a else 1
            packs.after[i], packs.head[p] = packs.head[p], i
            packs.num_held[p] += 1
            packs.sums[p] += columns[i]

        def score(sum_a, half=half, limits=limits, goal=goal):
            e = np.abs(sum_a - half)
            above = goal["slope"] * np.maximum(0.0, half + e - goal["mean"])
            over = goal["penalty"] * np.maximum(0.0, e - (limits - half))
            return float((goal["weight"] * e * e + over + above).sum())

        if r.random() < 0.5:  # as `polish` finds them: even already, and then the mean counts as well
            pair.share_pairs(columns, packs, 1, level, 1.0, pair.MAX_FREE, rng.make_stream(0), scratch)
        before = score(packs.sums[0])
        ways = ((np.arange(2**n)[:, None] >> np.arange(n)) & 1) @ columns
        best = min(score(way) for way in ways)
        moved = pair.share_pairs(columns, packs, 1, goal, 1.0, pair.MAX_FREE, rng.make_stream(0), scratch)
        after = score(packs.sums[0])
        assert after <= best * (1 + 1e-4) + 1e-6
        assert moved == (after < before)
        assert packs.num_held.sum() == n
        np.testing.assert_allclose(packs.sums.sum(axis=0), columns.sum(axis=0))


def test_sharing_many_samples_never_makes_it_worse():
    r = np.random.default_rng(1)
    n = 60
    columns = np.column_stack([r.integers(0, 9, n), r.integers(1, 900, n), r.random(n)]).astype(float)
    packs = pair.make_packs(2, n, 3)
    window.deal(columns, np.array([1 / 300, 1 / 30000, 1 / 40]), packs)
    none = np.zeros(3)
    goal = pair.make_goal(np.array([200.0, 20000.0, np.inf]), 1 / columns.sum(axis=0) ** 2, none, none, none)
    scratch = pair.make_scratch(2, n, 3)
    scratch.pairs[0] = 0, 1
    state, last = rng.make_stream(2), np.inf
    for _ in range(30):
        pair.share_pairs(columns, packs, 1, goal, 1.0, 8, state, scratch)
        e = (packs.sums[0] - packs.sums[1]) / 2
        now = float((goal["weight"] * e * e).sum())
        assert now <= last
        last = now
    assert last < 2e-5  # 0.4 % of the mean


def test_sharing_sizes_that_float32_cannot_tell_apart_never_makes_it_worse():
    r = np.random.default_rng(3)
    scratch = pair.make_scratch(2, 8, 2)
    scratch.pairs[0] = 0, 1
    wins = 0
    for _ in range(100):
        sizes = 2.0**26 + r.integers(0, 64, (8, 2))  # float32 rounds these to multiples of 8
        limits, penalties = np.array([2.0**28 + 128, np.inf]), np.array([1e-3, 0.0])
        goal = pair.make_goal(limits, np.full(2, 1e-4), penalties, *np.zeros((2, 2)))
        packs = pair.make_packs(2, 8, 2)
        for p in (0, 1):
            window._hold(packs, p, list(range(4 * p, 4 * p + 4)))
            packs.sums[p] = sizes[4 * p : 4 * p + 4].sum(axis=0)

        def score(packs=packs, limit=limits[0]):
            larger = packs.sums.max(axis=0)
            half_differences = larger - packs.sums.mean(axis=0)
            return 1e-4 * (half_differences**2).sum() + 1e-3 * max(0.0, larger[0] - limit)

        before = score()
        moved = pair.share_pairs(sizes, packs, 1, goal, 1.0, pair.MAX_FREE, rng.make_stream(0), scratch)
        assert moved == (score() < before)
        assert moved or score() == before
        wins += moved
    assert 20 < wins < 100


def test_polishing_ends_once_few_packs_get_better(monkeypatch):
    effort = window.Effort(4, 4, 0.004, 3, 8, num_polished=5, tail=0.25, polish_free=8, stuck=0.5)
    packs, goal = pair.make_packs(16, 16, 2), pair.make_goal(*np.ones((5, 2)))
    packs.sums[:] = np.arange(16.0)[:, None]
    asked, numbers_better = [], []

    def share(sizes, packs, num_pairs, *more):
        asked.append(sorted(more[-1].pairs[:num_pairs, 0].tolist()))
        return numbers_better[len(asked) - 1]

    monkeypatch.setattr(window, "share_pairs", share)
    for numbers, rounds in (([4] * 5, 5), ([2] * 5, 5), ([4, 3, 1, 4, 4], 3), ([0] * 5, 1)):
        asked.clear()
        numbers_better[:] = numbers
        window.polish(np.zeros((16, 2)), packs, goal, effort, rng.make_stream(0), pair.make_scratch(16, 16, 2))
        assert asked == [[12, 13, 14, 15]] * rounds
    few = pair.make_packs(4, 4, 2)
    few.sums[:] = np.arange(4.0)[:, None]
    asked.clear()
    numbers_better[:] = [1] * 5
    window.polish(np.zeros((4, 2)), few, goal, effort, rng.make_stream(0), pair.make_scratch(4, 4, 2))
    assert asked == [[3]] * 5  # one pack that sticks out is enough


def test_repair_keeps_every_sample_and_evict_keeps_every_limit():
    r = np.random.default_rng(2)
    n, P = 400, 90
    columns = np.column_stack([r.integers(1, 6, n), r.integers(1, 900, n), r.random(n)]).astype(float)
    bounds = np.array([np.ceil(columns[:, 0].sum() / P), 6000.0, np.inf])
    packs = pair.make_packs(P, n, 3)
    for i in range(n):  # all in the first ten packs: far above the limits
        p = i % 10
        packs.after[i], packs.head[p] = packs.head[p], i
        packs.num_held[p] += 1
        packs.sums[p] += columns[i]
    goal = pair.make_goal(bounds, np.ones(3), 1e3 / bounds, np.zeros(3), np.zeros(3))
    state = rng.make_stream(3)
    window.repair(columns, packs, goal, state, pair.make_scratch(P, n, 3))
    out = window.evict(columns, packs, goal, np.zeros(n, np.int64))
    members, counts = window.unload(packs, state)
    assert sorted(np.concatenate([members, out]).tolist()) == list(range(n))
    sums = np.add.reduceat(columns[members], np.concatenate([[0], np.cumsum(counts)[:-1]]), axis=0)
    assert (sums <= bounds).all()


def test_shuffle_is_even():
    counts = np.zeros((6, 6))
    for seed in range(3000):
        for place, item in enumerate(rng.permutation(6, seed)):
            counts[place, item] += 1
    assert abs(counts / 3000 - 1 / 6).max() < 0.03


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "best"}, "packing method 'best' is unknown: choose one of balanced, isf"),
        ({"order": "any"}, "order 'any' is unknown: choose one of random, tolerance, sorted"),
        ({"oversize": "drop"}, "oversize 'drop' is unknown: choose one of error, alone, skip"),
        ({"limits": (0, 90)}, r"limits \(0, 90\) hold no sample: give max_patches and max_tokens, 1 or more each"),
        ({"dp": 0}, "dp 0 packs nothing: give 1 or more"),
        ({"num_microbatches": 0}, "dp 1 x 0 micro-batches leaves no place for a pack: give 1 or more of both"),
        ({"fill": 1.5}, "fill 1.5 is not a share of the packs' room: give 0.5 to 1"),
        ({"batch_size": 0}, "batch_size 0 packs nothing: give 1 or more"),
        ({"order": "tolerance", "tolerance": -1.0}, "tolerance -1.0 is not a relative distance: give 0 or more"),
        ({"method": "isf", "iterations": 0}, "ISF with 0 iterations packs nothing: give 1 or more"),
        ({"method": "isf", "filters": (10, 80)}, r"ISF filters \(10, 80\) do not suit the limits \(9, 90\)"),
        ({"cost": np.ones(3)}, r"cost has shape \(3,\) for 2 samples: give one number per sample"),
        ({"cost": np.array([1.0, np.nan])}, "cost holds a negative or non-finite number: give each sample a cost"),
    ],
)
def test_wrong_arguments_say_what_to_try(changes, message):
    with pytest.raises(PackingError, match=message):
        pack_samples(make_table([1, 2], [10, 20]), **({"limits": (9, 90)} | changes))


def test_negative_sizes_are_refused_by_name():
    with pytest.raises(PackingError, match=r"sample b has a negative size \(1 such\): give sizes from 0"):
        pack_samples(make_table([1, -2], [10, 20], ids=("a", "b")), limits=(9, 90))


def test_oversize_error_lists_the_samples():
    table = make_table([1, 12, 3], [10, 20, 95], ids=("a", "b", "c"))
    with pytest.raises(PackingError) as error:
        pack_samples(table, limits=(9, 90))
    text = str(error.value)
    assert text.startswith("2 of 3 samples do not fit a pack of 9 tiles and 90 tokens: raise the limits, or choose")
    assert "sample b: 12 tiles, 20 tokens" in text
    assert "sample c: 3 tiles, 95 tokens" in text
    assert "sample a:" not in text


def test_many_oversize_samples_are_counted_not_listed():
    with pytest.raises(PackingError, match="more of the same input"):
        pack_samples(make_table([10] * 100, [1] * 100), limits=(9, 90))


def test_random_numbers_are_the_same_in_and_outside_compiled_loops():
    inside, outside = rng.make_stream(7), rng.make_stream(7)
    items = np.arange(100)
    rng.shuffle(items, inside)
    swaps = np.arange(100)
    for i in range(99, 0, -1):
        j = rng.draw_below(outside, i + 1, 1)[0] if i % 2 else ((rng.draw(outside) >> 32) * (i + 1)) >> 32
        swaps[[i, j]] = swaps[[j, i]]
    assert swaps.tolist() == items.tolist()
    assert rng.draw_below(inside, 10, 3).tolist() == [int(rng.draw_below(outside, 10, 1)[0]) for _ in range(3)]
    # where n is large, all bits count
    n = 2**32 - 1
    one_by_one = [int(rng.below(outside, np.int64(n))) for _ in range(8)]
    assert rng.draw_below(inside.copy(), n, 8).tolist() == one_by_one
    assert [((rng.draw(inside) >> 32) * n) >> 32 for _ in range(8)] == one_by_one


def test_extremes_are_paired_while_they_differ_and_rest_after_failures():
    sums = np.column_stack([np.ones(6), [9.0, 4.0, 6.0, 5.0, 1.0, 7.0]])
    failures, pairs = np.array([0, 0, 0, 0, 5, 0]), np.empty((6, 2), np.int64)

    def paired(patience, least):
        num_pairs = window.pair_extremes(sums, np.array([0.0, 1.0]), failures, patience, least, pairs)
        return pairs[:num_pairs].tolist()

    assert paired(5, 0.5) == [[1, 0], [3, 5]]  # pack 4 rests, 6 is alone in the middle
    assert paired(5, 3.0) == [[1, 0]]
    assert paired(6, 0.5) == [[4, 0], [1, 5], [3, 2]]
    assert paired(0, 0.5) == []


def test_a_share_of_sizes_that_grow_is_found_behind_the_first_guess():
    """Half of what is left lies in the last quarter, behind the half of the samples that is looked at first."""
    sizes, none_carried, left = np.repeat([[0.0], [1.0]], 1000, axis=0), np.empty(0, np.int64), np.array([1000.0])
    assert stream._count_share(sizes, none_carried, 0, 0.5, left, np.inf) == 1500
    assert stream._count_share(sizes, none_carried, 0, 1.0, left, np.inf) == 2000
    assert stream._count_share(sizes, none_carried, 1500, 0.5, left, np.inf) == 500
