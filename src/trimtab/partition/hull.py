"""The steps of `tiers`: convex hulls of what the upgrades of each class save and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimtab.partition.tiers import STEP, UPGRADE, TierTable
from trimtab.specs import IntArray


def tier_table(gain: IntArray, cost: IntArray, reach: IntArray) -> TierTable:
    """Hull steps of the upgrades (C, U); ties in cost per byte keep the order of the classes."""
    upgrades = np.zeros(gain.shape, UPGRADE)
    for name, values in (("gain", gain), ("cost", cost), ("reach", reach)):
        upgrades[name] = values
    return TierTable(
        upgrades=upgrades,
        levels=np.unique(upgrades["reach"][gain > 0]),
        steps=np.array([step[1:] for step in _hull_steps(gain.tolist(), cost.tolist())], STEP),
    )


class _Step(NamedTuple):
    """One hull step; after `slope` in the order of STEP."""

    slope: float  # cost per byte
    layer_class: int
    prefix: int
    upgrade: int
    start: int
    gain: int
    cost: int


def _hull_steps(gain: Sequence[Sequence[int]], cost: Sequence[Sequence[int]]) -> list[_Step]:
    """Every step, cheapest per byte first; a class's gains rise up to its first 0."""
    steps: list[_Step] = []
    for g, (gains, costs) in enumerate(zip(gain, cost, strict=True)):
        for p in range(1, sum(x > 0 for x in gains) + 1):
            points = [(0, 0), *zip(gains[:p], costs[:p], strict=True)]
            at = 0
            while at < p:  # the hull's next corner: least cost per byte from here, the furthest of equals
                ways = []
                for to in range(p, at, -1):
                    more, added = points[to][0] - points[at][0], points[to][1] - points[at][1]
                    ways.append(_Step(added / more, g, p, to - 1, at - 1, more, added))
                steps.append(min(ways, key=lambda way: way.slope))
                at = steps[-1].upgrade + 1
    return sorted(steps, key=lambda step: step[:4])
