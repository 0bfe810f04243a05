"""What packs of a data set should be like: how full, and which of their columns alike. Chosen by packing some of it.

Symbols: k limited columns, D = k + 1 columns with the cost; the *fullest* column is the one that needs most packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from trimtab.specs import FloatArray

if TYPE_CHECKING:
    from trimtab.balance.window import Effort, Pull


@dataclass(frozen=True, slots=True, kw_only=True)
class AimNumbers:
    """Every tuned number of this file. `python bench/aim_sweep.py` varies one at a time and prints what it costs.

    Weights count squared differences from the mean pack, slopes what is above it, of columns relative to their means.
    """

    tight_fill: float = 0.9955  # share of the packs' room that is used: as full as most data allow
    loose_fill: float = 0.985  # the same, with room to even out the cost
    worth: float = 0.012  # a looser fill is taken where it shortens the modelled time of a trial by more than this
    worth_of_many: float = 0.004  # the same in rows of more than `even_ranks` packs, where the largest decides
    even_price: float = 0.006  # all columns are evened out where that lengthens the time by no more than this
    even_ranks: int = 32  # rows of more packs even out only the cost, or are level: their largest takes all the room
    trial_packs: int = 2048  # of the trial that times are modelled on
    tight_fullest: float = 0.1  # weight of the fullest column of tight packs, which its limit holds; the others 1
    cost_weight: float = 8.0  # of the cost in loose packs
    cost_fullest: float = 0.1  # style "cost": weights of the fullest column and of the others, slope of the cost
    cost_others: float = 0.02
    cost_slope: float = 0.1
    even_fullest: float = 0.3  # styles "both" and "even": the same
    even_others: float = 0.1
    even_cost_slope: float = 0.2
    fullest_slope: float = 0.1  # and slopes of the fullest column and of the others
    both_slope: float = 0.1
    even_slope: float = 0.2
    level_price: float = 0.012  # as `even_price`, in rows of more than `even_ranks` packs, for style "level"
    level_fill: float = 0.99  # its share of the room
    level_ranks: int = 64  # rows of more packs are polished longer still, style "flat"
    level_slope: float = 20.0  # slopes of its columns but the fullest, and of its cost
    level_cost_slope: float = 1.0


NUMBERS = AimNumbers()

NUM_ROUNDS = 24
"""Rounds of pairwise sharing per window; docs/packing.md has what fewer and more give."""

Style = Literal["tight", "cost", "both", "even", "level", "flat"]
LOOSE_STYLES: tuple[Style, ...] = ("cost", "both", "even")  # from the shortest time to the most alike


@dataclass(frozen=True, slots=True)
class Aim:
    """How full packs are to be, and what they are to have alike."""

    fill: float
    style: Style

    def pull(self, columns: FloatArray, bounds: FloatArray) -> Pull:
        """Tight packs need little weight on the fullest column, which its limit holds, and follow all others alike.

        Loose ones spend their room on the cost (`cost`), or share it more and more (`both`, `even`). Those of many
        ranks may keep every column from rising above its mean first (`level`, `flat`): a row waits for its largest.
        """
        from trimtab.balance.bound import sum_columns
        from trimtab.balance.window import Pull

        D, n = columns.shape[1], NUMBERS
        fullest = int(np.argmax(sum_columns(columns)[:-1] / bounds[:-1]))
        weights, slopes = np.ones(D), np.zeros(D)
        if self.style in ("tight", "level", "flat"):
            weights[fullest] = n.tight_fullest
            if self.style != "tight":
                slopes[:] = n.level_slope
                slopes[fullest], slopes[-1] = n.fullest_slope, n.level_cost_slope
        elif self.style == "cost":
            weights[:] = n.cost_others
            weights[fullest], weights[-1], slopes[-1] = n.cost_fullest, n.cost_weight, n.cost_slope
        else:
            weights[:], slopes[:] = n.even_others, n.both_slope if self.style == "both" else n.even_slope
            weights[fullest], weights[-1] = n.even_fullest, n.cost_weight
            slopes[fullest], slopes[-1] = n.fullest_slope, n.even_cost_slope
        return Pull(weights, slopes)

    def effort(self) -> Effort:
        """Tight packs have little room for polishing; loose ones are worth much of it, flat ones most."""
        from trimtab.balance.window import Effort

        tight = self.style == "tight"
        return Effort(
            num_rounds=NUM_ROUNDS,
            num_coarse_rounds=4,
            alike=0.005,
            patience=5,
            max_free=8,
            num_polished=NUM_ROUNDS // 3 if tight else (10 if self.style == "flat" else 5) * NUM_ROUNDS,
            stuck=0.02 if self.style == "flat" else 0.1,
            tail=0.1 if tight else 0.2,
            polish_free=8 if tight else 10,
        )


def choose_aim(columns: FloatArray, counted: FloatArray, bounds: FloatArray, dp: int, fill: float | None = None) -> Aim:
    """The aim with which the first samples of the shuffle finish soonest, or nearly so and more alike; heuristic.

    Where a column is nearly full in every pack and the cost is not a function of the columns (long samples, attention
    squared), packs can only be evened out if they have room. Time is modelled as the number of rows times the
    largest cost expected of dp packs. With `fill` given, only the style is chosen.
    """
    from trimtab.balance.bound import sum_columns

    n = NUMBERS
    if fill is not None and fill > 0.5 * (n.tight_fill + n.loose_fill):
        return Aim(fill, "tight")
    fullest = float(sum_columns(counted).max())
    num_trial = int(np.ceil(len(columns) * min(1.0, n.trial_packs / max(fullest, 1.0))))
    trial, needed = columns[:num_trial], counted[:num_trial]

    def time_of(aim: Aim) -> float:
        return _model_time(trial, needed, bounds, aim, dp, n.trial_packs)

    best = Aim(n.loose_fill if fill is None else fill, "cost")
    shortest, tight = time_of(best), Aim(n.tight_fill, "tight")
    worth = n.worth if dp <= n.even_ranks else n.worth_of_many
    if fill is None and shortest >= (1.0 - worth) * time_of(tight):
        return tight
    chosen = best
    for style in LOOSE_STYLES[1:] if dp <= n.even_ranks else ():
        aim = Aim(best.fill, style)
        if time_of(aim) > (1.0 + n.even_price) * shortest:
            break
        chosen = aim
    level = Aim(n.level_fill, "level" if dp <= n.level_ranks else "flat")
    if dp > n.even_ranks and fill is None and time_of(level) <= (1.0 + n.level_price) * shortest:
        chosen = level
    return chosen


def _model_time(trial: FloatArray, counted: FloatArray, bounds: FloatArray, aim: Aim, dp: int, num_packs: int) -> float:
    from trimtab.balance.rng import make_stream
    from trimtab.balance.stream import pack_stream

    streamed = pack_stream(
        trial,
        counted,
        bounds,
        aim.pull(trial, bounds),
        dp=1,  # whole rows would round the fill
        num_others=0,
        window_packs=num_packs + 1,
        effort=aim.effort(),
        fill=aim.fill,
        state=make_stream(0, 0, 2),
    )
    cost = np.add.reduceat(trial[streamed.members, -1], streamed.offsets[:-1])
    return len(cost) * _expected_largest(cost, dp)


def _expected_largest(values: FloatArray, num_drawn: int) -> float:
    """Mean of the largest of `num_drawn` values drawn at random, with replacement."""
    n = len(values)
    chance = (np.arange(n + 1) / n) ** num_drawn  # that all drawn are among the i smallest
    return float((np.sort(values) * np.diff(chance)).sum())
