"""`balanced`: packs that are alike in every limited column and in cost, for any number of columns.

Symbols: k limited columns, D = k + 1 columns with the cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trimtab.balance.groups import Groups
from trimtab.specs import FloatArray, IntArray

if TYPE_CHECKING:
    from trimtab.balance.window import Effort

WINDOW_PACKS = 4096
"""Packs made at a time. More give better partners, rare sizes above all; beyond, the caches no longer hold them."""

NUM_ROUNDS = 24
"""Rounds of pairwise sharing per window; docs/packing.md has what fewer and more give."""

TIGHT_FILL, LOOSE_FILL = 0.9955, 0.985
"""Share of the packs' room that is used: as full as most data allow, and with room to even out the cost."""

WORTH = 0.01
"""The loose fill is taken where it shortens the modelled time of a trial window by more than this."""

_TRIAL_PACKS = 1024


def pack_balanced(
    sizes: IntArray,
    cost: FloatArray,
    *,
    limits: tuple[int, ...],
    dp: int,
    seed: int,
    epoch: int = 0,
    fill: float | None = None,
    num_rounds: int = NUM_ROUNDS,
    num_others: int = 0,
) -> Groups:
    """Packs of samples with columns `sizes` (n, k) that each fit a pack alone; every sample in exactly one.

    Packs plus `num_others` made elsewhere are a multiple of dp, unless there are fewer samples. They come in the order
    of the shuffle, `WINDOW_PACKS` at a time, and in random order among these. Exact: the limits, the cover, the best
    sharing of each pair tried. Heuristic, no bound: which pairs, hence the number of packs and their balance.

    `fill` None tries `TIGHT_FILL` and `LOOSE_FILL` on the first samples: see `_choose_fill`.
    """
    from trimtab.balance.rng import make_stream, permutation
    from trimtab.balance.stream import pack_stream
    from trimtab.balance.window import sum_columns

    n, k = sizes.shape
    order = permutation(n, seed, epoch, 0)
    columns = np.empty((n, k + 1))
    columns[:, :k] = sizes[order]
    columns[:, k] = cost[order]
    total_cost = float(sum_columns(columns)[k])
    columns[:, k] *= n / total_cost if total_cost > 0 else 0.0  # near 1: squares of it are summed in float32
    bounds = np.array([*limits, np.inf])
    if fill is None:
        fill = _choose_fill(columns, bounds, dp, num_rounds)
    streamed = pack_stream(
        columns,
        bounds,
        _weights(columns, bounds, fill),
        dp=dp,
        num_others=num_others,
        window_packs=max(1, WINDOW_PACKS // dp) * dp,
        effort=_effort(num_rounds),
        fill=fill,
        state=make_stream(seed, epoch, 1),
    )
    return Groups(order[streamed.members], streamed.offsets)


def _choose_fill(columns: FloatArray, bounds: FloatArray, dp: int, num_rounds: int) -> float:
    """The fill that the first samples of the shuffle finish soonest with.

    Where a column is nearly full in every pack and the cost is not a function of the columns (long samples, attention
    squared), packs can only be evened out if they have room. Time is modelled as the sum over rows of dp packs of the
    largest cost.
    """
    from trimtab.balance.rng import make_stream
    from trimtab.balance.stream import pack_stream
    from trimtab.balance.window import sum_columns

    fullest = float((sum_columns(columns)[:-1] / bounds[:-1]).max())
    trial = columns[: int(np.ceil(len(columns) * min(1.0, _TRIAL_PACKS / max(fullest, 1.0))))]
    times = []
    for fill in (TIGHT_FILL, LOOSE_FILL):
        streamed = pack_stream(
            trial,
            bounds,
            _weights(trial, bounds, fill),
            dp=dp,
            num_others=0,
            window_packs=_TRIAL_PACKS // dp * dp + dp,
            effort=_effort(num_rounds),
            fill=fill,
            state=make_stream(0, 0, 2),
        )
        cost = np.add.reduceat(trial[streamed.members, -1], streamed.offsets[:-1])
        rows = np.append(cost, np.zeros(-len(cost) % dp)).reshape(-1, dp)
        times.append(float(rows.max(axis=1).sum()))
    return LOOSE_FILL if times[1] < (1.0 - WORTH) * times[0] else TIGHT_FILL


def _weights(columns: FloatArray, bounds: FloatArray, fill: float) -> FloatArray:
    """Weights of squared relative differences: the fullest column needs little, being held by its limit already.

    Tight packs follow all the other columns alike; loose ones spend their room on the cost.
    """
    from trimtab.balance.window import sum_columns

    D = columns.shape[1]
    fullest = int(np.argmax(sum_columns(columns)[:-1] / bounds[:-1]))
    if fill > 0.5 * (TIGHT_FILL + LOOSE_FILL):
        weights = np.ones(D)
        weights[fullest] = 0.1
    else:
        weights = np.full(D, 0.3)
        weights[-1] = 8.0
    return weights


def _effort(num_rounds: int) -> Effort:
    from trimtab.balance.window import Effort

    return Effort(num_rounds=num_rounds, num_full_rounds=4, alike=0.003, patience=5, max_free=8)
