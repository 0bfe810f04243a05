"""How well packs and steps are balanced, and what that cost in randomness.

Symbols as in the OmniBal paper (arXiv 2407.20761): t_i the length of sample i, t_max the longest of its batch of B;
T_i the work of rank i in one step, T_max the largest of the N ranks.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.specs import FloatArray, IntArray, Packing, SampleTable, Schedule

# -- the bound: packs that any packing needs, by the room that samples fill, and by those of which no two fit one pack.
# Symbols: k limited columns, Q the limit of one.


MOST_COUNTED = 1 << 22  # largest size up to which counting beats sorting


def rounded_sizes(sizes: IntArray, limit: int) -> FloatArray | None:
    """Return the sizes (n,) rounded so that they still bound packs from below, and by more packs; None where none do.

    For a threshold x of at most Q / 2, what is above Q - x counts as Q, what is below x as nothing: no pack's sum of
    these is above Q, since next to a sample above Q - x there is room only for samples below x (a dual feasible
    function; Martello and Toth 1990, bound L2). The threshold that gives most packs is found by trying all.

    Example: of sizes [5, 5, 5, 3, 1] under Q = 9 there are 19, which fill 2.1 packs; with x = 4.5 the fives count as 9
    and the others as nothing: 3 packs. O(n log n).
    """
    # every threshold at once, from running sums over the distinct sizes
    values, counts = _histogram(sizes)
    sums = np.concatenate([[0.0], np.cumsum(values * counts, dtype=np.float64)])
    numbers = np.concatenate([[0], np.cumsum(counts)])
    thresholds = np.append(values[values <= 0.5 * limit], 0.5 * limit)
    first = np.searchsorted(values, thresholds, side="left")  # below: nothing
    last = np.searchsorted(values, limit - thresholds, side="right")  # from here on: whole packs
    packs = (numbers[-1] - numbers[last]) + (sums[last] - sums[first]) / limit
    best = int(np.argmax(packs))
    # no threshold is above the plain sum: a column less for the packer
    if packs[best] <= sums[-1] / limit * (1 + 1e-9):
        return None
    rounded = np.where(sizes > limit - thresholds[best], limit, sizes).astype(np.float64)
    rounded[sizes < thresholds[best]] = 0.0
    return rounded


def _histogram(sizes: IntArray) -> tuple[IntArray, IntArray]:
    """The sizes that occur, ascending, and how often."""
    # counting is ten times as fast as sorting, and takes memory by the largest size
    if len(sizes) and sizes.max() <= MOST_COUNTED:
        counts = np.bincount(sizes)
        values = np.flatnonzero(counts)
        return values, counts[values]
    values, counts = np.unique(sizes, return_counts=True)
    return values, counts


def counted_columns(sizes: IntArray, limits: tuple[int, ...], rounded_fill: float = 1.0) -> FloatArray:
    """Return columns (n, k or more) in units of a pack: the sum of each is a number of packs that are needed at least.

    Rounded sizes times `rounded_fill`: packs can hold a large sample each, all of them, but not be full of small ones.
    """
    columns = []
    for d, limit in enumerate(limits):
        columns.append(sizes[:, d] / limit)
        rounded = rounded_sizes(sizes[:, d], limit)
        if rounded is not None:
            columns.append(rounded * (rounded_fill / limit))
    return np.stack(columns, axis=1)


def sum_columns(sizes: FloatArray) -> FloatArray:
    """Return sums of (n, D) columns, each added as NumPy adds: the same bits on every machine."""
    return np.array([column.sum() for column in sizes.T])


def above_limits(sizes: IntArray | FloatArray, limits: tuple[int, ...] | FloatArray) -> npt.NDArray[np.bool_]:
    """Return (n,) whether a sample, or the sums of a pack, (n, k) is above a limit."""
    above = np.zeros(len(sizes), np.bool_)
    for d, limit in enumerate(limits):  # column by column: ten times as fast as any(axis=1)
        above |= sizes[:, d] > limit
    return above


def lower_bound_packs(sizes: IntArray, limits: tuple[int, ...]) -> int:
    """Count the packs that samples (n, k) need under `limits`, whatever the packing: no method makes fewer.

    >>> lower_bound_packs(np.array([[5, 10], [5, 10], [5, 10], [3, 10], [1, 10]]), (9, 100))
    3
    """
    if len(sizes) == 0:
        return 0
    # each column by itself, then pairs of large samples over both
    least = int(np.ceil(counted_columns(sizes, limits).sum(axis=0).max() - 1e-9))
    return max(least, _pairs_bound(sizes, limits, least)) if sizes.shape[1] == 2 else least


def _pairs_bound(sizes: IntArray, limits: tuple[int, ...], least: int) -> int:
    """Return packs that large samples need in two columns together: as many as there are, less the most pairs of them.

    Large are samples of which no three fit one pack, for either column or both together add up to more than a third:
    a x + (1 - a) y > 1/3 of the shares x, y, for three of them more than 1. Not counted where they are `least` at most.

    Example: sizes (6, 1), (1, 6), (6, 6) under (9, 9): the first two pair, so they need 2 packs; each column alone says
    that 13 of 9 do.
    """
    # a matching is exact for samples of which no three share a pack
    shares = sizes / limits
    for part in (0.5, 0.0, 1.0):
        large = part * shares[:, 0] + (1 - part) * shares[:, 1] > (1 + 1e-9) / 3
        if large.sum() > least:
            from trimtab.balance.pair import match_pairs

            own = sizes[large].astype(np.float64)
            own = own[(own <= limits).all(axis=1)]
            num_paired = int((match_pairs(own, np.array(limits, np.float64)) >= 0).sum())
            least = max(least, int(large.sum()) - num_paired // 2)
    return least


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceReport:
    """Every figure of one packing and its schedule. A *row* is what the ranks run at the same time: one pack each."""

    method: str
    order: str
    dp: int
    num_samples: int
    num_packed: int
    num_oversize: int  # left out, by the user's own choice
    num_packs: int
    lower_bound_packs: int
    packs_over_bound: float  # num_packs / lower_bound_packs
    num_over_limit: int  # packs above a limit
    samples_per_pack: float
    num_steps: int
    num_empty_slots: int
    pad_ratio: float  # share of the computed tokens that is padding
    dist_ratio_vit: float
    dist_ratio_llm: float
    dist_ratio_cost: float
    utilisation: float  # share of the ranks' time that is useful, if every row waits for its slowest rank
    fill_patches: float  # share of the packs' patch limit that is used
    fill_tokens: float
    shuffle_chi2: float | None  # of sources per step, per degree of freedom: 1.0 is random; None: one source only


def pad_ratio(lengths: FloatArray, offsets: IntArray) -> float:
    """Share of padding when each batch is padded to its longest: sum_i (t_max - t_i) / (t_max B), ratio of sums.

    Batch b holds lengths[offsets[b]:offsets[b + 1]]. The paper's formula is for one batch; over batches its numerators
    and denominators are summed, which weighs long batches as much as they cost.
    """
    if len(offsets) < 2:
        return 0.0
    longest = np.maximum.reduceat(lengths, offsets[:-1])
    computed = float((longest * np.diff(offsets)).sum())
    return 1.0 - float(lengths.sum()) / computed if computed > 0 else 0.0


def dist_ratio(work: FloatArray) -> float:
    """Share of the ranks' time spent waiting: sum_i (T_max - T_i) / (T_max N) = 1 - mean / max, mean over rows.

    `work` is (rows, N); an empty slot works 0. Rows in which nobody works count as balanced.
    """
    if work.size == 0:
        return 0.0
    largest = work.max(axis=1)
    idle = 1.0 - work.mean(axis=1) / np.where(largest > 0, largest, 1.0)
    return float(np.where(largest > 0, idle, 0.0).mean())


def utilisation(useful: FloatArray, computed: FloatArray) -> float:
    """Return useful work over what the ranks have time for: sum / (N sum over rows of the largest computed work).

    Both are (rows, N). A row lasts as long as its slowest rank; padding is computed but not useful.
    """
    time = float(computed.max(axis=1).sum()) * computed.shape[1] if computed.size else 0.0
    return float(useful.sum()) / time if time > 0 else 1.0


def shuffle_chi2(histograms: IntArray) -> float | None:
    """Return mean over steps of the chi-square of the step's source histogram against the whole, per degree of freedom.

    `histograms` is (steps, sources). 1.0 is what a random order gives; less is more even than random, more clustered.
    None if fewer than two sources occur.
    """
    histograms = histograms[:, histograms.sum(axis=0) > 0]
    sizes = histograms.sum(axis=1, keepdims=True)
    histograms, sizes = histograms[sizes[:, 0] > 0], sizes[sizes[:, 0] > 0]
    if histograms.shape[1] < 2 or len(histograms) < 2:
        return None
    expected = sizes * (histograms.sum(axis=0) / histograms.sum())
    chi2 = ((histograms - expected) ** 2 / expected).sum(axis=1)
    # the whole is what the steps add up to: that takes one step's worth of freedom
    return float(chi2.sum() / (len(histograms) - 1) / (histograms.shape[1] - 1))


def report_balance(
    samples: SampleTable,
    packing: Packing,
    schedule: Schedule,
    *,
    cost: FloatArray,
    padded_cost: FloatArray | None = None,
    padded: bool = False,
) -> BalanceReport:
    """Return all figures of a packing. `cost` is per sample; `padded`: batches are padded to their longest sample.

    Then ranks compute B t_max tokens, and `padded_cost` per sample in place of `cost`; tokens that are padding fill no
    limit and are not useful work. dist ratios are taken per row over the ranks, empty slots of the last rows included.
    A sample above a limit, packed alone by the user's choice, adds one pack to the lower bound.
    """
    dp, num_packs = int(schedule.table.shape[1]), packing.num_packs
    v = packing.sums(samples.num_patches).astype(np.float64)
    t = packing.sums(samples.num_tokens).astype(np.float64)
    c = packing.sums(cost).astype(np.float64)
    # what is computed: with padding every sample of a batch is as long as its longest
    computed_t, computed_c = t, c
    pad = 0.0
    if padded:
        lengths = samples.num_tokens[packing.indices].astype(np.float64)
        pad = pad_ratio(lengths, packing.offsets)
        if num_packs:
            computed_t = np.maximum.reduceat(lengths, packing.offsets[:-1]) * np.diff(packing.offsets)
        computed_c = c if padded_cost is None else packing.sums(padded_cost).astype(np.float64)

    # rows of ranks, without those that are empty
    rows = np.ascontiguousarray(schedule.table.transpose(0, 2, 1)).reshape(-1, dp)
    rows = rows[(rows >= 0).any(axis=1)]
    num_empty = int((schedule.table < 0).sum())
    # the fewest packs that could hold them
    sizes = np.stack([samples.num_patches, samples.num_tokens], axis=1)[packing.indices]
    alone = above_limits(sizes, packing.limits)
    bound = lower_bound_packs(sizes[~alone], packing.limits) + int(alone.sum())
    limits, room = packing.limits, max(1, num_packs)
    return BalanceReport(
        method=packing.method,
        order=schedule.order,
        dp=dp,
        num_samples=len(samples),
        num_packed=len(packing.indices),
        num_oversize=len(packing.oversize),
        num_packs=num_packs,
        lower_bound_packs=bound,
        packs_over_bound=num_packs / bound if bound else 1.0,
        num_over_limit=int(((v > limits[0]) | (t > limits[1])).sum()),
        samples_per_pack=len(packing.indices) / room,
        num_steps=schedule.num_steps,
        num_empty_slots=num_empty,
        pad_ratio=pad,
        dist_ratio_vit=dist_ratio(_work(v, rows)),
        dist_ratio_llm=dist_ratio(_work(computed_t, rows)),
        dist_ratio_cost=dist_ratio(_work(computed_c, rows)),
        utilisation=utilisation(_work(c, rows), _work(computed_c, rows)),
        fill_patches=float(v.sum()) / (room * limits[0]),
        fill_tokens=float(t.sum()) / (room * limits[1]),
        shuffle_chi2=shuffle_chi2(_sources_of_steps(samples, packing, schedule)),
    )


def _sources_of_steps(samples: SampleTable, packing: Packing, schedule: Schedule) -> IntArray:
    """Return (steps, sources) samples of each source in each step."""
    step_of_pack = np.empty(packing.num_packs, np.int64)
    steps, _, _ = np.nonzero(schedule.table >= 0)
    step_of_pack[schedule.table[schedule.table >= 0]] = steps
    step_of_sample = np.repeat(step_of_pack, np.diff(packing.offsets))
    num_sources = int(samples.source.max()) + 1 if len(samples) else 1
    return np.bincount(
        step_of_sample * num_sources + samples.source[packing.indices], minlength=schedule.num_steps * num_sources
    ).reshape(-1, num_sources)


def _work(per_pack: FloatArray, slots: IntArray) -> FloatArray:
    """Return the work of each slot; 0 where it is empty."""
    if len(per_pack) == 0:
        return np.zeros(slots.shape)
    return np.where(slots >= 0, per_pack[np.maximum(slots, 0)], 0.0)
