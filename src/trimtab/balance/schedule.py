"""Packs to whole rows, ranks and steps: in the order of the shuffle, or alike ones together for a price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from trimtab.errors import PackingError
from trimtab.options import Order
from trimtab.specs import FloatArray, IntArray, Schedule

if TYPE_CHECKING:
    from trimtab.compiled import UIntArray


ORDERS: tuple[Order, ...] = get_args(Order)

BLOCK_STEPS = 512
"""Steps within which `sorted` may move a pack: the reach of its disorder."""

ALIKE_COST = 0.005
"""Packs whose costs differ by more than this are grouped by cost, others by the column that differs most: rows wait for
their cost, and below this little is to be seen of it."""


def schedule_packs(
    columns: FloatArray,
    *,
    dp: int,
    num_microbatches: int = 1,
    order: Order = "random",
    seed: int = 0,
    epoch: int = 0,
    block_steps: int = BLOCK_STEPS,
) -> Schedule:
    """Return a schedule of packs with the given columns (num_packs, k): patches, tokens, cost, ...

    A *row* is what the ranks run at the same time: one pack each; a step is `num_microbatches` rows. `random` takes the
    packs as they come: only the shuffle decides in which step a pack is; within a step alike packs make the rows.
    `sorted` puts alike packs into one row within blocks of `block_steps` rows and shuffles the rows and the ranks of
    each row.

    Full rows but for the last, full steps but for the last; slots left over are -1.
    """
    # the order of packs, then steps of it, rank by rank
    check_order(order, dp, num_microbatches)
    keys = (seed, epoch)
    sequence = order_packs(
        columns,
        dp=dp,
        num_microbatches=num_microbatches,
        order=order,
        keys=keys,
        block_steps=block_steps,
    )
    return fill_table(sequence, dp, num_microbatches, order)


def check_order(order: Order, dp: int, num_microbatches: int) -> None:
    """Raise `PackingError` where packs cannot be put into such steps in this order."""
    if dp < 1 or num_microbatches < 1:
        raise PackingError(f"dp {dp} x {num_microbatches} micro-batches holds no pack: give 1 or more of both")
    if order not in ORDERS:
        raise PackingError(f"order {order!r} is unknown: choose one of {', '.join(ORDERS)}")


def _group_within(columns: FloatArray, sequence: IntArray, dp: int, run: int, keys: tuple[int, ...]) -> None:
    """Make rows of alike packs within each `run` packs in a row, which stay those packs; shuffle rows and ranks."""
    from trimtab.compiled import make_stream, shuffle

    group_alike(columns, sequence, dp, run=run)
    state = make_stream(*keys, 0x7264)
    for start in range(0, len(sequence), run):
        packs = sequence[start : start + run]
        num_rows = len(packs) // dp
        which = np.arange(num_rows, dtype=np.int64)
        shuffle(which, state)
        rows = packs[: num_rows * dp].reshape(-1, dp)[which]
        for row in rows:
            shuffle(row, state)
        packs[: num_rows * dp] = rows.reshape(-1)


def fill_table(sequence: IntArray, dp: int, num_microbatches: int, order: str) -> Schedule:
    """Put packs row after row into steps; what is left of the last one is -1."""
    num_steps = -(-len(sequence) // (dp * num_microbatches))
    slots = np.full(num_steps * num_microbatches * dp, -1, np.int64)
    slots[: len(sequence)] = sequence
    # (steps, microbatches, dp) -> (steps, dp, microbatches)
    table = slots.reshape(num_steps, num_microbatches, dp).transpose(0, 2, 1)
    return Schedule(table=np.ascontiguousarray(table), order=order)


def order_packs(
    columns: FloatArray,
    *,
    dp: int,
    num_microbatches: int,
    order: Order,
    keys: tuple[int, ...],
    block_steps: int = BLOCK_STEPS,
    num_before: int = 0,
) -> IntArray:
    """Return the packs in the order in which they run, row after row of dp; `num_before` packs run ahead of them."""
    sequence = np.arange(len(columns), dtype=np.int64)
    if order == "sorted":
        _group_within(columns, sequence, dp, max(1, block_steps) * dp, keys)
    elif num_microbatches > 1 and columns.shape[1]:
        per_step = dp * num_microbatches
        begun = -num_before % per_step  # packs that complete a step which others began
        for part in (sequence[:begun], sequence[begun:]):
            _group_within(columns, part, dp, per_step, keys)
    return sequence


def group_alike(columns: FloatArray, packs: IntArray, group: int, *, run: int | None = None) -> None:
    """Reorder `packs` in place so that each `group` in a row are alike in all columns; heuristic, no bound.

    Halves the packs (at a multiple of `group`) along the last column, the cost, or where that spreads by less than
    `ALIKE_COST` along the column in which they spread most, relative to its mean; and each half again. O(n log^2 n).
    With `run` each `run` packs in a row are grouped for themselves, all of them in the same passes.

    Example: tokens [9, 1, 8, 2] in groups of 2 spread over 8; sorted and cut in the middle: [9, 8] and [2, 1].
    """
    values = columns[packs]
    n = len(values)
    length = max(run or n, 1)
    starts = np.arange(0, n, length)  # of the runs that are still to be cut, all of one level of the tree
    ends = np.minimum(starts + length, n)
    means, mean_of = _means(values, length), np.arange(len(starts))
    while True:
        large = ends - starts > group
        starts, ends, mean_of = starts[large], ends[large], mean_of[large]
        if len(starts) == 0:
            return
        # 1. the column in which each run spreads most
        lengths = ends - starts
        first = np.cumsum(lengths) - lengths
        rows = np.repeat(starts - first, lengths) + np.arange(lengths.sum())
        spread = np.maximum.reduceat(values[rows], first) - np.minimum.reduceat(values[rows], first)
        mean = means[mean_of]
        relative = np.divide(spread, mean, out=np.zeros_like(spread), where=mean > 0)
        widest = np.where(relative[:, -1] > ALIKE_COST, relative.shape[1] - 1, np.argmax(relative, axis=1))
        # 2. each run in the order of that column, the largest first: a row that stays short gets the least
        number = np.repeat(np.arange(len(starts)), lengths)
        order = rows[np.lexsort((-values[rows, widest[number]], number))]
        values[rows], packs[rows] = values[order], packs[order]
        # 3. halves of whole groups
        middle = starts + group * (-(-lengths // group) // 2)
        starts, ends = np.stack([starts, middle], axis=1).reshape(-1), np.stack([middle, ends], axis=1).reshape(-1)
        mean_of = np.repeat(mean_of, 2)


def _means(values: FloatArray, length: int) -> FloatArray:
    """Return (runs, D) of each `length` rows, the last run maybe shorter; added in order: the same bits everywhere."""
    num_full = len(values) // length
    full, rest = np.split(values, [num_full * length])
    means = [np.cumsum(full.reshape(num_full, length, -1) / length, axis=1)[:, -1]] if num_full else []
    means += [np.cumsum(rest / len(rest), axis=0)[-1:]] if len(rest) else []
    return np.concatenate(means) if means else values


# -- packs as plain arrays while they are made, and the changes that whole rows ask for -----------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Samples in packs: pack p holds members[offsets[p]:offsets[p + 1]]."""

    members: IntArray
    offsets: IntArray

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1


