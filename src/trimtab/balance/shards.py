"""Shards of a data set: which sample goes where, and what is done with one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.balance.aim import Aim
from trimtab.balance.balanced import aim_for, pack_balanced
from trimtab.balance.bound import above_limits
from trimtab.balance.cost import Column, ColumnCost, price_columns
from trimtab.balance.groups import complete_rows, reorder
from trimtab.balance.rng import UIntArray, make_stream
from trimtab.balance.schedule import order_packs
from trimtab.compiled import compiled, inlined
from trimtab.options import Order
from trimtab.specs import FloatArray, IntArray

CHUNK = 1 << 20  # rows looked at in one go
_U = np.uint64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """What all shards share. Shard s owns indices[starts[s]:starts[s + 1]]: its samples, later its packs' samples."""

    sizes: Sequence[Column]
    cost: ColumnCost | Column | None
    limits: tuple[int, ...]
    dp: int
    order: Order
    seed: int
    epoch: int
    aim: Aim | float | None  # a number: the fill
    tolerance: float
    indices: Column
    starts: IntArray

    @property
    def how(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("limits", "dp", "seed", "epoch")}

    def with_aim(self) -> Job:
        """The same with the aim chosen on the first shard, so that all are alike."""
        if isinstance(self.aim, Aim) or len(self.starts) < 3:
            return self
        shard = _read_shard(self, 0)
        small = np.flatnonzero(~shard.above)
        if len(small) == 0:
            return self
        return replace(
            self,
            aim=aim_for(
                shard.sizes[small],
                shard.cost[small],
                fill=self.aim,
                **self.how,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    rows: IntArray
    sizes: IntArray  # (m, k)
    cost: FloatArray
    above: npt.NDArray[np.bool_]  # a limit


def find_oversize(sizes: Sequence[Column], limits: IntArray) -> IntArray:
    """Rows that are above a limit, ascending."""
    found = [np.empty(0, np.int64)]
    for first in range(0, len(sizes[0]), CHUNK):
        above = np.zeros(min(CHUNK, len(sizes[0]) - first), bool)
        for column, limit in zip(sizes, limits.tolist(), strict=True):
            above |= column[first : first + CHUNK] > limit
        found.append(first + np.flatnonzero(above))
    return np.concatenate(found)


def scatter(n: int, skipped: IntArray, num_shards: int, seed: int, epoch: int, out: Column) -> IntArray:
    """Rows 0 .. n - 1 but the skipped ones shard by shard into `out`, ascending in each; where the shards start.

    The shard of a row is a hash of its number and the seed: equally likely, independent. With the shuffle inside each
    shard that makes a random order of all, at two sequential passes instead of a cache miss per sample.
    """
    key = make_stream(seed, epoch, 0x7368)
    counts = np.zeros(num_shards + 1, np.int64)
    _count(n, skipped, key, num_shards, counts)
    starts = np.cumsum(counts)
    _place(n, skipped, key, num_shards, starts[:-1].copy(), out)
    return starts


@inlined
def _shard_of(row: int, key: UIntArray, num_shards: int) -> np.int64:
    z = key[0] + _U(row) * _U(0x9E3779B97F4A7C15)  # SplitMix64 of a counter: see rng
    z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
    z = z ^ (z >> _U(31))
    return np.int64(((z >> _U(32)) * _U(num_shards)) >> _U(32))


@compiled
def _count(n: int, skipped: IntArray, key: UIntArray, num_shards: int, counts: IntArray) -> None:
    s = 0
    for row in range(n):
        if s < len(skipped) and skipped[s] == row:
            s += 1
        else:
            counts[_shard_of(row, key, num_shards) + 1] += 1


@compiled
def _place(n: int, skipped: IntArray, key: UIntArray, num_shards: int, cursor: IntArray, out: Column) -> None:
    s = 0
    for row in range(n):
        if s < len(skipped) and skipped[s] == row:
            s += 1
        else:
            shard = _shard_of(row, key, num_shards)
            out[cursor[shard]] = row
            cursor[shard] += 1


def _read_shard(job: Job, number: int) -> _Shard:
    rows = job.indices[job.starts[number] : job.starts[number + 1]].copy()
    columns = [column[rows] for column in job.sizes]
    if isinstance(job.cost, np.ndarray):
        cost = job.cost[rows].astype(np.float64)
    else:
        cost = price_columns(job.cost, columns, job.limits)
    sizes = np.stack(columns, axis=1).astype(np.int64)
    return _Shard(rows=rows, sizes=sizes, cost=cost, above=above_limits(sizes, job.limits))


def pack_shard(job: Job, number: int) -> IntArray:
    """Pack one shard in its place in `job.indices`; samples in each of its packs, in the order in which they run."""
    shard = _read_shard(job, number)
    if len(shard.rows) == 0:
        return np.empty(0, np.int64)
    large, small = np.flatnonzero(shard.above), np.flatnonzero(~shard.above)
    sizes = shard.sizes if len(large) == 0 else shard.sizes[small]
    groups = pack_balanced(
        sizes,
        shard.cost if len(large) == 0 else shard.cost[small],
        shard=number,
        aim=job.aim,
        num_others=len(large),
        **job.how,
    )
    groups = complete_rows(groups, small, large, sizes, job.limits, dp=job.dp, keys=(job.seed, job.epoch), shard=number)
    if job.order != "random":
        members, starts = groups.members, groups.offsets[:-1]
        sums = np.column_stack([
            np.add.reduceat(shard.sizes[members], starts).astype(np.float64),
            np.add.reduceat(shard.cost[members], starts),
        ])  # fmt: skip
        sequence = order_packs(
            sums,
            dp=job.dp,
            order=job.order,
            seed=job.seed,
            epoch=job.epoch,
            tolerance=job.tolerance,
            first_block=number << 32,
        )
        groups = reorder(groups, sequence)
    job.indices[job.starts[number] : job.starts[number + 1]] = shard.rows[groups.members]
    return np.diff(groups.offsets)
