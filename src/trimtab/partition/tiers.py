"""The least extra backward time that brings a stage's saved bytes under its room, exactly.

Layers that offer the same tiers form a class; only how many of a class take which tier matters. A class has
*upgrades* of its first tier, each with the bytes that it saves (gain) and the composite time that it costs. A *prefix*
p allows a class its first p upgrades. A *step* is one edge of the convex hull of a class's upgrades under a prefix:
taking steps in order of cost per byte, the last in part, is the linear relaxation, a bound from below on every whole
choice (Sinha and Zoltners 1979, "The multiple-choice knapsack problem").

Example: 3 alike layers whose one upgrade saves 4 MB and costs 3 ms, 2 alike layers whose one upgrade saves 6 MB and
costs 5 ms; 13 MB are needed. Steps by cost per byte: 3/4, then 5/6. Relaxation: 3 layers save 12 MB for 9 ms, a sixth
of the next for the last MB, 9.83 ms. Rounded up: 14 ms, saving 18 MB. Branch and bound finds the optimum between the
two: 2 of the first and 1 of the second save 14 MB for 11 ms.

Plain Python on whole numbers of any length: a plan solves some hundred of these, each in 10 to 100 microseconds, while
compiling the same loops took 3 CPU seconds (docs/developers/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

ROUNDING = 1.0 - 1e-14
"""Of the relaxation: with it no bound is above a whole choice."""


class Upgrade(NamedTuple):
    """A tier of a class that saves more than its first, and costs more."""

    gain: int  # bytes of one layer and micro-batch
    cost: int  # composite time units
    reach: int  # bytes that the backward of one such layer needs next to what is saved


class Step(NamedTuple):
    """One hull edge."""

    layer_class: int
    prefix: int  # under which the step lies on the hull
    upgrade: int  # where the step leads
    start: int | None  # the upgrade where it begins; None: the first tier
    gain: int  # from there
    cost: int  # from there


class TierTable(NamedTuple):
    """Upgrades of every class, and the hull steps of all classes and prefixes.

    upgrades            u = 0        u = 1               steps (cheapest per byte first)
        class 0      4 MB, 3 ms   9 MB, 8 ms                 class 0, prefix 1: none -> 0, 4 MB, 3 ms
        class 1      6 MB, 5 ms       -                      class 0, prefix 2: none -> 0; 0 -> 1, 5 MB, 5 ms ...
    """

    upgrades: tuple[tuple[Upgrade, ...], ...]  # of each class; gain, cost and reach rise
    levels: tuple[int, ...]  # the different values of `reach`, rising
    steps: tuple[Step, ...]


Prefix = tuple[int, ...]
"""Of each class, how many of its upgrades are allowed."""


class Choice(NamedTuple):
    """Whose recompute a stage pays for."""

    extra: int  # composite time units
    counts: tuple[tuple[int, ...], ...]  # layers of each class on each of its upgrades


def tier_table(upgrades: Sequence[Sequence[Upgrade]]) -> TierTable:
    """The hull steps of the classes' upgrades; ties in cost per byte keep the order of the classes."""
    steps = sorted(
        (step for g, own in enumerate(upgrades) for p in range(1, len(own) + 1) for step in _hull(g, own[:p])),
        key=lambda step: (step.cost / step.gain, *step[:3]),
    )
    return TierTable(
        upgrades=tuple(map(tuple, upgrades)),
        levels=tuple(sorted({upgrade.reach for own in upgrades for upgrade in own})),
        steps=tuple(steps),
    )


def _hull(g: int, upgrades: Sequence[Upgrade]) -> list[Step]:
    """The steps of class g where it may take these upgrades."""
    steps: list[Step] = []
    start: int | None = None
    while start != len(upgrades) - 1:  # the hull's next corner: least cost per byte from here, the furthest of equals
        gain, cost = (0, 0) if start is None else upgrades[start][:2]
        ways = [
            Step(g, len(upgrades), u, start, upgrades[u].gain - gain, upgrades[u].cost - cost)
            for u in reversed(range(0 if start is None else start + 1, len(upgrades)))
        ]
        steps.append(min(ways, key=lambda way: way.cost / way.gain))
        start = steps[-1].upgrade
    return steps


class Menu(NamedTuple):
    """What a stage may choose from when its backward may need `transient` bytes next to what is saved."""

    transient: int
    prefix: Prefix
    steps: tuple[Step, ...]  # of the classes that the stage has, under their prefix


def menus_of(tiers: TierTable, present: Sequence[bool]) -> list[Menu]:
    """Return what a stage with layers of these classes may choose from, rising with the transient; the first: nothing.

    What needs at most a transient is a prefix of each class's upgrades, for `reach` rises.
    """
    menus = [Menu(0, (0,) * len(tiers.upgrades), ())]
    for level in tiers.levels:
        prefix = tuple(
            sum(upgrade.reach <= level for upgrade in own) if is_here else 0
            for own, is_here in zip(tiers.upgrades, present, strict=True)
        )
        if prefix != menus[-1].prefix:
            menus.append(Menu(level, prefix, tuple(x for x in tiers.steps if prefix[x.layer_class] == x.prefix)))
    return menus


