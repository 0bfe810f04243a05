"""`balanced`: packs that are alike in both limited columns and in cost, and how full they are to be for that.

Symbols: k limited columns, D = k + 1 columns with the cost; the *fullest* column is the one that needs most packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trimtab.balance.metrics import above_limits, counted_columns, sum_columns
from trimtab.balance.pair import make_packs
from trimtab.balance.rows import level_rows
from trimtab.balance.schedule import Groups, offsets_of, shuffle_rows
from trimtab.balance.stream import (
    FIT_RULES,
    KNOWN_WINDOW,
    FitRule,
    Streamed,
    even_out,
    fit_samples,
    fit_stream,
    pack_stream,
    pack_window,
    packs_for,
    round_up,
)
from trimtab.balance.window import Effort, Pull, load
from trimtab.compiled import UIntArray, make_stream, permutation
from trimtab.specs import FloatArray, IntArray

# -- the aim: what packs of a data set should be like; chosen by packing some of it ---------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AimNumbers:
    """Every tuned number of this file: each was varied alone, and those that moved nothing went.

    Weights count squared differences from the mean pack, slopes what is above it, of columns relative to their means.
    """

    tight_fill: float = 0.9957  # share of the packs' room that is used: as full as most data allow
    loose_fill: float = 0.985  # the same, with room to even out the cost,
    less_loose_fill: float = 0.99  # or some of it
    others_price: float = 0.15  # what rows wait for their largest patches and tokens counts this much of the cost's
    worth: float = 0.004  # a looser fill must save more than this of the rows' time
    even_ranks: int = 32  # in rows of up to so many packs
    polish_price: float = 0.002  # longer polishing than that of tight packs must save more than this,
    even_price: float = 0.004  # and packs that are alike in nothing but their cost
    pack_price: float = 0.4  # and the share of packs that a looser fill adds this much
    most_fill: float = 0.998  # as full as packs may be asked to be where that saves a row
    above_known: float = 0.003  # packs are to be fuller than those of best fit by this
    row_saved: float = 0.005  # packs are fuller than `tight_fill` where that saves more than this share of the rows
    fit_fill: float = 0.96  # where best fit leaves packs less full, windows would not be fuller,
    few_samples: float = 3.0  # with so few samples a pack
    fit_gain: float = 0.005  # best fit is taken where it saves more than this share of the packs,
    known_gain: float = 0.002  # or by its first rule, in windows, more than this
    trial_packs: int = 2048  # of the trial that times are modelled on
    tight_fullest: float = 0.1  # weight of the fullest column of tight packs, which its limit holds; the others 1
    cost_weight: float = 8.0  # of the cost in loose packs
    cost_fullest: float = 0.1  # style "cost": weights of the fullest column and of the others, slope of the cost
    cost_others: float = 0.02
    cost_slope: float = 0.1
    both_fullest: float = 0.3  # style "both": the same, and slopes
    both_others: float = 0.1
    both_cost_slope: float = 0.2
    both_slope: float = 0.1
    level_slope: float = 20.0  # style "level": slopes of its columns but the fullest, of this one, and of its cost
    level_fullest_slope: float = 0.1
    level_cost_slope: float = 1.0


NUMBERS = AimNumbers()

NUM_ROUNDS = 12
"""Rounds of pairwise sharing per window; docs/packing.md has what fewer and more give."""

Style = Literal["fit", "tight", "cost", "both", "level"]
EXTREMES: tuple[Style, ...] = ("cost", "level")  # which give all room to the time, or most of it to evenness


@dataclass(frozen=True, slots=True)
class Aim:
    """How full packs are to be, and what they are to have alike."""

    fill: float
    style: Style
    rule: FitRule | None = None  # of "fit"

    def pull(self, columns: FloatArray, bounds: FloatArray) -> Pull:
        """Weigh the columns: tight packs need little weight on the fullest, which its limit holds; others are alike.

        Loose ones spend their room on the cost (`cost`), or share it (`both`), or keep every column from rising above
        its mean first (`level`).
        """
        D, n = columns.shape[1], NUMBERS
        fullest = int(np.argmax(sum_columns(columns)[:-1] / bounds[:-1]))
        # weight of each column, and what rising above its mean costs on top
        weights, slopes = np.ones(D), np.zeros(D)
        if self.style in ("tight", "level"):
            weights[fullest] = n.tight_fullest
            if self.style == "level":
                slopes[:] = n.level_slope
                slopes[fullest], slopes[-1] = n.level_fullest_slope, n.level_cost_slope
        elif self.style in ("cost", "fit"):
            weights[:] = n.cost_others
            weights[fullest], weights[-1], slopes[-1] = n.cost_fullest, n.cost_weight, n.cost_slope
        else:
            weights[:], slopes[:] = n.both_others, n.both_slope
            weights[fullest], weights[-1], slopes[-1] = n.both_fullest, n.cost_weight, n.both_cost_slope
        return Pull(weights, slopes)

    def effort(self) -> Effort:
        """Return the effort: tight packs have little room for polishing; loose ones are worth much of it."""
        tight = self.style == "tight"
        return Effort(
            num_rounds=NUM_ROUNDS,
            num_coarse_rounds=4,
            alike=0.005,
            patience=5,
            max_free=8,
            num_polished=NUM_ROUNDS // 2 if tight else 8 * NUM_ROUNDS,
            stuck=0.1 if tight else 0.05,
            tail=0.1,
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
    if they have room. Rows of the trial are levelled, and what they wait for is counted; with `rows_alike` (packs are
    sorted into rows later) they need no room. With `fill` given, only the style is chosen. Fills are those of whole
    rows: where rows are few, the packs that fill up the last one are room for all.
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

    def rows_of(num_packs: float) -> float:
        """Return the whole rows of all samples that are packed as this many packs of the trial are."""
        return float(np.ceil((num_packs / own_needed * needed + num_others) / dp - 1e-9))

    def whole_rows(share: float) -> float:
        """The fill of as many whole rows as packs filled to this share make."""
        return min(n.most_fill, needed / max(rows_of(own_needed / share) * dp - num_others, 1.0))

    fitted = Aim(least, "fit", rule)
    few = num_trial < n.few_samples * num_fitted
    if fill is None and few and own_needed < n.fit_fill * num_fitted:
        return fitted
    # 2. windows as full as most data allow, or fuller where that saves a row
    fewest = rows_of(own_needed)
    fullest, tight_fill = needed / max(fewest * dp - num_others, 1.0), whole_rows(n.tight_fill)
    saved = fullest / tight_fill - 1.0
    tight = Aim(fullest if saved > n.row_saved and fullest <= n.most_fill else tight_fill, "tight")
    num_tight, tight_price = _try(trial, own, bounds, tight, dp)
    least_packs = min((1.0 + n.known_gain) * num_known, (1.0 + n.fit_gain) * num_fitted)
    if fill is None and rows_of(num_tight) > rows_of(least_packs):
        return fitted
    if (rows_alike or dp == 1) and fill is None:
        return tight

    # 3. with more room, where that is worth it; then in the style that is worth most
    def price_of(aim: Aim) -> float:
        return _try(trial, own, bounds, aim, dp)[1] + n.pack_price * (tight.fill / aim.fill - 1.0)

    shares = (tight.fill, n.less_loose_fill, n.loose_fill)
    fills = [min(tight.fill, whole_rows(max(share, least))) for share in shares] if fill is None else [fill]
    looser = {Aim(share, "both"): n.worth * (share < fills[0]) for share in fills}
    prices = {aim: price_of(aim) + worth for aim, worth in looser.items()}
    best = min(prices, key=lambda aim: prices[aim])
    prices = {best: prices[best] - looser[best]}
    prices |= {Aim(best.fill, style): price_of(Aim(best.fill, style)) for style in EXTREMES}
    if dp <= n.even_ranks:
        prices[Aim(best.fill, "cost")] += n.even_price
        prices |= {tight: tight_price - n.polish_price} if fill is None else {}
    return min(prices, key=lambda aim: prices[aim])


def _best_rule(trial: FloatArray, bounds: FloatArray) -> tuple[FitRule, int, int]:
    """The rule by which best fit makes fewest packs, these, and those of the first rule in windows as others use it."""

    num_packs = [len(fit_samples(trial, bounds[:2], rule).head) for rule in FIT_RULES]
    best = int(np.argmin(num_packs))
    return FIT_RULES[best], num_packs[best], _count_known(trial, bounds)


def _try(trial: FloatArray, counted: FloatArray, bounds: FloatArray, aim: Aim, dp: int) -> tuple[float, float]:
    """Pack the trial by this aim, and say what its rows wait for; samples that a window carries on are left out.

    That is the time of whole rows, as long as their largest cost each, over their mean; and `others_price` times what
    the same is above 1 in each limited column but the fullest, which its limit holds.
    """
    # the packs of one window
    needed = packs_for(sum_columns(counted))
    packed = pack_window(
        trial,
        min(len(trial), round_up(needed / aim.fill, 1)),
        bounds,
        aim.pull(trial, bounds),
        np.zeros(len(trial), np.int64),
        dp=1,
        hold_all=False,
        effort=aim.effort(),
        state=make_stream(0, 0, 2),
    )
    groups = Groups(packed.members, offsets_of(packed.counts))
    # its rows, level, and what they wait for
    width = min(dp, groups.num_packs)
    groups = level_rows(trial.take(groups.members, axis=0), groups, width, bounds, (0, 0))
    sums = np.add.reduceat(trial.take(groups.members, axis=0), groups.offsets[:-1])
    rows = sums[: len(sums) // width * width].reshape(-1, width, len(bounds))
    total = rows.sum(axis=(0, 1))
    waits = np.where(total > 0, rows.max(axis=1).sum(axis=0) * width / np.where(total > 0, total, 1.0), 1.0)
    waits[np.argmax(total[:-1] / bounds[:-1])] = 1.0
    num_packs = needed / aim.fill * needed / packs_for(sum_columns(counted.take(packed.members, axis=0)))
    return num_packs, float(waits[-1] + NUMBERS.others_price * (waits[:-1] - 1.0).sum())


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
    keys: tuple[int, ...],
    aim: Aim | float | None = None,
    num_others: int = 0,
    rows_alike: bool = False,
) -> tuple[Groups, Aim | None]:
    """Pack samples with columns `sizes` (n, k) that each fit a pack alone; return the aim too, if any; n is 1 or more.

    Every sample is in exactly one pack. Packs plus `num_others` made elsewhere are a multiple of dp, unless there are
    fewer samples. They come in the order of the shuffle, `WINDOW_PACKS` at a time, and in random order among these.
    Exact: the limits, the cover, the best sharing of each pair tried. Heuristic, no bound: which pairs, hence the
    number of packs and their balance.

    `aim` None, or a fill, leaves what is open to `choose_aim`, which knows from `rows_alike` whether packs are sorted
    into rows later. `keys` (seed, epoch, and a part's number) decide the shuffle.
    """
    # 1. samples of few kinds: patterns of kinds, where they need no more packs
    stream = _shuffle(sizes, cost, limits, keys)
    bounds = np.array([*limits, np.inf])
    streamed, chosen = None, aim if isinstance(aim, Aim) else None
    if aim is None:
        alike = Aim(1.0, "fit")
        pull, state = alike.pull(stream.columns, bounds), make_stream(*keys, 1)
        streamed = pack_kinds(stream.columns, bounds, pull, alike.effort(), dp, num_others, state)
    # 2. else windows of the shuffle by one aim; best fit by other rules where that leaves packs over the bound
    if streamed is None:
        if chosen is None:
            assert not isinstance(aim, Aim)
            chosen = choose_aim(stream.columns, stream.counted, bounds, dp, aim, num_others, rows_alike)
        streamed = _pack(stream, bounds, chosen, dp, num_others, keys)
        is_open = aim is None and chosen.rule is None and len(sizes) <= COMPARED_SAMPLES
        if is_open and len(streamed.offsets) - 1 > round_up(_count_known(stream.columns, bounds), dp):
            fitted = [_pack(stream, bounds, Aim(1.0, "fit", rule), dp, num_others, keys) for rule in FIT_RULES]
            streamed = min([streamed, *fitted], key=lambda found: len(found.offsets))
    groups = Groups(stream.order[streamed.members], streamed.offsets)
    return shuffle_rows(groups, dp, make_stream(*keys, 5)), chosen


def _pack(stream: _Shuffled, bounds: FloatArray, aim: Aim, dp: int, num_others: int, keys: tuple[int, ...]) -> Streamed:
    """Return the packs of the stream by one aim."""
    pull, effort, state = aim.pull(stream.columns, bounds), aim.effort(), make_stream(*keys, 1)
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
    """Count the packs by the first rule of best fit, in windows as it is known."""
    parts = np.array_split(columns, -(-len(columns) // KNOWN_WINDOW))
    return sum(len(fit_samples(part, bounds[:2], FIT_RULES[0]).head) for part in parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Shuffled:
    order: IntArray
    columns: FloatArray  # (n, D)
    counted: FloatArray  # (n, k or more): the sizes in packs needed


def _shuffle(sizes: IntArray, cost: FloatArray, limits: tuple[int, ...], keys: tuple[int, ...]) -> _Shuffled:
    """Return the samples in random order, their cost scaled to a mean of 1: squares of it are summed in float32."""
    n, k = sizes.shape
    order = permutation(n, *keys, 0)
    columns = np.empty((n, k + 1))
    shuffled = sizes.take(order, axis=0)  # of rows of two: a tenth of the seconds of an index
    columns[:, :k], columns[:, k] = shuffled, cost[order]
    total_cost = float(sum_columns(columns)[k])
    columns[:, k] *= n / total_cost if total_cost > 0 else 0.0
    return _Shuffled(order, columns, counted_columns(shuffled, limits, NUMBERS.tight_fill))


# -- samples of a few sizes in one column: as few packs as there can be, mostly ---------------------------------------

# K kinds of sizes s_i, the largest first, c_i samples of each, the limit Q; a pattern says how many samples of each
# kind a pack holds.


MOST_KINDS = 12
MOST_ROOM = 1 << 15  # of a limit in units of the sizes' greatest common divisor: the search for a pattern goes over it
ALIKE = 0.01  # kinds whose samples differ more in cost have better things to do than to be few packs
MOST_STEPS, MOST_WIDER = 20_000, 12
"""Patterns that are tried for the last packs, and times that packs are added to these where none suffice."""


def pack_kinds(
    columns: FloatArray, bounds: FloatArray, pull: Pull, effort: Effort, dp: int, num_others: int, state: UIntArray
) -> Streamed | None:
    """Pack a shuffled stream whose samples have few sizes and costs; None where one column alone does not limit them.

    Whole rows: packs that complete the last one get samples of others. Exact but for what `fill_patterns` says.
    """
    needed = sum_columns(columns)[:2] / bounds[:2]
    d = int(np.argmax(needed))
    if not all(_are_few(part[:, d], part[:, -1]) for part in (columns[:4096], columns)):
        return None
    values, kind, counts = np.unique(-columns[:, d], return_inverse=True, return_counts=True)
    sizes, limit = (-values).astype(np.int64), int(bounds[d])
    step = int(np.gcd.reduce(sizes))
    if sizes[-1] == 0 or limit > MOST_ROOM * step or needed[1 - d] > 0.5 * needed[d]:
        return None
    # 1. patterns, and the samples of each kind to them as they come
    patterns = fill_patterns(sizes // step, counts, limit // step)
    num_packs = round_up(len(patterns) + num_others, dp) - num_others
    if len(patterns) == 0 or num_packs > len(columns):
        return None
    pack_of = np.empty(len(columns), np.int64)
    for i in range(len(sizes)):
        pack_of[kind == i] = np.repeat(np.arange(len(patterns)), patterns[:, i])
    packs = make_packs(num_packs, *columns.shape)
    load(columns, np.arange(len(columns)), pack_of, packs)
    # 2. alike in the other columns
    members, counts = even_out(columns, packs, bounds, pull, effort, state)
    if above_limits(packs.sums, bounds).any():
        return None
    return Streamed(members=members, offsets=offsets_of(counts), oldest=0, num_grown=0)


def _are_few(sizes: FloatArray, costs: FloatArray) -> bool:
    """Return whether there are few sizes, and samples of one size cost about the same."""
    values = np.unique(sizes)
    if len(values) > MOST_KINDS:
        return False
    own = [costs[sizes == value] for value in values]
    return all(np.ptp(cost) <= ALIKE * cost.max() for cost in own)


def fill_patterns(sizes: IntArray, counts: IntArray, limit: int) -> IntArray:
    """Find patterns (packs, K) of the fewest packs for c_i samples of sizes s_i; none where none were found.

    The fewest packs in parts, each pattern any number of times, are exact, by column generation (Gilmore & Gomory
    1961). Whole times of its patterns hold nearly all samples. The rest is searched through for as few packs as the
    parts add up to; where that fails, the patterns that are used most give packs back, and it is tried again.

    Example: sizes 5, 3, 1 under 9, of which there are 4 each: the pattern 5 + 3 + 1, four times.
    """
    patterns, times = _fill_in_parts(sizes, counts, limit)
    fewest, whole = int(np.ceil(times.sum() - 1e-6)), np.floor(times + 1e-9).astype(np.int64)
    for _wider in range(MOST_WIDER):
        left, num_left = counts - whole @ patterns, fewest - int(whole.sum())
        if (last := _fill_last(sizes.tolist(), left.tolist(), limit, num_left)) is not None:
            return np.concatenate([np.repeat(patterns, whole, axis=0), *([[pattern] for pattern in last])])
        whole = whole - ((whole > 0) & (3 * whole >= whole.max()))
    return patterns[:0]


def _fill_in_parts(sizes: IntArray, counts: IntArray, limit: int) -> tuple[IntArray, FloatArray]:
    """Return K patterns, and how many times each is used in parts: the simplex method over all patterns."""
    room = limit // sizes
    patterns, inverse, times = np.diag(room), np.diag(1.0 / room), counts / room
    for _step in range(50 * len(sizes)):
        # 1. the pattern of most worth, where a sample of each kind is worth what it adds to the packs
        new, worth = _best_pattern(sizes, inverse.sum(axis=0), limit)
        change = (inverse * new).sum(axis=1)
        lasts = np.where(change > 1e-9, times / np.where(change > 1e-9, change, 1.0), np.inf)
        leaving = int(np.argmin(lasts))
        if worth <= 1.0 + 1e-9 or lasts[leaving] == np.inf:
            break
        # 2. it takes the place of the pattern that is used up first
        patterns[leaving], pivot = new, inverse[leaving] / change[leaving]
        times, inverse = np.maximum(times - lasts[leaving] * change, 0.0), inverse - change[:, None] * pivot
        times[leaving], inverse[leaving] = lasts[leaving], pivot
    return patterns, times


def _best_pattern(sizes: IntArray, worth: FloatArray, limit: int) -> tuple[IntArray, float]:
    """The pattern of most worth, and that: for each room what 1, 2, 4, ... samples more of a kind add to it."""
    # a bounded knapsack: 1, 2, 4, ... of a kind make any number of it in a logarithm of the steps
    best, added = np.zeros(limit + 1), []
    for i in range(len(sizes)):
        num, size = 1, int(sizes[i])
        while worth[i] > 0 and size <= limit:
            more = best.copy()
            more[size:] = np.maximum(best[size:], best[:-size] + num * worth[i])
            added.append((i, num, more > best))
            best, num, size = more, 2 * num, 2 * size
    # back from the full room: what was added last comes first
    pattern, room = np.zeros_like(sizes), limit
    for i, num, is_better in reversed(added):
        if is_better[room]:
            pattern[i] += num
            room -= num * int(sizes[i])
    return pattern, float(best[limit])


def _fill_last(sizes: list[int], left: list[int], limit: int, num_packs: int) -> list[list[int]] | None:
    """Return the patterns of so many packs for all that is left, or None: pack after pack, the fullest first.

    Each pack holds a sample of the largest kind that is left, and leaves no more room than all packs together may.
    """
    K, num_steps = len(sizes), 0

    def fill(i: int, room: int, spare: int, pattern: list[int]) -> Iterator[list[int]]:
        """Yield patterns with kinds i, i + 1, ... in what room there is, of which `spare` may stay empty."""
        nonlocal num_steps
        # too many steps, or what is left cannot fill the room
        num_steps += 1
        if num_steps > MOST_STEPS or sum(n * s for n, s in zip(left[i:], sizes[i:], strict=True)) < room - spare:
            return
        if i == K:
            yield pattern
            return
        # as many of this kind as fit first; the pattern holds one of its first kind at least
        for num in range(min(left[i], room // sizes[i]), -1 if any(pattern) else 0, -1):
            yield from fill(i + 1, room - num * sizes[i], spare, [*pattern, num])

    def search(spare: int, num_left: int) -> list[list[int]] | None:
        if not any(left):
            return []
        if num_left == 0 or spare < 0:
            return None
        # the pack of the largest sample that is left, then all others; else it is taken back
        first = next(i for i in range(K) if left[i])
        for pattern in fill(first, limit, spare, [0] * first):
            for i in range(K):
                left[i] -= pattern[i]
            rest = search(spare - limit + sum(n * s for n, s in zip(pattern, sizes, strict=True)), num_left - 1)
            if rest is not None:
                return [pattern, *rest]
            for i in range(K):
                left[i] += pattern[i]
        return None

    spare = num_packs * limit - sum(n * s for n, s in zip(left, sizes, strict=True))
    return search(spare, num_packs) if min(left) >= 0 else None
