"""pack_isf against a plain restatement of the published algorithm, and what it owes the user: nothing dropped."""

import numpy as np
import pytest

from trimtab.balance.published import default_filters, pack_isf
from trimtab.compiled import make_stream, shuffle


def restate_isf(sizes, limits, filters, iterations, state):
    """Algorithm 1 of arXiv 2407.20761 on lists, keeping what the last iteration leaves."""
    left, kept = list(range(len(sizes))), []
    for iteration in range(iterations):
        order = np.array(left, np.int64)
        shuffle(order, state)
        groups, group = [], []
        for i in order.tolist():
            if group and any(sum(sizes[j][d] for j in [*group, i]) > limits[d] for d in range(len(limits))):
                groups.append(group)
                group = []
            group.append(i)
        groups += [group] if group else []
        left = []
        for group in groups:
            v, t = (sum(sizes[j][d] for j in group) for d in (0, 1))
            if v >= filters[0] or t >= filters[1] or iteration == iterations - 1:
                kept.append(group)
            else:
                left += group
    return kept


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("iterations", [1, 2, 10])
def test_isf_does_what_the_paper_says(seed, iterations):
    r = np.random.default_rng(seed)
    n = int(r.integers(1, 200))
    sizes = np.column_stack([r.integers(0, 6, n), r.integers(1, 1500, n)])
    limits, filters = (9, 4096), (9, 3968)
    groups = pack_isf(sizes, limits=limits, filters=filters, iterations=iterations, seed=seed)
    ours = [groups.members[a:b].tolist() for a, b in zip(groups.offsets, groups.offsets[1:], strict=False)]
    theirs = restate_isf(sizes.tolist(), limits, filters, iterations, make_stream(seed, 0, 0x697366))
    assert sorted(ours) == sorted(theirs)


def test_isf_gives_its_packs_in_random_order():
    # packs of the first iteration are full, those of the last are what was left: in that order they would meet
    r = np.random.default_rng(0)
    sizes = np.column_stack([r.integers(1, 6, 4000), r.integers(1, 1500, 4000)])
    groups = pack_isf(sizes, limits=(9, 4096), filters=None, iterations=2, seed=0)
    fill = np.add.reduceat(sizes[groups.members, 0], groups.offsets[:-1])
    half = len(fill) // 2
    assert (fill < 9).sum() > 50
    assert abs((fill[:half] < 9).mean() - (fill[half:] < 9).mean()) < 0.05


def test_default_filters_are_the_papers():
    assert default_filters((9, 4096)) == (9, 3968)
    assert default_filters((18, 6016)) == (18, 5888)
    assert default_filters((9, 2048)) == (9, 1984)
    assert default_filters((1, 1)) == (1, 1)
