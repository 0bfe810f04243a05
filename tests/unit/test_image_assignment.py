"""Tests of balance/ (images, image_search): exact where promised, close to the bound, the same for everybody."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab import LinearCost, ParallelDims, describe, find_device, profile_model
from trimtab.balance.images import keep_at_home, lower_bound, share_images, tower_bytes, tower_seconds

COSTS = st.lists(st.floats(0, 1e6, allow_nan=False), max_size=40)


def best_by_trying(cost: list[float], num_ranks: int) -> float:
    return min(
        max(sum(w for w, r in zip(cost, ranks, strict=True) if r == rank) for rank in range(num_ranks))
        for ranks in itertools.product(range(num_ranks), repeat=len(cost))
    )


def best_cuts_by_trying(cost: list[float], num_ranks: int) -> float:
    ends = itertools.combinations_with_replacement(range(len(cost) + 1), num_ranks - 1)
    return min(max(sum(cost[a:b]) for a, b in itertools.pairwise((0, *cuts, len(cost)))) for cuts in ends)


@settings(max_examples=150, deadline=None)
@given(COSTS, st.integers(1, 9), st.sampled_from(["balanced", "contiguous"]))
def test_every_image_goes_to_one_rank_and_keeps_its_order(cost, num_ranks, rule):
    shares = share_images(cost, num_ranks, rule=rule)
    assert sorted(shares.order.tolist()) == list(range(len(cost)))
    assert shares.offsets[0] == 0
    assert shares.offsets[-1] == len(cost)
    for rank in range(num_ranks):
        atoms = shares.atoms_of(rank)
        assert (np.diff(atoms) > 0).all()
        assert shares.load[rank] == pytest.approx(sum(cost[i] for i in atoms), rel=1e-9, abs=1e-9 * sum(cost))
    if rule == "contiguous":
        assert (shares.order == np.arange(len(cost))).all()
    assert shares.max_load >= shares.lower_bound * (1 - 1e-9)
    assert shares.max_load <= max(cost, default=0) + sum(cost) / num_ranks + 1e-9 * sum(cost)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_bounds_and_results_against_every_assignment(cost, num_ranks):
    best = best_by_trying(cost, num_ranks)
    shares = share_images(cost, num_ranks)
    assert shares.lower_bound <= best * (1 + 1e-9)
    assert shares.max_load <= best * (4 / 3 - 1 / (3 * num_ranks)) * (1 + 1e-9)
    cuts = share_images(cost, num_ranks, rule="contiguous")
    assert cuts.max_load == pytest.approx(best_cuts_by_trying(cost, num_ranks), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([7.0, 12.5, 30.0]), min_size=1, max_size=9), st.integers(2, 4))
def test_the_bound_of_few_sizes_is_a_sum_of_atoms(cost, num_ranks):
    """No load lies between the mean and the next sum that atoms can have; such a bound is still one."""
    shares = share_images(cost, num_ranks)
    attainable = {sum(cost[i] for i in range(len(cost)) if subset >> i & 1) for subset in range(1 << len(cost))}
    at_least = min(x for x in attainable if x >= sum(cost) / num_ranks - 1e-9)
    if shares.max_load > 1.001 * sum(cost) / num_ranks:  # it is worked out where it matters
        assert shares.lower_bound >= at_least * (1 - 1e-9)
    if num_ranks ** len(cost) <= 5_000:
        assert shares.lower_bound <= best_by_trying(cost, num_ranks) * (1 + 1e-9)


def test_some_rank_holds_two_of_three_equal_images():
    cost, order = np.array([10, 10, 10]), np.arange(3)
    assert lower_bound(cost, order, 2) == 20  # the mean is 15
    assert lower_bound(cost, order, 3) == 10


def test_equal_screenshots_are_shared_as_well_as_can_be():
    shares = share_images([9.0] * 3 + [5.0] * 4, 4)  # 11.75 on the mean, and no nines and fives make 12 or 13
    assert shares.lower_bound == pytest.approx(14.0)
    assert shares.max_load == pytest.approx(14.0)


def test_moves_and_swaps_reach_what_longest_first_misses():
    cost = [3, 3, 2, 2, 2]  # longest first: 7 and 5
    assert share_images(cost, 2).max_load == pytest.approx(6)
    cost = [8, 7, 6, 5, 4]  # longest first: 17 and 13
    assert share_images(cost, 2).max_load == pytest.approx(15)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_generated_batches_come_close_to_the_bound(num_ranks):
    rng = np.random.default_rng(0)
    slowest = bound = 0.0
    for _ in range(200):
        shares = share_images(rng.lognormal(0, 1.5, rng.integers(1, 60)), num_ranks)
        slowest, bound = slowest + shares.max_load, bound + shares.lower_bound
    assert slowest <= 1.01 * bound


def test_equal_input_gives_equal_shares_whatever_its_unit():
    cost = np.random.default_rng(1).lognormal(0, 1, 50)
    a, b, c = share_images(cost, 4), share_images(cost.tolist(), 4), share_images(cost * 2.0**-40, 4)
    for other in (b, c):
        assert (a.order == other.order).all()
        assert (a.offsets == other.offsets).all()


def test_images_stay_where_they_are_if_loads_allow():
    cost = np.array([5.0, 5.0, 3.0, 2.0])
    shares = share_images(cost, 3)
    for home in ([0, 1, 2, 2], [2, 0, 1, 1], [1, 2, 0, 0]):
        kept = keep_at_home(shares, np.array(home), cost)
        assert sorted(kept.load) == sorted(shares.load)
        assert all(home[atom] == rank for rank in range(3) for atom in kept.atoms_of(rank))
    assert sorted(keep_at_home(shares, np.zeros(4, np.int64), cost).order) == [0, 1, 2, 3]  # all on one rank


def test_no_images_and_one_rank():
    shares = share_images([], 3)
    assert shares.load.tolist() == [0, 0, 0]
    assert shares.imbalance == 0
    assert share_images([1, 2], 1).atoms_of(0).tolist() == [0, 1]
    assert share_images([0, 0], 2).imbalance == 0


def test_tower_costs_are_the_profiles_own():
    profile = profile_model(describe("Qwen2.5-VL-7B"), find_device("H100"), dims=ParallelDims())
    seconds = tower_seconds(profile)
    layers = [layer for layer in profile.layers if layer.tower != "language"]
    assert seconds.patches == pytest.approx(sum(x.forward_s[1] + x.backward_s[1] for x in layers))
    assert seconds.patches_windowed > 0
    assert seconds.of_images(np.array([[100, 10_000, 1000]]))[0] == pytest.approx(
        100 * seconds.patches + 10_000 * seconds.patches_sq + 1000 * seconds.patches_windowed
    )
    assert tower_bytes(profile).patches == pytest.approx(sum(x.tiers[0].saved_bytes[1] for x in layers))
    one = LinearCost(patches=2, patches_sq=3)
    assert one.of([1, 10]).tolist() == [5, 320]
    windowed = LinearCost(patches_windowed=1)  # windows not given are the segments, which are whole where not given
    assert windowed.of([2, 3]).tolist() == [4, 9]
    assert windowed.of([2, 3], patches_sq=[2, 5]).tolist() == [2, 5]
