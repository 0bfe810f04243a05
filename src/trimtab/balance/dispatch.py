"""Packs to ranks and steps: in the order of the shuffle, or alike packs together at a price in randomness."""

from __future__ import annotations

from typing import Literal

import numpy as np

from trimtab.errors import PackingError
from trimtab.specs import FloatArray, IntArray, Schedule

Order = Literal["random", "tolerance", "sorted"]
ORDERS: tuple[Order, ...] = ("random", "tolerance", "sorted")

BLOCK_STEPS = 512
"""Steps within which `tolerance` and `sorted` may move a pack: the reach of their disorder."""

TOLERANCE = 0.004
"""`tolerance` groups only packs that are further than this from the median of their block, in any column."""


def dispatch_packs(
    columns: FloatArray,
    *,
    dp: int,
    num_microbatches: int = 1,
    order: Order = "random",
    seed: int = 0,
    epoch: int = 0,
    tolerance: float = TOLERANCE,
    block_steps: int = BLOCK_STEPS,
) -> Schedule:
    """A schedule of packs with the given columns (num_packs, k): patches, tokens, cost, ...

    A *row* is what the ranks run at the same time: one pack each; a step is `num_microbatches` rows. `random` takes the
    packs as they come. `sorted` puts alike packs into one row within blocks of `block_steps` rows and shuffles the rows
    and the ranks of each row. `tolerance` does so only with the packs that stick out; the others keep their order.

    Full rows but for the last, full steps but for the last; slots left over are -1.
    """
    if dp < 1 or num_microbatches < 1:
        raise PackingError(
            f"dp {dp} x {num_microbatches} micro-batches leaves no place for a pack: give 1 or more of both"
        )
    if order not in ORDERS:
        raise PackingError(f"order {order!r} is unknown: choose one of {', '.join(ORDERS)}")
    if not tolerance >= 0:
        raise PackingError(f"tolerance {tolerance} is not a relative distance: give 0 or more (default {TOLERANCE})")
    num_packs = len(columns)
    num_rows = -(-num_packs // dp)
    num_steps = -(-num_rows // num_microbatches)
    sequence = np.arange(num_packs, dtype=np.int64)
    if order != "random":
        block = max(1, block_steps) * dp
        for number, start in enumerate(range(0, num_packs, block)):
            part = sequence[start : start + block]
            chosen = part if order == "sorted" else _outliers(columns, part, dp, tolerance)
            sequence[start : start + block] = _regroup(columns, part, chosen, dp, (seed, epoch, number))
    slots = np.full(num_steps * num_microbatches * dp, -1, np.int64)
    slots[:num_packs] = sequence
    # (steps, microbatches, dp) -> (steps, dp, microbatches)
    table = slots.reshape(num_steps, num_microbatches, dp).transpose(0, 2, 1)
    return Schedule(table=np.ascontiguousarray(table), order=order)


def _outliers(columns: FloatArray, packs: IntArray, dp: int, tolerance: float) -> IntArray:
    """Packs further than `tolerance` from the median in any column; made up to whole rows by the next furthest."""
    values = columns[packs]
    median = np.median(values, axis=0)
    distance = (np.abs(values - median) / np.where(median > 0, median, 1.0)).max(axis=1)
    num_far = int((distance > tolerance).sum())
    rest = len(packs) % dp  # an incomplete last row takes packs from either kind
    wanted = min(len(packs) - rest, -(-num_far // dp) * dp)
    furthest = np.argsort(-distance, kind="stable")[:wanted]
    return packs[np.sort(furthest)]


def _regroup(columns: FloatArray, packs: IntArray, chosen: IntArray, dp: int, keys: tuple[int, int, int]) -> IntArray:
    """`packs` as rows of dp: rows of alike `chosen` packs at random places among the rows of the others, in order."""
    from trimtab.balance.grouping import group_alike
    from trimtab.balance.rng import make_stream, shuffle

    state = make_stream(*keys, 0x6469)
    others = packs[~np.isin(packs, chosen)]
    grouped = chosen.copy()
    group_alike(columns, grouped, dp)
    num_grouped = len(grouped) // dp
    whole = (len(packs) // dp) * dp
    rows = np.concatenate([grouped, others])
    ragged, rows = rows[whole:], rows[:whole].reshape(-1, dp)
    for row in range(num_grouped):
        shuffle(rows[row], state)
    is_grouped = np.zeros(len(rows), np.int64)
    is_grouped[:num_grouped] = 1
    shuffle(is_grouped, state)
    places = np.empty(len(rows), np.int64)
    which = np.arange(num_grouped, dtype=np.int64)
    shuffle(which, state)
    places[is_grouped == 1] = which
    places[is_grouped == 0] = np.arange(num_grouped, len(rows))
    return np.concatenate([rows[places].reshape(-1), ragged])
