"""Rows made level: what a row of packs waits for, its largest packs, share samples again with others of the row.

Symbols: D columns per sample, the last of them the cost; a row is what dp ranks run at the same time, one pack each.
"""

import numpy as np

from trimtab.balance.pair import Goal, Packs, Scratch, make_goal, make_packs, make_scratch, share_pairs
from trimtab.balance.schedule import Groups
from trimtab.compiled import UIntArray, compiled, inner, make_stream
from trimtab.specs import FloatArray, IntArray

ROW_TRIALS, ROW_PARTNERS = 200, 256
"""Times that the largest pack of a row is shared with others, four of each rank at least; and how many are tried."""

ROW_CLOSE = 5e-4
"""A row is level once its largest pack is this close to the mean: below, nothing can be seen on a device."""

ROW_FREE = 8
"""Samples of two packs of a row that may change side at once."""

OTHERS_WEIGHT = 1e-3
"""Weight of the other columns while one is levelled; they may differ by a hundred times as much as it does."""

STRICT_PENALTY = 1e9
"""What a pack above a limit costs where all are within the limits already: nothing else is worth breaking one."""


def level_rows(columns: FloatArray, groups: Groups, dp: int, bounds: FloatArray, keys: tuple[int, ...]) -> Groups:
    """Level each `dp` packs in a row; `columns` (n, D) are those of the members, in their order, `bounds` their limits.

    The largest cost of a row falls, and no limited column may then stand out further above the row's mean than it
    did, or than the cost did; after that each limited column's largest falls, where that raises no other's. Rows keep
    their samples, and samples that are alone above a limit their pack. Heuristic, no bound.
    """
    if dp == 1 or groups.num_packs == 0:
        return groups
    D = columns.shape[1]
    total = float(columns[:, -1].sum())
    scaled = columns.copy()
    scaled[:, -1] *= len(columns) / total if total > 0 else 0.0  # squares of it are summed in float32
    longest = int(np.diff(groups.offsets[np.append(np.arange(0, groups.num_packs, dp), groups.num_packs)]).max())
    order, offsets = np.empty(len(columns), np.int64), np.zeros_like(groups.offsets)
    packs, scratch = make_packs(dp, longest, D), make_scratch(dp, longest, D)
    goal = make_goal(bounds, *np.ones((4, D)))
    _level_each(scaled, groups.offsets, dp, bounds, goal, packs, make_stream(*keys, 0x726F77), scratch, order, offsets)
    return Groups(groups.members[order], offsets)


@compiled
def _level_each(
    sizes: FloatArray,
    offsets: IntArray,
    dp: int,
    bounds: FloatArray,
    goal: Goal,
    packs: Packs,
    state: UIntArray,
    scratch: Scratch,
    order: IntArray,
    new_offsets: IntArray,
) -> None:
    """Level row after row; `order` gets the samples of the packs as they are then, `new_offsets` where each begins."""
    D, num_packs = sizes.shape[1], len(offsets) - 1
    excess, is_shared = np.empty(D), np.empty(dp, np.bool_)
    for first in range(0, num_packs, dp):
        # 1. the packs of the row, but those of one sample above a limit: they are left alone
        start, P = offsets[first], np.int64(0)
        own = sizes[start : offsets[min(first + dp, num_packs)]]
        for p in range(first, min(first + dp, num_packs)):
            packs.head[P], packs.num_held[P] = -1, offsets[p + 1] - offsets[p]
            for d in range(D):
                packs.sums[P, d] = 0.0
            for i in range(offsets[p] - start, offsets[p + 1] - start):
                packs.after[i] = packs.head[P]
                packs.head[P] = i
                for d in range(D):
                    packs.sums[P, d] += own[i, d]
            is_shared[p - first] = True
            for d in range(D):
                is_shared[p - first] = is_shared[p - first] and packs.sums[P, d] <= bounds[d]
            P += np.int64(is_shared[p - first])
        row = Packs(packs.head[:P], packs.after, packs.num_held[:P], packs.sums[:P])
        # 2. the cost first, then the limited columns
        for turn in range(D if P > 1 else 0):
            led = (D - 1 + turn) % D
            _aim_at(row.sums, led, bounds, excess, goal)
            tries = np.int64(max(ROW_TRIALS, 4 * dp)), np.int64(ROW_PARTNERS)
            target = goal[led].mean if led == D - 1 else np.ceil(goal[led].mean)  # sizes are whole numbers
            level_worst(own, row, goal, led, target, ROW_CLOSE, *tries, np.int64(ROW_FREE), state, scratch)
        # 3. the packs in their places
        P = np.int64(0)
        for p in range(first, min(first + dp, num_packs)):
            place = new_offsets[p]
            if is_shared[p - first]:
                item = row.head[P]
                while item >= 0:
                    order[place] = start + item
                    place += 1
                    item = row.after[item]
                P += 1
            else:
                for i in range(offsets[p], offsets[p + 1]):
                    order[place] = i
                    place += 1
            new_offsets[p + 1] = place


