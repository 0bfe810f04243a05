"""Exact cuts of a chain over unlike devices: the fullest device as empty as it can be, or a sum as small.

A chain of n units is cut into consecutive runs, each on a device of its own, devices in any order, some left empty.
Devices of one class are alike. `fraction[c, s, e]` is the share of a class-c device that units s <= i < e take; it must
not shrink when a run grows at either end, which sums and maxima of what single units take never do.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.specs import FloatArray

MAX_STATES = 4096  # multisets of devices in use: 12 unlike ones, or any number of alike ones


@dataclass(frozen=True, slots=True)
class Run:
    """Units `start <= i < stop` on device `device` of the machine."""

    start: int
    stop: int
    device: int


@dataclass(frozen=True, slots=True)
class _Step:
    before: int  # states: which devices are used
    device_class: int
    after: int
    device: int  # of the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Ways to take one device after the other, as steps between states in an order that never goes back."""

    num_states: int
    steps: tuple[_Step, ...]
    num_used: tuple[int, ...]  # devices in use in each state


def choices_of(classes: Sequence[int]) -> Choices:
    """All orders of devices, device i being of class `classes[i]`; past `MAX_STATES` only the order given."""
    members = [[i for i, c in enumerate(classes) if c == k] for k in range(max(classes) + 1)]
    sizes = [len(m) + 1 for m in members]
    if np.prod(np.array(sizes, dtype=np.float64)) > MAX_STATES:
        steps = tuple(_Step(i, c, j + 1, j) for i in range(len(classes)) for j, c in enumerate(classes[i:], start=i))
        return Choices(num_states=len(classes) + 1, steps=steps, num_used=tuple(range(len(classes) + 1)))
    states = list(itertools.product(*(range(size) for size in sizes)))  # lexicographic: a larger multiset comes later
    index = {state: i for i, state in enumerate(states)}
    found = []
    for state in states:
        for k, used in enumerate(state):
            if used < len(members[k]):
                after = (*state[:k], used + 1, *state[k + 1 :])
                found.append(_Step(index[state], k, index[after], members[k][used]))
    return Choices(num_states=len(states), steps=tuple(found), num_used=tuple(sum(state) for state in states))


def smallest_fullest(fraction: FloatArray, choices: Choices, *, below: float = np.inf) -> float:
    """The least value that the fullest device can have, exactly; `below` itself if none is lower.

    The answer is one of the fractions. For a bound every state's longest reach is found by extending greedily, which
    is right because a run that starts later, or ends earlier, never takes more.
    """
    n = fraction.shape[1] - 1
    upper = np.triu_indices(n + 1, k=1)
    values = np.unique(fraction[:, upper[0], upper[1]])
    values = values[values < below]
    rows = [[row.tolist() for row in matrix] for matrix in fraction]
    least = bisect_left(values, True, key=lambda bound: _reaches_end(rows, choices, float(bound), n))
    return float(values[least]) if least < len(values) else below


def _reaches_end(rows: list[list[list[float]]], choices: Choices, bound: float, n: int) -> bool:
    reach = [0] * choices.num_states
    for step in choices.steps:
        start = reach[step.before]
        stop = bisect_right(rows[step.device_class][start], bound, lo=start) - 1
        if stop >= n:
            return True
        reach[step.after] = max(reach[step.after], stop)
    return False


def least_sum(cost: FloatArray, choices: Choices, *, num_devices: int | None = None) -> tuple[float, tuple[Run, ...]]:
    """Runs whose costs (infinite where a run does not fit) add up to the least sum, exactly; no runs if none fit.

    `num_devices`: exactly so many devices. Every (state, cut) pair once: states x classes x n^2.
    """
    n = cost.shape[1] - 1
    best = np.full((choices.num_states, n + 1), np.inf)
    came: list[list[tuple[int, _Step] | None]] = [[None] * (n + 1) for _ in range(choices.num_states)]
    best[0, 0] = 0.0
    for step in choices.steps:
        if num_devices is not None and choices.num_used[step.after] > num_devices:
            continue
        sums = best[step.before][:, None] + cost[step.device_class]
        start = sums.argmin(axis=0)
        value = sums[start, np.arange(n + 1)]
        for stop in np.flatnonzero(value < best[step.after]).tolist():
            best[step.after, stop] = value[stop]
            came[step.after][stop] = (int(start[stop]), step)
    ends = [
        state for state in range(choices.num_states) if num_devices is None or choices.num_used[state] == num_devices
    ]
    last = min(ends, key=lambda state: (best[state, n], choices.num_used[state]), default=0)
    total = float(best[last, n])
    if not np.isfinite(total):
        return total, ()
    runs: list[Run] = []
    state, stop = last, n
    while (step_in := came[state][stop]) is not None:
        start_at, step = step_in
        runs.append(Run(start_at, stop, step.device))
        state, stop = step.before, start_at
    return total, tuple(reversed(runs))
