"""Tests of runtime/training/ (shared): samples of a step shared among ranks, against one process. Needs torch, gloo."""

import numpy as np
import pytest
import torch

from refusals import refused

pytest.importorskip("transformers", minversion="5", reason="holds the models")

import online_runs
from gloo_ranks import on_ranks

from trimtab.errors import TrimtabError
from trimtab.runtime.training.shared import ForwardClock, LearnedCost, OnlineBalancer, SampleSize, share_ranks

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


@pytest.mark.parametrize("factor", [0.2, 3.0])
def test_forward_passes_teach_what_samples_cost(factor):
    """Towers that run slower or faster than multiply-adds say, and a constant of each pass; with 2 % of noise."""
    draw, learned, slowest = np.random.default_rng(0), LearnedCost(), []
    for step in range(33):
        tokens = draw.lognormal(6, 1, 64 * 16).astype(int) + 1
        patches = draw.lognormal(7, 1, len(tokens)).astype(int) * draw.integers(0, 2, len(tokens))
        sizes = np.stack([patches, tokens, 1e9 * tokens, 6e8 * patches + 5e3 * patches**2.0], axis=1)
        seconds = 1e-14 * (sizes[:, 2] + factor * sizes[:, 3])
        shares = share_ranks(np.split(np.column_stack([sizes[:, :2], sizes @ learned.weights]), 64), step=step)
        of_rank = np.array([seconds[part].sum() for part in shares.members])
        slowest.append(of_rank.max() / max(of_rank.mean(), seconds.max()))
        passes = [[*sizes[part].sum(axis=0), 0.01 + own] for part, own in zip(shares.members, of_rank, strict=True)]
        learned.add(np.array(passes) * np.insert(np.ones((64, 4)), 4, draw.normal(1, 0.02, 64), axis=1))
    before, after = np.mean(slowest[:16]) - 1, np.mean(slowest[16:]) - 1
    assert after < 0.02 < before


def test_passes_that_see_no_image_are_learnt_from_and_no_pass_teaches_nothing():
    learned = LearnedCost()
    for step in range(48):
        tokens = 100.0 + np.arange(8) * step
        passes = np.stack([0 * tokens, tokens, 1e9 * tokens, 0 * tokens, 2e-3 * tokens * (step > 30)], axis=1)
        learned.add(passes)
        assert np.isfinite(learned.weights).all()
        assert (learned.weights[1:3] > 0).any()
    expected = 2e-3 * 500
    assert learned.weights @ [0, 500, 5e11, 0] == pytest.approx(expected, rel=1e-3)


def test_a_clock_counts_passes_in_training_alone():
    model = torch.nn.Linear(64, 64)
    clock = ForwardClock(model)
    with torch.no_grad():
        model(torch.ones(2, 64))
    model.eval()(torch.ones(2, 64))
    assert clock.read_s() == 0.0
    model.train()(torch.ones(2, 64))
    assert clock.read_s() > 0.0
    assert clock.read_s() == 0.0


def test_one_process_keeps_nothing_of_its_passes():
    model = torch.nn.Linear(1, 1)
    balancer = OnlineBalancer(model, dict, size=lambda _: SampleSize(tokens=1, patches=0, flops=1.0))
    assert balancer.share(["one", "two"]) == ["one", "two"]
    assert not model._forward_hooks
