"""Samples to packs under two limits at once, and packs to the steps and ranks of a training run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from trimtab.balance.cost import LinearCost, default_cost
from trimtab.balance.metrics import BalanceReport, above_limits, report_balance
from trimtab.balance.schedule import (
    Groups,
    check_order,
    complete_rows,
    fill_table,
    offsets_of,
    order_packs,
    reorder,
)
from trimtab.errors import PackingError, join_problems, refuse_type
from trimtab.options import Order, Oversize, PackMethod
from trimtab.specs import FloatArray, IntArray, Packing, SampleTable, Schedule
from trimtab.units import three_lines

if TYPE_CHECKING:
    from trimtab.balance.balanced import Aim

METHODS: tuple[PackMethod, ...] = get_args(PackMethod)
PADDED_METHODS: tuple[PackMethod, ...] = ("random", "length_group", "device_group")
"""Methods that know no limits: batches of about `batch_size` samples, padded to their longest."""

OVERSIZE: tuple[Oversize, ...] = get_args(Oversize)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackResult:
    """Packs, and who runs them when."""

    packing: Packing
    schedule: Schedule

    def __repr__(self) -> str:
        packing, (num_steps, dp, num_microbatches) = self.packing, self.schedule.table.shape
        return three_lines(
            f"PackResult: {len(packing.indices):,} samples in {packing.num_packs:,} packs",
            f"at most {' and '.join(f'{limit:,}' for limit in packing.limits)} (patches and tokens) a pack",
            f"{num_steps:,} steps of {dp} ranks x {num_microbatches} micro-batches",
        )


_MOST_SLOTS = 1 << 22

LEAST_COST, MOST_COST = 1e-200, 1e200
"""Costs of samples are 0 or between these: they can then be added up, and divided by their mean."""

MOST_LIMIT = (1 << 53) - 1
"""No limit is above: up to here sums of whole numbers are exact in float64."""

SHARD_SAMPLES, SHARD_RANKS = 1 << 19, 256
"""Samples packed together for so many ranks, about: larger data sets are packed in parts, which the caches hold, at 200
bytes a sample of one part; each part ends with a whole row. A row of the data goes to a part by chance, so with the
shuffle inside the parts the order of all is random."""


def pack_samples(
    samples: SampleTable,
    *,
    limits: tuple[int, int],
    dp: int = 1,
    num_microbatches: int = 1,
    method: PackMethod = "balanced",
    order: Order = "random",
    cost: LinearCost | FloatArray | None = None,
    seed: int = 0,
    epoch: int = 0,
    oversize: Oversize = "error",
    fill: float | None = None,
    filters: tuple[int, int] | None = None,
    iterations: int = 10,
    batch_size: float = 4,
) -> PackResult:
    """Return packs of samples of at most `limits` = (max_patches, max_tokens), and their schedule over `dp` ranks.

    Use this when you have sizes and a training loop of your own; `make_plan` calls it for you. Raises `PackingError`
    for a sample above a limit, unless `oversize` says what to do with it.

    Every sample is in exactly one pack or, with `oversize="skip"`, in `packing.oversize`; no pack is above a limit but
    those of one oversize sample (`"alone"`). The number of packs is a multiple of `dp` where there are samples enough,
    so the ranks take equally many. The arguments decide the result to the last bit, on any machine. Columns may be
    of any integer type, also `np.load(path, mmap_mode="r")`: more than `SHARD_SAMPLES` samples are read and packed a
    part at a time.

    `cost` is what a sample costs (see `LinearCost`) or one number per sample; without it that of a 6B + 20B model.
    `fill` belongs to `balanced`, `filters` (Q'_v, Q'_t; None: the paper's) and `iterations` to `isf`,
    `batch_size` to the padded methods (`random`, `length_group`, `device_group`), which know no limits.

    >>> import numpy as np
    >>> from trimtab import SampleTable
    >>> tiles = np.array([1, 5, 3, 0, 2, 5, 1, 4])
    >>> samples = SampleTable.of(tiles, 256 * tiles + 90, patch_unit="tiles")
    >>> packed = pack_samples(samples, limits=(9, 4096), dp=2).packing
    >>> packed.num_packs, int(packed.sums(tiles).max())
    (4, 6)
    """
    from trimtab.compiled import scatter  # loads numba

    # what was asked for, and samples above a limit
    refuse_type("samples", samples, SampleTable, "size_samples(...).table or read_lengths(files)")
    _check(samples, limits, dp, num_microbatches, method, oversize, fill, batch_size)
    check_order(order, dp, num_microbatches)
    large = _find_oversize(samples, limits) if method not in PADDED_METHODS else np.empty(0, np.int64)
    if len(large) and oversize == "error":
        raise PackingError(describe_oversize(samples, large, limits))
    asked = _Asked(
        samples=samples,
        limits=tuple(limits),
        dp=dp,
        num_microbatches=num_microbatches,
        method=method,
        order=order,
        cost=default_cost(samples) if cost is None else cost,
        keys=(seed, epoch),
        keeps_large=oversize == "alone",
        aim=fill,
        filters=filters,
        iterations=iterations,
        batch_size=batch_size,
    )
    # parts of the data set, one unless it is large; packs take the places of the samples that they hold
    num_parts = max(1, -(-len(samples) // (SHARD_SAMPLES * -(-dp // SHARD_RANKS)))) if method == "balanced" else 1
    rows, starts = scatter(len(samples), num_parts, seed, epoch)
    counts, num_packed, num_packs = [np.empty(0, np.int32)], 0, 0
    for part in range(num_parts):
        own = rows[starts[part] : starts[part + 1]].copy() if num_parts > 1 else rows
        groups, asked = _pack_part(asked, own, part, num_packs)
        rows[num_packed : num_packed + len(groups.members)] = own[groups.members]
        counts.append(np.diff(groups.offsets).astype(np.int32))
        num_packed, num_packs = num_packed + len(groups.members), num_packs + groups.num_packs

    # no sample is lost
    packing = Packing(
        offsets=offsets_of(np.concatenate(counts)),
        indices=rows[:num_packed],
        limits=tuple(limits),
        oversize=large if oversize == "skip" else np.empty(0, np.int64),
        method=method,
        seed=seed,
    )
    assert len(packing.indices) + len(packing.oversize) == len(samples), "a sample was lost"
    counts.clear()
    sequence = np.arange(num_packs, dtype=rows.dtype)
    return PackResult(packing=packing, schedule=fill_table(sequence, dp, num_microbatches, order))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """What `pack_samples` was given, for one part of the samples after the other."""

    samples: SampleTable
    limits: tuple[int, ...]
    dp: int
    num_microbatches: int
    method: PackMethod
    order: Order
    cost: LinearCost | FloatArray
    keys: tuple[int, int]  # seed, epoch
    keeps_large: bool  # samples above a limit are packs of their own, else nobody's
    aim: Aim | float | None  # a number: the fill
    filters: tuple[int, int] | None
    iterations: int
    batch_size: float


def _pack_part(asked: _Asked, own: IntArray, part: int, num_before: int) -> tuple[Groups, _Asked]:
    """Return packs of the rows `own`, by their places in it, in the order in which they run after `num_before` others.

    And what is asked of the next part: the first one has chosen the aim of all.
    """
    # 1. the part's samples, without those above a limit
    sizes, cost = read_sizes(asked.samples, own), cost_column(asked.samples, asked.cost, own)
    above = above_limits(sizes, asked.limits) & (asked.method not in PADDED_METHODS)
    small, alone = np.flatnonzero(~above), np.flatnonzero(above & asked.keeps_large)
    # 2. packs of them, those above a limit somewhere among these
    groups = Groups(np.empty(0, np.int64), np.zeros(1, np.int64))
    keys = (*asked.keys, part) if part else asked.keys
    if len(small):
        columns, own_cost = (sizes[small], cost[small]) if above.any() else (sizes, cost)
        groups, aim = _pack_small(asked, columns, own_cost, len(alone), keys)
        asked = replace(asked, aim=aim)
    groups = complete_rows(groups, small, alone, sizes, asked.limits, dp=asked.dp, keys=keys)
    # 3. rows
    work = np.column_stack([sizes.astype(np.float64), cost])
    if asked.order != "random" or asked.num_microbatches > 1:
        sums = np.add.reduceat(work.take(groups.members, axis=0), groups.offsets[:-1]) if groups.num_packs else work[:0]
        sequence = order_packs(
            sums,
            dp=asked.dp,
            num_microbatches=asked.num_microbatches,
            order=asked.order,
            keys=keys,
            num_before=num_before,
        )
        groups = reorder(groups, sequence)
    if asked.method == "balanced":
        from trimtab.balance.rows import level_rows

        groups = level_rows(
            work.take(groups.members, axis=0), groups, asked.dp, np.array([*asked.limits, np.inf]), keys
        )
    return groups, asked


def _pack_small(
    asked: _Asked, columns: IntArray, cost: FloatArray, num_others: int, keys: tuple[int, ...]
) -> tuple[Groups, Aim | float | None]:
    """Return packs of samples (n, 2) that each fit a pack alone, and the aim that they were made with."""
    if asked.method == "balanced":
        from trimtab.balance.balanced import pack_balanced

        alike = asked.order != "random"
        return pack_balanced(
            columns,
            cost,
            limits=asked.limits,
            dp=asked.dp,
            keys=keys,
            aim=asked.aim,
            num_others=num_others,
            rows_alike=alike,
        )
    # methods that were published, each by its own rule
    from trimtab.balance import published

    # what is published has no parts and no aim: these see all samples at once
    seed, epoch = asked.keys
    if asked.method == "isf":
        filters, iterations = asked.filters, asked.iterations
        packs = published.pack_isf(
            columns, limits=asked.limits, filters=filters, iterations=iterations, seed=seed, epoch=epoch
        )
        return packs, None
    if asked.method == "greedy":
        return published.pack_greedily(columns, limits=asked.limits, seed=seed, epoch=epoch), None
    # batches of a fixed number of samples, padded
    # padding is by tokens; images are not padded
    lengths = columns[:, 1].astype(np.float64)
    batch = {"length_group": published.batch_by_length, "device_group": published.batch_by_device}.get(asked.method)
    if batch is None:
        packs = published.batch_randomly(len(lengths), batch_size=asked.batch_size, dp=asked.dp, seed=seed, epoch=epoch)
        return packs, None
    return batch(lengths, batch_size=asked.batch_size, dp=asked.dp, seed=seed, epoch=epoch), None


def report_packing(
    samples: SampleTable, result: PackResult, *, cost: LinearCost | FloatArray | None = None
) -> BalanceReport:
    """Return all figures of what `pack_samples` returned, with the same `cost`.

    Use it to see how even packs are, and to compare two ways of packing.

    Batches of the padded methods count what padding adds. With a cost of one number per sample that cannot be known
    exactly: it is scaled by padded over own tokens.

    >>> import numpy as np
    >>> from trimtab import SampleTable
    >>> tiles = np.array([1, 5, 3, 0, 2, 5, 1, 4])
    >>> samples = SampleTable.of(tiles, 256 * tiles + 90, patch_unit="tiles")
    >>> from trimtab import pack_samples
    >>> report_packing(samples, pack_samples(samples, limits=(9, 4096))).num_packs
    3
    """
    refuse_type("result", result, PackResult, "pack_samples(...)")
    packing = result.packing
    per_sample = cost_column(samples, cost)
    if packing.method not in PADDED_METHODS:
        return report_balance(samples, packing, result.schedule, cost=per_sample)
    own = samples.num_tokens.astype(np.float64)
    # each batch computes its longest sample as often as it holds samples
    longest = np.maximum.reduceat(own[packing.indices], packing.offsets[:-1])
    padded = own.copy()
    padded[packing.indices] = np.repeat(longest, np.diff(packing.offsets))
    if cost is None or isinstance(cost, LinearCost):
        weights = cost or default_cost(samples)
        padded_cost = per_sample + (weights.of(0.0, padded) - weights.of(0.0, own))  # patches are not padded
    else:
        padded_cost = per_sample * padded / np.where(own > 0, own, 1.0)
    return report_balance(samples, packing, result.schedule, cost=per_sample, padded_cost=padded_cost, padded=True)


def refuse_empty(packing: Packing) -> None:
    """Raise `PackingError` where every sample was skipped: packs of nothing are no result for a run."""
    if packing.num_packs == 0:
        raise PackingError(
            f"all {len(packing.oversize)} samples are above {packing.limits[0]} patches or {packing.limits[1]} tokens: "
            "raise max_patches or max_tokens"
        )


def warm_up(*methods: PackMethod) -> None:
    """Compile or load the compiled loops of these methods, or of all: a measured run then contains none of it."""
    many = SampleTable.of(np.arange(40) % 5, np.arange(40) + 1, patch_unit="tiles")
    few = SampleTable.of(np.arange(40) % 7 + 3, np.arange(40) * 7 % 40 + 30, patch_unit="tiles")
    for method in methods or METHODS:
        for table in (many, few):
            pack_samples(table, limits=(9, 90), dp=2, method=method)
        pack_samples(many, limits=(9, 90), dp=2, method=method, order="sorted")


def read_sizes(samples: SampleTable, rows: IntArray | None = None) -> IntArray:
    """Return (n, 2) patches and tokens of these rows, or of all."""
    columns = (samples.num_patches, samples.num_tokens)
    return np.stack([column if rows is None else column[rows] for column in columns], axis=1).astype(np.int64)


def cost_column(samples: SampleTable, cost: LinearCost | FloatArray | None, rows: IntArray | None = None) -> FloatArray:
    """Return the cost of each sample, or of these rows: by weights, as given, or of the default model."""
    # a line in the sizes, or a number for each sample
    if cost is None:
        cost = default_cost(samples)
    if isinstance(cost, LinearCost):
        column = cost.of_samples(samples, rows)
    else:
        column = np.asarray(cost, np.float64) if np.ndim(cost) == 0 else np.asanyarray(cost)
        if column.shape != (len(samples),):
            raise PackingError(f"cost has shape {column.shape} for {len(samples)} samples: give one number per sample")
        column = np.asarray(column if rows is None else column[rows], np.float64)
    check_costs(column)
    return column


def check_costs(column: FloatArray) -> None:
    """Raise `PackingError` for a cost that compiled loops cannot add up or divide by."""
    if not (np.isfinite(column).all() and (column >= 0).all()):
        raise PackingError("cost holds a negative or non-finite number: give each sample a cost of 0 or more")
    # compiled loops divide by costs: a subnormal one overflows, and an index with it
    smallest, largest = column[column > 0].min(initial=1.0), column.max(initial=1.0)
    if smallest < LEAST_COST or largest > MOST_COST:
        raise PackingError(f"cost holds {smallest:g} and {largest:g}: give 0, or {LEAST_COST:g} to {MOST_COST:g}")


def find_problems(fill: float | None, oversize: str, **counts: float) -> list[str]:
    """Return what is wrong with settings that all packers have in common; `counts` must be 1 or more."""
    problems = [f"{name} must be at least 1, not {value}" for name, value in counts.items() if value < 1]
    if oversize not in OVERSIZE:
        problems.append(f"oversize {oversize!r} is unknown: choose one of {', '.join(OVERSIZE)}")
    if fill is not None and not 0.5 <= fill <= 1.0:
        problems.append(f"fill {fill} is not a share of the packs' room: give 0.5 to 1, or none to have it chosen")
    return problems


def _check(
    samples: SampleTable,
    limits: tuple[int, int],
    dp: int,
    num_microbatches: int,
    method: PackMethod,
    oversize: Oversize,
    fill: float | None,
    batch_size: float,
) -> None:
    # each setting by itself, then the sizes
    problems = find_problems(fill, oversize, dp=dp, batch_size=batch_size)
    if dp * num_microbatches > _MOST_SLOTS:
        problems.append(
            f"dp {dp} x num_microbatches {num_microbatches} are more than {_MOST_SLOTS:,} micro-batches: give fewer"
        )
    if method not in METHODS:
        problems.append(f"packing method {method!r} is unknown: choose one of {', '.join(METHODS)}")
    if len(limits) != 2 or any(not 1 <= limit <= MOST_LIMIT for limit in limits):
        problems.append(
            f"limits {limits} are not two whole numbers from 1 to 2^53 - 1: give max_patches and max_tokens as such"
        )
    if len(samples) and min(samples.num_patches.min(), samples.num_tokens.min()) < 0:
        negative = np.flatnonzero((samples.num_patches < 0) | (samples.num_tokens < 0))
        name = samples.sample_id(int(negative[0]))
        problems.append(f"sample {name} has a negative size ({len(negative)} such): give sizes from 0")
    if problems:
        raise PackingError(join_problems(problems))


def _find_oversize(samples: SampleTable, limits: tuple[int, int]) -> IntArray:
    """Return rows that are above a limit, ascending; a part of the columns at a time, as they may be mapped files."""
    found = [np.empty(0, np.int64)]
    for first in range(0, len(samples), SHARD_SAMPLES):
        part = slice(first, first + SHARD_SAMPLES)
        above = (samples.num_patches[part] > limits[0]) | (samples.num_tokens[part] > limits[1])
        found.append(first + np.flatnonzero(above))
    return np.concatenate(found)


def describe_oversize(samples: SampleTable, rows: IntArray, limits: tuple[int, int]) -> str:
    """Return all samples above a limit, a line each."""
    lines = [
        f"{len(rows):,} of {len(samples):,} samples do not fit a pack of {limits[0]} {samples.patch_unit} and "
        f"{limits[1]} "
        'tokens: raise the limits, or choose oversize "alone" (a pack of its own each) or "skip" (left out and '
        "listed): --set oversize=skip"
    ]
    for row in rows.tolist():
        lines.append(
            f"  sample {samples.sample_id(row)}: {samples.num_patches[row]} {samples.patch_unit}, "
            f"{samples.num_tokens[row]} tokens"
        )
    return join_problems(lines)
