"""Packs as plain arrays while they are made, and the changes that whole steps ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trimtab.specs import IntArray

if TYPE_CHECKING:
    from trimtab.balance.rng import UIntArray


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Samples in packs: pack p holds members[offsets[p]:offsets[p + 1]]."""

    members: IntArray
    offsets: IntArray

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1


def split_packs(groups: Groups, sizes: IntArray, limits: tuple[int, ...], extra: int) -> Groups:
    """`extra` packs more: those with the most samples are cut in two where the samples reach half of
    what they fill, each by its fullest column (`sizes` is (n, k)).

    The halves go to the end, so that they meet in the same steps. Unchanged if there are too few samples for so many.
    """
    if groups.num_packs + extra > len(groups.members):
        return groups
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
        groups = Groups(np.concatenate([whole.members, *halves]), _offsets_of(held))
        extra -= len(chosen)
    return groups


def insert_singles(groups: Groups, singles: IntArray, places: IntArray) -> Groups:
    """Each of `singles` as a pack of its own, before the pack whose number `places` gives."""
    starts = np.append(groups.offsets[:-1], groups.offsets[-1])[places]
    counts = np.insert(np.diff(groups.offsets), places, 1)
    return Groups(np.insert(groups.members, starts, singles), _offsets_of(counts))


def complete_rows(
    groups: Groups,
    small: IntArray,
    large: IntArray,
    sizes: IntArray,
    limits: tuple[int, ...],
    *,
    dp: int,
    keys: tuple[int, int],
    shard: int = 0,
) -> Groups:
    """Packs of all samples, a multiple of dp where there are samples enough.

    `groups` packs the rows of `small`, whose columns are `sizes`; each of `large` is a pack alone, somewhere among the
    others: where a shuffle would put it.
    """
    num_alone = len(large)
    missing = -(groups.num_packs + num_alone) % dp  # packs short of whole rows: balanced plans for them, others do not
    if missing:
        groups = split_packs(groups, sizes, limits, missing)
    groups = Groups(small[groups.members], groups.offsets)
    if num_alone:
        from trimtab.balance.rng import permutation

        keys_of_shard = (*keys, shard) if shard else keys
        slots = np.sort(permutation(groups.num_packs + num_alone, *keys_of_shard, 3)[:num_alone])
        shuffled = large[permutation(num_alone, *keys_of_shard, 4)]
        groups = insert_singles(groups, shuffled, slots - np.arange(num_alone))
    return groups


def shuffle_rows(groups: Groups, dp: int, state: UIntArray) -> Groups:
    """The same rows of dp packs in random order, an incomplete last one still last.

    Packs made together share out the same samples: steps of one window are more alike than chance would make them, and
    differ from those of the next. Shuffled, they follow each other as random batches do.
    """
    from trimtab.balance.rng import shuffle

    num_packs = groups.num_packs
    rows = np.arange(num_packs // dp, dtype=np.int64)
    shuffle(rows, state)
    sequence = np.arange(num_packs, dtype=np.int64)
    sequence[: len(rows) * dp] = (rows[:, None] * dp + np.arange(dp)).reshape(-1)
    return reorder(groups, sequence)


def reorder(groups: Groups, sequence: IntArray) -> Groups:
    """The same packs in another order."""
    counts = np.diff(groups.offsets)[sequence]
    offsets = _offsets_of(counts)
    moved = np.repeat(groups.offsets[sequence] - offsets[:-1], counts)  # of each sample, by how much
    moved += np.arange(len(moved))
    return Groups(groups.members[moved], offsets)


def _offsets_of(counts: IntArray | list[int]) -> IntArray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
