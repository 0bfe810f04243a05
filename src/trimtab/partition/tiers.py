"""Compiled: the least extra backward time that brings a stage's saved bytes under its room, exactly.

Layers that offer the same tiers form a class; only how many of a class take which tier matters. A class has two
*upgrades* of its first tier: gain (bytes saved) and cost (composite time), 0 where there is none; both rise.
A *step* is one edge of the convex hull of a class's tiers: taking steps in order of cost per byte, the last in part, is
the linear relaxation, a bound from below on every whole choice (Sinha and Zoltners 1979, "The multiple-choice
knapsack problem").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from trimtab.specs import IntArray

IMPOSSIBLE = 2**62


class TierTable(NamedTuple):
    """Upgrades of every class and the hull steps of all classes, cheapest per byte first."""

    gain: IntArray  # (C, 2) bytes of one layer and micro-batch
    cost: IntArray  # (C, 2) composite time units
    step_class: IntArray  # (H,)
    step_upgrade: IntArray  # (H,) 0 or 1: where the step leads
    step_from: IntArray  # (H,) -1 or 0: where it starts
    step_gain: IntArray  # (H,)
    step_cost: IntArray  # (H,)


@njit(cache=True)
def relax(tiers: TierTable, num_alike: IntArray, level_of: IntArray, level: int, need: int) -> float:
    """Least cost of saving `need` bytes with the classes of level >= `level`, layers divisible; inf if impossible."""
    cost, rest = 0.0, float(need)
    for h in range(tiers.step_class.shape[0]):
        g = tiers.step_class[h]
        if num_alike[g] == 0 or level_of[g] < level:
            continue
        gain = float(num_alike[g] * tiers.step_gain[h])
        if gain >= rest:
            return cost + rest / float(tiers.step_gain[h]) * float(tiers.step_cost[h])
        rest -= gain
        cost += float(num_alike[g] * tiers.step_cost[h])
    return np.inf


@njit(cache=True)
def round_up(tiers: TierTable, num_alike: IntArray, need: int, counts: IntArray) -> int:
    """Cost of the relaxation's choice, its last step rounded up to whole layers: within one layer of the optimum."""
    counts[:] = 0
    cost, rest = np.int64(0), np.int64(need)
    for h in range(tiers.step_class.shape[0]):
        g = tiers.step_class[h]
        if num_alike[g] == 0:
            continue
        layers = min(num_alike[g], -(-rest // tiers.step_gain[h]))
        if tiers.step_from[h] == 0:
            counts[g, 0] -= layers
        counts[g, tiers.step_upgrade[h]] += layers
        cost += layers * tiers.step_cost[h]
        rest -= layers * tiers.step_gain[h]
        if rest <= 0:
            return int(cost)
    return IMPOSSIBLE


@njit(cache=True)
def finish(tiers: TierTable, g: int, num_layers: int, need: int, best: int, counts: IntArray) -> int:
    """Least cost below `best` of saving `need` > 0 bytes with class g alone, else `best`; sets counts[g] if below."""
    for second in range(num_layers + 1 if tiers.gain[g, 1] > 0 else 1):
        cost = second * tiers.cost[g, 1]
        if cost >= best:
            break
        rest = need - second * tiers.gain[g, 1]
        first = max(0, -(-rest // tiers.gain[g, 0]))
        if first + second <= num_layers and cost + first * tiers.cost[g, 0] < best:
            best = int(cost + first * tiers.cost[g, 0])
            counts[g, 0], counts[g, 1] = first, second
        if rest <= 0:
            break
    return best


@njit(cache=True)
def least_extra(tiers: TierTable, num_alike: IntArray, need: int, limit: int, counts: IntArray) -> int:
    """Least composite time that saves `need` bytes, or `IMPOSSIBLE` when it exceeds `limit`; `counts` (C, 2) says how.

    `num_alike` (C,) layers of each class. Exact: branch and bound over the counts of each class, the largest class in
    closed form; a branch is dropped only when the relaxation of what is left (with slack for its rounding) cannot
    undercut the best choice known. Microseconds where the classes' seconds per byte differ; exponential in the number
    of classes at worst (four of fifty layers each, all within 1e-4 of one ratio: a second).
    """
    counts[:] = 0
    if need <= 0:
        return 0
    C = num_alike.shape[0]
    level_of = np.zeros(C, np.int64)
    bound = relax(tiers, num_alike, level_of, 0, need)
    if bound * (1.0 - 1e-14) > limit:
        return IMPOSSIBLE
    best = round_up(tiers, num_alike, need, counts)
    found = best <= limit
    if found and best <= bound:
        return int(best)
    if not found:
        best = limit + 1

    order = np.argsort(num_alike, kind="mergesort")
    while num_alike[order[0]] == 0:
        order = order[1:]
    n = order.shape[0]
    for j in range(n):
        level_of[order[j]] = j
    trial = np.zeros_like(counts)
    rest, spent = np.zeros(n, np.int64), np.zeros(n, np.int64)
    rest[0] = need
    if n == 1:
        cost = finish(tiers, order[0], num_alike[order[0]], need, best, trial)
        if cost < best:
            counts[:] = trial
            best, found = cost, True
        return int(best) if found else IMPOSSIBLE

    level = 0
    trial[order[0], 0] = -1
    while level >= 0:
        g = order[level]
        trial[g, 0] += 1
        if trial[g, 0] + trial[g, 1] > num_alike[g]:
            trial[g, 0] = 0
            trial[g, 1] += 1
            if trial[g, 1] > num_alike[g] or tiers.gain[g, 1] == 0:
                trial[g, 1] = 0
                level -= 1
                continue
        cost = spent[level] + trial[g, 0] * tiers.cost[g, 0] + trial[g, 1] * tiers.cost[g, 1]
        if cost >= best:
            if trial[g, 0] == 0:  # more of the dearer upgrade costs more still
                trial[g, 1] = 0
                level -= 1
            else:
                trial[g, 0] = num_alike[g]
            continue
        left = rest[level] - trial[g, 0] * tiers.gain[g, 0] - trial[g, 1] * tiers.gain[g, 1]
        if left <= 0:
            counts[:] = trial
            for j in range(level + 1, n):
                counts[order[j]] = 0
            best, found = cost, True
            trial[g, 0] = num_alike[g]
            continue
        below = cost + relax(tiers, num_alike, level_of, level + 1, left)
        if below * (1.0 - 1e-14) > best - 1:
            continue
        if level + 2 == n:
            last = order[n - 1]
            total = cost + finish(tiers, last, num_alike[last], left, best - cost, trial)
            if total < best:
                counts[:] = trial
                best, found = total, True
            trial[last] = 0
            continue
        level += 1
        rest[level], spent[level] = left, cost
        trial[order[level], 0], trial[order[level], 1] = -1, 0
    return int(best) if found else IMPOSSIBLE


def tier_table(gain: IntArray, cost: IntArray) -> TierTable:
    """Hull steps of the upgrades (C, 2); ties in cost per byte keep the order of the classes."""
    steps: list[tuple[float, int, int, int, int, int]] = []
    for g in range(len(gain)):
        (gain_1, gain_2), (cost_1, cost_2) = (int(x) for x in gain[g]), (int(x) for x in cost[g])
        if gain_2 == 0:
            steps.append((cost_1 / gain_1, g, 0, -1, gain_1, cost_1))
        elif cost_1 * gain_2 < cost_2 * gain_1:  # the first upgrade lies below the chord to the second
            steps.append((cost_1 / gain_1, g, 0, -1, gain_1, cost_1))
            steps.append(((cost_2 - cost_1) / (gain_2 - gain_1), g, 1, 0, gain_2 - gain_1, cost_2 - cost_1))
        else:
            steps.append((cost_2 / gain_2, g, 1, -1, gain_2, cost_2))
    steps.sort(key=lambda step: step[:3])
    columns: list[npt.NDArray[np.int64]] = [np.array([s[i] for s in steps], np.int64) for i in range(1, 6)]
    return TierTable(
        gain=gain,
        cost=cost,
        step_class=columns[0],
        step_upgrade=columns[1],
        step_from=columns[2],
        step_gain=columns[3],
        step_cost=columns[4],
    )
