"""Packs of samples of a few sizes in one column: as few as there can be, mostly.

Symbols: K kinds of sizes s_i, the largest first, c_i samples of each, the limit Q; a pattern says how many samples of
each kind a pack holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trimtab.balance.metrics import above_limits, sum_columns
from trimtab.balance.pair import make_packs
from trimtab.balance.schedule import offsets_of
from trimtab.balance.stream import Streamed, even_out, round_up
from trimtab.balance.window import Effort, Pull, load
from trimtab.compiled import UIntArray
from trimtab.specs import FloatArray, IntArray

MOST_KINDS = 12
MOST_ROOM = 1 << 15  # of a limit in units of the sizes' greatest common divisor: the search for a pattern goes over it
ALIKE = 0.01  # kinds whose samples differ more in cost have better things to do than to be few packs
MOST_STEPS, MOST_WIDER = 20_000, 12
"""Patterns that are tried for the last packs, and times that packs are added to these where none suffice."""


def pack_kinds(
    columns: FloatArray, bounds: FloatArray, pull: Pull, effort: Effort, dp: int, num_others: int, state: UIntArray
) -> Streamed | None:
    """Pack a shuffled stream whose samples have few sizes and costs; None where one column alone does not limit them.

    Whole rows: packs that complete the last one get samples of others. Exact but for what `fill_patterns` says.
    """
    needed = sum_columns(columns)[:2] / bounds[:2]
    d = int(np.argmax(needed))
    values, kind, counts = np.unique(-columns[:, d], return_inverse=True, return_counts=True)
    sizes, limit = (-values).astype(np.int64), int(bounds[d])
    step = int(np.gcd.reduce(sizes))
    if len(sizes) > MOST_KINDS or sizes[-1] == 0 or limit > MOST_ROOM * step or needed[1 - d] > 0.5 * needed[d]:
        return None
    costs = [columns[kind == i, -1] for i in range(len(sizes))]
    if any(np.ptp(cost) > ALIKE * cost.mean() for cost in costs):
        return None
    # 1. patterns, and the samples of each kind to them as they come
    patterns = fill_patterns(sizes // step, counts, limit // step)
    num_packs = round_up(len(patterns) + num_others, dp) - num_others
    if len(patterns) == 0 or num_packs > len(columns):
        return None
    pack_of = np.empty(len(columns), np.int64)
    for i in range(len(sizes)):
        pack_of[kind == i] = np.repeat(np.arange(len(patterns)), patterns[:, i])
    packs = make_packs(num_packs, *columns.shape)
    load(columns, np.arange(len(columns)), pack_of, packs)
    # 2. alike in the other columns
    members, counts = even_out(columns, packs, bounds, pull, effort, state)
    if above_limits(packs.sums, bounds).any():
        return None
    return Streamed(members=members, offsets=offsets_of(counts), oldest=0, num_grown=0)


def fill_patterns(sizes: IntArray, counts: IntArray, limit: int) -> IntArray:
    """Patterns (packs, K) of the fewest packs that were found for c_i samples of sizes s_i; where none were, of none.

    The fewest packs in parts, each pattern any number of times, are exact, by column generation (Gilmore & Gomory
    1961). Whole times of its patterns hold nearly all samples. The rest is searched through for as few packs as the
    parts add up to; where that fails, the patterns that are used most give packs back, and it is tried again.

    Example: sizes 5, 3, 1 under 9, of which there are 4 each: the pattern 5 + 3 + 1, four times.
    """
    patterns, times = _fill_in_parts(sizes, counts, limit)
    fewest, whole = int(np.ceil(times.sum() - 1e-6)), np.floor(times + 1e-9).astype(np.int64)
    for _wider in range(MOST_WIDER):
        left, num_left = counts - whole @ patterns, fewest - int(whole.sum())
        if (last := _fill_last(sizes.tolist(), left.tolist(), limit, num_left)) is not None:
            return np.concatenate([np.repeat(patterns, whole, axis=0), *([[pattern] for pattern in last])])
        whole = whole - ((whole > 0) & (3 * whole >= whole.max()))
    return patterns[:0]


def _fill_in_parts(sizes: IntArray, counts: IntArray, limit: int) -> tuple[IntArray, FloatArray]:
    """K patterns, and how many times each is used in parts: the simplex method over all patterns."""
    room = limit // sizes
    patterns, inverse, times = np.diag(room), np.diag(1.0 / room), counts / room
    for _step in range(50 * len(sizes)):
        # 1. the pattern of most worth, where a sample of each kind is worth what it adds to the packs
        new, worth = _best_pattern(sizes, inverse.sum(axis=0), limit)
        change = (inverse * new).sum(axis=1)
        lasts = np.where(change > 1e-9, times / np.where(change > 1e-9, change, 1.0), np.inf)
        leaving = int(np.argmin(lasts))
        if worth <= 1.0 + 1e-9 or lasts[leaving] == np.inf:
            break
        # 2. it takes the place of the pattern that is used up first
        patterns[leaving], pivot = new, inverse[leaving] / change[leaving]
        times, inverse = np.maximum(times - lasts[leaving] * change, 0.0), inverse - change[:, None] * pivot
        times[leaving], inverse[leaving] = lasts[leaving], pivot
    return patterns, times


def _best_pattern(sizes: IntArray, worth: FloatArray, limit: int) -> tuple[IntArray, float]:
    """The pattern of most worth, and that: for each room what 1, 2, 4, ... samples more of a kind add to it."""
    # a bounded knapsack: 1, 2, 4, ... of a kind make any number of it in a logarithm of the steps
    best, added = np.zeros(limit + 1), []
    for i in range(len(sizes)):
        num, size = 1, int(sizes[i])
        while worth[i] > 0 and size <= limit:
            more = best.copy()
            more[size:] = np.maximum(best[size:], best[:-size] + num * worth[i])
            added.append((i, num, more > best))
            best, num, size = more, 2 * num, 2 * size
    # back from the full room: what was added last comes first
    pattern, room = np.zeros_like(sizes), limit
    for i, num, is_better in reversed(added):
        if is_better[room]:
            pattern[i] += num
            room -= num * int(sizes[i])
    return pattern, float(best[limit])


def _fill_last(sizes: list[int], left: list[int], limit: int, num_packs: int) -> list[list[int]] | None:
    """Patterns of so many packs for all that is left, or None: pack after pack, the fullest first.

    Each pack holds a sample of the largest kind that is left, and leaves no more room than all packs together may.
    """
    K, num_steps = len(sizes), 0

    def fill(i: int, room: int, spare: int, pattern: list[int]) -> Iterator[list[int]]:
        """Patterns with kinds i, i + 1, ... in what room there is, of which `spare` may stay empty."""
        nonlocal num_steps
        # too many steps, or what is left cannot fill the room
        num_steps += 1
        if num_steps > MOST_STEPS or sum(n * s for n, s in zip(left[i:], sizes[i:], strict=True)) < room - spare:
            return
        if i == K:
            yield pattern
            return
        # as many of this kind as fit first; the pattern holds one of its first kind at least
        for num in range(min(left[i], room // sizes[i]), -1 if any(pattern) else 0, -1):
            yield from fill(i + 1, room - num * sizes[i], spare, [*pattern, num])

    def search(spare: int, num_left: int) -> list[list[int]] | None:
        if not any(left):
            return []
        if num_left == 0 or spare < 0:
            return None
        # the pack of the largest sample that is left, then all others; else it is taken back
        first = next(i for i in range(K) if left[i])
        for pattern in fill(first, limit, spare, [0] * first):
            for i in range(K):
                left[i] -= pattern[i]
            rest = search(spare - limit + sum(n * s for n, s in zip(pattern, sizes, strict=True)), num_left - 1)
            if rest is not None:
                return [pattern, *rest]
            for i in range(K):
                left[i] += pattern[i]
        return None

    spare = num_packs * limit - sum(n * s for n, s in zip(left, sizes, strict=True))
    return search(spare, num_packs) if min(left) >= 0 else None
