"""Tests of plan/decide/compare.py: idle time falls to its causes, and the parts add up."""

from __future__ import annotations

import numpy as np
import pytest
from partition_cases import layer, problem_of, profile_of

from trimtab.partition.simulate import StageTimes, simulate, simulate_steps
from trimtab.plan.decide.compare import split_idle


def times_of(forward, sends=0.0):
    """`forward` (stages, packs) seconds; the backward takes twice as long."""
    forward = np.asarray(forward, float)
    send = np.full_like(forward, sends)
    return StageTimes(forward_s=forward, backward_s=2 * forward, send_forward_s=send, send_backward_s=send)


def split(forward, table, **more):
    times, table = times_of(forward, **more), np.asarray(table, np.int64)
    P, M = len(times.forward_s), table.shape[2]
    problem = problem_of(profile_of([layer(i) for i in range(P)]), P, M, np.ones((1, M, 7)))
    slowest = simulate_steps(times, table, num_devices=P).sum()
    busy = (times.forward_s + times.backward_s)[:, table[table >= 0]].sum()
    idle = 1 - busy / (slowest * P * table.shape[1])
    parts, rank_s = split_idle(times, table, problem, idle)
    longest = np.array([simulate_steps(times, table[:, [rank]], num_devices=P).max() for rank in range(table.shape[1])])
    assert rank_s[2] == pytest.approx(longest)
    assert (np.diff(rank_s, axis=0) >= 0).all()
    found = np.array([parts.bubble, parts.stages, parts.packs, parts.ranks])
    assert found.sum() == pytest.approx(idle)
    assert (found >= 0).all()
    return found


def test_even_packs_on_even_stages_leave_the_bubble_alone():
    found = split(np.ones((4, 8)), [[range(8)]])
    assert found == pytest.approx([3 / 11, 0, 0, 0])


def test_the_worked_example():
    """Forward and backward of 3 and 1 s: of 2 x 12 s, 4 are the uneven stages' and 4 the bubble's."""
    found = split([[1.0] * 4, [1 / 3] * 4], [[range(4)]])
    assert found == pytest.approx([4 / 24, 4 / 24, 0, 0])


def test_a_rank_with_less_work_waits():
    found = split([[1.0, 0.5]], [[[0, 0], [1, 1]]])
    assert found == pytest.approx([0, 0, 0, 0.25])


def test_uneven_packs_of_a_rank_are_told_from_uneven_ranks():
    uneven = np.tile([1.0, 3.0, 1.0, 3.0], (4, 1))
    found = split(uneven, [[range(4)], [range(4)]])
    even = split(np.full((4, 4), 2.0), [[range(4)], [range(4)]])
    longer = (
        simulate(times_of(uneven), num_devices=4).makespan_s
        / simulate(times_of(np.full((4, 4), 2.0)), num_devices=4).makespan_s
    )
    assert found[1] == found[3] == pytest.approx(0)
    assert found[2] == pytest.approx(1 - 1 / longer)
    assert found[0] == pytest.approx(even[0] / longer)


def test_empty_slots_and_sends_are_counted_once():
    """A rank without one of its micro-batches waits for the other; sends lengthen the bubble."""
    full = split(np.ones((2, 4)), [[range(4), range(4)]])
    short = split(np.ones((2, 4)), [[range(4), [0, 1, 2, -1]]])
    assert short[3] > 0
    assert full[3] == pytest.approx(0)
    assert split(np.ones((2, 4)), [[range(4)]], sends=0.5)[0] > full[0]
