"""One window of `balanced`: samples to packs, pairs of packs improved round by round, what does not fit sent back.

What goes through samples or pairs one by one is compiled; rounds are NumPy's. Symbols as in `pair`: D columns, the last
of them the cost; P packs.
"""

from typing import NamedTuple

import numpy as np

from trimtab.balance.pair import MAX_FREE, Goal, Packs, Scratch, share_pairs
from trimtab.compiled import UIntArray, below, compiled, inner, next_u64, permute, relaxed
from trimtab.specs import FloatArray, IntArray

NUM_BUCKETS = 4096
BLOCK = 32  # packs that `fit` looks at, or leaves out, together
NO_REST = 1e150  # more than any pack has left
_U = np.uint64
ALL_AGAIN = 8  # every eighth round packs that nothing could improve are tried again
REPAIR_PASSES = 4
REPAIR_PARTNERS, SHARED_PARTNERS = 8, 2048  # of each pack above its limit, in each pass; more where they are few
MOST_REPAIRED = 0.125  # share of the packs that a pass looks at; where more are above a limit, samples are carried on
SHAKEN_PAIRS = 4  # pairs with room that are shaken for each pack that stays above a limit
SHAKE_FREE = 8


class Pull(NamedTuple):
    """What two packs' differences count, relative to the mean pack: weights of squares, and slopes above the mean.

    A square pulls packs together from both sides. A slope counts only what is above the mean: rows wait for their
    largest pack, and a pack that is small in one column, as one long sample makes it, holds up nobody.
    """

    weights: FloatArray  # (D,)
    slopes: FloatArray  # (D,); 0: this column's limit counts instead


class Effort(NamedTuple):
    """How long a window is improved; see docs/packing.md for what each buys."""

    num_rounds: int
    num_coarse_rounds: int  # rounds that leave out pairs twice as far apart as later ones
    alike: float  # relative difference below which two packs count as alike
    patience: int  # failures in a row after which a pack rests
    max_free: int  # samples of a pair that may change side at once
    num_polished: int  # rounds in which the packs that stick out most meet random others
    tail: float  # share of the packs that each of them takes
    polish_free: int  # as max_free, in these rounds
    stuck: float  # they end once fewer than this share of the packs that stick out get better


@inner
def _bucket_of(place: float) -> int:
    """Return a whole number from 0 to NUM_BUCKETS - 1, whatever the figure is: it says where memory is written."""
    return np.int64(place) if 0.0 <= place < NUM_BUCKETS else np.int64(0 if place < 0.0 else NUM_BUCKETS - 1)


@inner
def _sort_by_buckets(key: FloatArray, chosen: IntArray, n: int, out: IntArray, start: IntArray) -> None:
    """The first n of `chosen` in about ascending order of key (exact between buckets), in linear time."""
    smallest, largest = key[chosen[0]], key[chosen[0]]
    for i in range(n):
        smallest = min(smallest, key[chosen[i]])
        largest = max(largest, key[chosen[i]])
    if largest - smallest <= 1e-12 * max(abs(largest), abs(smallest)):
        for i in range(n):
            out[i] = chosen[i]
        return
    scale = (NUM_BUCKETS - 1e-6) / (largest - smallest)
    for k in range(NUM_BUCKETS + 1):
        start[k] = 0
    for i in range(n):
        start[_bucket_of((key[chosen[i]] - smallest) * scale) + 1] += 1
    for k in range(NUM_BUCKETS):
        start[k + 1] += start[k]
    for i in range(n):
        bucket = _bucket_of((key[chosen[i]] - smallest) * scale)
        out[start[bucket]] = chosen[i]
        start[bucket] += 1


