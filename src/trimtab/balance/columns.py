"""Packs of data sets that are too large for objects and copies: columns in, also memory-mapped ones, two arrays out.

Symbols: n samples, k limited columns (patches, tokens, and what else is limited: audio frames, video frames).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trimtab.balance.cost import Column, ColumnCost, find_cost_problem
from trimtab.balance.packing import find_problems
from trimtab.balance.schedule import TOLERANCE, schedule_packs
from trimtab.errors import PackingError, join_problems
from trimtab.options import Order
from trimtab.specs import IntArray, Packing, Schedule

SHARD_SAMPLES = 1 << 21
"""Samples packed together, about. Part of the result: the same for any number of threads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedColumns:
    """Packs in the order in which they run: row r on dp ranks is packs r * dp .. r * dp + dp - 1.

    Pack p holds samples indices[offsets[p]:offsets[p + 1]]. So any step is found without reading another one.
    """

    offsets: IntArray
    indices: npt.NDArray[np.int32] | IntArray  # int32 where the data set has fewer than 2^31 samples
    limits: tuple[int, ...]
    dp: int
    order: Order
    seed: int
    oversize: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # left out by the user's own choice

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1

    def pack(self, number: int) -> npt.NDArray[np.int32] | IntArray:
        """Samples of one pack."""
        return self.indices[self.offsets[number] : self.offsets[number + 1]]

    def schedule(self, num_microbatches: int = 1) -> Schedule:
        """The packs as a table of steps, 8 bytes a pack."""
        slots = schedule_packs(np.empty((self.num_packs, 0)), dp=self.dp, num_microbatches=num_microbatches)
        return Schedule(table=slots.table, order=self.order)

    def packing(self) -> Packing:
        """The same packs as 8-byte integers."""
        return Packing(
            offsets=np.asarray(self.offsets, np.int64),
            indices=np.asarray(self.indices, np.int64),
            limits=self.limits,
            oversize=self.oversize,
            method="balanced",
            seed=self.seed,
        )


def pack_columns(
    sizes: Sequence[Column],
    *,
    limits: tuple[int, ...],
    cost: ColumnCost | Column | None = None,
    dp: int = 1,
    order: Order = "random",
    seed: int = 0,
    epoch: int = 0,
    oversize: str = "error",
    fill: float | None = None,
    tolerance: float = TOLERANCE,
    shard_samples: int = SHARD_SAMPLES,
    num_threads: int = 1,
) -> PackedColumns:
    """Packs under `limits`, one per column, as `pack_samples` makes them.

    Use this in place of `pack_samples` for a hundred million samples, with columns that are mapped from files.

    Every sample goes to one of n / `shard_samples` shards by chance (its number and the seed decide), and every shard
    is packed for itself, in whole rows of dp packs: memory beyond the columns and the result is that of one shard per
    thread (about 200 bytes a sample of it), and threads do not change the result. Up to `shard_samples` samples there
    is one shard, and the packs are those of `pack_samples`.

    `cost` is one number per sample, or a function of the columns (float64, those of one shard at a time), as
    `LinearCost.of` is of patches and tokens; without it each column counts as a share of its limit.
    Raises `PackingError` as `pack_samples` does.

    >>> import numpy as np
    >>> frames, tokens = np.array([30, 10, 20, 40]), np.array([500, 900, 300, 700])
    >>> packed = pack_columns([frames, tokens], limits=(50, 1400))
    >>> sorted(sorted(packed.pack(p).tolist()) for p in range(packed.num_packs))
    [[0, 2], [1], [3]]
    """
    from trimtab.balance.shards import Job, find_oversize, pack_shard, scatter  # loads numba

    sizes = [np.asarray(column) for column in sizes]  # a memory map stays one: no copy
    settings = {"dp": dp, "shard_samples": shard_samples, "num_threads": num_threads}
    _check(sizes, limits, cost, find_problems(fill, oversize, **settings))
    n = len(sizes[0])
    bounds = np.array(limits, np.int64)
    large = find_oversize(sizes, bounds)
    if len(large) and oversize == "error":
        raise PackingError(_describe_oversize(sizes, large, limits))
    skipped = large if oversize == "skip" else large[:0]
    num_packed = n - len(skipped)
    indices: Column = np.empty(num_packed, np.int32 if n < 2**31 else np.int64)
    num_shards = max(1, -(-n // shard_samples))
    starts = scatter(n, skipped, num_shards, seed, epoch, indices)
    job = Job(
        sizes=sizes,
        cost=cost if cost is None or callable(cost) else np.asarray(cost),
        limits=limits,
        dp=dp,
        order=order,
        seed=seed,
        epoch=epoch,
        aim=fill,
        tolerance=tolerance,
        indices=indices,
        starts=starts,
    ).with_aim()
    with ThreadPoolExecutor(num_threads) as pool:
        num_samples = list(pool.map(lambda shard: pack_shard(job, shard), range(num_shards)))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(num_samples))]).astype(np.int64)
    return PackedColumns(
        offsets=offsets, indices=indices, limits=tuple(limits), dp=dp, order=order, seed=seed, oversize=skipped
    )


def _check(
    sizes: Sequence[Column], limits: tuple[int, ...], cost: ColumnCost | Column | None, problems: list[str]
) -> None:
    if not sizes or len(sizes) != len(limits) or any(limit < 1 for limit in limits):
        problems.append(f"limits {limits} do not suit {len(sizes)} columns: give one per column, 1 or more each")
    lengths = {column.shape for column in sizes}
    if len(lengths) > 1 or any(len(shape) != 1 for shape in lengths):
        problems.append(f"columns have shapes {sorted(lengths)}: give one number per sample in each")
    for d, column in enumerate(sizes):
        if column.dtype.kind not in "iu":
            problems.append(f"column {d} holds {column.dtype}: give whole numbers, limits are exact")
        elif len(column) and int(column.min()) < 0:
            problems.append(f"column {d} holds a negative size: give sizes from 0")
    if callable(cost):
        if problem := find_cost_problem(cost, len(sizes)):
            problems.append(problem)
    elif cost is not None and sizes and np.shape(cost) != sizes[0].shape:
        problems.append(f"cost has shape {np.shape(cost)} for {len(sizes[0])} samples: give one number per sample")
    if problems:
        raise PackingError(join_problems(problems))


def _describe_oversize(sizes: Sequence[Column], rows: IntArray, limits: tuple[int, ...]) -> str:
    lines = [
        f"{len(rows)} of {len(sizes[0])} samples do not fit a pack of {limits}: raise the limits, or choose oversize "
        '"alone" (a pack of its own each) or "skip" (left out and listed)'
    ]
    for row in rows[:40].tolist():
        lines.append(f"  sample {row}: {tuple(int(column[row]) for column in sizes)}")
    lines += [""] * max(0, len(rows) - 40)
    return join_problems(lines)
