"""Images to the ranks of a group, so that every rank's share of the vision tower costs the same.

An *atom* is what cannot be divided between ranks: an image, or one frame of a clip where attention stays inside frames.
Symbols: n atoms of cost w_i, N ranks.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from trimtab.balance.cost import LinearCost
from trimtab.compiled import compiled
from trimtab.errors import PackingError
from trimtab.options import Rule
from trimtab.specs import WORK_TERMS, FloatArray, IntArray, Profile

RULES: tuple[Rule, ...] = get_args(Rule)

WHOLE = 2.0**50
"""Costs become integers that sum to about this: comparisons and sums are then exact, whatever the order."""


def tower_seconds(profile: Profile) -> LinearCost:
    """Return forward and backward seconds of the vision tower and the projector, from a profile.

    Give it to `vision_dp` or `share_images` as the cost of an image; docs/vision-data-parallel.md says when.
    Not counted: what a call costs whatever is in it, which no assignment changes; recomputed forwards.
    """
    total = np.zeros(len(WORK_TERMS))
    for layer in profile.layers:
        if layer.tower != "language":
            total += np.add(layer.forward_s, layer.backward_s)
    return _as_cost(total)


def tower_bytes(profile: Profile) -> LinearCost:
    """Return the bytes the tower holds for its backward, nothing recomputed.

    Give it to `vision_dp` in place of `tower_seconds` to balance memory; docs/vision-data-parallel.md says when.
    """
    total = np.zeros(len(WORK_TERMS))
    for layer in profile.layers:
        if layer.tower != "language":
            total += layer.tiers[0].saved_bytes
    return _as_cost(total)


def _as_cost(total: FloatArray) -> LinearCost:
    of = dict(zip(WORK_TERMS, total.tolist(), strict=True))
    return LinearCost(**{name: of[name] for name in ("patches", "patches_sq", "patches_windowed")})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageShares:
    """Which rank encodes which atom: rank r encodes `order[offsets[r]:offsets[r + 1]]`, in their own order."""

    order: IntArray  # (n,) atoms, rank after rank
    offsets: IntArray  # (N + 1,)
    load: FloatArray  # (N,) in the unit of the costs
    lower_bound: float  # no assignment of these atoms has a smaller largest load
    rule: Rule

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def max_load(self) -> float:
        return float(self.load.max())

    @property
    def imbalance(self) -> float:
        """Return slowest / mean - 1."""
        mean = float(self.load.mean())
        return self.max_load / mean - 1.0 if mean > 0 else 0.0

    def atoms_of(self, rank: int) -> IntArray:
        return self.order[self.offsets[rank] : self.offsets[rank + 1]]


def share_images(cost: npt.ArrayLike, num_ranks: int, *, rule: Rule = "balanced") -> ImageShares:
    """Share atoms of cost w among `num_ranks` ranks, the largest load small; the same on every rank of equal input.

    Use it to divide images among ranks in code of your own; `vision_dp` calls it.

    `balanced`: longest first, then moves and swaps that lower the largest load.
    At most 4/3 - 1/(3N) times the optimum (longest-first's bound, Graham 1969); mostly within 1 % of `lower_bound`.
    `contiguous`: whole runs of atoms in order, cut where the largest load is least (exact): no row changes place.
    Time or memory is the caller's choice of cost: see `tower_seconds`, `tower_bytes`.

    >>> shares = share_images([8100, 1024, 1024, 4096, 576, 2304], 2)
    >>> [shares.atoms_of(rank).tolist() for rank in range(2)]
    [[0, 4], [1, 2, 3, 5]]
    """
    weights = np.ascontiguousarray(cost, dtype=np.float64)
    if problem := _find_problem(weights, num_ranks, rule):
        raise PackingError(problem)

    # whole numbers, whose sums are the same in any order
    total = math.fsum(weights.tolist())  # exact, so the same on every kind of processor
    whole = np.rint(weights / (total or 1.0) * WHOLE).astype(np.int64)
    found = balance(whole, num_ranks) if rule == "balanced" else cut(whole, num_ranks)
    # loads in the caller's unit
    ranks = np.repeat(np.arange(num_ranks), np.diff(found.offsets))
    load: FloatArray = np.bincount(ranks, weights[found.order], num_ranks).astype(np.float64)
    bound = found.bound / WHOLE * total
    return ImageShares(order=found.order, offsets=found.offsets, load=load, lower_bound=bound, rule=rule)


def keep_at_home(shares: ImageShares, home: IntArray, size: npt.ArrayLike) -> ImageShares:
    """The same shares, given to the ranks so that much of `size` stays where it is: atom i lies on rank `home[i]`.

    Greedy, largest overlap first: at least half of the most that could stay. Loads change ranks, not their sizes.
    """
    N = shares.num_ranks
    # how much of each share lies on each rank already
    share_of = np.repeat(np.arange(N), np.diff(shares.offsets))
    stays = np.bincount(share_of * N + home[shares.order], np.asarray(size, np.float64)[shares.order], N * N)
    some = np.flatnonzero(stays)
    share_for = _assign_home(some[np.argsort(-stays[some], kind="stable")], N)
    parts = [shares.atoms_of(share) for share in share_for]
    return ImageShares(
        order=np.concatenate(parts),
        offsets=np.concatenate([[0], np.cumsum([len(part) for part in parts])]),
        load=shares.load[share_for],
        lower_bound=shares.lower_bound,
        rule=shares.rule,
    )


@compiled
def _assign_home(pairs, num_ranks):  # type: ignore[no-untyped-def]
    """The share of each rank: pairs `share * N + rank` in the order in which they are taken, then whatever is left."""
    share_for, taken = np.full(num_ranks, -1, np.int64), np.zeros(num_ranks, np.bool_)
    for pair in pairs:
        share, rank = pair // num_ranks, pair % num_ranks
        if share_for[rank] < 0 and not taken[share]:
            share_for[rank], taken[share] = share, True
    rank = 0
    for share in range(num_ranks):
        if not taken[share]:
            while share_for[rank] >= 0:
                rank += 1
            share_for[rank] = share
    return share_for


def _find_problem(weights: FloatArray, num_ranks: int, rule: str) -> str | None:
    if rule not in RULES:
        return f"'{rule}' is not a rule to share images by: choose one of {', '.join(RULES)}"
    if num_ranks < 1:
        return f"images cannot be shared among {num_ranks} ranks: give a group of at least 1"
    if weights.ndim != 1:
        return f"costs of shape {weights.shape} are not one number for each image: give a flat list"
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        i = int(np.argmin(np.isfinite(weights) & (weights >= 0)))
        return f"the cost of image {i} is {weights[i]:g}: give finite numbers that are not negative"
    return None


# -- compiled searches behind `share_images`: integer costs to N ranks, the largest sum small.
# Symbols: n atoms of integer cost w_i, N ranks. All ties go to the smaller number, so equal input gives equal output.


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
    """Share longest first, improved by moves and swaps: `Found`."""
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
    """Cut atoms into at most N runs: the largest sum is least, and the others as even as can be: `Found`."""
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
    """Return max over k of: the mean; the k + 1 smallest of the k N + 1 largest atoms (a rank holds k + 1 of them)."""
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
    # how many atoms of each size there are, and so how many sums
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
    # all sums, one for each number of atoms of each size
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
    """Give each atom, the most expensive first, to the rank with the least so far."""
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
        # the best of both is made
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


# -- images of many calls of the vision tower, each call's shared out among the same number of ranks: one compiled loop.
# Pool j holds atoms `offsets[j]` to `offsets[j + 1]`: those that ranks share in one call. Symbols: N ranks.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolLoads:
    """What every rank encodes in every pool."""

    load: FloatArray  # (pools, N) in the unit of `measure`
    slowest: FloatArray  # (pools, T) terms of the share of largest load
    largest: FloatArray  # (pools, T) term by term the most of any share


def share_pools(
    cost: FloatArray, measure: FloatArray, terms: FloatArray, offsets: IntArray, num_ranks: int, *, rule: Rule
) -> PoolLoads:
    """Share every pool by `cost` as `share_images` does; shares are measured in `measure` (n,) and `terms` (n, T).

    The same shares as `share_images` gives pool by pool, but for sums of costs that differ in their last bit.
    """
    arrays = [np.ascontiguousarray(a, np.float64) for a in (cost, measure, terms)]
    found = _share(*arrays, np.ascontiguousarray(offsets, np.int64), num_ranks, rule == "contiguous", WHOLE)
    return PoolLoads(load=found[0], slowest=found[1], largest=found[2])


@compiled
def _share(cost, measure, terms, offsets, num_ranks, contiguous, whole):  # type: ignore[no-untyped-def]
    num_pools, num_terms = len(offsets) - 1, terms.shape[1]
    load = np.zeros((num_pools, num_ranks))
    slowest = np.zeros((num_pools, num_terms))
    largest = np.zeros((num_pools, num_terms))
    for j in range(num_pools):
        first, last = offsets[j], offsets[j + 1]
        # costs as whole numbers: sums of them are exact
        total = 0.0
        for i in range(first, last):
            total += cost[i]
        scale = whole / total if total > 0 else 1.0
        units = np.empty(last - first, np.int64)
        for i in range(first, last):
            units[i - first] = np.int64(np.rint(cost[i] * scale))
        # each pool by itself, then what its slowest rank holds
        found = cut(units, num_ranks) if contiguous else balance(units, num_ranks)
        shares = np.zeros((num_ranks, num_terms))
        for rank in range(num_ranks):
            for place in range(found.offsets[rank], found.offsets[rank + 1]):
                i = first + found.order[place]
                load[j, rank] += measure[i]
                for t in range(num_terms):
                    shares[rank, t] += terms[i, t]
        top = np.argmax(load[j])
        for t in range(num_terms):
            slowest[j, t] = shares[top, t]
            largest[j, t] = shares[:, t].max()
    return load, slowest, largest
