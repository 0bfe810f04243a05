"""Cuts of a chain over unlike devices equal brute force over all cuts and all orders of devices."""

import itertools

import numpy as np
import pytest

from trimtab.placement.place import choices_of, least_sum, smallest_fullest


def draw(seed: int) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Shares [class, start, stop], the class of every device, and free costs of the same shape."""
    rng = np.random.default_rng(seed)
    num_units, num_devices = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    num_classes = int(rng.integers(1, num_devices + 1))
    classes = [*range(num_classes), *rng.integers(0, num_classes, num_devices - num_classes).tolist()]
    capacities = rng.integers(5, 40, num_classes)
    added, peak = rng.integers(0, 12, num_units), rng.integers(0, 9, num_units)
    fixed = int(rng.integers(0, 4))
    total = np.zeros((num_units + 1, num_units + 1))
    for s, e in itertools.combinations(range(num_units + 1), 2):
        total[s, e] = added[s:e].sum() + peak[s:e].max() + fixed
    shares = total[None] / capacities[:, None, None]
    return shares, classes, rng.random(shares.shape)


def all_maps(num_units: int, num_devices: int):
    """Every way to cut the units into runs that are not empty, each run on a device of its own."""
    for num_runs in range(1, min(num_units, num_devices) + 1):
        for cuts in itertools.combinations(range(1, num_units), num_runs - 1):
            ends = (0, *cuts, num_units)
            for devices in itertools.permutations(range(num_devices), num_runs):
                yield list(zip(ends[:-1], ends[1:], devices, strict=True))


@pytest.mark.parametrize("block", range(10))
def test_both_solvers_match_brute_force_on_a_thousand_instances(block):
    for seed in range(100 * block, 100 * (block + 1)):
        shares, classes, cost = draw(seed)
        num_units, num_devices = shares.shape[1] - 1, len(classes)
        maps = list(all_maps(num_units, num_devices))
        fullest = [max(shares[classes[d], s, e] for s, e, d in runs) for runs in maps]
        sums = [sum(cost[classes[d], s, e] for s, e, d in runs) for runs in maps]
        choices = choices_of(classes)
        assert smallest_fullest(shares, choices) == min(fullest), seed
        positive = np.where(np.triu(np.ones(cost.shape[1:], bool), 1), cost, np.inf)
        total, runs = least_sum(positive, choices)
        assert total == pytest.approx(min(sums), abs=1e-12), seed
        assert sum(cost[classes[r.device], r.start, r.stop] for r in runs) == pytest.approx(total)
        assert [r.start for r in runs] == [0, *[r.stop for r in runs[:-1]]]
        assert runs[-1].stop == num_units
        assert len({r.device for r in runs}) == len(runs)


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_that_nothing_beats_is_handed_back(seed):
    shares, classes, _ = draw(seed)
    choices = choices_of(classes)
    best = smallest_fullest(shares, choices)
    assert smallest_fullest(shares, choices, below=best) == best
    assert smallest_fullest(shares, choices, below=best / 2) == best / 2


def test_the_number_of_devices_can_be_asked_for():
    shares, classes, cost = draw(3)
    num_units = shares.shape[1] - 1
    positive = np.where(np.triu(np.ones(cost.shape[1:], bool), 1), cost, np.inf)
    for num in range(1, min(num_units, len(classes)) + 1):
        assert len(least_sum(positive, choices_of(classes), num_devices=num)[1]) == num


def test_more_than_twelve_unlike_devices_keep_their_order():
    classes = list(range(14))
    choices = choices_of(classes)
    rng = np.random.default_rng(0)
    before = np.concatenate([[0], np.cumsum(rng.integers(1, 9, 40))]).astype(float)
    capacities = rng.integers(10, 40, 14)
    shares = np.maximum(before[None, :] - before[:, None], 0)[None] / capacities[:, None, None]
    bound = smallest_fullest(shares, choices)
    cost = np.where((shares > 0) & (shares <= bound), shares**2, np.inf)
    _, runs = least_sum(cost, choices)
    devices = [r.device for r in runs]
    assert devices == sorted(devices)
    assert max(shares[classes[r.device], r.start, r.stop] for r in runs) == bound


def test_nothing_fits_gives_no_runs():
    total, runs = least_sum(np.full((1, 4, 4), np.inf), choices_of([0, 0]))
    assert total == np.inf
    assert runs == ()
