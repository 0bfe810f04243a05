"""Iterative sampling and filtering, the packing of OmniBal (arXiv 2407.20761, algorithm 1), with nothing dropped.

Symbols as in the paper: Q_v, Q_t the limits of patches (images there) and tokens, Q'_v, Q'_t the filters, T iterations.
"""

from __future__ import annotations

import numpy as np

from trimtab.balance.groups import Groups, reorder
from trimtab.balance.rng import make_stream, shuffle
from trimtab.compiled import compiled
from trimtab.errors import PackingError
from trimtab.specs import IntArray

FILTER_GAP = 128
"""Q_t - Q'_t of the paper's setting, Q_t 4096 and Q'_t 3968; its Q'_v is Q_v."""


def default_filters(limits: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's: Q_v itself and Q_t - 128; below Q_t 4096 the same share of it. (18, 6016) gives (18, 5888)."""
    first, *others = limits
    return (first, *(limit - min(FILTER_GAP, limit // 32) for limit in others))


def pack_isf(
    sizes: IntArray,
    *,
    limits: tuple[int, ...],
    filters: tuple[int, ...] | None,
    iterations: int,
    seed: int,
    epoch: int = 0,
) -> Groups:
    """Packs by ISF of samples with columns `sizes` (n, k), each of which fits a pack alone.

    T times: shuffle what is left, fill packs in that order, closing one when the next sample would break a limit,
    keep those with v >= Q'_v or t >= Q'_t. The packs of the last iteration are all kept, good or not: every sample is
    in one. The packs come out in random order. Heuristic, no bound; O(T (n + packs)).
    """
    filters = default_filters(limits) if filters is None else filters
    if iterations < 1:
        raise PackingError(f"ISF with {iterations} iterations packs nothing: give 1 or more (the paper uses 10)")
    if len(filters) != len(limits) or any(not 0 < f <= q for f, q in zip(filters, limits, strict=True)):
        raise PackingError(
            f"ISF filters {filters} do not suit the limits {limits}: give one per limit, above 0 and not above it"
        )
    bounds, least = np.array(limits, np.int64), np.array(filters, np.int64)
    state = make_stream(seed, epoch, 0x697366)
    left = np.arange(len(sizes))
    members, counts = [left[:0]], [left[:0]]
    for iteration in range(iterations):
        if len(left) == 0:
            break
        shuffle(left, state)
        starts = _fill_packs(sizes, left, bounds)
        num_held = np.diff(starts, append=len(left))
        is_kept = (np.add.reduceat(sizes[left], starts) >= least).any(axis=1) | (iteration == iterations - 1)
        is_packed = np.repeat(is_kept, num_held)
        members.append(left[is_packed])
        counts.append(num_held[is_kept])
        left = left[~is_packed]
    packs = Groups(np.concatenate(members), np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64))
    order = np.arange(packs.num_packs)
    shuffle(order, state)
    return reorder(packs, order)


@compiled
def _fill_packs(sizes: IntArray, order: IntArray, limits: IntArray) -> IntArray:
    """Where packs begin: samples in this order, a new pack where the next one would break a limit."""
    k = sizes.shape[1]
    starts = np.zeros(len(order), np.int64)
    total = np.zeros(k, np.int64)
    num_packs = 1
    for position in range(len(order)):
        fits = True
        for d in range(k):
            total[d] += sizes[order[position], d]
            if total[d] > limits[d]:
                fits = False
        if not fits:
            starts[num_packs] = position
            num_packs += 1
            for d in range(k):
                total[d] = sizes[order[position], d]
    return starts[:num_packs]