def split_packs(groups: Groups, sizes: IntArray, limits: tuple[int, ...], extra: int) -> Groups:
    """Return `extra` packs more: those with the most samples are cut in two where the samples reach half of
    what they fill, each by its fullest column (`sizes` is (n, k)).

    The halves go to the end, so that they meet in the same steps. Unchanged if there are too few samples for so many.
    """
    if groups.num_packs + extra > len(groups.members):
        return groups
    # one round is enough where that many packs hold two samples; else the halves are cut again
    while extra > 0:
        counts = np.diff(groups.offsets)
        chosen = np.argsort(-counts, kind="stable")[:extra]
        chosen = chosen[counts[chosen] >= 2]
        stays = np.ones(groups.num_packs, np.bool_)
        stays[chosen] = False
        halves: list[IntArray] = []
        for p in chosen:
            pack = groups.members[groups.offsets[p] : groups.offsets[p + 1]]
            filled = np.cumsum((sizes[pack] / np.array(limits)).max(axis=1))
            cut = min(int(np.searchsorted(filled, filled[-1] / 2)) + 1, len(pack) - 1)
            halves += [pack[:cut], pack[cut:]]
        whole = reorder(groups, np.flatnonzero(stays))
        held = np.concatenate([counts[stays], [len(half) for half in halves]])
        groups = Groups(np.concatenate([whole.members, *halves]), offsets_of(held))
        extra -= len(chosen)
    return groups


def insert_singles(groups: Groups, singles: IntArray, places: IntArray) -> Groups:
    """Return each of `singles` as a pack of its own, before the pack whose number `places` gives."""
    starts = np.append(groups.offsets[:-1], groups.offsets[-1])[places]
    counts = np.insert(np.diff(groups.offsets), places, 1)
    return Groups(np.insert(groups.members, starts, singles), offsets_of(counts))


def complete_rows(
    groups: Groups,
    small: IntArray,
    large: IntArray,
    sizes: IntArray,
    limits: tuple[int, ...],
    *,
    dp: int,
    keys: tuple[int, ...],
) -> Groups:
    """Return the packs of all samples, a multiple of dp where there are samples enough.

    `groups` packs the samples `small`; each of `large` is a pack alone, somewhere among the others: where a shuffle
    would put it. `sizes` are the columns of all samples.
    """
    num_alone = len(large)
    groups = Groups(small[groups.members], groups.offsets)
    missing = -(groups.num_packs + num_alone) % dp  # packs short of whole rows: balanced plans for them, others do not
    if missing:
        groups = split_packs(groups, sizes, limits, missing)
    # large ones among the others, so that no step gathers them
    if num_alone:
        from trimtab.compiled import permutation

        slots = np.sort(permutation(groups.num_packs + num_alone, *keys, 3)[:num_alone])
        shuffled = large[permutation(num_alone, *keys, 4)]
        groups = insert_singles(groups, shuffled, slots - np.arange(num_alone))
    return groups


def shuffle_rows(groups: Groups, dp: int, state: UIntArray) -> Groups:
    """The same rows of dp packs in random order, an incomplete last one still last.

    Packs made together share out the same samples: steps of one window are more alike than chance would make them, and
    differ from those of the next. Shuffled, they follow each other as random batches do.
    """
    from trimtab.compiled import shuffle

    num_packs = groups.num_packs
    rows = np.arange(num_packs // dp, dtype=np.int64)
    shuffle(rows, state)
    sequence = np.arange(num_packs, dtype=np.int64)
    sequence[: len(rows) * dp] = (rows[:, None] * dp + np.arange(dp)).reshape(-1)
    return reorder(groups, sequence)


def reorder(groups: Groups, sequence: IntArray) -> Groups:
    """The same packs in another order."""
    counts = np.diff(groups.offsets)[sequence]
    offsets = offsets_of(counts)
    moved = np.repeat(groups.offsets[sequence] - offsets[:-1], counts)  # of each sample, by how much
    moved += np.arange(len(moved))
    return Groups(groups.members[moved], offsets)


def offsets_of(counts: IntArray | list[int]) -> IntArray:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
