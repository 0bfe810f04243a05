"""Compiled: the least extra backward time that brings a stage's saved bytes under its room, exactly.

Layers that offer the same tiers form a class; only how many of a class take which tier matters. A class has up to U
*upgrades* of its first tier, each with the bytes that it saves (gain) and the composite time that it costs. A *prefix*
p allows a class its first p upgrades. A *step* is one edge of the convex hull of a class's upgrades under a prefix:
taking steps in order of cost per byte, the last in part, is the linear relaxation, a bound from below on every whole
choice (Sinha and Zoltners 1979, "The multiple-choice knapsack problem").

Example: 3 alike layers whose one upgrade saves 4 MB and costs 3 ms, 2 alike layers whose one upgrade saves 6 MB and
costs 5 ms; 13 MB are needed. Steps by cost per byte: 3/4, then 5/6. Relaxation: 3 layers save 12 MB for 9 ms, a sixth
of the next for the last MB, 9.83 ms. Rounded up: 14 ms, saving 18 MB. Branch and bound finds the optimum between the
two: 2 of the first and 1 of the second save 14 MB for 11 ms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trimtab.compiled import compiled, inlined, inner
from trimtab.specs import IntArray

IMPOSSIBLE = 2**62

UPGRADE = np.dtype(
    [
        ("gain", np.int64),  # bytes of one layer and micro-batch
        ("cost", np.int64),  # composite time units
        ("reach", np.int64),  # bytes that the backward of one such layer needs beside what is saved
    ]
)
STEP = np.dtype(
    [
        ("layer_class", np.int64),
        ("prefix", np.int64),  # under which the step lies on the hull
        ("upgrade", np.int64),  # where the step leads
        ("start", np.int64),  # the upgrade where it begins; -1: the first tier
        ("gain", np.int64),  # from there
        ("cost", np.int64),  # from there
    ]
)
Records = npt.NDArray[np.void]


class TierTable(NamedTuple):
    """Upgrades of every class, and the hull steps of all classes and prefixes.

    upgrades            u = 0        u = 1               steps (cheapest per byte first)
        class 0      4 MB, 3 ms   9 MB, 8 ms                 class 0, prefix 1: none -> 0, 4 MB, 3 ms
        class 1      6 MB, 5 ms       -                      class 0, prefix 2: none -> 0; 0 -> 1, 5 MB, 5 ms ...
    """

    upgrades: Records  # (C, U) of UPGRADE, in the order of `reach`; gain 0 where there is none
    levels: IntArray  # (V,) the different values of `reach`, rising
    steps: Records  # (H,) of STEP


@compiled
def allowed(tiers: TierTable, transient: int) -> IntArray:
    """(C,) upgrades of each class whose backward needs at most `transient` bytes: a prefix, for `reach` rises."""
    C, U = tiers.upgrades.shape
    prefix = np.zeros(C, np.int64)
    for g in range(C):
        for u in range(U):
            if tiers.upgrades[g, u].gain > 0 and tiers.upgrades[g, u].reach <= transient and prefix[g] == u:
                prefix[g] = u + 1
    return prefix


@inner
def clear(counts: IntArray) -> None:
    """Nothing chosen."""
    for g in range(counts.shape[0]):
        for u in range(counts.shape[1]):
            counts[g, u] = 0


@inner
def relax(tiers: TierTable, num_alike: IntArray, prefix: IntArray, need: int) -> float:
    """Least cost of saving `need` bytes, layers divisible; inf if impossible."""
    cost, rest = 0.0, float(need)
    for h in range(tiers.steps.shape[0]):
        step = tiers.steps[h]
        g = step.layer_class
        if num_alike[g] == 0 or prefix[g] != step.prefix:
            continue
        gain = float(num_alike[g] * step.gain)
        if gain >= rest:
            return cost + rest / float(step.gain) * step.cost
        rest -= gain
        cost += num_alike[g] * step.cost
    return np.inf


@inner
def round_up(tiers: TierTable, num_alike: IntArray, prefix: IntArray, need: int, counts: IntArray) -> int:
    """Cost of the relaxation's choice, its last step rounded up to whole layers: within one layer of the optimum.

    Adds the choice to `counts`.
    """
    cost, rest = np.int64(0), np.int64(need)
    for h in range(tiers.steps.shape[0]):
        step = tiers.steps[h]
        g, u = step.layer_class, step.upgrade
        if num_alike[g] == 0 or prefix[g] != step.prefix:
            continue
        layers = min(num_alike[g], -(-rest // step.gain))
        counts[g, u] += layers
        if step.start >= 0:
            counts[g, step.start] -= layers
        cost += layers * step.cost
        rest -= layers * step.gain
        if rest <= 0:
            return cost
    return np.int64(IMPOSSIBLE)


@inlined
def _list_items(tiers: TierTable, num_alike: IntArray, prefix: IntArray) -> IntArray:
    """(n, 2) class and upgrade of each number to be chosen, in the order in which branches choose.

    A class at a time, small classes first, strongest upgrade first.
    """
    C, U = tiers.upgrades.shape
    items = np.empty((C * U, 2), np.int64)
    order = np.empty(C, np.int64)
    for g in range(C):
        k = g  # insertion sort by number of layers
        while k > 0 and num_alike[order[k - 1]] > num_alike[g]:
            order[k] = order[k - 1]
            k -= 1
        order[k] = g
    n = 0
    for k in range(C):
        g = order[k]
        for u in range(prefix[g] - 1 if num_alike[g] > 0 else -1, -1, -1):
            items[n, 0], items[n, 1] = g, u
            n += 1
    return items[:n]


@inlined
def _branch_and_bound(
    tiers: TierTable, num_alike: IntArray, prefix: IntArray, need: int, best: int, counts: IntArray
) -> int:
    """The least cost below `best`, its choice in `counts`; `IMPOSSIBLE` and `counts` as they were if there is none.

    Depth first, over `chosen[level]` layers that take item `level`, from none upwards.
    """
    items = _list_items(tiers, num_alike, prefix)
    n = len(items)
    chosen, rest, spent = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)  # before the item
    outer_prefix = np.zeros(n, np.int64)  # of the item's class
    free, open_prefix = num_alike.copy(), prefix.copy()  # of what is left
    found = np.int64(IMPOSSIBLE)
    level = 0
    chosen[0], rest[0], outer_prefix[0] = -1, need, open_prefix[items[0, 0]]
    while level >= 0:
        # 1. one layer more on this item
        g, u = items[level, 0], items[level, 1]
        upgrade = tiers.upgrades[g, u]
        if chosen[level] > 0:
            free[g] += chosen[level]
        chosen[level] += 1
        if level + 1 == n:  # the last number in closed form: fewer do not save enough, more cost more
            chosen[level] = max(chosen[level], -(-rest[level] // upgrade.gain))
        cost = spent[level] + chosen[level] * upgrade.cost
        left = rest[level] - chosen[level] * upgrade.gain
        # 2. too many, too expensive, or enough saved: back to the item before
        too_many = chosen[level] > free[g] or cost >= best
        if too_many or left <= 0:
            if not too_many:
                best = found = cost
                clear(counts)
                for j in range(level + 1):
                    counts[items[j, 0], items[j, 1]] = chosen[j]
            open_prefix[g] = outer_prefix[level]
            level -= 1
            continue
        # 3. can what is left (the class's other layers under its weaker upgrades, the classes to come) do better?
        free[g] -= chosen[level]
        open_prefix[g] = u
        if (cost + relax(tiers, free, open_prefix, left)) * (1.0 - 1e-14) > best - 1:
            continue
        level += 1
        rest[level], spent[level], chosen[level] = left, cost, -1
        outer_prefix[level] = open_prefix[items[level, 0]]
    return found


@compiled
def least_extra(
    tiers: TierTable, num_alike: IntArray, prefix: IntArray, need: int, limit: int, counts: IntArray
) -> int:
    """Least composite time that saves `need` bytes, or `IMPOSSIBLE` when it exceeds `limit`; `counts` (C, U) says how.

    `num_alike` (C,) layers of each class, `prefix` (C,) the upgrades they may take. Exact: the relaxation with slack
    for its rounding is never above a whole choice, so a branch is dropped only when it cannot undercut the best choice
    known. Microseconds where the seconds per byte differ; exponential in the number of classes at worst.
    """
    clear(counts)
    if need <= 0:
        return np.int64(0)
    # 1. a bound from below: too much already?
    bound = relax(tiers, num_alike, prefix, need)
    if bound * (1.0 - 1e-14) > limit:
        return np.int64(IMPOSSIBLE)
    # 2. a choice: as good as the bound already?
    best = round_up(tiers, num_alike, prefix, need, counts)
    found = best <= limit
    if found and best <= bound:
        return best
    # 3. anything better than both
    better = _branch_and_bound(tiers, num_alike, prefix, need, best if found else np.int64(limit + 1), counts)
    if better != IMPOSSIBLE:
        return better
    return best if found else np.int64(IMPOSSIBLE)
