"""`balanced`: packs that are alike in every limited column and in cost, for any number of columns.

Symbols: k limited columns, D = k + 1 columns with the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.balance.aim import NUMBERS, Aim, choose_aim
from trimtab.balance.groups import Groups, shuffle_rows
from trimtab.specs import FloatArray, IntArray

WINDOW_PACKS = 4096
"""Packs made at a time. More give better partners, rare sizes above all; beyond, the caches no longer hold them."""


def pack_balanced(
    sizes: IntArray,
    cost: FloatArray,
    *,
    limits: tuple[int, ...],
    dp: int,
    seed: int,
    epoch: int = 0,
    shard: int = 0,
    aim: Aim | float | None = None,
    num_others: int = 0,
    rows_alike: bool = False,
) -> Groups:
    """Packs of samples with columns `sizes` (n, k) that each fit a pack alone; every sample in exactly one.

    Packs plus `num_others` made elsewhere are a multiple of dp, unless there are fewer samples. They come in the order
    of the shuffle, `WINDOW_PACKS` at a time, and in random order among these. Exact: the limits, the cover, the best
    sharing of each pair tried. Heuristic, no bound: which pairs, hence the number of packs and their balance.

    `aim` None, or a fill, leaves what is open to `choose_aim`, which knows from `rows_alike` whether packs are sorted
    into rows later. `shard` is one more key of the randomness, for parts of one data set.
    """
    from trimtab.balance.rng import make_stream
    from trimtab.balance.stream import fit_stream, pack_stream

    if len(sizes) == 0:
        return Groups(np.empty(0, np.int64), np.zeros(1, np.int64))
    stream = _shuffle(sizes, cost, limits, seed, epoch, shard)
    bounds = np.array([*limits, np.inf])
    if not isinstance(aim, Aim):
        aim = choose_aim(stream.columns, stream.counted, bounds, dp, aim, num_others, rows_alike)
    pull, effort = aim.pull(stream.columns, bounds), aim.effort()
    state = make_stream(seed, epoch, 1, *_shard_key(shard))
    if aim.rule is not None:
        streamed = fit_stream(
            stream.columns, bounds, pull, aim.rule, dp=dp, num_others=num_others, effort=effort, state=state
        )
    else:
        streamed = pack_stream(
            stream.columns,
            stream.counted,
            bounds,
            pull,
            dp=dp,
            num_others=num_others,
            window_packs=max(1, WINDOW_PACKS // dp) * dp,
            effort=effort,
            fill=aim.fill,
            state=state,
        )
    state = make_stream(seed, epoch, 5, *_shard_key(shard))
    return shuffle_rows(Groups(stream.order[streamed.members], streamed.offsets), dp, state)


def aim_for(
    sizes: IntArray,
    cost: FloatArray,
    *,
    limits: tuple[int, ...],
    dp: int,
    seed: int,
    epoch: int,
    fill: float | None,
    rows_alike: bool,
) -> Aim:
    """The aim that `pack_balanced` would choose for these samples, as its first shard."""
    stream = _shuffle(sizes, cost, limits, seed, epoch, 0)
    return choose_aim(stream.columns, stream.counted, np.array([*limits, np.inf]), dp, fill, 0, rows_alike)


@dataclass(frozen=True, slots=True, eq=False)
class _Shuffled:
    order: IntArray
    columns: FloatArray  # (n, D)
    counted: FloatArray  # (n, k or more): the sizes in packs needed


def _shuffle(
    sizes: IntArray, cost: FloatArray, limits: tuple[int, ...], seed: int, epoch: int, shard: int
) -> _Shuffled:
    """Samples in random order, their cost scaled to a mean of 1: squares of it are summed in float32."""
    from trimtab.balance.bound import counted_columns, sum_columns
    from trimtab.balance.rng import permutation

    n, k = sizes.shape
    order = permutation(n, seed, epoch, 0, *_shard_key(shard))
    columns = np.empty((n, k + 1))
    shuffled = sizes[order]
    columns[:, :k], columns[:, k] = shuffled, cost[order]
    total_cost = float(sum_columns(columns)[k])
    columns[:, k] *= n / total_cost if total_cost > 0 else 0.0
    return _Shuffled(order, columns, counted_columns(shuffled, limits, NUMBERS.tight_fill))


def _shard_key(shard: int) -> tuple[int, ...]:
    return (shard,) if shard else ()
