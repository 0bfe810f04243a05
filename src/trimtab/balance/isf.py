"""Iterative sampling and filtering, the packing of OmniBal (arXiv 2407.20761, algorithm 1), with nothing dropped.

Symbols as in the paper: Q_v, Q_t the limits of patches (images there) and tokens, Q'_v, Q'_t the filters, T iterations.
"""

from __future__ import annotations

import numpy as np

from trimtab.balance.groups import Groups
from trimtab.balance.rng import UIntArray, make_stream, shuffle
from trimtab.compiled import compiled, inlined
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
    state = make_stream(seed, epoch, 0x697366)
    bounds = np.array(limits, np.int64)
    members, offsets = _iterate(sizes, bounds, np.array(filters, np.int64), iterations, state)
    return Groups(members, offsets)


@inlined
def _in_order(kept: IntArray, starts: IntArray, order: IntArray, offsets: IntArray) -> IntArray:
    """The packs' samples, pack by pack in this order; fills their `offsets`."""
    members = np.empty(len(kept), np.int64)
    for i in range(len(order)):
        p = order[i]
        at = offsets[i]
        for j in range(starts[p], starts[p + 1]):
            members[at] = kept[j]
            at += 1
        offsets[i + 1] = at
    return members


@compiled
def _iterate(
    sizes: IntArray, limits: IntArray, filters: IntArray, iterations: int, state: UIntArray
) -> tuple[IntArray, IntArray]:
    n, k = sizes.shape
    left = np.arange(n)
    kept = np.empty(n, np.int64)
    starts = np.zeros(n + 1, np.int64)
    num_kept, num_packs = 0, 0
    total = np.zeros(k, np.int64)
    for iteration in range(iterations):
        if len(left) == 0:
            break
        shuffle(left, state)
        keep_all = iteration == iterations - 1
        num_left, first = 0, 0  # samples that stay for the next iteration; first sample of the open pack
        for d in range(k):
            total[d] = 0
        for position in range(len(left) + 1):
            ends = position == len(left)
            if not ends:
                for d in range(k):
                    if total[d] + sizes[left[position], d] > limits[d]:
                        ends = True
            if ends and position > first:
                keeps = keep_all
                for d in range(k):
                    if total[d] >= filters[d]:
                        keeps = True
                if keeps:
                    for i in range(first, position):
                        kept[num_kept] = left[i]
                        num_kept += 1
                    num_packs += 1
                    starts[num_packs] = num_kept
                else:
                    for i in range(first, position):
                        left[num_left] = left[i]
                        num_left += 1
                first = position
                for d in range(k):
                    total[d] = 0
            if position < len(left):
                for d in range(k):
                    total[d] += sizes[left[position], d]
        left = left[:num_left]
    order = np.arange(num_packs)
    shuffle(order, state)
    offsets = np.zeros(num_packs + 1, np.int64)
    return _in_order(kept, starts, order, offsets), offsets
