"""Compiled: the least extra backward time that brings a stage's saved bytes under its room, exactly.

Layers that offer the same tiers form a class; only how many of a class take which tier matters. A class has up to U
*upgrades* of its first tier: gain (bytes saved) and cost (composite time), 0 where there is none, in the order of
`reach`. One that offloads takes bytes of host memory besides, of which a stage has so many. A *prefix* p allows a class
its first p upgrades. A *step* is one edge of the convex hull of a class's tiers under a prefix: taking steps in order
of cost per byte, the last in part, is the linear relaxation, a bound from below on every whole choice (Sinha and
Zoltners 1979, "The multiple-choice knapsack problem"). Host memory is left aside there, or has a price: costs then rise
by price x bytes of it, and what the room is worth is taken off (Lagrange: a bound whatever the price).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from trimtab.specs import FloatArray, IntArray

IMPOSSIBLE = 2**62


class TierTable(NamedTuple):
    """Upgrades of every class, and the hull steps of all classes and prefixes, cheapest per byte first."""

    gain: IntArray  # (C, U) bytes of one layer and micro-batch
    cost: IntArray  # (C, U) composite time units
    reach: IntArray  # (C, U) bytes that the backward of one such layer needs beside what is saved, rising
    host: IntArray  # (C, U) bytes that one layer and micro-batch take of host memory
    uses_host: bool  # whether any upgrade takes host memory
    levels: IntArray  # (V,) the different values of `reach`, rising
    step_class: IntArray  # (H,)
    step_prefix: IntArray  # (H,) under which the step lies on the hull
    step_upgrade: IntArray  # (H,) where the step leads
    step_from: IntArray  # (H,) the upgrade where it starts; -1: the first tier
    step_gain: IntArray  # (H,)
    step_cost: IntArray  # (H,)
    price: FloatArray  # (N,) of a byte of host memory, in composite time; the first is 0
    priced_start: IntArray  # (N + 1,) the steps below that belong to each price
    priced_class: IntArray
    priced_prefix: IntArray
    priced_upgrade: IntArray
    priced_gain: IntArray
    priced_cost: FloatArray


@njit(cache=True)
def allowed(tiers: TierTable, transient: int) -> IntArray:
    """(C,) upgrades of each class whose backward needs at most `transient` bytes: a prefix, for `reach` rises."""
    C, U = tiers.gain.shape
    prefix = np.zeros(C, np.int64)
    for g in range(C):
        while prefix[g] < U and tiers.gain[g, prefix[g]] > 0 and tiers.reach[g, prefix[g]] <= transient:
            prefix[g] += 1
    return prefix


@njit(cache=True)
def within_host(tiers: TierTable, prefix: IntArray, num_alike: IntArray, room: int) -> IntArray:
    """(C,) `prefix` without its last upgrades as long as `room` bytes of host memory do not hold one such layer."""
    found = prefix.copy()
    for g in range(prefix.shape[0]):
        while num_alike[g] > 0 and found[g] > 0 and tiers.host[g, found[g] - 1] > room:
            found[g] -= 1
    return found


@njit(cache=True)
def relax(tiers: TierTable, num_alike: IntArray, prefix: IntArray, need: int) -> float:
    """Least cost of saving `need` bytes, layers divisible; inf if impossible."""
    cost, rest = 0.0, float(need)
    for h in range(tiers.step_class.shape[0]):
        g = tiers.step_class[h]
        if num_alike[g] == 0 or prefix[g] != tiers.step_prefix[h]:
            continue
        gain = float(num_alike[g] * tiers.step_gain[h])
        if gain >= rest:
            return cost + rest / float(tiers.step_gain[h]) * float(tiers.step_cost[h])
        rest -= gain
        cost += float(num_alike[g] * tiers.step_cost[h])
    return np.inf


@njit(cache=True)
def relax_priced(tiers: TierTable, which: int, num_alike: IntArray, prefix: IntArray, need: int) -> float:
    """`relax` at price number `which`, before what the room is worth is taken off."""
    cost, rest = 0.0, float(need)
    for h in range(tiers.priced_start[which], tiers.priced_start[which + 1]):
        g = tiers.priced_class[h]
        if num_alike[g] == 0 or prefix[g] != tiers.priced_prefix[h]:
            continue
        gain = float(num_alike[g] * tiers.priced_gain[h])
        if gain >= rest:
            return float(cost + rest / float(tiers.priced_gain[h]) * tiers.priced_cost[h])
        rest -= gain
        cost += num_alike[g] * tiers.priced_cost[h]
    return np.inf


@njit(cache=True)
def best_price(tiers: TierTable, num_alike: IntArray, prefix: IntArray, need: int, room: int) -> int:
    """The number of the price that bounds best from below."""
    best, found = -np.inf, 0
    for v in range(tiers.price.shape[0]):
        bound = relax_priced(tiers, v, num_alike, prefix, need) - tiers.price[v] * room
        if bound > best:
            best, found = bound, v
    return found


@njit(cache=True)
def round_within_host(
    tiers: TierTable, which: int, num_alike: IntArray, prefix: IntArray, need: int, room: int, counts: IntArray
) -> int:
    """Cost of a choice that host memory holds: what the steps at that price offload, as far as there is room, and
    `round_up` of the other layers. A heuristic; `IMPOSSIBLE` where that does not save enough."""
    away = np.zeros_like(counts)
    others, rest, left, cost = num_alike.copy(), np.int64(need), np.int64(room), np.int64(0)
    covered = np.int64(0)
    for h in range(tiers.priced_start[which], tiers.priced_start[which + 1]):
        g, u = tiers.priced_class[h], tiers.priced_upgrade[h]
        if num_alike[g] == 0 or prefix[g] != tiers.priced_prefix[h] or covered >= need:
            continue
        layers = min(num_alike[g], -(-(need - covered) // tiers.priced_gain[h]))
        covered += layers * tiers.priced_gain[h]
        host = tiers.host[g, u]
        if host > 0:
            layers = min(layers, left // host)
            away[g, u] += layers
            others[g] -= layers
            left -= layers * host
            rest -= layers * tiers.gain[g, u]
            cost += layers * tiers.cost[g, u]
    counts[:] = 0
    if rest > 0:
        more = round_up(tiers, others, within_host(tiers, prefix, others, 0), rest, counts)
        if more == IMPOSSIBLE:
            return IMPOSSIBLE
        cost += more
    counts += away
    return int(cost) if np.sum(counts * tiers.host) <= room else IMPOSSIBLE


@njit(cache=True)
def round_up(tiers: TierTable, num_alike: IntArray, prefix: IntArray, need: int, counts: IntArray) -> int:
    """Cost of the relaxation's choice, its last step rounded up to whole layers: within one layer of the optimum."""
    counts[:] = 0
    cost, rest = np.int64(0), np.int64(need)
    for h in range(tiers.step_class.shape[0]):
        g = tiers.step_class[h]
        if num_alike[g] == 0 or prefix[g] != tiers.step_prefix[h]:
            continue
        layers = min(num_alike[g], -(-rest // tiers.step_gain[h]))
        if tiers.step_from[h] >= 0:
            counts[g, tiers.step_from[h]] -= layers
        counts[g, tiers.step_upgrade[h]] += layers
        cost += layers * tiers.step_cost[h]
        rest -= layers * tiers.step_gain[h]
        if rest <= 0:
            return int(cost)
    return IMPOSSIBLE


@njit(cache=True)
def least_extra(
    tiers: TierTable, num_alike: IntArray, prefix: IntArray, need: int, limit: int, host_room: int, counts: IntArray
) -> int:
    """Least composite time that saves `need` bytes, or `IMPOSSIBLE` when it exceeds `limit`; `counts` (C, U) says how.

    `num_alike` (C,) layers of each class, `prefix` (C,) the upgrades they may take, `host_room` the bytes of host
    memory for one micro-batch. Exact: branch and bound over the number of layers of each class and upgrade, small
    classes first, strong upgrades first, the last number in closed form. A branch is dropped only when the relaxation
    of what is left (the class's other layers under its weaker upgrades, and the classes to come), with slack for its
    rounding, cannot undercut the best choice known, or when host memory does not hold it. Microseconds
    where the seconds per byte differ; exponential in the number of classes at worst.
    """
    counts[:] = 0
    if need <= 0:
        return 0
    if tiers.uses_host:
        prefix = within_host(tiers, prefix, num_alike, host_room)
    bound = relax(tiers, num_alike, prefix, need)
    if bound * (1.0 - 1e-14) > limit:
        return IMPOSSIBLE
    best = round_up(tiers, num_alike, prefix, need, counts)
    found = best <= limit
    priced = -1
    if tiers.uses_host and np.sum(counts * tiers.host) > host_room:
        priced = best_price(tiers, num_alike, prefix, need, host_room)
        best = round_within_host(tiers, priced, num_alike, prefix, need, host_room, counts)
        found = best <= limit
    if found and best <= bound:
        return int(best)
    if not found:
        best = limit + 1

    # one item for each number to be chosen: what takes host memory, then a class at a time, strongest upgrade first
    C, U = tiers.gain.shape
    item_class, item_upgrade = np.zeros(C * U, np.int64), np.zeros(C * U, np.int64)
    last_of = prefix.copy()
    n = 0
    for g in range(C):
        if num_alike[g] > 0 and prefix[g] > 0 and tiers.host[g, prefix[g] - 1] > 0:
            last_of[g] -= 1
            item_class[n], item_upgrade[n] = g, last_of[g]
            n += 1
    for g in np.argsort(num_alike, kind="mergesort"):
        for u in range(last_of[g] - 1 if num_alike[g] > 0 else -1, -1, -1):
            item_class[n], item_upgrade[n] = g, u
            n += 1
    chosen, rest, spent, room = np.zeros((4, n), np.int64)
    outer_prefix = np.zeros(n, np.int64)  # of the item's class, before the item
    free, open_prefix = num_alike.copy(), prefix.copy()  # of what is left
    level = 0
    chosen[0], rest[0], room[0], outer_prefix[0] = -1, need, host_room, open_prefix[item_class[0]]
    while level >= 0:
        g, u = item_class[level], item_upgrade[level]
        free[g] += max(chosen[level], 0)
        chosen[level] += 1
        if level + 1 == n:  # fewer do not save enough, more cost more
            chosen[level] = max(chosen[level], -(-rest[level] // tiers.gain[g, u]))
        cost = spent[level] + chosen[level] * tiers.cost[g, u]
        left_room = room[level] - chosen[level] * tiers.host[g, u]
        if chosen[level] > free[g] or cost >= best or left_room < 0:
            open_prefix[g] = outer_prefix[level]
            level -= 1
            continue
        left = rest[level] - chosen[level] * tiers.gain[g, u]
        if left <= 0:
            counts[:] = 0
            for j in range(level + 1):
                counts[item_class[j], item_upgrade[j]] = chosen[j]
            best, found = cost, True
            open_prefix[g] = outer_prefix[level]
            level -= 1
            continue
        free[g] -= chosen[level]
        open_prefix[g] = u
        holds = within_host(tiers, open_prefix, free, left_room) if tiers.uses_host else open_prefix
        below = (cost + relax(tiers, free, holds, left)) * (1.0 - 1e-14)
        if priced >= 0 and below <= best - 1:
            at_price = (cost + relax_priced(tiers, priced, free, holds, left)) * (1.0 - 1e-13)
            below = max(below, at_price - tiers.price[priced] * left_room * (1.0 + 1e-13))
        if below > best - 1:
            continue
        level += 1
        rest[level], spent[level], chosen[level], room[level] = left, cost, -1, left_room
        outer_prefix[level] = open_prefix[item_class[level]]
    return int(best) if found else IMPOSSIBLE


def tier_table(
    gain: IntArray, cost: IntArray, reach: IntArray | None = None, host: IntArray | None = None
) -> TierTable:
    """Hull steps of the upgrades (C, U); ties in cost per byte keep the order of the classes. None: zeros."""
    reach = np.zeros_like(gain) if reach is None else reach
    host = np.zeros_like(gain) if host is None else host
    steps = _hull_steps(gain.tolist(), cost.tolist())
    columns: list[npt.NDArray[np.int64]] = [np.array([s[i] for s in steps], np.int64) for i in range(1, 7)]
    prices = _host_prices(gain, cost, host, [step[0] for step in steps])
    priced = [_hull_steps(gain.tolist(), (cost + price * host).tolist()) for price in prices]
    flat = [step for steps_at in priced for step in steps_at]
    return TierTable(
        gain=gain,
        cost=cost,
        reach=reach,
        host=host,
        uses_host=bool((host > 0).any()),
        levels=np.unique(reach[gain > 0]).astype(np.int64),
        step_class=columns[0],
        step_prefix=columns[1],
        step_upgrade=columns[2],
        step_from=columns[3],
        step_gain=columns[4],
        step_cost=columns[5],
        price=np.array(prices),
        priced_start=np.cumsum([0, *map(len, priced)]).astype(np.int64),
        priced_class=np.array([s[1] for s in flat], np.int64),
        priced_prefix=np.array([s[2] for s in flat], np.int64),
        priced_upgrade=np.array([s[3] for s in flat], np.int64),
        priced_gain=np.array([s[5] for s in flat], np.int64),
        priced_cost=np.array([s[6] for s in flat], np.float64),
    )


def _hull_steps(
    gain: Sequence[Sequence[int]], cost: Sequence[Sequence[float]]
) -> list[tuple[float, int, int, int, int, int, float]]:
    """(cost per byte, class, prefix, upgrade, upgrade it starts from, bytes, cost) of every step, cheapest first."""
    steps: list[tuple[float, int, int, int, int, int, float]] = []
    for g, (gains, costs) in enumerate(zip(gain, cost, strict=True)):
        for p in range(1, sum(x > 0 for x in gains) + 1):
            points: list[tuple[int, float]] = [(0, 0), *zip(gains[:p], costs[:p], strict=True)]
            at = 0
            while True:  # the hull's next corner: least cost per byte from here, the furthest of equals
                bytes_at, cost_at = points[at]
                further = [k for k in range(1, p + 1) if points[k][0] > bytes_at]
                if not further:
                    break
                to = min(further, key=lambda k: ((points[k][1] - cost_at) / (points[k][0] - bytes_at), -points[k][0]))
                more, dearer = points[to][0] - bytes_at, points[to][1] - cost_at
                steps.append((dearer / more, g, p, to - 1, at - 1, more, dearer))
                at = to
    return sorted(steps, key=lambda step: step[:4])


def _host_prices(gain: IntArray, cost: IntArray, host: IntArray, slopes: list[float]) -> list[float]:
    """0, and the prices at which offload of some class costs as much per byte as some step without a price.

    Where one host memory is short and one class offloads, the best price is among them.
    """
    prices = {0.0}
    taken = host > 0
    for bytes_freed, seconds, bytes_taken in zip(
        gain[taken].tolist(), cost[taken].tolist(), host[taken].tolist(), strict=True
    ):
        prices |= {(slope * bytes_freed - seconds) / bytes_taken for slope in slopes}
    return sorted(price for price in prices if price >= 0)
