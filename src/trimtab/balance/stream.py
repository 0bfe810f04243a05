"""`balanced` over a whole data set: windows of packs along the shuffled stream, what does not fit carried on.

Symbols: k limited columns, D = k + 1 columns per sample, the last of them the cost; P packs a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.balance.bound import sum_columns
from trimtab.balance.pair import make_goal, make_packs, make_scratch
from trimtab.balance.rng import UIntArray
from trimtab.balance.window import Effort, Pull, arrange, deal, evict, unload
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
        ceiling = 0.5 + 0.5 * fill
        packs_left = _enough_packs(planned - num_packs, packs_for(left), ceiling, dp)
        planned = num_packs + packs_left
        num_left = n - position + len(carried)
        last = packs_left < LAST_WINDOWS * window_packs
        P = packs_left if last else window_packs
        taken = num_left
        if not last:
            taken = _count_share(counted, carried, position, P / packs_left, left, ceiling * P)
            last = taken == num_left
        fresh = taken - len(carried)
        chosen = np.concatenate([carried, np.arange(position, position + fresh)])
        age = np.concatenate([age, np.zeros(fresh, np.int64)])
        position += fresh

        window = counted[chosen]
        packed = pack_window(
            columns[chosen], window, min(P, taken), bounds, pull, age, dp=dp, hold_all=last, effort=effort, state=state
        )
        out = packed.left
        members.append(chosen[packed.members])
        counts.append(packed.counts)
        num_packs += len(packed.counts)
        num_grown += packed.num_grown
        left = left - sum_columns(window) + sum_columns(window[out])
        carried, age = chosen[out], age[out] + 1
        oldest = max(oldest, int(age.max(initial=0)))
        fill = next_fill(fill, highest, packs_for(sum_columns(window[out])), packed)
    return Streamed(
        members=np.concatenate(members),
        offsets=np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64),
        oldest=oldest,
        num_grown=num_grown,
    )


def next_fill(fill: float, highest: float, packs_carried: float, packed: PackedWindow) -> float:
    """Looser after a window that carried much on, fuller again, up to `highest`, after one that held all."""
    if packs_carried > MAX_CARRY * packed.num_wanted:
        return max(min(fill, LEAST_FULL), fill - LESS_FULL)
    return min(highest, fill + FULLER) if len(packed.left) == 0 else fill


def _enough_packs(num_packs: int, needed: float, ceiling: float, dp: int) -> int:
    """`num_packs`, and rows of packs on top until what needs `needed` full ones fills no more than the ceiling."""
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
    counted: FloatArray,
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
    """Pack one window of samples, which need `counted` packs, into `num_packs` packs.

    Samples that do not fit are left, unless `hold_all` or one of them is `MAX_AGE` windows old: then there are more
    packs, by dp at a time, in the end one for each sample.
    """
    n, D = window.shape
    k = D - 1
    P = num_packs
    total = sum_columns(window)
    tried, growth, num_grown = False, dp, 0
    while True:
        mean = np.where(total > 0, total, 1.0) / P
        weights = np.where(total > 0, pull.weights / mean**2, 0.0)
        slopes = np.where(total > 0, pull.slopes / mean, 0.0)
        goal = make_goal(bounds, weights, PENALTY / bounds, mean, np.zeros(D))
        last_goal = make_goal(bounds, weights, PENALTY / bounds, mean, slopes)
        # in dealing, the cost counts as if the mean pack were as full of it as of the fullest column
        share = np.append(1.0 / bounds[:k], min(1.0, float((total[:k] / bounds[:k]).max()) / P) / mean[k])
        packs, scratch = make_packs(P, n, D), make_scratch(P, n, D)
        deal(window, share, packs)
        arrange(window, packs, goal, last_goal, effort, state, scratch)
        out = evict(window, packs, goal, age)
        if n <= P or not (len(out) and (hold_all or age[out].max() >= MAX_AGE)):
            break
        tried = not tried  # another deal of the same packs may hold them all
        if tried:
            continue
        P = min(n, P + max(growth, round_up(packs_for(sum_columns(counted[out])), dp)))
        growth *= 2  # few trials, however far from possible the fill is
        num_grown += 1
    members, counts = unload(packs, state)
    return PackedWindow(members=members, counts=counts, left=out, num_wanted=P, num_grown=num_grown)


def packs_for(needed: FloatArray) -> float:
    """Packs that samples need whose counted columns add up to `needed`, as a real number."""
    return float(needed.max())


def round_up(packs: float, multiple: int) -> int:
    return max(1, int(np.ceil(packs / multiple - 1e-9))) * multiple


def _count_share(
    counted: FloatArray, carried: IntArray, position: int, share: float, left: FloatArray, room: float
) -> int:
    """Samples to take, all carried ones first: until the fullest column has its share or another one no more room."""
    fullest = int(np.argmax(left))
    num_left = len(counted) - position + len(carried)
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
