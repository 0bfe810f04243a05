"""Tests of runtime/training/ (shared): samples of a step shared among ranks, against one process. Needs torch, gloo."""

import numpy as np
import pytest

from refusals import refused

pytest.importorskip("transformers", minversion="5", reason="holds the models")

import online_runs
from gloo_ranks import on_ranks

from trimtab.errors import TrimtabError
from trimtab.runtime.training.shared import share_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_gradients_are_those_of_one_process(family):
    on_ranks(online_runs.run_online, family)


def draw_sizes(num_ranks: int, most: int, seed: int) -> list[np.ndarray]:
    """Patches, tokens and flops of each rank's samples."""
    draw = np.random.default_rng(seed)
    tokens = [draw.lognormal(5, 1, draw.integers(1, most + 1)).astype(int) + 1 for _ in range(num_ranks)]
    return [np.stack([4 * t, t, t * t], axis=1).astype(float) for t in tokens]


@pytest.mark.parametrize("seed", range(6))
def test_ranks_run_every_sample_once_and_cost_alike(seed):
    sizes = draw_sizes(8, 16, seed)
    shares = share_ranks(sizes, step=seed)
    cost = np.concatenate(sizes)[:, 2]
    assert sorted(np.concatenate(shares.members).tolist()) == list(range(len(cost)))
    assert shares.load.max() <= 1.01 * max(shares.load.mean(), cost.max())
    np.testing.assert_allclose(shares.load, [cost[part].sum() for part in shares.members])
    again = share_ranks(sizes, step=seed)
    np.testing.assert_array_equal(np.concatenate(shares.members), np.concatenate(again.members))


def test_few_samples_leave_no_rank_without_one():
    for costs in ([[1e9, 1.0, 1.0], [1.0], []], [[1.0, 0.0], [], [0.0]]):
        sizes = [np.array([[0.0, 9.0, f] for f in own]).reshape(-1, 3) for own in costs]
        shares = share_ranks(sizes)
        assert all(len(part) for part in shares.members)
        assert sorted(np.concatenate(shares.members).tolist()) == list(range(sum(map(len, costs))))
    with refused(TrimtabError, "3", "2"):
        share_ranks([np.ones((1, 3)), np.ones((1, 3)), np.ones((0, 3))])
