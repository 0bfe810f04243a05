"""What packs of a data set should be like: how full, and which of their columns alike. Chosen by packing some of it.

Symbols: k limited columns, D = k + 1 columns with the cost; the *fullest* column is the one that needs most packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from trimtab.specs import FloatArray

if TYPE_CHECKING:
    from trimtab.balance.window import Effort

TIGHT_FILL, LOOSE_FILLS = 0.9955, (0.99, 0.985)
"""Share of the packs' room that is used: as full as most data allow, and with room to even out the cost."""

WORTH, WORTH_OF_MANY = 0.012, 0.004
"""A looser fill is taken where it shortens the modelled time of a trial window by more than this; the second in rows of
more than `EVEN_RANKS` packs, where the largest of them decides and every seed should decide alike."""

WORTH_OF_MORE = 0.003
"""The loosest fill is taken where it shortens that time by this much more."""

EVEN_PRICE = 0.006
"""All columns are evened out, not the cost alone, where that lengthens the modelled time by no more than this."""

EVEN_RANKS = 32
"""Rows of more packs even out the cost alone: the largest of so many takes all the room there is."""

TRIAL_PACKS, TRIAL_ROWS = 2048, 32

Style = Literal["tight", "cost", "both", "even"]
LOOSE_STYLES: tuple[Style, ...] = ("cost", "both", "even")  # from the shortest time to the most alike


class Pull(NamedTuple):
    """What two packs' differences count, relative to the mean pack: weights of squares, and slopes above the mean.

    A square pulls packs together from both sides. A slope counts only what is above the mean: rows wait for their
    largest pack, and a pack that is small in one column, as one long sample makes it, holds up nobody.
    """

    weights: FloatArray  # (D,)
    slopes: FloatArray  # (D,); 0: this column's limit counts instead


@dataclass(frozen=True, slots=True)
class Aim:
    """How full packs are to be, and what they are to have alike."""

    fill: float
    style: Style

    def pull(self, columns: FloatArray, bounds: FloatArray) -> Pull:
        """Tight packs need little weight on the fullest column, which its limit holds, and follow all others alike.

        Loose ones spend their room on the cost (`cost`), or share it more and more (`both`, `even`).
        """
        from trimtab.balance.window import sum_columns

        D = columns.shape[1]
        fullest = int(np.argmax(sum_columns(columns)[:-1] / bounds[:-1]))
        if self.style == "tight":
            weights, slopes = np.ones(D), np.zeros(D)
            weights[fullest] = 0.1
        elif self.style == "cost":
            weights, slopes = np.full(D, 0.02), np.zeros(D)
            weights[fullest], weights[-1], slopes[-1] = 0.1, 8.0, 0.1
        else:
            weights = np.full(D, 0.1)
            weights[fullest], weights[-1] = 0.3, 8.0
            slopes = np.full(D, 0.1 if self.style == "both" else 0.2)
            slopes[fullest], slopes[-1] = 0.1, 0.2
        return Pull(weights, slopes)

    def effort(self, num_rounds: int) -> Effort:
        """Tight packs have little room for polishing; loose ones are worth much of it."""
        from trimtab.balance.window import Effort

        tight = self.style == "tight"
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


def choose_aim(
    columns: FloatArray, counted: FloatArray, bounds: FloatArray, dp: int, num_rounds: int, fill: float | None = None
) -> Aim:
    """The aim with which the first samples of the shuffle finish soonest, or nearly so and more alike; heuristic.

    Where a column is nearly full in every pack and the cost is not a function of the columns (long samples, attention
    squared), packs can only be evened out if they have room. Time is modelled as the number of rows times the
    largest cost expected of dp packs. With `fill` given, only the style is chosen.
    """
    from trimtab.balance.window import sum_columns

    if fill is not None and fill > 0.5 * (TIGHT_FILL + LOOSE_FILLS[0]):
        return Aim(fill, "tight")
    fullest = float(sum_columns(counted).max())
    num_packs = min(2 * TRIAL_PACKS, max(TRIAL_PACKS, TRIAL_ROWS * dp))
    num_trial = int(np.ceil(len(columns) * min(1.0, num_packs / max(fullest, 1.0))))
    trial = columns[:num_trial]

    def time_of(aim: Aim) -> float:
        return _model_time(trial, counted[:num_trial], bounds, aim, dp, num_packs, num_rounds)

    first, *looser = LOOSE_FILLS if fill is None else (fill,)
    best = Aim(first, "cost")
    shortest = time_of(best)
    for loose in looser:
        time = time_of(Aim(loose, "cost"))
        if time < (1.0 - WORTH_OF_MORE) * shortest:
            best, shortest = Aim(loose, "cost"), time
    if fill is None:
        tight, worth = Aim(TIGHT_FILL, "tight"), WORTH if dp <= EVEN_RANKS else WORTH_OF_MANY
        if shortest >= (1.0 - worth) * time_of(tight):
            return tight
    chosen = best
    for style in LOOSE_STYLES[1:] if dp <= EVEN_RANKS else ():
        aim = Aim(best.fill, style)
        if time_of(aim) > (1.0 + EVEN_PRICE) * shortest:
            break
        chosen = aim
    return chosen


def _model_time(
    trial: FloatArray, counted: FloatArray, bounds: FloatArray, aim: Aim, dp: int, num_packs: int, num_rounds: int
) -> float:
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
        effort=aim.effort(num_rounds),
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
