"""The steps of `tiers`: convex hulls of what the upgrades of each class save and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimtab.partition.tiers import STEP, UPGRADE, TierTable
from trimtab.specs import IntArray


def tier_table(gain: IntArray, cost: IntArray, reach: IntArray, host: IntArray) -> TierTable:
    """Hull steps of the upgrades (C, U); ties in cost per byte keep the order of the classes."""
    upgrades = np.zeros(gain.shape, UPGRADE)
    for name, values in (("gain", gain), ("cost", cost), ("reach", reach), ("host", host)):
        upgrades[name] = values
    cheapest = [step.slope for step in _hull_steps(gain.tolist(), cost.tolist())]
    prices = _host_prices(gain, cost, host, cheapest)
    steps = [_hull_steps(gain.tolist(), (cost + price * host).tolist()) for price in prices]
    return TierTable(
        upgrades=upgrades,
        levels=np.unique(upgrades["reach"][gain > 0]),
        uses_host=bool((host > 0).any()),
        price=np.array(prices),
        first_step=np.cumsum([0, *map(len, steps)]),
        steps=np.array([step[1:] for steps_at in steps for step in steps_at], STEP),
    )


class _Step(NamedTuple):
    """One hull step; after `slope` in the order of STEP."""

    slope: float  # cost per byte
    layer_class: int
    prefix: int
    upgrade: int
    start: int
    gain: int
    cost: float


def _hull_steps(gain: Sequence[Sequence[int]], cost: Sequence[Sequence[float]]) -> list[_Step]:
    """Every step, cheapest per byte first."""
    steps: list[_Step] = []
    for g, (gains, costs) in enumerate(zip(gain, cost, strict=True)):
        for p in range(1, sum(x > 0 for x in gains) + 1):
            points: list[tuple[int, float]] = [(0, 0), *zip(gains[:p], costs[:p], strict=True)]
            at = 0
            while True:  # the hull's next corner: least cost per byte from here, the furthest of equals
                bytes_at, cost_at = points[at]
                further = [k for k in range(1, p + 1) if points[k][0] > bytes_at]
                if not further:
                    break
                to = min(further, key=lambda k: ((points[k][1] - cost_at) / (points[k][0] - bytes_at), -points[k][0]))
                more, added = points[to][0] - bytes_at, points[to][1] - cost_at
                steps.append(_Step(added / more, g, p, to - 1, at - 1, more, added))
                at = to
    return sorted(steps, key=lambda step: step[:4])


def _host_prices(gain: IntArray, cost: IntArray, host: IntArray, slopes: list[float]) -> list[float]:
    """0, and the prices at which offload of some class costs as much per byte as some step without a price.

    Where one host memory is short and one class offloads, the best price is among them.
    """
    prices = {0.0}
    taken = host > 0
    for bytes_freed, seconds, bytes_taken in zip(
        gain[taken].tolist(), cost[taken].tolist(), host[taken].tolist(), strict=True
    ):
        prices |= {(slope * bytes_freed - seconds) / bytes_taken for slope in slopes}
    return sorted(price for price in prices if price >= 0)