@inner
def _aim_at(sums: FloatArray, led: int, bounds: FloatArray, excess: FloatArray, goal: Goal) -> None:
    """Set the goal of levelling column `led`: others weigh little, and have limits of their own in this row.

    A column may stand out as far as it does; where the cost is levelled, also as far as the cost does.

    Example: costs [9, 11] and tokens [96, 104] stand out by 10 and 4 %. Tokens may rise up to 110 where the cost is
    levelled, and the cost not above 11 where the tokens are.
    """
    P, D = sums.shape
    for d in range(D):
        most, total = 0.0, 0.0
        for p in range(P):
            most, total = max(most, sums[p, d]), total + sums[p, d]
        mean = total / P if total > 0.0 else 1.0
        goal[d].mean, goal[d].slope = mean, 0.0
        goal[d].weight = (1.0 if d == led else OTHERS_WEIGHT) / (mean * mean)
        excess[d] = max(most / mean, 1.0)
    for d in range(D):
        allowed = max(excess[d], excess[led]) if led == D - 1 else excess[d]
        goal[d].limit = min(bounds[d], allowed * goal[d].mean * (1.0 + 1e-12))
        goal[d].penalty = STRICT_PENALTY / goal[d].limit if goal[d].limit < np.inf else 0.0


@inner
def level_worst(
    sizes: FloatArray,
    packs: Packs,
    goal: Goal,
    led: int,
    target: float,
    close: float,
    num_trials: int,
    num_partners: int,
    max_free: int,
    state: UIntArray,
    scratch: Scratch,
) -> float:
    """Share the pack with most of column `led` with others, the emptiest first, until near `target` or none helps.

    Returns how much the pack then has that has most.
    """
    P = len(packs.head)
    left = np.empty(P)
    for _trial in range(num_trials):
        # 1. the pack with most
        worst = np.int64(0)
        for p in range(P):
            left[p] = packs.sums[p, led]
            if left[p] > left[worst]:
                worst = np.int64(p)
        before = left[worst]
        if before <= target * (1.0 + close):
            break
        # 2. shared with the emptiest ones in turn: two that are about alike cannot help each other, so it ends there
        left[worst] = np.inf
        better = False
        for _partner in range(min(P - 1, num_partners)):
            other = np.int64(0)
            for p in range(P):
                if left[p] < left[other]:
                    other = np.int64(p)
            if left[other] >= 0.5 * (target + before):
                break
            left[other] = np.inf
            scratch.pairs[0, 0], scratch.pairs[0, 1] = worst, other
            share_pairs(sizes, packs, np.int64(1), goal, 1.0, max_free, state, scratch)
            if max(packs.sums[worst, led], packs.sums[other, led]) < before * (1.0 - 1e-7):
                better = True
                break
        if not better:
            break
    most = 0.0
    for p in range(P):
        most = max(most, packs.sums[p, led])
    return most
