"""Every figure of BalanceReport against a case worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab import Packing, SampleTable, Schedule, pack_samples, report_packing
from trimtab.balance.metrics import (
    counted_columns,
    dist_ratio,
    lower_bound_packs,
    pad_ratio,
    report_balance,
    rounded_sizes,
    shuffle_chi2,
    utilisation,
)
from trimtab.balance.pair import match_pairs


def make_case():
    """Six samples in four packs on two ranks: packs {0,1}, {2}, {3,4}, {5}."""
    v, t = np.array([1, 2, 3, 0, 1, 2]), np.array([100, 300, 200, 100, 100, 400])
    source = np.array([0, 0, 1, 1, 0, 1], np.int32)
    table = SampleTable.of(v, t, source=source, source_names=("a", "b"), patch_unit="tiles")
    packing = Packing(offsets=np.array([0, 2, 3, 5, 6]), indices=np.arange(6), limits=(3, 400))
    return table, packing, Schedule(table=np.array([[[0], [1]], [[2], [3]]]))


def test_report_equals_the_hand_computed_figures():
    table, packing, schedule = make_case()
    report = report_balance(table, packing, schedule, cost=np.array([1.0, 1, 4, 1, 2, 3]))
    # patches of packs 3 3 | 1 2, tokens 400 200 | 200 400, cost 2 4 | 3 3
    assert report.dist_ratio_vit == pytest.approx((0 + 0.25) / 2)
    assert report.dist_ratio_llm == pytest.approx((0.25 + 0.25) / 2)
    assert report.dist_ratio_cost == pytest.approx((0.25 + 0) / 2)
    assert report.utilisation == pytest.approx(12 / (2 * (4 + 3)))
    assert report.fill_patches == pytest.approx(9 / 12)
    assert report.fill_tokens == pytest.approx(1200 / 1600)
    assert report.lower_bound_packs == 3
    assert report.packs_over_bound == pytest.approx(4 / 3)
    assert report.samples_per_pack == 1.5
    assert (report.num_packs, report.num_steps, report.dp, report.num_empty_slots) == (4, 2, 2, 0)
    assert (report.num_samples, report.num_packed, report.num_oversize, report.num_over_limit) == (6, 6, 0, 0)
    assert report.pad_ratio == 0.0
    # sources of step 0: a a b, of step 1: b a b; expected 1.5 each: chi-square 1/3 + 1/3 over one degree of freedom
    assert report.shuffle_chi2 == pytest.approx(2 / 3)


def test_padded_batches_compute_their_longest_sample():
    table, packing, schedule = make_case()
    report = report_balance(
        table, packing, schedule, cost=np.ones(6), padded_cost=np.array([3.0, 1, 1, 1, 1, 1]), padded=True
    )
    # computed tokens 600 200 | 200 400: of 1400, 1200 are real
    assert report.pad_ratio == pytest.approx(1 - 1200 / 1400)
    assert report.dist_ratio_llm == pytest.approx(((1 - 400 / 600) + (1 - 300 / 400)) / 2)
    # cost 2 1 | 2 1 useful; 4 1 | 2 1 computed
    assert report.dist_ratio_cost == pytest.approx(((1 - 2.5 / 4) + (1 - 1.5 / 2)) / 2)
    assert report.utilisation == pytest.approx(6 / (2 * (4 + 2)))


def test_an_empty_slot_waits_for_the_others():
    table, packing, _ = make_case()
    schedule = Schedule(table=np.array([[[0], [1], [2]], [[3], [-1], [-1]]]))
    report = report_balance(table, packing, schedule, cost=np.ones(6))
    assert report.num_empty_slots == 2
    assert report.dist_ratio_vit == pytest.approx(((1 - 7 / 9) + (1 - 1 / 3)) / 2)
    assert report.utilisation == pytest.approx(6 / (3 * (2 + 1)))


def test_a_sample_alone_above_the_limits_adds_one_to_the_bound():
    table, packing, schedule = make_case()
    small = Packing(offsets=packing.offsets, indices=packing.indices, limits=(3, 300))
    report = report_balance(table, small, schedule, cost=np.ones(6))
    assert report.lower_bound_packs == 1 + max(-(-7 // 3), -(-800 // 300))
    assert report.num_over_limit == 2


def test_pad_ratio_of_one_batch_is_the_papers_formula():
    lengths = np.array([10.0, 7, 4])
    assert pad_ratio(lengths, np.array([0, 3])) == pytest.approx((0 + 3 + 6) / (10 * 3))
    assert pad_ratio(np.array([5.0, 5, 5]), np.array([0, 2, 3])) == 0.0
    assert pad_ratio(np.array([]), np.array([0])) == 0.0


def test_dist_ratio_of_one_step_is_the_papers_formula():
    assert dist_ratio(np.array([[4.0, 3, 1, 4]])) == pytest.approx((0 + 1 + 3 + 0) / (4 * 4))
    assert dist_ratio(np.array([[0.0, 0.0]])) == 0.0
    assert dist_ratio(np.zeros((0, 4))) == 0.0


def test_useful_work_is_all_of_it_when_ranks_are_alike():
    assert utilisation(np.ones((3, 4)), np.ones((3, 4))) == 1.0
    assert utilisation(np.zeros((3, 4)), np.zeros((3, 4))) == 1.0


def test_chi2_is_one_for_random_and_grows_with_clusters():
    r = np.random.default_rng(0)
    sources = r.permutation(np.repeat(np.arange(4), 5000))
    random = np.array([np.bincount(step, minlength=4) for step in sources.reshape(-1, 40)])
    assert shuffle_chi2(random) == pytest.approx(1.0, abs=0.1)
    clustered = np.array([np.bincount(step, minlength=4) for step in np.sort(sources).reshape(-1, 40)])
    assert shuffle_chi2(clustered) > 30
    even = np.full((500, 4), 10)
    assert shuffle_chi2(even) == 0.0
    assert shuffle_chi2(np.array([[5], [6]])) is None


def test_baselines_show_what_the_paper_says_of_them():
    r = np.random.default_rng(1)
    v = r.integers(0, 6, 6000)
    t = 256 * v + r.integers(30, 900, 6000)
    source = (v > 2).astype(np.int32)
    table = SampleTable.of(v, t, source=source, source_names=("small", "large"), patch_unit="tiles")
    reports = {
        method: report_packing(table, pack_samples(table, limits=(18, 8192), dp=8, method=method))
        for method in ("random", "length_group", "device_group", "isf", "balanced")
    }
    assert reports["random"].pad_ratio > 0.1
    assert reports["isf"].pad_ratio == reports["balanced"].pad_ratio == 0.0
    assert reports["length_group"].dist_ratio_cost < 0.7 * reports["random"].dist_ratio_cost
    assert reports["device_group"].dist_ratio_cost < 0.4 * reports["random"].dist_ratio_cost
    assert reports["random"].shuffle_chi2 == pytest.approx(1.0, abs=0.25)
    assert reports["device_group"].shuffle_chi2 > 2
    assert reports["balanced"].utilisation > reports["isf"].utilisation > reports["random"].utilisation
    for name in ("random", "length_group", "device_group"):
        assert reports[name].num_packed == 6000
        assert reports[name].samples_per_pack == pytest.approx(4, abs=0.1)


def test_padding_of_a_plain_cost_column_is_scaled_by_tokens():
    table, _, _ = make_case()
    result = pack_samples(table, limits=(3, 400), dp=1, method="random", batch_size=6, cost=np.ones(6))
    report = report_packing(table, result, cost=np.ones(6))
    padded = (400 / np.array([100, 300, 200, 100, 100, 400])).sum()
    assert report.utilisation == pytest.approx(6 / padded)


# -- balance/metrics.py: the fewest packs that samples need, against every packing of a few of them -------------------


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


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12)), min_size=1, max_size=9))
def test_as_many_pairs_as_any_choice_makes(sizes):
    limits = (20, 12)
    partner = match_pairs(np.array(sizes, float), np.array(limits, float)).tolist()

    def most(left: tuple[int, ...]) -> int:
        if len(left) < 2:
            return 0
        i, *others = left
        pairs = [j for j in others if all(a + b <= q for a, b, q in zip(sizes[i], sizes[j], limits, strict=True))]
        return max([most(tuple(others)), *(1 + most(tuple(k for k in others if k != j)) for j in pairs)])

    for i, j in enumerate(partner):
        assert j < 0 or (partner[j] == i != j)
        assert j < 0 or (np.array(sizes[i]) + sizes[j] <= limits).all()
    assert sum(j >= 0 for j in partner) == 2 * most(tuple(range(len(sizes))))


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
        ([[6, 1], [1, 6], [6, 6]], (9, 9), 2),  # in pairs of columns: the first two share a pack
        ([[5, 3], [3, 5], [4, 7], [7, 4]], (9, 9), 3),  # 19 of 9 in each column, and one pair at most
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
