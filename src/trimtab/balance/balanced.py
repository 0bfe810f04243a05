"""`balanced`: packs that are alike in both limited columns and in cost, and how full they are to be for that.

Symbols: k limited columns, D = k + 1 columns with the cost; the *fullest* column is the one that needs most packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trimtab.balance.metrics import counted_columns, sum_columns
from trimtab.balance.schedule import Groups, shuffle_rows
from trimtab.balance.stream import (
    FIT_RULES,
    KNOWN_WINDOW,
    FitRule,
    Streamed,
    fit_samples,
    fit_stream,
    pack_stream,
    pack_window,
    packs_for,
    round_up,
)
from trimtab.balance.window import Effort, Pull
from trimtab.compiled import make_stream, permutation
from trimtab.specs import FloatArray, IntArray

# -- the aim: what packs of a data set should be like; chosen by packing some of it ---------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AimNumbers:
    """Every tuned number of this file. `python bench/aim_sweep.py` varies one at a time and prints what it costs.

    Weights count squared differences from the mean pack, slopes what is above it, of columns relative to their means.
    """

    tight_fill: float = 0.9957  # share of the packs' room that is used: as full as most data allow
    loose_fill: float = 0.985  # the same, with room to even out the cost
    worth: float = 0.012  # a looser fill or longer polishing is taken where it shortens the modelled time by more
    worth_of_many: float = 0.004  # (in rows of more than `even_ranks` packs, where the largest decides, than this),
    pack_price: float = 0.5  # and by more than this times the share of packs that it adds
    most_fill: float = 0.998  # as full as packs may be asked to be where that saves a row
    above_known: float = 0.003  # packs are to be fuller than those of best fit by this
    row_saved: float = 0.005  # packs are fuller than `tight_fill` where that saves more than this share of the rows
    fit_fill: float = 0.96  # where best fit leaves packs less full, windows would not be fuller,
    few_samples: float = 3.0  # with so few samples a pack
    fit_gain: float = 0.005  # best fit is taken where it saves more than this share of the packs,
    known_gain: float = 0.002  # or by its first rule, in windows, more than this
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

Style = Literal["fit", "tight", "cost", "both", "even", "level", "flat"]
LOOSE_STYLES: tuple[Style, ...] = ("cost", "both", "even")  # from the shortest time to the most alike


@dataclass(frozen=True, slots=True)
class Aim:
    """How full packs are to be, and what they are to have alike."""

    fill: float
    style: Style
    rule: FitRule | None = None  # of "fit"

    def pull(self, columns: FloatArray, bounds: FloatArray) -> Pull:
        """Tight packs need little weight on the fullest column, which its limit holds, and follow all others alike.

        Loose ones spend their room on the cost (`cost`), or share it more and more (`both`, `even`). Those of many
        ranks may keep every column from rising above its mean first (`level`, `flat`): a row waits for its largest.
        """
        from trimtab.balance.metrics import sum_columns
        from trimtab.balance.window import Pull

        D, n = columns.shape[1], NUMBERS
        fullest = int(np.argmax(sum_columns(columns)[:-1] / bounds[:-1]))
        weights, slopes = np.ones(D), np.zeros(D)
        if self.style in ("tight", "level", "flat"):
            weights[fullest] = n.tight_fullest
            if self.style != "tight":
                slopes[:] = n.level_slope
                slopes[fullest], slopes[-1] = n.fullest_slope, n.level_cost_slope
        elif self.style in ("cost", "fit"):
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

        tight = self.style in ("tight", "fit")
        return Effort(
            num_rounds=NUM_ROUNDS // 3 if self.style == "fit" else NUM_ROUNDS,
            num_coarse_rounds=4,
            alike=0.005,
            patience=5,
            max_free=8,
            num_polished=NUM_ROUNDS // 3 if tight else (10 if self.style == "flat" else 5) * NUM_ROUNDS,
            stuck=0.02 if self.style == "flat" else 0.1,
            tail=0.1 if tight else 0.2,
            polish_free=8 if tight else 10,
        )


def choose_aim(
    columns: FloatArray,
    counted: FloatArray,
    bounds: FloatArray,
    dp: int,
    fill: float | None = None,
    num_others: int = 0,
    rows_alike: bool = False,
) -> Aim:
    """The aim with which the first samples of the shuffle make few packs that finish soon; heuristic.

    First the number of packs: where best fit makes fewer than windows as full as most data allow, its packs are the
    start; and no window is less full than best fit would leave it. Then time: where a column is nearly full in every
    pack and the cost is not a function of the columns (long samples, attention squared), packs can only be evened out
    if they have room. Time is modelled as the largest cost expected of dp packs; with `rows_alike` (packs are sorted
    into rows later) it needs no room. With `fill` given, only the style is
    chosen. Fills are those of whole rows: where rows are few, the packs that fill up the last one are room for all.
    """

    n = NUMBERS
    if fill is not None and fill > 0.5 * (n.tight_fill + n.loose_fill):
        return Aim(fill, "tight")
    # 1. the trial, and best fit on it: `least` is how full its packs are
    needed = float(sum_columns(counted).max())
    if needed <= 0.0:
        return Aim(n.tight_fill, "tight")
    num_trial = int(np.ceil(len(columns) * min(1.0, n.trial_packs / max(needed, 1.0))))
    trial, own = columns[:num_trial], counted[:num_trial]
    own_needed = float(sum_columns(own).max())
    rule, num_fitted, num_known = _best_rule(trial, bounds)
    least = own_needed / max(num_known, 1) * (1.0 + n.above_known)

    def whole_rows(share: float) -> float:
        """The fill of as many whole rows as packs filled to this share make."""
        rows = float(np.ceil((needed / share + num_others) / dp - 1e-9))
        return min(n.most_fill, needed / max(rows * dp - num_others, 1.0))

    def time_of(aim: Aim) -> tuple[int, float]:
        return _model(trial, own, bounds, aim, dp)

    fitted = Aim(least, "fit", rule)
    few = num_trial < n.few_samples * num_fitted
    if fill is None and few and own_needed < n.fit_fill * num_fitted:
        return fitted
    # 2. windows as full as most data allow, or fuller where that saves a row
    fewest = np.ceil((needed + num_others) / dp - 1e-9)
    fullest, tight_fill = needed / max(fewest * dp - num_others, 1.0), whole_rows(n.tight_fill)
    saved = fullest / tight_fill - 1.0
    tight = Aim(fullest if saved > n.row_saved and fullest <= n.most_fill else tight_fill, "tight")
    num_tight, tight_time = time_of(tight)
    if fill is None and num_tight > min((1.0 + n.known_gain) * num_known, (1.0 + n.fit_gain) * num_fitted):
        return fitted
    if rows_alike and fill is None:
        return tight
    # 3. with more room, where that is worth it, and then as alike as it costs nothing
    loose = min(tight.fill, whole_rows(max(n.loose_fill, least))) if fill is None else fill
    best = Aim(loose, "cost")
    shortest = time_of(best)[1]
    price = n.worth if dp <= n.even_ranks else n.worth_of_many
    price += n.pack_price * (tight.fill / best.fill - 1.0)
    if fill is None and shortest >= (1.0 - price) * tight_time:
        return tight
    chosen = best
    for style in LOOSE_STYLES[1:] if dp <= n.even_ranks else ():
        aim = Aim(best.fill, style)
        if time_of(aim)[1] > (1.0 + n.even_price) * shortest:
            break
        chosen = aim
    level = Aim(min(tight.fill, whole_rows(max(n.level_fill, least))), "level" if dp <= n.level_ranks else "flat")
    if dp > n.even_ranks and fill is None and time_of(level)[1] <= (1.0 + n.level_price) * shortest:
        chosen = level
    return chosen


def _best_rule(trial: FloatArray, bounds: FloatArray) -> tuple[FitRule, int, int]:
    """The rule by which best fit makes fewest packs, these, and those of the first rule in windows as others use it."""

    num_packs = [len(fit_samples(trial, bounds[:2], rule).head) for rule in FIT_RULES]
    best = int(np.argmin(num_packs))
    return FIT_RULES[best], num_packs[best], _count_known(trial, bounds)


def _model(trial: FloatArray, counted: FloatArray, bounds: FloatArray, aim: Aim, dp: int) -> tuple[int, float]:
    """Packs of the trial, and the largest cost of dp of them over their mean, which the time of rows goes with."""

    packed = pack_window(
        trial,
        min(len(trial), round_up(packs_for(sum_columns(counted)) / aim.fill, 1)),
        bounds,
        aim.pull(trial, bounds),
        np.zeros(len(trial), np.int64),
        dp=1,
        hold_all=True,
        effort=aim.effort(),
        state=make_stream(0, 0, 2),
    )
    cost = np.add.reduceat(trial[packed.members, -1], np.cumsum(packed.counts) - packed.counts)
    mean = float(cost.mean())
    return len(cost), _expected_largest(cost, dp) / mean if mean > 0 else 1.0


def _expected_largest(values: FloatArray, num_drawn: int) -> float:
    """Mean of the largest of `num_drawn` values drawn at random, with replacement."""
    n = len(values)
    chance = (np.arange(n + 1) / n) ** num_drawn  # that all drawn are among the i smallest
    return float((np.sort(values) * np.diff(chance)).sum())


# -- the packs ------------------------------------------------------------------------------------------------------

COMPARED_SAMPLES = 1 << 16
"""Up to so many samples the packs are compared with those of best fit once more, all of them; the fewer are kept."""

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

    if len(sizes) == 0:
        return Groups(np.empty(0, np.int64), np.zeros(1, np.int64))
    stream = _shuffle(sizes, cost, limits, seed, epoch, shard)
    bounds = np.array([*limits, np.inf])
    is_open = aim is None and len(sizes) <= COMPARED_SAMPLES
    if not isinstance(aim, Aim):
        aim = choose_aim(stream.columns, stream.counted, bounds, dp, aim, num_others, rows_alike)
    keys = (seed, epoch, 1, *_shard_key(shard))
    streamed = _pack(stream, bounds, aim, dp, num_others, keys)
    if is_open and aim.rule is None and len(streamed.offsets) - 1 > round_up(_count_known(stream.columns, bounds), dp):
        fitted = [_pack(stream, bounds, Aim(1.0, "fit", rule), dp, num_others, keys) for rule in FIT_RULES]
        streamed = min([streamed, *fitted], key=lambda found: len(found.offsets))
    state = make_stream(seed, epoch, 5, *_shard_key(shard))
    return shuffle_rows(Groups(stream.order[streamed.members], streamed.offsets), dp, state)


def _pack(stream: _Shuffled, bounds: FloatArray, aim: Aim, dp: int, num_others: int, keys: tuple[int, ...]) -> Streamed:
    """Packs of the stream by one aim."""
    pull, effort, state = aim.pull(stream.columns, bounds), aim.effort(), make_stream(*keys)
    if aim.rule is not None:
        return fit_stream(
            stream.columns, bounds, pull, aim.rule, dp=dp, num_others=num_others, effort=effort, state=state
        )
    return pack_stream(
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


def _count_known(columns: FloatArray, bounds: FloatArray) -> int:
    """Packs by the first rule of best fit, in windows as it is known."""
    parts = np.array_split(columns, -(-len(columns) // KNOWN_WINDOW))
    return sum(len(fit_samples(part, bounds[:2], FIT_RULES[0]).head) for part in parts)


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