@compiled
def spread(sizes: FloatArray, fill: FloatArray, packs: Packs) -> None:
    """Put the largest sample first (about), each to the emptiest pack (about), by the fullest of its columns.

    `fill` turns a column into a share of a pack. Packs wait in buckets of equal fullness, in each the one that has
    waited longest first, so samples of size zero spread too. No pack gets emptier: the emptiest bucket only moves up.
    """
    n, D = sizes.shape
    P = len(packs.head)
    # 1. samples by their fullest column
    key = np.zeros(n)
    for i in range(n):
        for d in range(D):
            key[i] = max(key[i], sizes[i, d] * fill[d])
    everyone, order = np.empty(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        everyone[i] = i
    start = np.empty(NUM_BUCKETS + 1, np.int64)
    _sort_by_buckets(key, everyone, n, order, start)
    # 2. all packs in the first bucket, which is a queue
    first, last = np.full(NUM_BUCKETS, -1, np.int64), np.full(NUM_BUCKETS, -1, np.int64)
    behind = np.empty(P, np.int64)
    for p in range(P):
        behind[p] = p + 1 if p + 1 < P else -1
    first[0], last[0] = 0, P - 1
    emptiest = 0
    # 3. each sample to the first pack of the emptiest bucket
    for position in range(n - 1, -1, -1):
        i = order[position]
        while first[emptiest] < 0:
            emptiest += 1
        p = first[emptiest]
        first[emptiest] = behind[p]
        _put(sizes, packs, i, p)
        full = 0.0
        for d in range(D):
            full = max(full, packs.sums[p, d] * fill[d])
        # never below: a negative size would leave a pack where nobody looks for it
        bucket = np.int64(max(emptiest, min(NUM_BUCKETS - 1.0, full * (NUM_BUCKETS - 2))))
        behind[p] = -1
        if first[bucket] < 0:
            first[bucket] = p
        else:
            behind[last[bucket]] = p
        last[bucket] = p


@relaxed
def fit(
    sizes: FloatArray, order: IntArray, limits: FloatArray, squared: bool, packs: Packs, num_open: int, most: int
) -> tuple[int, IntArray]:
    """Pack by best fit in two columns: each sample in this order into the open pack that it fills best.

    That is the pack with the least rest, added up as shares of the limits (or the squares of the shares), among those
    that hold the sample. Where none does, a new one is opened, up to `most`. Packs 0 .. num_open - 1 are open from the
    start. Returns the number of open packs, and the samples that found no place.

    Packs are looked through in blocks. A block is left out if its largest rest in some column is too small, or if even
    its fullest pack would keep more than the best so far. Packs that have no room for the smallest sample are looked at
    no more: once they are half of all, the others move together.

    Example: limits (10, 10); of (6, 1), (5, 5), (4, 4) the first two open a pack each, and the third joins the second,
    which keeps (1, 1): a rest of 0.2, where the first would keep (0, 5), 0.5.
    """
    P = min(most, num_open + len(order))
    least_0, least_1 = limits[0], limits[1]  # the smallest sample
    for position in range(len(order)):
        least_0, least_1 = min(least_0, sizes[order[position], 0]), min(least_1, sizes[order[position], 1])
    open_packs = _make_open(P, limits)
    rests, pack_at = open_packs.rests, open_packs.pack_at
    # 1. packs that have room for it
    num_roomy, num_closed = np.int64(0), np.int64(0)
    for p in range(num_open):
        room_0, room_1 = limits[0] - packs.sums[p, 0], limits[1] - packs.sums[p, 1]
        if room_0 >= least_0 and room_1 >= least_1:
            pack_at[num_roomy], rests[0, num_roomy], rests[1, num_roomy] = p, room_0, room_1
            num_roomy += 1
    for block in range(num_roomy // BLOCK + 1):
        _look_at(open_packs, block)
    left, num_left = np.empty(len(order), np.int64), np.int64(0)
    for position in range(len(order)):
        i = order[position]
        # 2. the one with the least rest, or a new one, or none
        best = _best_open(open_packs, sizes[i, 0], sizes[i, 1], squared, num_roomy // BLOCK + 1)
        if best < 0 and num_open == P:
            left[num_left] = i
            num_left += 1
            continue
        if best < 0:
            best = num_roomy
            pack_at[best], rests[0, best], rests[1, best] = num_open, limits[0], limits[1]
            num_roomy += 1
            num_open += 1
        _put(sizes, packs, i, pack_at[best])
        # 3. what it and its block have left
        rests[0, best] -= sizes[i, 0]
        rests[1, best] -= sizes[i, 1]
        _look_at(open_packs, best // BLOCK)
        num_closed += np.int64(rests[0, best] < least_0 or rests[1, best] < least_1)
        if num_closed > BLOCK and 2 * num_closed > num_roomy:
            num_roomy, num_closed = _leave_out_full(open_packs, num_roomy, least_0, least_1), np.int64(0)
    return num_open, left[:num_left]


class _Open(NamedTuple):
    """Packs that `fit` looks at; where there is none, rests are -1."""

    pack_at: IntArray  # (P,) their numbers, ascending
    rests: FloatArray  # (2, P and the rest of a block) of each column
    blocks: FloatArray  # (3, blocks) the largest rest in each column, the least of both together, as shares
    scale: FloatArray  # (2,) one over each limit


@inner
def _make_open(P: int, limits: FloatArray) -> _Open:
    num_blocks, scale = P // BLOCK + 1, np.empty(2)
    scale[0], scale[1] = 1.0 / limits[0], 1.0 / limits[1]
    return _Open(np.empty(P, np.int64), np.full((2, num_blocks * BLOCK), -1.0), np.zeros((3, num_blocks)), scale)


@relaxed
def _best_open(packs: _Open, size_0: float, size_1: float, squared: bool, num_blocks: int) -> int:
    """The place of the pack that the sample fills best, the first of equal ones; -1: it fits none."""
    rests, blocks, w_0, w_1 = packs.rests, packs.blocks, packs.scale[0], packs.scale[1]
    size = w_0 * size_0 + w_1 * size_1
    best, least = np.int64(-1), NO_REST
    for block in range(num_blocks):
        kept = blocks[2, block] - size
        if size_0 > blocks[0, block] or size_1 > blocks[1, block]:
            continue
        if kept > 0.0 and (0.5 * kept * kept if squared else kept) >= least:
            continue
        # vector code comes of a loop of fixed length without branches
        first, least_here = _U(block * BLOCK), NO_REST
        for k in range(_U(BLOCK)):
            room_0, room_1 = rests[0, first + k] - size_0, rests[1, first + k] - size_1
            left_0, left_1 = w_0 * room_0, w_1 * room_1
            rest = left_0 * left_0 + left_1 * left_1 if squared else left_0 + left_1
            least_here = min(least_here, rest if min(room_0, room_1) >= 0.0 else NO_REST)
        if least_here < least:
            least = least_here
            for k in range(_U(BLOCK)):
                room_0, room_1 = rests[0, first + k] - size_0, rests[1, first + k] - size_1
                left_0, left_1 = w_0 * room_0, w_1 * room_1
                rest = left_0 * left_0 + left_1 * left_1 if squared else left_0 + left_1
                if min(room_0, room_1) >= 0.0 and rest <= least_here:
                    best = np.int64(first + k)
                    break
    return best


@inner
def _look_at(packs: _Open, block: int) -> None:
    """Find what the packs of a block have left at most, and at least."""
    rests, most_0, most_1, least = packs.rests, -1.0, -1.0, NO_REST
    for p in range(block * BLOCK, block * BLOCK + BLOCK):
        most_0, most_1 = max(most_0, rests[0, p]), max(most_1, rests[1, p])
        both = packs.scale[0] * rests[0, p] + packs.scale[1] * rests[1, p]
        least = min(least, both if rests[0, p] >= 0.0 else NO_REST)
    packs.blocks[0, block], packs.blocks[1, block], packs.blocks[2, block] = most_0, most_1, least


@inner
def _leave_out_full(packs: _Open, num_packs: int, least_0: float, least_1: float) -> int:
    """Move packs that have room together; their number."""
    rests, n = packs.rests, np.int64(0)
    for p in range(num_packs):
        rest_0, rest_1 = rests[0, p], rests[1, p]
        rests[0, p] = rests[1, p] = -1.0
        if rest_0 >= least_0 and rest_1 >= least_1:
            packs.pack_at[n], rests[0, n], rests[1, n] = packs.pack_at[p], rest_0, rest_1
            n += 1
    for block in range(num_packs // BLOCK + 1):
        _look_at(packs, block)
    return n


@compiled
def pair_extremes(
    sums: FloatArray, direction: FloatArray, failures: IntArray, patience: int, least: float, pairs: IntArray
) -> int:
    """Pair packs that failed less than `patience` times, sorted along a direction: first with last, and so on.

    As many `pairs` as differ by `least`; their number. Example: along tokens packs of [9, 4, 6, 5], least 2, give
    (4, 9), and leave out (5, 6).
    """
    P, D = sums.shape
    key = np.empty(P)
    chosen, order = np.empty(P, np.int64), np.empty(P, np.int64)
    # where each pack lies along the direction, but for those that nothing could improve
    n = np.int64(0)
    for p in range(P):
        if failures[p] < patience:
            key[p] = 0.0
            for d in range(D):
                key[p] += direction[d] * sums[p, d]
            chosen[n] = p
            n += 1
    if n < 2:
        return 0
    # first with last, second with last but one, while they differ enough
    _sort_by_buckets(key, chosen, n, order, np.empty(NUM_BUCKETS + 1, np.int64))
    for i in range(n // 2):
        a, b = order[i], order[n - 1 - i]
        if key[b] - key[a] < least:
            return i
        pairs[i, 0], pairs[i, 1] = a, b
    return n // 2


@compiled
def improve(
    sizes: FloatArray,
    packs: Packs,
    goal: Goal,
    effort: Effort,
    num_rounds: int,
    num_coarse_rounds: int,
    state: UIntArray,
    scratch: Scratch,
) -> None:
    """Run rounds of pairwise sharing: sort the packs along one direction, pair the extremes, share each pair again.

    The direction is each column in turn, then a random mix of all. The fullest column, which its limit holds, has no
    turn of its own. What two packs differ by is halved or better by
    every success, so extremes meet in the middle; those that are alike, or that failed `patience` times, are skipped.
    """
    D = len(goal)
    fullest = np.int64(0)
    for d in range(D):
        if goal[d].mean / goal[d].limit > goal[fullest].mean / goal[fullest].limit:
            fullest = np.int64(d)
    for p in range(len(packs.head)):
        scratch.failures[p] = 0
    direction = np.empty(D)
    for r in range(num_rounds):
        # 1. the direction of this round
        turn = D - 1 - r % D  # 0: the mix; else the column with that many others below it
        for d in range(D):
            mix = np.float64(next_u64(state)) / 2.0**63 - 1.0
            alone = np.float64(turn == (d if d > fullest else d + 1) and d != fullest)
            direction[d] = (mix if turn == 0 else alone) / goal[d].mean
        # 2. extremes, but for packs at rest and for those that are alike
        patience = np.int64(effort.patience if r % ALL_AGAIN != ALL_AGAIN - 1 else r + 1)
        least = 2.0 * effort.alike if r < num_coarse_rounds else effort.alike
        num_pairs = pair_extremes(packs.sums, direction, scratch.failures, patience, least, scratch.pairs)
        share_pairs(sizes, packs, num_pairs, goal, 1.0, effort.max_free, state, scratch)


@compiled
def polish(sizes: FloatArray, packs: Packs, goal: Goal, effort: Effort, state: UIntArray, scratch: Scratch) -> None:
    """Share the packs that stick out most with random others, looking at more ways than `improve` does.

    Rows wait for their largest pack, so the tail decides. Extremes of one direction often cannot help each other (both
    are full of the same column); most packs are near the mean and can take a little each.
    """
    P, D = packs.sums.shape
    num_worst = min(P - 1, np.int64(np.ceil(effort.tail * P)))
    if num_worst < 1:
        return
    score = np.empty(P)
    everyone, order = np.arange(P), np.empty(P, np.int64)
    start = np.empty(NUM_BUCKETS + 1, np.int64)
    # each round the packs that stick out most, each with a random one
    for _round in range(effort.num_polished):
        for p in range(P):
            score[p] = 0.0
            for d in range(D):
                above = packs.sums[p, d] - goal[d].mean
                score[p] += goal[d].weight * above * above + goal[d].slope * max(0.0, above)
        _sort_by_buckets(score, everyone, P, order, start)
        for i in range(num_worst):
            scratch.pairs[i, 0], scratch.pairs[i, 1] = order[P - 1 - i], below(state, P)
        num_better = share_pairs(sizes, packs, num_worst, goal, 1.0, effort.polish_free, state, scratch)
        if num_better < effort.stuck * num_worst:
            break


@inner
def _is_above(sums: FloatArray, p: int, goal: Goal) -> bool:
    """Return whether a pack is above a limit."""
    above = False
    for d in range(len(goal)):
        above = above or sums[p, d] > goal[d].limit
    return above


@inner
def _next_with_room(sums: FloatArray, p: int, goal: Goal, first: int) -> int:
    """The first pack from `first` on, round the end, whose room and that of pack p together are not negative; or -1."""
    P = len(sums)
    for step in range(P):
        q = (first + step) % P
        fits = q != p
        for d in range(len(goal)):
            fits = fits and sums[p, d] + sums[q, d] <= 2.0 * goal[d].limit
        if fits:
            return q
    return -1


@compiled
def repair(sizes: FloatArray, packs: Packs, goal: Goal, state: UIntArray, scratch: Scratch) -> None:
    """Share each pack above a limit, exactly, with packs that leave room for both.

    Where that fails, *shake* and try again: the pack and some pairs that have room are shared under the opposite
    weights, which gathers scattered room in one pack and mixes large samples with small ones.
    """
    P = len(packs.head)
    one, pair = np.int64(1), scratch.pairs[0]
    for attempt in range(REPAIR_PASSES):
        num_above = np.int64(0)
        for p in range(P):
            num_above += np.int64(_is_above(packs.sums, p, goal))
        num_partners = REPAIR_PARTNERS + SHARED_PARTNERS // (num_above + 1)
        num_left = np.int64(max(1.0, MOST_REPAIRED * P))
        for p in range(P):
            if num_left == 0:
                break
            if not _is_above(packs.sums, p, goal):
                continue
            num_left -= 1
            # 1. with packs that have room for the excess
            for _partner in range(num_partners):
                q = _next_with_room(packs.sums, p, goal, below(state, P))
                if q < 0:
                    break
                pair[0], pair[1] = p, q
                share_pairs(sizes, packs, one, goal, 1.0, np.int64(MAX_FREE), state, scratch)
                if not _is_above(packs.sums, p, goal):
                    break
            if attempt + 1 == REPAIR_PASSES or not _is_above(packs.sums, p, goal):
                continue
            # 2. mixed with one, and pairs of others mixed
            pair[0], pair[1] = p, below(state, P)
            share_pairs(sizes, packs, one, goal, -1.0, np.int64(SHAKE_FREE), state, scratch)
            for _mixed in range(SHAKEN_PAIRS):
                a = _next_with_room(packs.sums, p, goal, below(state, P))
                b = _next_with_room(packs.sums, p, goal, below(state, P))
                if a >= 0 and b >= 0 and a != b:
                    pair[0], pair[1] = a, b
                    share_pairs(sizes, packs, one, goal, -1.0, np.int64(SHAKE_FREE), state, scratch)


def arrange(
    sizes: FloatArray, packs: Packs, goal: Goal, last_goal: Goal, effort: Effort, state: UIntArray, scratch: Scratch
) -> None:
    """Share the samples of a window's packs again until they are alike and, where that can be, within the limits."""
    improve(sizes, packs, goal, effort, effort.num_rounds, effort.num_coarse_rounds, state, scratch)
    repair(sizes, packs, goal, state, scratch)
    improve(sizes, packs, goal, effort, max(1, effort.num_rounds // 4), 0, state, scratch)
    polish(sizes, packs, last_goal, effort, state, scratch)


def even_packs(sizes: FloatArray, packs: Packs, goal: Goal, effort: Effort, state: UIntArray, scratch: Scratch) -> None:
    """Even out packs that are within the limits, and stay so."""
    improve(sizes, packs, goal, effort, effort.num_rounds, effort.num_coarse_rounds, state, scratch)
    polish(sizes, packs, goal, effort, state, scratch)


@compiled
def evict(sizes: FloatArray, packs: Packs, goal: Goal, age: IntArray) -> IntArray:
    """Take samples out of packs above a limit until none is; those that fit nowhere else.

    From each such pack goes the youngest sample, of equal age the one that leaves the least above the limits, then the
    smallest; each is put into the fullest pack that still has room, if one has.
    """
    P, D = packs.sums.shape
    evicted, num_evicted = np.empty(len(sizes), np.int64), np.int64(0)
    # 1. out of each pack above a limit, until it is not
    for p in range(P):
        while _is_above(packs.sums, p, goal):
            chosen, before_chosen, least, youngest = np.int64(-1), np.int64(-1), np.inf, np.int64(0)
            item, before = packs.head[p], np.int64(-1)
            while item >= 0:
                score = 0.0
                for d in range(D - 1):
                    limit = goal[d].limit
                    excess = max(0.0, packs.sums[p, d] - sizes[item, d] - limit)
                    score += (1e3 * excess + sizes[item, d]) / limit
                if chosen < 0 or age[item] < youngest or (age[item] == youngest and score < least):
                    chosen, before_chosen, least, youngest = item, before, score, age[item]
                before, item = item, packs.after[item]
            if before_chosen < 0:
                packs.head[p] = packs.after[chosen]
            else:
                packs.after[before_chosen] = packs.after[chosen]
            packs.num_held[p] -= 1
            for d in range(D):
                packs.sums[p, d] -= sizes[chosen, d]
            evicted[num_evicted] = chosen
            num_evicted += 1
    # 2. into the fullest other that has room
    limits = np.empty(D - 1)
    for d in range(D - 1):
        limits[d] = goal[d].limit
    return fit(sizes, evicted[:num_evicted], limits, False, packs, np.int64(P), np.int64(P))[1]


@inner
def _put(sizes: FloatArray, packs: Packs, item: int, p: int) -> None:
    """Put sample `item` into pack p."""
    packs.after[item] = packs.head[p]
    packs.head[p] = item
    packs.num_held[p] += 1
    for d in range(sizes.shape[1]):
        packs.sums[p, d] += sizes[item, d]


@compiled
def load(sizes: FloatArray, items: IntArray, pack_of: IntArray, packs: Packs) -> None:
    """Put each of `items` into the pack that `pack_of` says."""
    for i in range(len(items)):
        _put(sizes, packs, items[i], pack_of[i])


def unload(packs: Packs, state: UIntArray) -> tuple[IntArray, IntArray]:
    """List samples pack by pack, packs in random order, and the number in each; packs without samples are left out."""
    # in random order, or packs that were improved together would meet in one step
    order = permute(np.arange(len(packs.head)), state)
    order = order[packs.num_held[order] > 0]
    counts = packs.num_held[order]
    place = np.cumsum(counts) - counts
    members = np.empty(int(counts.sum()), np.int64)
    item = packs.head[order]
    while len(item):  # one sample of every pack that has one left
        members[place] = item
        item = packs.after[item]
        more = item >= 0
        item, place = item[more], place[more] + 1
    return members, counts
