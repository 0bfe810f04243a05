"""Steps of exactly N samples: the samples of a step shared among dp ranks x M micro-batches, nothing added or left out.

Symbols: N samples, k limited columns, D = k + 1 columns with the cost; M packs (micro-batches) a rank.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trimtab.balance.cost import LinearCost
from trimtab.balance.metrics import above_limits, lower_bound_packs, sum_columns
from trimtab.balance.packing import MOST_LIMIT, PackResult, check_costs, cost_column, describe_oversize, find_problems
from trimtab.balance.pair import Goal, Packs, Scratch, make_goal, make_packs, make_scratch, share_pairs
from trimtab.balance.rows import level_worst
from trimtab.balance.schedule import offsets_of
from trimtab.balance.window import pair_extremes, repair, spread
from trimtab.compiled import UIntArray, below, compiled, inner, make_stream, next_u64, permutation
from trimtab.errors import PackingError, join_problems
from trimtab.options import Oversize
from trimtab.specs import FloatArray, IntArray, Packing, SampleTable, Schedule

PENALTY = 1e3
"""What a pack above a limit costs, per limit's worth of excess; the largest other difference costs about 1."""

OTHERS_WEIGHT = 0.02
"""Weight of patches and tokens when ranks are evened out; the cost, which decides when a rank is done, has 1."""

COST_SLOPE = 1.0
"""What a rank's cost above the bound counts: the step waits for the most expensive rank."""


NUM_ROUNDS = 4
"""Rounds in which all ranks are paired, extremes of one direction with each other."""

MAX_TRIALS, MAX_PARTNERS = 200, 32
"""Times that the most expensive rank is shared with others, and how many are tried each time."""

NUM_KICKS, MIXED_PAIRS = 24, 3
"""Times that ranks are mixed where the most expensive one stays above the bound, and pairs of ranks mixed each time."""

CLOSE, CLOSEST, MORE_TRIALS = 1e-4, 2e-6, 96
"""They end once the most expensive rank is this close to the bound, relative to it; the first trials go on to 2e-6."""


