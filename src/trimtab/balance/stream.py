"""`balanced` over a whole data set: windows of packs along the shuffled stream, what does not fit carried on.

Symbols: k limited columns, D = k + 1 columns per sample, the last of them the cost; P packs a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trimtab.balance.metrics import sum_columns
from trimtab.balance.pair import NO_THREE_FIT, Goal, Packs, make_goal, make_packs, make_scratch, match_pairs
from trimtab.balance.schedule import offsets_of
from trimtab.balance.window import (
    Effort,
    Pull,
    arrange,
    even_packs,
    evict,
    fit,
    load,
    spread,
    unload,
)
from trimtab.compiled import UIntArray, permute
from trimtab.specs import FloatArray, IntArray

PENALTY = 1e3
"""What a pack above a limit costs, per limit's worth of excess; the largest other difference costs about 1."""

MAX_AGE = 4
"""Windows a sample may be carried on before its window gets more packs instead."""

MAX_CARRY = 0.01
"""A window that carries on more than this share of its packs' worth asks for less full ones."""

LAST_WINDOWS = 2.5
"""What is left is packed as one window once it is less than this many: nothing can be carried on from the last."""

LESS_FULL, FULLER, LEAST_FULL = 0.001, 0.0002, 0.9
"""Steps in which the fill follows what turns out possible, and its end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streamed:
    """Packs in the order of the stream: pack p holds members[offsets[p]:offsets[p + 1]]."""

    members: IntArray  # positions in the shuffled stream
    offsets: IntArray
    oldest: int  # windows the most patient sample was carried on
    num_grown: int  # times a window was given more packs


def pack_stream(
    columns: FloatArray,
    counted: FloatArray,
    bounds: FloatArray,
    pull: Pull,
    *,
    dp: int,
    num_others: int,
    window_packs: int,
    effort: Effort,
    fill: float,
    state: UIntArray,
) -> Streamed:
    """Pack a shuffled stream; every sample fits a pack alone, and is in exactly one pack of the result.

    `counted` are the samples' columns in packs needed (`bound.counted_columns`).

    Each window takes its share of what is left, so the fill is even to the very end. Packs of a window are a multiple
    of dp, so each window is whole steps; the last one leaves room for `num_others` packs made elsewhere, and is smaller
    only if there are fewer samples. What a window cannot hold is carried on; later windows are filled up to half way
    between `fill` and full before packs are added for it.

    Ends: the last window, and one with a sample too old to be carried, grows until it holds all; it does at the latest
    when it has a pack per sample.
    """
    n = len(columns)
    left = sum_columns(counted)  # packs that the samples not yet packed need, by each column
    members, counts = [], []
    num_packs, oldest, num_grown = 0, 0, 0
    highest = fill
    planned = round_up(packs_for(left) / fill + num_others, dp) - num_others
    carried, age = np.empty(0, np.int64), np.empty(0, np.int64)
    position = 0
    while position < n or len(carried):
        # 1. how many packs this window makes, and whether it is the last
        ceiling = 0.5 + 0.5 * fill
        packs_left = _enough_packs(planned - num_packs, packs_for(left), ceiling, dp)
        planned = num_packs + packs_left
        num_left = n - position + len(carried)
        last = packs_left < LAST_WINDOWS * window_packs
        P = packs_left if last else window_packs
        # 2. its samples: those carried on, then the next of the stream
        taken = num_left
        if not last:
            taken = _count_share(counted, carried, position, P / packs_left, left, ceiling * P)
            last = taken == num_left
        fresh = taken - len(carried)
        chosen = np.concatenate([carried, np.arange(position, position + fresh)])
        age = np.concatenate([age, np.zeros(fresh, np.int64)])
        position += fresh

        # 3. its packs
        window, own = counted.take(chosen, axis=0), columns.take(chosen, axis=0)
        packed = pack_window(own, min(P, taken), bounds, pull, age, dp=dp, hold_all=last, effort=effort, state=state)
        out = packed.left
        members.append(chosen[packed.members])
        counts.append(packed.counts)
        num_packs += len(packed.counts)
        num_grown += packed.num_grown
        # 4. what is carried on, and how full the next window shall be
        left = left - sum_columns(window) + sum_columns(window[out])
        carried, age = chosen[out], age[out] + 1
        oldest = max(oldest, int(age.max(initial=0)))
        fill = next_fill(fill, highest, packs_for(sum_columns(window[out])), packed)
    return Streamed(
        members=np.concatenate(members),
        offsets=offsets_of(np.concatenate(counts)),
        oldest=oldest,
        num_grown=num_grown,
    )


FIT_SAMPLES = 6144
"""Samples that `fit_stream` packs together, up to half as many more in the last window."""

KNOWN_WINDOW = 4096
"""Samples that best fit decreasing is known to look at together; what it makes of them is the mark to beat."""

STRICT_PENALTY = 1e9
"""As `PENALTY`, where all packs are within the limits already: nothing else is worth breaking one."""


class FitRule(NamedTuple):
    """How `fit` goes about it."""

    by_sum: bool  # samples by the sum of their shares of the limits, the largest first; else by the larger share
    squared: bool  # packs by the squares of their rests
    paired: bool = False  # samples of which no three fit a pack are paired first: as many pairs as there can be


FIT_RULES = (FitRule(False, False), FitRule(True, True), FitRule(True, False), FitRule(True, True, True))
"""The first is two-column best fit decreasing as it is known; others win where columns do not move together."""


def fit_samples(sizes: FloatArray, limits: FloatArray, rule: FitRule) -> Packs:
    """Return packs of samples (n, 2 or more columns) by best fit decreasing in the first two."""
    shares = sizes[:, :2] / limits
    total = shares[:, 0] + shares[:, 1]
    key = total if rule.by_sum else np.maximum(shares[:, 0], shares[:, 1])
    packs, order = make_packs(len(sizes), *sizes.shape), np.argsort(-key, kind="stable")
    # of samples so large that no three fit, as many pairs as any choice makes; the rest joins them
    num_packs = 0
    if rule.paired:
        large = np.flatnonzero(total > NO_THREE_FIT)
        partner, own = match_pairs(sizes[large, :2], limits), np.arange(len(large))
        firsts, pack_of = np.unique(np.where(partner < 0, own, np.minimum(own, partner)), return_inverse=True)
        load(sizes, large, pack_of, packs)
        num_packs = len(firsts)
        order = order[total[order] <= NO_THREE_FIT]
    num_packs, _ = fit(sizes, order, limits, rule.squared, packs, num_packs, len(sizes))
    return first_packs(packs, num_packs)


def first_packs(packs: Packs, num_packs: int) -> Packs:
    """The first of the packs; the others are empty."""
    return Packs(packs.head[:num_packs], packs.after, packs.num_held[:num_packs], packs.sums[:num_packs])


def fit_stream(
    columns: FloatArray,
    bounds: FloatArray,
    pull: Pull,
    rule: FitRule,
    *,
    dp: int,
    num_others: int,
    effort: Effort,
    state: UIntArray,
) -> Streamed:
    """Pack a shuffled stream by best fit, window after window, and even out the packs of each: few samples a pack.

    Packs of a window are a multiple of dp: the others are taken apart, and their samples carried on. The last
    window gets empty packs instead, which are then filled from others.
    """
    n = len(columns)
    members, counts = [], []
    num_packs, num_carried = 0, 0
    carried = np.empty(0, np.int64)
    position = 0
    while position < n or len(carried):
        # 1. samples of this window, and their packs
        last = n - position < 1.5 * FIT_SAMPLES
        fresh = n - position if last else FIT_SAMPLES
        chosen = np.concatenate([carried, np.arange(position, position + fresh)])
        position += fresh
        window = columns.take(chosen, axis=0)
        packs = fit_samples(window, bounds[:2], rule)
        found = len(packs.head)
        # 2. whole rows
        if last:
            wanted = min(len(chosen), round_up(num_packs + found + num_others, dp) - num_others - num_packs)
            order, out = np.arange(found), np.empty(0, np.int64)
        else:
            wanted = max(1, found // dp) * dp if found >= dp else found
            order = permute(np.arange(found), state)  # any are carried on: the emptiest hold samples of some kind
            out = np.concatenate([_samples_of(packs, p) for p in order[wanted:].tolist()] or [carried[:0]])
            order = order[:wanted]
        kept = make_packs(wanted, len(chosen), columns.shape[1])
        for name in ("head", "num_held", "sums"):
            getattr(kept, name)[: len(order)] = getattr(packs, name)[order]
        kept.after[:] = packs.after
        # 3. alike
        held, held_counts = even_out(window, kept, bounds, pull, effort, state)
        members.append(chosen[held])
        counts.append(held_counts)
        num_packs += len(held_counts)
        carried = chosen[out]
        num_carried = max(num_carried, len(out))
    offsets = offsets_of(np.concatenate(counts))
    return Streamed(members=np.concatenate(members), offsets=offsets, oldest=int(num_carried > 0), num_grown=0)


def even_out(
    columns: FloatArray, packs: Packs, bounds: FloatArray, pull: Pull, effort: Effort, state: UIntArray
) -> tuple[IntArray, IntArray]:
    """Even out packs that are within the limits, and unload them."""
    goal = _goal_of(sum_columns(columns), len(packs.head), bounds, pull, STRICT_PENALTY)
    even_packs(columns, packs, goal, effort, state, make_scratch(len(packs.head), *columns.shape))
    return unload(packs, state)


def _goal_of(total: FloatArray, num_packs: int, bounds: FloatArray, pull: Pull, penalty: float) -> Goal:
    """The goal of so many packs that hold `total` together."""
    mean = np.where(total > 0, total, 1.0) / num_packs
    weights, slopes = np.where(total > 0, pull.weights, 0.0), np.where(total > 0, pull.slopes, 0.0)
    return make_goal(bounds, weights / mean**2, penalty / bounds, mean, slopes / mean)


def _samples_of(packs: Packs, p: int) -> IntArray:
    held, item = [], int(packs.head[p])
    while item >= 0:
        held.append(item)
        item = int(packs.after[item])
    return np.array(held, np.int64)


def next_fill(fill: float, highest: float, packs_carried: float, packed: PackedWindow) -> float:
    """Fill looser after a window that carried much on, fuller again, up to `highest`, after one that held all."""
    if packs_carried > MAX_CARRY * packed.num_wanted:
        return max(min(fill, LEAST_FULL), fill - LESS_FULL)
    return min(highest, fill + FULLER) if len(packed.left) == 0 else fill


def _enough_packs(num_packs: int, needed: float, ceiling: float, dp: int) -> int:
    """Return `num_packs` and rows of packs on top, until what needs `needed` full ones is below the ceiling."""
    while num_packs < 1 or needed > ceiling * num_packs:
        num_packs += dp
    return num_packs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWindow:
    """One window: pack p holds counts[p] of the members, which are positions in the window."""

    members: IntArray
    counts: IntArray
    left: IntArray  # positions of samples that did not fit
    num_wanted: int  # packs it was given in the end; fewer come out only if some hold nothing
    num_grown: int


def pack_window(
    window: FloatArray,
    num_packs: int,
    bounds: FloatArray,
    pull: Pull,
    age: IntArray,
    *,
    dp: int,
    hold_all: bool,
    effort: Effort,
    state: UIntArray,
) -> PackedWindow:
    """Pack one window of samples into `num_packs` packs.

    Samples that do not fit are left, unless `hold_all` or one of them is `MAX_AGE` windows old: then they get packs of
    their own, in whole rows of dp.
    """
    n, D = window.shape
    k, P = D - 1, num_packs
    total = sum_columns(window)
    # 1. the samples to P packs, improved in pairs; what does not fit is left
    last_goal = _goal_of(total, P, bounds, pull, PENALTY)
    goal = last_goal.copy()
    goal["slope"] = 0.0
    # while they are spread, the cost counts as if the mean pack were as full of it as of the fullest column
    share = np.append(1.0 / bounds[:k], min(1.0, float((total[:k] / bounds[:k]).max()) / P) / goal[k]["mean"])
    packs, scratch = make_packs(P, n, D), make_scratch(P, n, D)
    spread(window, share, packs)
    arrange(window, packs, goal, last_goal, effort, state, scratch)
    out = evict(window, packs, goal, age)
    if len(out) == 0 or n <= P or not (hold_all or age[out].max() >= MAX_AGE):
        members, counts = unload(packs, state)
        return PackedWindow(members=members, counts=counts, left=out, num_wanted=P, num_grown=0)
    # 2. more packs for what is left, by best fit, in whole rows; all are evened out
    grown = make_packs(n, n, D)
    for name in ("head", "num_held", "sums"):
        getattr(grown, name)[:P] = getattr(packs, name)
    grown.after[:] = packs.after
    num_packs, _ = fit(window, out, bounds[:k], True, grown, P, n)
    grown = first_packs(grown, min(n, P + round_up(num_packs - P, dp)))
    members, counts = even_out(window, grown, bounds, pull, effort, state)
    return PackedWindow(members=members, counts=counts, left=out[:0], num_wanted=len(grown.head), num_grown=1)


def packs_for(needed: FloatArray) -> float:
    """Return the packs that samples need whose counted columns add up to `needed`, as a real number."""
    return float(needed.max())


def round_up(packs: float, multiple: int) -> int:
    return max(1, int(np.ceil(packs / multiple - 1e-9))) * multiple


def _count_share(
    counted: FloatArray, carried: IntArray, position: int, share: float, left: FloatArray, room: float
) -> int:
    """Count samples to take, carried ones first: until the fullest column has its share or another one no more room."""
    fullest = int(np.argmax(left))
    num_left = len(counted) - position + len(carried)
    # sums of a guess, of twice as many where it was too small: most windows need one
    guess = int(1.05 * share * num_left) + 64
    while True:
        guess = min(num_left, max(guess, len(carried)))
        taken = np.concatenate([counted[carried], counted[position : position + guess - len(carried)]])
        fits = np.ones(guess, bool)
        for d in range(len(left)):
            total = taken[:, d].cumsum()
            fits &= (total - 0.5 * taken[:, d] <= share * left[d]) if d == fullest else (total <= room)
        stops = np.flatnonzero(~fits[len(carried) :])
        if len(stops):
            return max(1, len(carried) + int(stops[0]))
        if guess == num_left:
            return num_left
        guess *= 2
