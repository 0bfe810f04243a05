"""Tests of partition/stages.py (the search on the makespan): near complete enumeration, never worse than the start."""

import itertools

import numpy as np
import pytest
from partition_cases import equal_work, layer, problem_of, profile_of, random_profile, random_work

from trimtab.errors import PartitionError
from trimtab.partition.simulate import simulate, stage_times
from trimtab.partition.stages import _STEPS, Evaluator, _joint_moves, recompute_stages, search_makespan, split_stages
from trimtab.specs import stages_between

SHAPES = [("1F1B", 4, 1), ("GPipe", 4, 1), ("ZBH1", 4, 1), ("Interleaved1F1B", 2, 2), ("ZBVZeroBubble", 2, 2)]


def enumerate_makespans(problem, work, link=None):
    """Mean simulated makespan of every split that fits, recompute solved per stage."""
    found = {}
    for inner in itertools.combinations(
        range(1, len(problem.profile.layers)), problem.num_stages * problem.num_chunks - 1
    ):
        try:
            solved = recompute_stages(problem, stages_between((0, *inner, len(problem.profile.layers)))).stages
        except PartitionError:
            continue
        lines = [
            simulate(
                stage_times(problem.profile, solved, w, link_bytes_per_s=link, latency_s=0.1 if link else 0.0),
                schedule=problem.schedule,
                num_devices=problem.num_stages,
            )
            for w in work
        ]
        found[inner] = float(np.mean([line.makespan_s for line in lines]))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("schedule", "P", "V"), SHAPES)
def test_the_search_is_near_the_best_of_all_splits(schedule, P, V, seed):
    rng = np.random.default_rng(seed)
    L, M = int(rng.integers(7, 11)), int(rng.integers(1, 9)) // P * P if V > 1 else int(rng.integers(2, 9))
    M = max(M, P if V > 1 else 1)
    profile = random_profile(rng, L, 4)
    work = random_work(rng, 2, M, spread=0.9)
    tight = V == 1 and seed % 2 == 0
    problem = problem_of(profile, P, M, work, memory_bytes=900 if tight else 1e18, schedule=schedule, num_chunks=V)
    link = None if seed % 4 else 20.0
    every = enumerate_makespans(problem, work, link)
    if not every:
        pytest.skip("nothing fits")
    evaluator = Evaluator(problem, work, link_bytes_per_s=link, latency_s=0.1 if link else 0.0)
    result = search_makespan(evaluator)
    assert min(every.values()) <= result.makespan_s * (1 + 1e-9)
    assert result.makespan_s <= min(result.start_makespan_s, 1.05 * min(every.values()))
    cuts = tuple(stage.start for stage in result.split.stages[1:])
    assert result.makespan_s == pytest.approx(every[cuts], rel=1e-9)
    assert max(device.total_bytes for device in result.split.memory) <= problem.memory_bytes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("schedule", "P", "V"), SHAPES)
def test_no_split_ends_before_its_lower_bound(schedule, P, V, seed):
    rng = np.random.default_rng(seed)
    M = P * int(rng.integers(1, 4))
    work = random_work(rng, 2, M, spread=0.9)
    problem = problem_of(random_profile(rng, 9, 4), P, M, work, schedule=schedule, num_chunks=V)
    evaluator = Evaluator(problem, work)
    for cuts in itertools.combinations(range(1, 9), P * V - 1):
        makespan = evaluator.makespan((0, *cuts, 9))
        least = evaluator.least_makespan((0, *cuts, 9))
        assert 0.3 * makespan < least <= makespan * (1 + 1e-12)


def test_few_microbatches_want_smaller_late_stages():
    profile = profile_of([layer(i) for i in range(80)])
    work = equal_work(4)
    problem = problem_of(profile, 4, 4, work)
    result = search_makespan(Evaluator(problem, work))
    assert result.start_makespan_s == pytest.approx(7 * 60.0)
    assert result.makespan_s < 0.97 * result.start_makespan_s
    sizes = [stage.stop - stage.start for stage in result.split.stages]
    assert sizes[0] > sizes[-1]
    assert not result.split.exact
    again = search_makespan(Evaluator(problem, work))
    assert again.split.stages == result.split.stages


def test_sends_move_the_cut_to_where_little_is_sent():
    layers = [layer(i, sent=1000.0 if i in (3, 4) else 10.0) for i in range(10)]
    work = equal_work(4)
    problem = problem_of(profile_of(layers), 2, 4, work)
    free = search_makespan(Evaluator(problem, work)).split.stages[0].stop
    dear = search_makespan(Evaluator(problem, work, link_bytes_per_s=10.0)).split.stages[0].stop
    assert free == 5
    assert dear not in (4, 5)


def test_forbidden_cuts_and_interleaving_are_respected():
    rng = np.random.default_rng(3)
    profile = random_profile(rng, 24, 4)
    work = random_work(rng, 3, 8)
    forbidden = frozenset({5, 6, 7, 13})
    for schedule, chunks in (("1F1B", 1), ("Interleaved1F1B", 2)):
        problem = problem_of(profile, 4, 8, work, forbidden_cuts=forbidden, schedule=schedule, num_chunks=chunks)
        result = search_makespan(Evaluator(problem, work))
        assert not forbidden & {stage.start for stage in result.split.stages}
        assert len(result.split.stages) == 4 * chunks
        assert result.makespan_s <= result.start_makespan_s


def test_a_start_that_nothing_beats_is_kept_and_is_exact():
    work = equal_work(2)
    problem = problem_of(profile_of([layer(0), layer(1)]), 2, 2, work)
    result = search_makespan(Evaluator(problem, work))
    assert result.split == split_stages(problem)
    assert result.split.exact
    assert result.makespan_s == result.start_makespan_s


def test_runs_of_two_or_more_cuts_move_together():
    whole = {(step, step, step) for step in _STEPS}
    assert set(_joint_moves(3)) == whole | {move for step in _STEPS for move in ((step, step, 0), (0, step, step))}
