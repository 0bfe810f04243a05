"""Tests of plan/decide/omnibal.py: OmniBal's limits, data sets packed apart, and ISF by iterations."""

import itertools

import numpy as np
import pytest

from trimtab import SampleTable, pack_samples, report_packing
from trimtab.plan.decide.omnibal import isf_iterations, pack_apart, paper_limits, search_limits
from trimtab.plan.decide.work import select_rows


def table(tiles, tokens, source=None):
    source = np.zeros(len(tiles), np.int32) if source is None else np.asarray(source, np.int32)
    return SampleTable.of(tiles, tokens, source=source, source_names=("images", "text"), patch_unit="tiles")


def drawn(n=4000, seed=0):
    """Images of 1 to 5 tiles with 256 tokens each, and a set of text alone."""
    r = np.random.default_rng(seed)
    tiles = r.integers(1, 6, n)
    source = (r.random(n) < 0.3).astype(np.int32)
    tiles[source == 1] = 0
    return table(tiles, 256 * tiles + r.integers(40, 700, n), source)


def test_the_papers_limits_hold_every_sample():
    assert paper_limits(table([2, 4, 0], [600, 1400, 100])) == (4, 1400)  # 6 patches come with 2,100 tokens
    samples = drawn()
    max_patches, max_tokens = paper_limits(samples)
    assert max_tokens == samples.num_tokens.max()
    ratio = samples.num_tokens.sum() / samples.num_patches.sum()
    assert max_patches == max(int(max_tokens / ratio), samples.num_patches.max())
    assert paper_limits(table([0, 0], [5, 9])) == (1, 9)


@pytest.mark.parametrize(("mean_batch", "unit"), [(2, 1), (4, 1), (4, 1025), (8, 1)])
def test_searched_limits_pack_the_wanted_number_and_the_most_even_come_first(mean_batch, unit):
    samples = drawn()
    step = (256 * np.ceil(samples.num_tokens / 256)).mean() // samples.num_patches.mean()
    r = int((step + 1) // 16) * 16
    if unit > 1:
        samples = table(samples.num_patches * unit, samples.num_tokens, samples.source)
    found = search_limits(samples, mean_batch=mean_batch)
    for one in found:
        assert mean_batch <= one.report.samples_per_pack <= mean_batch + 1
        patches, tokens = one.limits
        assert tokens - 4096 == (patches // unit - 4096 // r) * r  # on the line that the public code walks
    packed = pack_samples(samples, limits=found[0].limits, dp=8, method="isf", iterations=50, oversize="skip")
    assert report_packing(samples, packed) == found[0].report
    assert [one.unevenness for one in found] == sorted(one.unevenness for one in found)


@pytest.mark.parametrize(("method", "num_microbatches"), [("balanced", 1), ("isf", 3)])
def test_packs_and_rows_hold_one_set_each_and_every_sample_once(method, num_microbatches):
    samples = drawn(3001)
    limits = [(12, 8192), (1, 4096)]
    packed = pack_apart(samples, limits=limits, dp=4, num_microbatches=num_microbatches, how={"method": method})
    packing = packed.packing
    assert sorted(packing.indices.tolist()) == list(range(3001))
    of_pack = [set(samples.source[packing.indices[a:b]].tolist()) for a, b in itertools.pairwise(packing.offsets)]
    assert all(len(sources) == 1 for sources in of_pack)
    tokens = packing.sums(samples.num_tokens)
    assert all(total <= limits[min(sources)][1] for total, sources in zip(tokens, of_pack, strict=True))
    rows = packed.schedule.table.transpose(0, 2, 1).reshape(-1, 4)
    own = [set().union(*(of_pack[p] for p in row if p >= 0)) for row in rows.tolist()]
    assert all(len(sources) <= 1 for sources in own)
    assert sorted(rows[rows >= 0].tolist()) == list(range(packing.num_packs))
    order = [min(sources) for sources in own if sources]
    assert order != sorted(order)  # rows of both sets are mixed
    text = select_rows(samples, np.flatnonzero(samples.source == 1))
    alone = pack_samples(text, limits=limits[1], dp=4, method=method)
    assert np.diff(packing.offsets)[-alone.packing.num_packs :].tolist() == np.diff(alone.packing.offsets).tolist()


def test_more_iterations_leave_less_and_fewer_packs():
    r = np.random.default_rng(2)
    v = r.integers(0, 6, 3000)
    samples = table(v, r.integers(1, 1500, 3000))
    found = list(isf_iterations(samples, limits=(9, 4096), iterations=5, dp=4))
    assert [x.number for x in found] == [1, 2, 3, 4, 5]
    assert all(a.share_left > b.share_left >= 0 and a.num_kept < b.num_kept for a, b in itertools.pairwise(found))
    last = pack_samples(samples, limits=(9, 4096), dp=4, method="isf", iterations=5)
    assert found[-1].num_packs == last.packing.num_packs < found[0].num_packs
    assert found[-1].dist_ratio_llm == report_packing(samples, last).dist_ratio_llm
