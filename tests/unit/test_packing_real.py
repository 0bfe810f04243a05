"""Tests of balance/ (aim, stream): what `balanced` reaches on real lengths; thresholds are the project's own goals.

Everywhere on lengths drawn from distributions that were fitted to the real ones (bench/lengths.py), and on the real
ones themselves where ../shared/data has them.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trimtab import LinearCost, SampleTable, pack_samples, report_packing

LENGTHS = Path(__file__).resolve().parents[2] / "bench" / "lengths.py"


@pytest.fixture(scope="module")
def lengths() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lengths", LENGTHS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def real_or_skip(found: SampleTable | None) -> SampleTable:
    if found is None:
        pytest.skip("the length files are not in ../shared/data")
    return found


@pytest.fixture(scope="module", params=["drawn", "real"])
def real_table(request, lengths) -> SampleTable:
    """40,941 samples of three public sets."""
    return (
        lengths.draw_lengths("real")
        if request.param == "drawn"
        else real_or_skip(lengths.read_real(lengths.DEFAULT_DATA))
    )


@pytest.fixture(scope="module", params=["drawn", "real"])
def mixture_table(request, lengths) -> SampleTable:
    """1.24 million samples, or 150,000 by their distributions."""
    if request.param == "drawn":
        return lengths.draw_lengths("mixture", 150_000)
    pytest.importorskip("pyarrow.parquet", reason="reading the mixture needs pyarrow")
    return real_or_skip(lengths.read_mixture(lengths.DEFAULT_DATA))


@pytest.fixture(scope="module")
def part_of_mixture(mixture_table, lengths) -> SampleTable:
    rows = np.random.default_rng(0).permutation(len(mixture_table))[:150_000]
    t = mixture_table
    return lengths.make_table(t.num_patches[rows], t.num_tokens[rows], t.source[rows], t.source_names, "tiles")


def test_drawn_lengths_have_the_published_means(lengths):
    """tiles and tokens, as the data sets' own README prints them."""
    table = lengths.draw_lengths("real")
    assert np.bincount(table.source).tolist() == [12_413, 18_317, 10_211]
    for source, (tiles, tokens) in enumerate([(2.49, 691), (4.75, 1305), (4.62, 1465)]):
        own = table.source == source
        assert table.num_patches[own].mean() == pytest.approx(tiles, abs=0.005)
        assert table.num_tokens[own].mean() == pytest.approx(tokens, rel=0.002)


