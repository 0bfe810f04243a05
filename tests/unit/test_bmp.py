"""Tests of partition/published.py: the anchor, the candidates' ranking, what is timed."""

import itertools

import numpy as np
import pytest
from partition_cases import equal_work, layer, problem_of, profile_of, random_profile, random_work

from trimtab.partition.published import bmp_anchor, bmp_candidates, bmp_split, rank_cuts
from trimtab.partition.stages import Evaluator, search_makespan
from trimtab.units import MIB


def work_of(steps, M):
    return random_work(np.random.default_rng(0), steps, M)


def test_the_anchor_divides_the_forward_evenly():
    work = equal_work(4)
    profile = profile_of([layer(i, forward) for i, forward in enumerate([4, 4, 1, 1, 1, 1, 1, 1, 1, 1])])
    assert bmp_anchor(problem_of(profile, 4, 4, work)) == (1, 2, 6)
    assert bmp_anchor(problem_of(profile, 4, 4, work, forbidden_cuts=frozenset({1, 6}))) == (2, 3, 5)
    assert bmp_anchor(problem_of(profile, 10, 4, work)) == tuple(range(1, 10))


@pytest.mark.parametrize("seed", range(5))
def test_candidates_are_all_cuts_in_the_radius_ranked_as_published(seed):
    rng = np.random.default_rng(seed)
    layers = [layer(i, 1e-3 * rng.uniform(1, 5), sent=float(rng.integers(1, 9)) * MIB) for i in range(12)]
    profile, work = profile_of(layers), work_of(2, 4)
    problem = problem_of(profile, 4, 4, work, forbidden_cuts=frozenset({5}))
    anchor = bmp_anchor(problem)
    found = bmp_candidates(problem, anchor, radius=2)
    allowed = [c for c in range(1, 12) if c != 5]
    near = [allowed[max(0, allowed.index(a) - 2) : allowed.index(a) + 3] for a in anchor]
    expected = {}
    for cuts in itertools.product(*near):
        if all(a < b for a, b in itertools.pairwise(cuts)):
            ends = itertools.pairwise((0, *cuts, 12))
            forward = [sum(x.forward_s[0] for x in layers[a:b]) * problem.work_mean[0] for a, b in ends]
            sent = sum(layers[c - 1].output_bytes[0] for c in cuts) * problem.work_mean[0] / MIB
            expected[cuts] = 1e6 * np.square(np.subtract(forward, np.mean(forward))).sum() + sent
    assert {x.cuts: pytest.approx(x.rank) for x in found} == expected
    assert all(rank_cuts(problem, x.cuts) == x for x in found)
    ranks = [x.rank for x in found]
    assert ranks == sorted(ranks)


def test_the_fastest_of_the_best_ranked_is_taken_and_never_beats_the_search():
    num_full = 0  # candidates that do not fit
    for seed in range(5):
        profile, work = random_profile(np.random.default_rng(seed), 14, 4), work_of(2, 6)
        problem = problem_of(profile, 4, 6, work, memory_bytes=600.0)
        evaluator = Evaluator(problem, work)
        result = bmp_split(problem, evaluator.makespan_of, radius=2, num_timed=5)
        ranked = bmp_candidates(problem, result.anchor, radius=2)
        assert [candidate for candidate, _ in result.timed] == ranked[: len(result.timed)]
        fitting = [seconds for _, seconds in result.timed if seconds < float("inf")]
        num_full += len(result.timed) - len(fitting)
        assert len(fitting) == min(5, result.num_candidates)
        assert result.seconds == min(fitting) == evaluator.makespan_of(result.split.stages)
        assert search_makespan(evaluator).makespan_s <= result.seconds * (1 + 1e-12)
        assert max(device.total_bytes for device in result.split.memory) <= problem.memory_bytes
    assert num_full > 0


def test_one_stage_has_one_candidate():
    profile, work = random_profile(np.random.default_rng(0), 6, 4), work_of(1, 4)
    problem = problem_of(profile, 1, 4, work)
    (candidate,) = bmp_candidates(problem, bmp_anchor(problem), radius=3)
    assert (candidate.cuts, candidate.spread_ms, candidate.sent_mib) == ((), 0.0, 0.0)
    result = bmp_split(problem, lambda _: 1.0)
    assert [(stage.start, stage.stop) for stage in result.split.stages] == [(0, 6)]
    assert (result.anchor, result.seconds, result.num_candidates) == ((), 1.0, 1)
