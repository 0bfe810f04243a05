"""Tests of balance/isf_limits.py and plan/decide/apart.py: OmniBal's limits, and data sets packed apart."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from trimtab.balance.isf_limits import paper_limits, search_limits
from trimtab.balance.packing import pack_samples, report_packing
from trimtab.errors import PackingError, PlanError
from trimtab.plan.decide.apart import pack_apart
from trimtab.plan.decide.work import select_rows
from trimtab.specs import SampleTable


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


@pytest.mark.parametrize("mean_batch", [2, 4, 8])
def test_searched_limits_pack_the_wanted_number_and_the_most_even_come_first(mean_batch):
    samples = drawn()
    found = search_limits(samples, mean_batch=mean_batch)
    step = (256 * np.ceil(samples.num_tokens / 256)).mean() // samples.num_patches.mean()
    for one in found:
        assert mean_batch <= one.samples_per_pack <= mean_batch + 1
        (patches, tokens), r = one.limits, int((step + 1) // 16) * 16
        assert (tokens - 4096) == (patches - 4096 // r) * r  # on the line that the public code walks
        packed = pack_samples(samples, limits=one.limits, dp=8, method="isf", iterations=50, oversize="skip")
        assert report_packing(samples, packed).dist_ratio_vit == one.dist_ratio_vit
    sums = [one.dist_ratio_vit + one.dist_ratio_llm for one in found]
    assert sums == sorted(sums)


def test_a_table_in_patches_of_tiles_is_searched_by_the_tile():
    samples = drawn()
    patches = replace(samples, num_patches=samples.num_patches * 1025)
    tiles = [(one.limits, one.samples_per_pack) for one in search_limits(samples)]
    found = search_limits(patches)
    assert [((one.limits[0] // 1025, one.limits[1]), one.samples_per_pack) for one in found] == tiles


def test_limits_that_cannot_be_found():
    with pytest.raises(PackingError, match="packs of 0 samples were asked for"):
        search_limits(drawn(50), mean_batch=0)
    with pytest.raises(PackingError, match=r"no limits near \d+ tokens a patch pack 90 to 91 samples"):
        search_limits(drawn(50), mean_batch=90)
    for choose in (paper_limits, search_limits):
        with pytest.raises(PackingError, match="there is none"):
            choose(table([], []))


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


def test_a_set_of_few_samples_leaves_slots_empty_in_the_last_rows():
    samples = table([1] * 40 + [0] * 3, [300] * 40 + [50] * 3, [0] * 40 + [1] * 3)
    packed = pack_apart(samples, limits=[(4, 1200)], dp=4, how={})
    rows = packed.schedule.table[:, :, 0]
    assert (rows[:-1] >= 0).all()
    assert sorted(packed.packing.indices.tolist()) == list(range(43))
    with pytest.raises(PlanError, match=r"3 pairs of limits were given for 2 data sets"):
        pack_apart(samples, limits=[(4, 1200)] * 3, dp=4, how={})


def test_apart_is_what_each_set_packs_to_alone():
    samples = drawn(1000)
    text = select_rows(samples, np.flatnonzero(samples.source == 1))
    alone = pack_samples(text, limits=(12, 4096), dp=2)
    apart = pack_apart(samples, limits=[(12, 4096)], dp=2, how={})
    assert (np.diff(apart.packing.offsets)[-alone.packing.num_packs :] == np.diff(alone.packing.offsets)).all()
