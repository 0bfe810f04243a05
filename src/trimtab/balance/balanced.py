"""`balanced`: packs that are alike in every limited column and in cost, for any number of columns.

Symbols: k limited columns, D = k + 1 columns with the cost.
"""

from __future__ import annotations

from dataclasses import dataclass
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

TIGHT_FILL, LOOSE_FILLS = 0.9955, (0.99, 0.985)
"""Share of the packs' room that is used: as full as most data allow, and with room to even out the cost."""

WORTH = 0.01
"""A looser fill is taken where it shortens the modelled time of a trial window by more than this."""

_TRIAL_PACKS, _TRIAL_ROWS = 1024, 32


def pack_balanced(
    sizes: IntArray,
    cost: FloatArray,
    *,
    limits: tuple[int, ...],
    dp: int,
    seed: int,
    epoch: int = 0,
    shard: int = 0,
    fill: float | None = None,
    num_rounds: int = NUM_ROUNDS,
    num_others: int = 0,
) -> Groups:
    """Packs of samples with columns `sizes` (n, k) that each fit a pack alone; every sample in exactly one.

    Packs plus `num_others` made elsewhere are a multiple of dp, unless there are fewer samples. They come in the order
    of the shuffle, `WINDOW_PACKS` at a time, and in random order among these. Exact: the limits, the cover, the best
    sharing of each pair tried. Heuristic, no bound: which pairs, hence the number of packs and their balance.

    `fill` None tries `TIGHT_FILL` and `LOOSE_FILLS` on the first samples: see `fill_for`. `shard` is one more
    key of the randomness, for parts of one data set.
    """
    from trimtab.balance.rng import make_stream
    from trimtab.balance.stream import pack_stream

    if len(sizes) == 0:
        return Groups(np.empty(0, np.int64), np.zeros(1, np.int64))
    stream = _shuffle(sizes, cost, seed, epoch, shard)
    bounds = np.array([*limits, np.inf])
    if fill is None:
        fill = fill_for(stream.columns, bounds, dp, num_rounds)
    streamed = pack_stream(
        stream.columns,
        bounds,
        weigh(stream.columns, bounds, fill),
        dp=dp,
        num_others=num_others,
        window_packs=max(1, WINDOW_PACKS // dp) * dp,
        effort=choose_effort(num_rounds, fill),
        fill=fill,
        state=make_stream(seed, epoch, 1, *_shard_key(shard)),
    )
    return Groups(stream.order[streamed.members], streamed.offsets)


def choose_fill(
    sizes: IntArray, cost: FloatArray, *, limits: tuple[int, ...], dp: int, seed: int, epoch: int, num_rounds: int
) -> float:
    """The fill that `pack_balanced` would choose for these samples, as its first shard."""
    stream = _shuffle(sizes, cost, seed, epoch, 0)
    return fill_for(stream.columns, np.array([*limits, np.inf]), dp, num_rounds)


@dataclass(frozen=True, slots=True, eq=False)
class _Shuffled:
    order: IntArray
    columns: FloatArray  # (n, D)


def _shuffle(sizes: IntArray, cost: FloatArray, seed: int, epoch: int, shard: int) -> _Shuffled:
    """Samples in random order, their cost scaled to a mean of 1: squares of it are summed in float32."""
    from trimtab.balance.rng import permutation
    from trimtab.balance.window import gather, sum_columns

    n, k = sizes.shape
    order = permutation(n, seed, epoch, 0, *_shard_key(shard))
    columns = gather(sizes, cost, order)
    total_cost = float(sum_columns(columns)[k])
    columns[:, k] *= n / total_cost if total_cost > 0 else 0.0
    return _Shuffled(order, columns)


def _shard_key(shard: int) -> tuple[int, ...]:
    return (shard,) if shard else ()


def fill_for(columns: FloatArray, bounds: FloatArray, dp: int, num_rounds: int) -> float:
    """The fill that the first samples of the shuffle finish soonest with.

    Where a column is nearly full in every pack and the cost is not a function of the columns (long samples, attention
    squared), packs can only be evened out if they have room. Time is modelled as the number of rows times the
    largest cost expected of dp packs.
    """
    from trimtab.balance.rng import make_stream
    from trimtab.balance.stream import pack_stream
    from trimtab.balance.window import sum_columns

    fullest = float((sum_columns(columns)[:-1] / bounds[:-1]).max())
    num_packs = min(WINDOW_PACKS, max(_TRIAL_PACKS, _TRIAL_ROWS * dp))
    trial = columns[: int(np.ceil(len(columns) * min(1.0, num_packs / max(fullest, 1.0))))]
    times: dict[float, float] = {}
    for fill in (TIGHT_FILL, *LOOSE_FILLS):
        streamed = pack_stream(
            trial,
            bounds,
            weigh(trial, bounds, fill),
            dp=1,  # whole rows would round the fill
            num_others=0,
            window_packs=num_packs + 1,
            effort=choose_effort(num_rounds, fill),
            fill=fill,
            state=make_stream(0, 0, 2),
        )
        cost = np.add.reduceat(trial[streamed.members, -1], streamed.offsets[:-1])
        times[fill] = len(cost) * _expected_largest(cost, dp)
    best = min(LOOSE_FILLS, key=lambda fill: times[fill])
    return best if times[best] < (1.0 - WORTH) * times[TIGHT_FILL] else TIGHT_FILL


def _expected_largest(values: FloatArray, num_drawn: int) -> float:
    """Mean of the largest of `num_drawn` values drawn at random, with replacement."""
    n = len(values)
    chance = (np.arange(n + 1) / n) ** num_drawn  # that all drawn are among the i smallest
    return float((np.sort(values) * np.diff(chance)).sum())


def weigh(columns: FloatArray, bounds: FloatArray, fill: float) -> FloatArray:
    """Weights of squared relative differences: the fullest column needs little, being held by its limit already.

    Tight packs follow all the other columns alike; loose ones spend their room on the cost.
    """
    from trimtab.balance.window import sum_columns

    D = columns.shape[1]
    fullest = int(np.argmax(sum_columns(columns)[:-1] / bounds[:-1]))
    if _is_tight(fill):
        weights = np.ones(D)
        weights[fullest] = 0.1
    else:
        weights = np.full(D, 0.1)
        weights[fullest] = 0.6
        weights[-1] = 8.0
    return weights


def _is_tight(fill: float) -> bool:
    return fill > 0.5 * (TIGHT_FILL + LOOSE_FILLS[0])


def choose_effort(num_rounds: int, fill: float) -> Effort:
    """Tight packs have little room for polishing; loose ones are worth much of it."""
    from trimtab.balance.window import Effort

    tight = _is_tight(fill)
    return Effort(
        num_rounds=num_rounds,
        num_full_rounds=4,
        alike=0.005,
        patience=5,
        max_free=8,
        num_polished=num_rounds // 4 if tight else 5 * num_rounds,
        tail=0.1 if tight else 0.2,
        polish_free=8 if tight else 10,
    )