def most_saved(menu: Menu, num_alike: Sequence[int]) -> int:
    """Count the bytes of one micro-batch that the strongest allowed upgrades save: no choice saves more."""
    return sum(num_alike[step.layer_class] * step.gain for step in menu.steps)


def no_choice(tiers: TierTable) -> Choice:
    """Return every layer on its first tier."""
    return Choice(0, tuple((0,) * len(own) for own in tiers.upgrades))


def least_bound(menu: Menu, num_alike: Sequence[int], need: int) -> float:
    """Return the relaxation's cost, below which no choice saves `need` bytes; inf where none saves them."""
    return _relax(menu.steps, num_alike, need) * ROUNDING if need > 0 else 0.0


def least_extra(
    tiers: TierTable, menu: Menu, num_alike: Sequence[int], need: int, limit: int | None = None
) -> Choice | None:
    """The choice of least composite time that saves `need` bytes; None where none does within `limit`.

    `num_alike` layers of each class. Exact: the relaxation with slack for its rounding is never above a whole choice,
    so a branch is dropped only when it cannot undercut the best choice known. Exponential in the number of classes at
    worst. Of equal choices: the relaxation's, rounded up, if it is one, else the first in the order of the branches.
    """
    if need <= 0:
        return no_choice(tiers)
    # 1. a bound from below: too much already?
    bound = _relax(menu.steps, num_alike, need)
    if bound == inf or (limit is not None and bound * ROUNDING > limit):
        return None
    # 2. a choice: as good as the bound already?
    rounded = round_up(tiers, menu, num_alike, need)
    within = limit is None or rounded.extra <= limit
    if within and rounded.extra <= bound:
        return rounded
    # 3. anything better than both
    best = rounded.extra if within or limit is None else limit + 1
    return _Branches(tiers, menu, num_alike, best).search(need) or (rounded if within else None)


def round_up(tiers: TierTable, menu: Menu, num_alike: Sequence[int], need: int) -> Choice:
    """The relaxation's choice, its last step rounded up to whole layers: within one layer of the optimum."""
    counts = [[0] * len(own) for own in tiers.upgrades]
    cost = 0
    # steps come with the best price a byte first, as the relaxation takes them
    for g, _, upgrade, start, gain, step_cost in menu.steps:
        number = min(num_alike[g], -(-need // gain))
        counts[g][upgrade] += number
        if start is not None:
            counts[g][start] -= number
        cost += number * step_cost
        need -= number * gain
        if need <= 0:
            break
    return Choice(cost, tuple(map(tuple, counts)))


def _relax(steps: Sequence[Step], num_alike: Sequence[int], need: int) -> float:
    """Return the least cost of saving `need` bytes, layers divisible; inf if impossible."""
    cost = 0
    for g, _, _, _, gain, step_cost in steps:
        number = num_alike[g]
        if number * gain >= need:
            return cost + need / gain * step_cost
        need -= number * gain
        cost += number * step_cost
    return inf


@dataclass
class _Branches:
    """Depth first over how many layers take each item, an upgrade of a class, from none upwards."""

    tiers: TierTable
    menu: Menu
    num_alike: Sequence[int]
    best: int  # only less is looked for
    found: list[int] | None = None  # layers on each item, from the first on

    def search(self, need: int) -> Choice | None:
        """The choice of least cost below `best`; None where there is none."""
        upgrades, prefix = self.tiers.upgrades, list(self.menu.prefix)
        # a class at a time, small classes first, strongest upgrade first
        classes = sorted(range(len(prefix)), key=lambda g: self.num_alike[g])
        self.items = [(g, u, *upgrades[g][u][:2]) for g in classes for u in reversed(range(prefix[g]))]
        # the steps open behind each item: its class's weaker upgrades, and the classes to come
        self.steps_behind = []
        for g, u, _, _ in self.items:
            prefix[g] = u
            self.steps_behind.append([step for step in self.tiers.steps if prefix[step.layer_class] == step.prefix])
        self.free = list(self.num_alike)  # layers that no item before has taken
        self.chosen: list[int] = []
        self._descend(need, 0)
        if self.found is None:
            return None
        counts = [[0] * len(own) for own in upgrades]
        for (g, u, _, _), number in zip(self.items, self.found, strict=False):
            counts[g][u] = number
        return Choice(self.best, tuple(map(tuple, counts)))

    def _descend(self, need: int, spent: int) -> None:
        """Try every number of layers on the next item; `need` bytes are missing, `spent` was paid before."""
        level = len(self.chosen)
        g, _, gain, cost = self.items[level]
        num_free = self.free[g]
        # the last number in closed form: fewer do not save enough, more cost more
        is_last = level + 1 == len(self.items)
        for number in range(-(-need // gain) if is_last else 0, num_free + 1):
            # 1. too expensive, or enough saved: more of this item costs more
            paid, left = spent + number * cost, need - number * gain
            if paid >= self.best:
                break
            if left <= 0:
                self.best, self.found = paid, [*self.chosen, number]
                break
            # 2. can what is left do better?
            self.free[g] = num_free - number
            if (paid + _relax(self.steps_behind[level], self.free, left)) * ROUNDING <= self.best - 1:
                self.chosen.append(number)
                self._descend(left, paid)
                self.chosen.pop()
        self.free[g] = num_free