SPLIT_ROUNDS = 8
"""Rounds in which the packs of each rank are paired; two packs take two."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedStep:
    """Who runs what in one step: pack r * M + m is micro-batch m of rank r.

    It holds samples members[offsets[p]:offsets[p + 1]], positions in the arrays that were given. The packs of a rank
    come from the most expensive to the cheapest, so packs that run at the same time are alike. Only where a rank has
    fewer than M samples are its last packs empty.
    """

    members: IntArray  # (N,)
    offsets: IntArray  # (dp * M + 1,)
    dp: int
    num_microbatches: int  # M: what was asked for, or more where N samples would not fit

    def of_rank(self, rank: int) -> list[IntArray]:
        """The samples of each micro-batch of a rank; empty ones are left out."""
        first = rank * self.num_microbatches
        bounds = self.offsets[first : first + self.num_microbatches + 1].tolist()
        return [self.members[a:b] for a, b in pairwise(bounds) if b > a]


def share_step(
    sizes: IntArray,
    cost: FloatArray,
    *,
    limits: tuple[int, ...] | None,
    dp: int,
    num_microbatches: int = 1,
    keys: tuple[int, ...] = (0,),
) -> SharedStep:
    """Share N given samples among dp x M packs: ranks even in cost, then in each column, and so the packs of a rank.

    Use it where the samples of a step are known, and every one of them must run in it; `pack_steps` calls it for each
    step of an epoch. `sizes` is (N, k), whole numbers; `cost` (N,) says what each sample takes. No pack is above
    `limits` (None: there are none). M is `num_microbatches`, or the least above it for which packs within the limits
    were found. `keys` are integers (seed, epoch, step): they and the samples decide the result to the last bit.

    Raises `PackingError` where a rank would have no sample, and for a sample that is above a limit.
    Exact: the cover, the limits, the best sharing of each pair of packs tried. Heuristic: which pairs are.

    >>> step = share_step(np.array([[9], [1], [5], [5]]), np.array([9.0, 1.0, 5.0, 5.0]), limits=(10,), dp=2)
    >>> sorted(sorted(pack.tolist()) for rank in range(2) for pack in step.of_rank(rank))
    [[0, 1], [2, 3]]
    """
    if len(sizes) < dp:
        raise PackingError(f"{len(sizes)} samples a step leave {dp - len(sizes)} of {dp} ranks idle: give {dp} or more")
    if limits is not None and any(not 1 <= limit <= MOST_LIMIT for limit in limits):
        raise PackingError(f"limits {limits} are not whole numbers from 1 to 2^53 - 1: give such ones, or None")
    check_costs(cost)
    return _share_any(sizes, cost, limits, dp, num_microbatches, keys)


def pack_steps(
    samples: SampleTable,
    *,
    global_batch: int,
    limits: tuple[int, int] | None,
    dp: int,
    num_microbatches: int = 1,
    equal_microbatches: bool = False,
    cost: LinearCost | FloatArray | None = None,
    oversize: Oversize = "error",
    seed: int = 0,
    epoch: int = 0,
) -> PackResult:
    """Pack steps of exactly `global_batch` samples of the shuffle, each by `share_step`; the last may hold fewer.

    Use it where the batch is to stay what a trainer without packs makes of it; `pack_samples` fills packs instead, and
    its steps hold unlike numbers of samples.

    The schedule's table has a row of M slots for each rank, -1 where a rank has no pack: in steps that need fewer
    micro-batches than the largest, unless `equal_microbatches` shares every step among that many (hosts that count
    them once need this), and in a last step of fewer than dp x M samples. A sample above a limit has a pack to itself
    with `oversize="alone"`; "skip" leaves it out before the steps are cut.

    >>> samples = SampleTable.of(np.arange(10), 100 * np.arange(10) + 50)
    >>> packed = pack_steps(samples, global_batch=4, limits=(20, 2000), dp=2)
    >>> packed.schedule.table.shape, np.diff(packed.packing.offsets).tolist()
    ((3, 2, 1), [3, 1, 2, 2, 1, 1])
    """
    # samples in the order of the shuffle; one above a limit fills a pack
    sizes = np.stack([samples.num_patches, samples.num_tokens], axis=1).astype(np.int64)
    per_sample = cost_column(samples, cost)
    above = np.zeros(len(sizes), np.bool_) if limits is None else above_limits(sizes, limits)
    _check(global_batch, dp, num_microbatches, limits, oversize)
    if above.any() and oversize == "error":
        raise PackingError(describe_oversize(samples, np.flatnonzero(above), limits or (0, 0)))
    shuffled = permutation(len(sizes), seed, epoch, 0)
    if oversize == "skip":
        shuffled = shuffled[~above[shuffled]]
    sizes[above] = limits or 0  # a full pack in every column: nothing joins it

    def share(first: int, least: int) -> SharedStep:
        rows = shuffled[first : first + global_batch]
        keys = (seed, epoch, first // global_batch)
        return _share_any(sizes[rows], per_sample[rows], limits, dp, least, keys)

    # every step by itself, then as many micro-batches for all as the largest needs
    starts = range(0, len(shuffled), global_batch)
    steps = [share(first, num_microbatches) for first in starts]
    M = max((step.num_microbatches for step in steps), default=num_microbatches)
    while equal_microbatches and any(step.num_microbatches != M for step in steps):
        steps = [step if step.num_microbatches == M else share(i * global_batch, M) for i, step in enumerate(steps)]
        M = max(step.num_microbatches for step in steps)

    table = np.full((len(steps), dp, M), -1, np.int64)
    members, counts, num_packs = [shuffled[:0]], [shuffled[:0]], 0
    for i, (first, step) in enumerate(zip(starts, steps, strict=True)):
        held = np.diff(step.offsets)
        filled = np.flatnonzero(held)
        table[i, filled // step.num_microbatches, filled % step.num_microbatches] = num_packs + np.arange(len(filled))
        members.append(shuffled[first + step.members])
        counts.append(held[filled])
        num_packs += len(filled)
    packing = Packing(
        offsets=offsets_of(np.concatenate(counts)),
        indices=np.concatenate(members),
        limits=limits or tuple(int(column.max(initial=1)) * global_batch for column in sizes.T),
        oversize=np.flatnonzero(above) if oversize == "skip" else np.empty(0, np.int64),
        seed=seed,
    )
    return PackResult(packing=packing, schedule=Schedule(table=table))


def _check(global_batch: int, dp: int, num_microbatches: int, limits: tuple[int, int] | None, oversize: str) -> None:
    problems = find_problems(None, oversize, dp=dp, num_microbatches=num_microbatches)
    if global_batch < dp:
        problems.append(f"global_batch {global_batch} leaves {dp - global_batch} of {dp} ranks idle: give {dp} or more")
    if limits is not None and (len(limits) != 2 or any(not 1 <= limit <= MOST_LIMIT for limit in limits)):
        problems.append(f"limits {limits} are not two whole numbers from 1 to 2^53 - 1: give patches and tokens")
    if problems:
        raise PackingError(join_problems(problems))


def _share_any(
    sizes: IntArray,
    cost: FloatArray,
    limits: tuple[int, ...] | None,
    dp: int,
    num_microbatches: int,
    keys: tuple[int, ...],
) -> SharedStep:
    """Share any number of samples as `share_step` does: of fewer than dp, some ranks have none."""
    n, k = sizes.shape
    bounds = np.array([*(limits or [np.inf] * k), np.inf])
    # at least as many packs as the samples need
    M = num_microbatches
    if limits is not None:
        if above_limits(sizes, limits).any():
            raise PackingError(f"a sample of the step is above {limits}: raise the limits, or leave it out")
        M = max(M, -(-lower_bound_packs(sizes, limits) // dp))
    # the cost at a mean of 1, for squares of it are summed in float32
    columns = np.empty((n, k + 1))
    columns[:, :k], columns[:, k] = sizes, cost
    total = sum_columns(columns)
    columns[:, k] *= n / total[k] if total[k] > 0 else 0.0
    state = make_stream(*keys, 0x73746570)
    while (packs := _share(columns, bounds, dp, M, state)) is None:
        M += 1  # ends: with a pack for each sample all are within the limits
    members, offsets = _unload(packs, dp, M)
    return SharedStep(members=members, offsets=offsets, dp=dp, num_microbatches=M)


def _share(columns: FloatArray, bounds: FloatArray, dp: int, M: int, state: UIntArray) -> Packs | None:
    """Return the packs of the step, or None where none within the limits were found."""
    n, D = columns.shape
    # 1. what ranks are to have alike: each the mean, and no cost above the mean or the largest sample
    total = sum_columns(columns)
    mean = np.where(total > 0, total, 1.0) / dp
    target = max(float(mean[-1]), float(columns[:, -1].max()))
    weights, slopes = np.where(total > 0, OTHERS_WEIGHT, 0.0), np.zeros(D)
    weights[-1], slopes[-1] = 1.0, COST_SLOPE / mean[-1]
    aim = np.append(mean[:-1], target)
    penalties = np.where(np.isfinite(bounds), PENALTY / bounds, 0.0)
    scratch = make_scratch(dp * M + MIXED_PAIRS, n, D)
    # 2. samples to ranks
    ranks = make_packs(dp, n, D)
    share = np.zeros(D)
    share[-1] = 1.0 / target
    spread(columns, share, ranks)
    goal = make_goal(bounds * M, weights / mean**2, penalties / M, aim, slopes)
    _even_out(columns, ranks, goal, target, state, scratch)
    # 3. the samples of each rank to its packs
    packs = ranks
    if M > 1:
        packs = make_packs(dp * M, n, D)
        share = np.append(np.where(np.isfinite(bounds), 1.0 / bounds, 0.0)[:-1], M / mean[-1])
        goal = make_goal(bounds, weights / (mean / M) ** 2, penalties, aim / M, np.zeros(D))
        _split_ranks(columns, ranks, packs, share, goal, dp, M, state, scratch)
        # 4. where one is above a limit, packs of other ranks take some of it
        repair(columns, packs, goal, state, scratch)
    return None if above_limits(packs.sums, bounds).any() else packs


@compiled
def _even_out(sizes: FloatArray, packs: Packs, goal: Goal, target: float, state: UIntArray, scratch: Scratch) -> None:
    """Share pairs of ranks again until they are even, above all in cost, and the most expensive is near `target`."""
    P, D = packs.sums.shape
    direction = np.zeros(D)
    # 1. rounds of all ranks: extremes of the cost, and of a random mix of the columns
    for p in range(P):
        scratch.failures[p] = 0
    for r in range(NUM_ROUNDS):
        for d in range(D):
            mix = np.float64(next_u64(state) >> np.uint64(11)) / 2.0**52 - 1.0
            only_cost = np.float64(d == D - 1)
            direction[d] = (only_cost if r % 2 == 0 else mix) / goal[d].mean
        num_pairs = pair_extremes(packs.sums, direction, scratch.failures, np.int64(1 << 30), 0.0, scratch.pairs)
        share_pairs(sizes, packs, num_pairs, goal, 1.0, np.int64(10), state, scratch)
    # 2. the most expensive rank with others; where it stays, some ranks are mixed and the best of all trials is kept
    best = _level(sizes, packs, goal, target, state, scratch)
    head, after = packs.head.copy(), packs.after.copy()
    num_held, sums = packs.num_held.copy(), packs.sums.copy()
    for _kick in range(NUM_KICKS):
        if best <= target * (1.0 + CLOSE):
            break
        for i in range(MIXED_PAIRS):
            scratch.pairs[i, 0] = _most_expensive(packs) if i == 0 else below(state, P)
            scratch.pairs[i, 1] = below(state, P)
        share_pairs(sizes, packs, np.int64(MIXED_PAIRS), goal, -1.0, np.int64(8), state, scratch)
        found = _level(sizes, packs, goal, target, state, scratch)
        if found < best:
            best = found
            head[:], after[:], num_held[:], sums[:] = packs.head, packs.after, packs.num_held, packs.sums
        else:
            packs.head[:], packs.after[:], packs.num_held[:], packs.sums[:] = head, after, num_held, sums
    packs.head[:], packs.after[:], packs.num_held[:], packs.sums[:] = head, after, num_held, sums


@inner
def _level(sizes: FloatArray, packs: Packs, goal: Goal, target: float, state: UIntArray, scratch: Scratch) -> float:
    """Share the most expensive rank with others until it is near `target` or none helps; what it then costs."""
    led, tried, free = packs.sums.shape[1] - 1, np.int64(MAX_PARTNERS), np.int64(12)
    level_worst(sizes, packs, goal, led, target, CLOSEST, np.int64(MORE_TRIALS), tried, free, state, scratch)
    num_left = np.int64(MAX_TRIALS - MORE_TRIALS)
    most: float = level_worst(sizes, packs, goal, led, target, CLOSE, num_left, tried, free, state, scratch)
    return most


@inner
def _most_expensive(packs: Packs) -> np.int64:
    P, D = packs.sums.shape
    worst = np.int64(0)
    for p in range(P):
        if packs.sums[p, D - 1] > packs.sums[worst, D - 1]:
            worst = np.int64(p)
    return worst


@compiled
def _split_ranks(
    sizes: FloatArray,
    ranks: Packs,
    packs: Packs,
    share: FloatArray,
    goal: Goal,
    dp: int,
    M: int,
    state: UIntArray,
    scratch: Scratch,
) -> None:
    """Put the samples of each rank into its M packs, packs r M .. r M + M - 1, and even these out in pairs.

    `share` turns a column into a share of a pack.
    """
    n, D = sizes.shape
    held, key = np.empty(n, np.int64), np.empty(n)
    # 1. largest sample first, each to the pack that is then least full
    for r in range(dp):
        num_held = np.int64(0)
        item = ranks.head[r]
        while item >= 0:
            full = 0.0
            for d in range(D):
                full = max(full, sizes[item, d] * share[d])
            place = num_held
            while place > 0 and key[place - 1] < full:
                key[place], held[place] = key[place - 1], held[place - 1]
                place -= 1
            key[place], held[place] = full, item
            num_held += 1
            item = ranks.after[item]
        for i in range(num_held):
            item = held[i]
            best, least = np.int64(r * M), np.float64(np.inf)
            for p in range(r * M, r * M + M):
                full = np.float64(0.0)
                for d in range(D):
                    full = max(full, (packs.sums[p, d] + sizes[item, d]) * share[d])
                if full < least:
                    best, least = np.int64(p), full
            packs.after[item] = packs.head[best]
            packs.head[best] = item
            packs.num_held[best] += 1
            for d in range(D):
                packs.sums[best, d] += sizes[item, d]
    # 2. rounds of all packs of each rank: extremes of one column after the other, the cost first
    order = np.empty(M, np.int64)
    for turn in range(2 if M == 2 else SPLIT_ROUNDS):
        d = D - 1 - turn % D
        num_pairs = np.int64(0)
        for r in range(dp):
            _sort_packs(packs, r * M, M, d, order)
            for i in range(M // 2):
                scratch.pairs[num_pairs, 0], scratch.pairs[num_pairs, 1] = order[i], order[M - 1 - i]
                num_pairs += 1
        share_pairs(sizes, packs, num_pairs, goal, 1.0, np.int64(10), state, scratch)


@inner
def _sort_packs(packs: Packs, first: int, count: int, d: int, order: IntArray) -> None:
    """Sort packs first .. first + count - 1 by column d, the largest first."""
    for i in range(count):
        place = i
        while place > 0 and packs.sums[order[place - 1], d] < packs.sums[first + i, d]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = first + i


@compiled
def _unload(packs: Packs, dp: int, M: int) -> tuple[IntArray, IntArray]:
    """List samples rank by rank, packs of a rank from the most expensive to the cheapest; where each pack begins."""
    D = packs.sums.shape[1]
    members, offsets = np.empty(len(packs.after), np.int64), np.zeros(dp * M + 1, np.int64)
    order = np.empty(M, np.int64)
    position = np.int64(0)
    for r in range(dp):
        _sort_packs(packs, r * M, M, D - 1, order)
        for i in range(M):
            item = packs.head[order[i]]
            while item >= 0:
                members[position] = item
                position += 1
                item = packs.after[item]
            offsets[r * M + i + 1] = position
    return members, offsets
