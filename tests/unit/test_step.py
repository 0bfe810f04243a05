"""Steps of exactly N samples (balance/step.py): cover, limits, evenness against the bound and against exact search."""

from itertools import pairwise, product

import numpy as np
import pytest

from refusals import refused
from trimtab import SampleTable
from trimtab.balance.cost import TILE_COST
from trimtab.balance.step import pack_steps, share_step
from trimtab.errors import PackingError


def draw_step(r, n):
    """Heavy-tailed patches and tokens, as native-resolution data have them."""
    patches = np.minimum(r.lognormal(7.0, 1.0, n), 40_000).astype(np.int64) * (r.random(n) < 0.9)
    tokens = np.minimum(r.lognormal(6.5, 0.9, n), 20_000).astype(np.int64) + 1
    sizes = np.stack([patches, tokens], axis=1)
    return sizes, 11.0 * patches + 6e-4 * patches**2 + 40.0 * tokens + 6e-4 * tokens**2


def rank_sums(step, values):
    packs = np.add.reduceat(np.append(values[step.members], 0), step.offsets[:-1])
    packs[np.diff(step.offsets) == 0] = 0
    return packs.reshape(step.dp, -1).sum(axis=1)


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_once_within_the_limits(seed):
    r = np.random.default_rng(seed)
    dp, num_microbatches = int(r.integers(1, 9)), int(r.integers(1, 5))
    n = int(r.integers(dp, 12 * dp + 1))
    sizes, cost = draw_step(r, n)
    limits = tuple(int(column.max() * r.uniform(1.0, 4.0)) + 1 for column in sizes.T)
    step = share_step(sizes, cost, limits=limits, dp=dp, num_microbatches=num_microbatches, keys=(seed,))
    assert sorted(step.members.tolist()) == list(range(n))
    assert step.num_microbatches >= num_microbatches
    assert len(step.offsets) == dp * step.num_microbatches + 1
    for rank in range(dp):
        packs = step.of_rank(rank)
        assert packs, f"rank {rank} has no sample"
        for pack in packs:
            assert (sizes[pack].sum(axis=0) <= limits).all()
    again = share_step(sizes, cost, limits=limits, dp=dp, num_microbatches=num_microbatches, keys=(seed,))
    assert again.members.tobytes() == step.members.tobytes()


@pytest.mark.parametrize(("dp", "per_rank", "most"), [(8, 4, 1.02), (8, 8, 1.01), (32, 8, 1.01), (64, 16, 1.01)])
def test_slowest_rank_is_near_the_bound(dp, per_rank, most):
    r = np.random.default_rng(dp)
    over = []
    for _ in range(20):
        sizes, cost = draw_step(r, dp * per_rank)
        step = share_step(sizes, cost, limits=None, dp=dp)
        over.append(rank_sums(step, cost).max() / max(cost.sum() / dp, cost.max()))
    assert np.mean(over) <= most


def test_small_steps_against_exact_search():
    """Nine samples on three ranks, all 3^8 ways: the slowest rank within 2 %, in the mean within 0.5 %."""
    r = np.random.default_rng(5)
    ways = np.array([(0, *way) for way in product(range(3), repeat=8)])
    ratios = []
    for _ in range(30):
        sizes, cost = draw_step(r, 9)
        exact = np.stack([(ways == rank) @ cost for rank in range(3)]).max(axis=0).min()
        ratios.append(rank_sums(share_step(sizes, cost, limits=None, dp=3), cost).max() / exact)
    assert max(ratios) <= 1.02
    assert np.mean(ratios) <= 1.005


def test_microbatches_grow_where_samples_would_not_fit():
    sizes = np.full((12, 2), 6)
    step = share_step(sizes, np.ones(12), limits=(10, 100), dp=3)
    assert step.num_microbatches == 4  # one of six in each pack of ten
    assert share_step(sizes, np.ones(12), limits=(12, 100), dp=3).num_microbatches == 2


def test_steps_of_an_epoch_hold_the_global_batch():
    sizes, _ = draw_step(np.random.default_rng(3), 1000)
    samples = SampleTable.of(sizes[:, 0], sizes[:, 1])
    limits = tuple(int(2.2 * column.max()) for column in sizes.T)
    how = {"global_batch": 96, "limits": limits, "dp": 8, "cost": TILE_COST, "seed": 4}
    for equal in (False, True):
        packed = pack_steps(samples, equal_microbatches=equal, **how)
        packing, table = packed.packing, packed.schedule.table
        assert sorted(packing.indices.tolist()) == list(range(1000))
        assert (packing.sums(sizes) <= limits).all()
        held = np.append(np.diff(packing.offsets), 0)[table]  # -1: none
        assert held.sum(axis=(1, 2)).tolist() == [96] * 10 + [40]
        assert (held.sum(axis=2) > 0).all()
        if equal:
            assert (table[:-1] >= 0).all()


def test_oversize_samples_run_alone_or_are_left_out():
    samples = SampleTable.of([5, 50, 5, 5, 5, 5, 0, 5], [10, 10, 10, 10, 10, 500, 10, 10])
    how = {"global_batch": 4, "limits": (20, 100), "dp": 2}
    with refused(PackingError, "1", "50"):
        pack_steps(samples, **how)
    alone = pack_steps(samples, oversize="alone", **how).packing
    packs = [set(alone.indices[a:b].tolist()) for a, b in pairwise(alone.offsets)]
    assert {1} in packs
    assert {5} in packs
    skipped = pack_steps(samples, oversize="skip", **how)
    assert skipped.packing.oversize.tolist() == [1, 5]
    assert len(skipped.packing.indices) == 6
    assert skipped.schedule.num_steps == 2


def test_samples_without_size_leave_no_rank_empty():
    step = share_step(np.zeros((9, 2), np.int64), np.zeros(9), limits=(4, 4), dp=8, num_microbatches=1)
    assert np.diff(step.offsets).min() == 1
