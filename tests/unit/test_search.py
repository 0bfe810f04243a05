"""Tests of partition/search.py: against complete enumeration, never worse than the start, the bound is one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from partition_cases import layer, profile_of, random_profile

from trimtab.errors import PartitionError
from trimtab.partition.search import makespan_bound, search_makespan
from trimtab.partition.simulate import simulate, stage_times
from trimtab.partition.stages import SplitProblem, recompute_stages
from trimtab.specs import NUM_WORK_TERMS, Stage


def problem_of(profile, P, M, work, *, memory=1e18, **kwargs):
    return SplitProblem(
        profile=profile,
        num_stages=P,
        work_mean=work.mean(axis=(0, 1)),
        work_max=work.max(axis=(0, 1)),
        memory_bytes=memory,
        num_microbatches=M,
        **kwargs,
    )


def random_work(rng, steps, M, spread=0.5):
    work = np.zeros((steps, M, NUM_WORK_TERMS))
    work[:, :, 0] = rng.uniform(1 - spread, 1 + spread, (steps, M))
    return work


def enumerate_makespans(problem, work, link=None):
    """Mean simulated makespan of every split that fits, recompute solved per stage."""
    L = len(problem.profile.layers)
    found = {}
    for inner in itertools.combinations(range(1, L), problem.num_stages - 1):
        stages = [Stage(index=i, start=a, stop=b) for i, (a, b) in enumerate(itertools.pairwise((0, *inner, L)))]
        try:
            solved = recompute_stages(problem, stages).stages
        except PartitionError:
            continue
        lines = [simulate(stage_times(problem.profile, solved, w, link_bytes_per_s=link)) for w in work]
        found[inner] = float(np.mean([line.makespan_s for line in lines]))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_search_finds_the_optimum_of_small_instances(seed):
    rng = np.random.default_rng(seed)
    L, M = int(rng.integers(7, 11)), int(rng.integers(2, 9))
    profile = random_profile(rng, L, 4)
    work = random_work(rng, 2, M)
    problem = problem_of(profile, 4, M, work, memory=1e18 if seed % 2 else 700)
    every = enumerate_makespans(problem, work)
    assert every, "the case was meant to be feasible"
    result = search_makespan(problem, work)
    assert result.makespan_s == pytest.approx(min(every.values()), rel=1e-9)
    assert result.makespan_s <= result.start_makespan_s
    assert result.lower_bound_s <= min(every.values())
    assert max(device.total_bytes for device in result.split.memory) <= problem.memory_bytes


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_no_split_undercuts_the_bound(schedule):
    for seed in range(25):
        rng = np.random.default_rng(1000 + seed)
        P, M = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        profile = random_profile(rng, int(rng.integers(P, 8)), 3)
        work = random_work(rng, 2, M, spread=0.9)
        memory = float(rng.integers(300, 900))
        problem = problem_of(profile, P, M, work, memory=memory, schedule=schedule)
        every = {
            cuts: np.mean(
                [
                    simulate(
                        stage_times(profile, recompute_stages(problem, _stages(cuts, profile)).stages, w),
                        schedule=schedule,
                    ).makespan_s
                    for w in work
                ]
            )
            for cuts in enumerate_makespans(problem, work)
        }
        if every:
            assert makespan_bound(problem, work) <= min(every.values())


def _stages(inner, profile):
    cuts = (0, *inner, len(profile.layers))
    return [Stage(index=i, start=a, stop=b) for i, (a, b) in enumerate(itertools.pairwise(cuts))]


def test_equal_layers_meet_the_bound():
    profile = profile_of([layer(i) for i in range(64)])
    work = np.zeros((1, 64, NUM_WORK_TERMS))
    work[:, :, 0] = 1.0
    problem = problem_of(profile, 4, 64, work)
    result = search_makespan(problem, work)
    assert result.makespan_s <= (64 + 3) * 16 * 3.0
    assert 0 <= result.gap < 0.01


def test_few_microbatches_want_smaller_late_stages():
    profile = profile_of([layer(i) for i in range(80)])
    work = np.zeros((1, 4, NUM_WORK_TERMS))
    work[:, :, 0] = 1.0
    problem = problem_of(profile, 4, 4, work)
    result = search_makespan(problem, work)
    assert result.start_makespan_s == pytest.approx(7 * 60.0)
    assert result.makespan_s < 0.97 * result.start_makespan_s
    sizes = [stage.stop - stage.start for stage in result.split.stages]
    assert sizes[0] > sizes[-1]
    assert not result.split.exact
    again = search_makespan(problem, work)
    assert again.split.stages == result.split.stages


def test_sends_move_the_cut_to_where_little_is_sent():
    layers = [layer(i, sent=1000.0 if i in (3, 4) else 10.0) for i in range(10)]
    work = np.zeros((1, 4, NUM_WORK_TERMS))
    work[:, :, 0] = 1.0
    problem = problem_of(profile_of(layers), 2, 4, work)
    free = search_makespan(problem, work).split.stages[0].stop
    dear = search_makespan(problem, work, link_bytes_per_s=10.0).split.stages[0].stop
    assert free == 5
    assert dear not in (4, 5)


def test_forbidden_cuts_and_interleaving_are_respected():
    rng = np.random.default_rng(3)
    profile = random_profile(rng, 24, 4)
    work = random_work(rng, 3, 8)
    forbidden = frozenset({5, 6, 7, 13})
    for schedule, chunks in (("1F1B", 1), ("Interleaved1F1B", 2)):
        problem = problem_of(profile, 4, 8, work, forbidden_cuts=forbidden, schedule=schedule, num_chunks=chunks)
        result = search_makespan(problem, work)
        assert not forbidden & {stage.start for stage in result.split.stages}
        assert len(result.split.stages) == 4 * chunks
        assert result.lower_bound_s <= result.makespan_s <= result.start_makespan_s


def test_work_of_the_wrong_shape_is_refused():
    profile = profile_of([layer(i) for i in range(4)])
    work = np.ones((1, 4, NUM_WORK_TERMS))
    problem = problem_of(profile, 2, 4, work)
    with pytest.raises(
        PartitionError, match=r"shape \(1, 3, 7\) cannot be simulated with 4 micro-batches.*give \(steps, 4, 7\)"
    ):
        search_makespan(problem, work[:, :3])