GOALS = {  # order: dist ratio ViT, LLM, cost; chi-square
    "random": (0.006, 0.028, 0.014, 1.02),
    "sorted": (0.005, 0.008, 0.0015, 3.0),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("order", GOALS)
def test_three_real_sets_reach_the_goals(real_table, order, seed):
    result = pack_samples(real_table, limits=(18, 6016), dp=8, order=order, seed=seed)
    report = report_packing(real_table, result)
    vit, llm, cost, chi2 = GOALS[order]
    assert report.dist_ratio_vit <= vit
    assert report.dist_ratio_llm <= llm
    assert report.dist_ratio_cost <= cost
    assert report.shuffle_chi2 <= chi2
    assert report.packs_over_bound <= 1.006
    assert report.num_over_limit == 0
    assert report.num_empty_slots == 0
    assert (np.bincount(result.packing.indices, minlength=len(real_table)) == 1).all()


def test_native_resolution_reaches_the_goals(lengths):
    """Long samples and attention over all pairs: loose packs, whose room goes to an even cost first."""
    table = lengths.generate_native(40_000)
    cost = LinearCost(patches=1.2e9, patches_sq=0.0, tokens=14e9, tokens_sq=0.4e6)
    result = pack_samples(table, limits=(41_920, 16_384), dp=8, cost=cost, oversize="skip")
    report = report_packing(table, result, cost=cost)
    assert report.dist_ratio_vit <= 0.0135
    assert report.dist_ratio_llm <= 0.026
    assert report.dist_ratio_cost <= 0.0085
    assert report.packs_over_bound <= 1.02


def test_isf_with_the_papers_filters_has_the_public_codes_figures(lengths):
    table = real_or_skip(lengths.read_real(lengths.DEFAULT_DATA))
    wide, narrow = (
        report_packing(table, pack_samples(table, limits=limits, dp=8, method="isf", oversize="skip"))
        for limits in ((18, 6016), (9, 4096))
    )
    assert wide.num_packs == pytest.approx(9448, rel=0.005)
    ratios = (wide.dist_ratio_vit, wide.dist_ratio_llm, wide.dist_ratio_cost)
    assert ratios == pytest.approx((0.0292, 0.0989, 0.0646), rel=0.03)
    assert narrow.num_packs == pytest.approx(27_295, rel=0.005)


def test_isf_is_much_less_even_on_the_three_real_sets(real_table):
    isf = report_packing(real_table, pack_samples(real_table, limits=(18, 6016), dp=8, method="isf"))
    assert isf.dist_ratio_llm > 0.05
    assert isf.dist_ratio_cost > 0.03
    assert isf.num_packed == len(real_table)


@pytest.mark.parametrize("order", GOALS)
def test_samples_of_which_no_two_fit_a_pack_are_neither_a_cliff_nor_a_loss(real_table, order):
    """At 9 tiles two thirds of the samples have 5: a pack for each of those, no more, and more even than ISF's."""
    balanced, isf = (
        report_packing(
            real_table, pack_samples(real_table, limits=(9, 4096), dp=8, method=method, order=order, oversize="skip")
        )
        for method in ("balanced", "isf")
    )
    num_large = int((real_table.num_patches > 9 / 2).sum()) - balanced.num_oversize
    assert balanced.lower_bound_packs >= num_large > 1.4 * balanced.fill_patches * balanced.num_packs
    assert balanced.num_packs <= balanced.lower_bound_packs * 1.001
    assert balanced.num_packs <= isf.num_packs
    assert balanced.dist_ratio_cost <= (0.8 if order == "random" else 1.05) * isf.dist_ratio_cost


def test_mixture_is_packed_and_dispatched_evenly(mixture_table):
    result = pack_samples(mixture_table, limits=(9, 4096), dp=8)
    report = report_packing(mixture_table, result)
    assert report.dist_ratio_vit <= 0.006
    assert report.dist_ratio_llm <= 0.020
    assert report.dist_ratio_cost <= 0.008
    assert report.packs_over_bound <= 1.006
    assert report.num_over_limit == 0
    assert report.shuffle_chi2 <= 1.02
    assert (np.bincount(result.packing.indices, minlength=len(mixture_table)) == 1).all()


@pytest.mark.parametrize("order", ["random", "sorted"])
def test_many_ranks_use_their_time(part_of_mixture, order):
    result = pack_samples(part_of_mixture, limits=(9, 4096), dp=64, order=order)
    report = report_packing(part_of_mixture, result)
    assert report.utilisation / report.packs_over_bound >= 0.975
    assert report.utilisation >= (0.986 if order == "random" else 0.995)
    assert report.packs_over_bound <= 1.02
    assert report.dist_ratio_llm <= 0.033
    assert report.num_over_limit == 0


def test_isf_on_the_mixture_has_the_papers_ratios(mixture_table):
    # by construction of the mixture: 0.0222 / 0.1366 / 0.0821 and 267,593 packs with OmniBal's own code
    report = report_packing(mixture_table, pack_samples(mixture_table, limits=(9, 4096), dp=8, method="isf"))
    assert report.dist_ratio_vit == pytest.approx(0.0222, rel=0.03)
    assert report.dist_ratio_llm == pytest.approx(0.1366, rel=0.02)
    assert report.dist_ratio_cost == pytest.approx(0.0821, rel=0.02)
    assert report.num_packs == pytest.approx(267_593 * len(mixture_table) / 1_238_054, rel=0.002)
