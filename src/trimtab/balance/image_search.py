"""Compiled searches behind `share_images`: integer costs to N ranks, the largest sum small.

Symbols: n atoms of integer cost w_i, N ranks. All ties go to the smaller number, so equal input gives equal output.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimtab.compiled import compiled
from trimtab.specs import IntArray

CLOSE_ENOUGH = 2000
"""Stop when the largest sum exceeds the lower bound by less than one part in this."""

MAX_SUMS = 4096
"""Sums of atoms that `attainable_bound` goes through; batches of few distinct sizes have fewer."""

MAX_SWAPS = 64
"""Moves and swaps made at most; few batches of images use ten."""


class Found(NamedTuple):
    """Atoms in rank order, where each rank's begin, and a bound no assignment can pass."""

    order: IntArray
    offsets: IntArray
    bound: int


@compiled
def balance(cost, num_ranks):  # type: ignore[no-untyped-def]
    """Longest first, improved by moves and swaps: `Found`."""
    largest_first = np.argsort(-cost, kind="mergesort")
    bound = lower_bound(cost, largest_first, num_ranks)
    ranks = longest_first(cost, largest_first, num_ranks)
    load = sums(cost, ranks, num_ranks)
    if _is_open(load, bound):
        bound = attainable_bound(cost, largest_first, bound)
    improve(cost, ranks, load, bound)
    return _in_order(ranks, num_ranks, bound)


