"""Images of many calls of the vision tower, each call's shared out among the same number of ranks: one compiled loop.

Pool j holds atoms `offsets[j]` to `offsets[j + 1]`: those that ranks share in one call. Symbols: N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.balance.image_search import balance, cut
from trimtab.balance.images import WHOLE
from trimtab.compiled import compiled
from trimtab.options import Rule
from trimtab.specs import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolLoads:
    """What every rank encodes in every pool."""

    load: FloatArray  # (pools, N) in the unit of `measure`
    slowest: FloatArray  # (pools, T) terms of the share of largest load
    largest: FloatArray  # (pools, T) term by term the most of any share


def share_pools(
    cost: FloatArray, measure: FloatArray, terms: FloatArray, offsets: IntArray, num_ranks: int, *, rule: Rule
) -> PoolLoads:
    """Every pool shared by `cost` as `share_images` shares it; shares are told in `measure` (n,) and `terms` (n, T).

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
        total = 0.0
        for i in range(first, last):
            total += cost[i]
        scale = whole / total if total > 0 else 1.0
        units = np.empty(last - first, np.int64)
        for i in range(first, last):
            units[i - first] = np.int64(np.rint(cost[i] * scale))
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