@compiled
def cut(cost, num_ranks):  # type: ignore[no-untyped-def]
    """Consecutive runs of atoms, at most N: the largest sum is least, and the others as even as can be: `Found`."""
    # 1. The least largest sum, by bisection over integers.
    low, high = np.int64(0), np.int64(0)
    for w in cost:
        low = max(low, w)
        high += w
    low = max(low, -(-high // num_ranks))
    while low < high:
        middle = (low + high) // 2
        runs, run = 1, np.int64(0)
        for w in cost:
            if run + w > middle:
                runs, run = runs + 1, np.int64(0)
            run += w
        if runs <= num_ranks:
            high = middle
        else:
            low = middle + 1
    # 2. Of all cuts that have it, the one whose squared sums add up to least.
    ranks = _even_runs(cost, num_ranks, high)
    largest_first = np.argsort(-cost, kind="mergesort")
    bound = attainable_bound(cost, largest_first, lower_bound(cost, largest_first, num_ranks))
    return _in_order(ranks, num_ranks, bound)


@compiled
def _even_runs(cost, num_ranks, most):  # type: ignore[no-untyped-def]
    """The rank of each atom: consecutive runs, none above `most`, the sum of their squares least.

    Example: five atoms of cost 1 on 3 ranks, most 2 -> runs of 1, 2, 2 and not of 2, 2, 1: ties go to earlier cuts.
    """
    n = len(cost)
    ends = np.zeros(n + 1, np.int64)
    ends[1:] = np.cumsum(cost)
    # 1. Window of the end of run r: the runs up to it reach it, and those behind it suffice for the rest.
    first, last = np.zeros(num_ranks + 1, np.int64), np.full(num_ranks + 1, n)
    last[0], first[num_ranks] = 0, n
    for r in range(1, num_ranks):
        last[r] = np.searchsorted(ends, ends[last[r - 1]] + most, side="right") - 1
    for r in range(num_ranks - 1, 0, -1):
        first[r] = np.searchsorted(ends, ends[first[r + 1]] - most, side="left")
    # 2. Least sum of squares of the first r runs, for each end in the window, and where their last run begins.
    least, begins = np.full((num_ranks + 1, n + 1), np.inf), np.zeros((num_ranks + 1, n + 1), np.int64)
    least[0, 0] = 0.0
    for r in range(1, num_ranks + 1):
        for end in range(first[r], last[r] + 1):
            for begin in range(first[r - 1], min(last[r - 1], end) + 1):
                run = ends[end] - ends[begin]
                squares = least[r - 1, begin] + (run / max(most, 1)) ** 2
                if run <= most and squares < least[r, end]:
                    least[r, end], begins[r, end] = squares, begin
    # 3. Back from the last run.
    ranks, end = np.empty(n, np.int64), n
    for r in range(num_ranks, 0, -1):
        begin = begins[r, end]
        ranks[begin:end] = r - 1
        end = begin
    return ranks


@compiled
def lower_bound(cost, largest_first, num_ranks):  # type: ignore[no-untyped-def]
    """max over k of: the mean; the k + 1 smallest of the k N + 1 largest atoms (some rank holds k + 1 of them)."""
    n = len(cost)
    bound = -(-cost.sum() // num_ranks)
    for k in range((n - 1) // num_ranks + 1 if n else 0):
        last = k * num_ranks
        together = np.int64(0)
        for i in range(last - k, last + 1):
            together += cost[largest_first[i]]
        bound = max(bound, together)
    return bound


@compiled
def attainable_bound(cost, largest_first, bound):  # type: ignore[no-untyped-def]
    """The least sum of some of the atoms that is not below `bound`: the largest load is such a sum.

    Much higher than `bound` where sizes are few (equal screenshots, frames of one clip). Goes through all sums, one for
    each number of atoms of each size; `bound` as it is where they are more than `MAX_SUMS`.
    """
    n = len(cost)
    size, count = np.empty(n, np.int64), np.zeros(n, np.int64)
    num_sizes, num_sums = 0, 1
    for i in largest_first:
        if num_sizes and size[num_sizes - 1] == cost[i]:
            num_sums = num_sums // (count[num_sizes - 1] + 1) * (count[num_sizes - 1] + 2)
        else:
            size[num_sizes] = cost[i]
            num_sizes += 1
            num_sums *= 2
        count[num_sizes - 1] += 1
        if num_sums > MAX_SUMS:
            return bound
    best, together = cost.sum(), np.int64(0)
    taken = np.zeros(n, np.int64)  # counts through as digits do
    for _ in range(num_sums - 1):
        k = num_sizes - 1
        while taken[k] == count[k]:
            together -= count[k] * size[k]
            taken[k] = 0
            k -= 1
        taken[k] += 1
        together += size[k]
        if bound <= together < best:
            best = together
    return best


@compiled
def longest_first(cost, largest_first, num_ranks):  # type: ignore[no-untyped-def]
    """Each atom, the dearest first, to the rank with the least so far."""
    ranks = np.empty(len(cost), np.int64)
    load = np.zeros(num_ranks, np.int64)
    for i in largest_first:
        rank = np.argmin(load)
        ranks[i] = rank
        load[rank] += cost[i]
    return ranks


@compiled
def improve(cost, ranks, load, bound):  # type: ignore[no-untyped-def]
    """Moves or swaps an atom of the largest sum, the best first, until none lowers it; in place."""
    n = len(cost)
    for _ in range(MAX_SWAPS):
        if not _is_open(load, bound):
            return
        top = np.argmax(load)
        best, first, second, target = load[top], -1, -1, -1
        for i in range(n):
            if ranks[i] != top:
                continue
            for r in range(len(load)):  # a move
                if r != top and load[r] + cost[i] < best:
                    best, first, second, target = load[r] + cost[i], i, -1, r
            for j in range(n):  # a swap
                r = ranks[j]
                if r != top and cost[j] < cost[i]:
                    larger = max(load[top] - cost[i] + cost[j], load[r] + cost[i] - cost[j])
                    if larger < best:
                        best, first, second, target = larger, i, j, r
        if first < 0:
            return
        moved = cost[first]
        if second >= 0:
            ranks[second] = top
            moved -= cost[second]
        ranks[first] = target
        load[top] -= moved
        load[target] += moved


@compiled
def sums(cost, ranks, num_ranks):  # type: ignore[no-untyped-def]
    load = np.zeros(num_ranks, np.int64)
    for i in range(len(cost)):
        load[ranks[i]] += cost[i]
    return load


@compiled
def _is_open(load, bound):  # type: ignore[no-untyped-def]
    return (load.max() - bound) * CLOSE_ENOUGH > bound


@compiled
def _in_order(ranks, num_ranks, bound):  # type: ignore[no-untyped-def]
    offsets = np.zeros(num_ranks + 1, np.int64)
    for r in ranks:
        offsets[r + 1] += 1
    offsets = np.cumsum(offsets)
    return Found(np.argsort(ranks, kind="mergesort"), offsets, bound)
