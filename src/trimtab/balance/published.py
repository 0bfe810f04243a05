"""Packs as others make them: OmniBal's ISF, trainers' greedy packs, and their padded batches.

ISF, iterative sampling and filtering, is algorithm 1 of OmniBal (arXiv 2407.20761), here with nothing dropped. Symbols
as in the paper: Q_v, Q_t the limits of patches (images there) and tokens, Q'_v, Q'_t the filters, T iterations.
"""

import numpy as np

from trimtab.balance.schedule import Groups, offsets_of, reorder
from trimtab.compiled import compiled, make_stream, permutation, shuffle
from trimtab.errors import PackingError
from trimtab.specs import FloatArray, IntArray

FILTER_GAP = 128
"""Q_t - Q'_t of the paper's setting, Q_t 4096 and Q'_t 3968; its Q'_v is Q_v."""


def default_filters(limits: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's: Q_v itself and Q_t - 128; below Q_t 4096 the same share of it. (18, 6016) gives (18, 5888)."""
    first, *others = limits
    return (first, *(limit - min(FILTER_GAP, limit // 32) for limit in others))


def pack_isf(
    sizes: IntArray,
    *,
    limits: tuple[int, ...],
    filters: tuple[int, ...] | None,
    iterations: int,
    seed: int,
    epoch: int = 0,
) -> Groups:
    """Return the packs by ISF of samples with columns `sizes` (n, k), each of which fits a pack alone.

    T times: shuffle what is left, fill packs in that order, closing one when the next sample would break a limit,
    keep those with v >= Q'_v or t >= Q'_t. The packs of the last iteration are all kept, good or not: every sample is
    in one. The packs come out in random order. Heuristic, no bound; O(T (n + packs)).
    """
    filters = default_filters(limits) if filters is None else filters
    if iterations < 1:
        raise PackingError(f"iterations must be at least 1, not {iterations} (the paper uses 10)")
    if len(filters) != len(limits) or any(not 0 < f <= q for f, q in zip(filters, limits, strict=True)):
        raise PackingError(f"ISF filters {filters} for limits {limits}: give one per limit, above 0, not above it")
    # each iteration keeps the packs that pass a filter; the last one all
    bounds, least = np.array(limits, np.int64), np.array(filters, np.int64)
    state = make_stream(seed, epoch, 0x697366)
    left = np.arange(len(sizes))
    members, counts = [left[:0]], [left[:0]]
    for iteration in range(iterations):
        if len(left) == 0:
            break
        shuffle(left, state)
        starts = _fill_packs(sizes, left, bounds)
        num_held = np.diff(starts, append=len(left))
        is_kept = (np.add.reduceat(sizes[left], starts) >= least).any(axis=1) | (iteration == iterations - 1)
        is_packed = np.repeat(is_kept, num_held)
        members.append(left[is_packed])
        counts.append(num_held[is_kept])
        left = left[~is_packed]
    packs = Groups(np.concatenate(members), offsets_of(np.concatenate(counts)))
    # packs of early iterations are the fullest: in random order no part of an epoch has them all
    order = np.arange(packs.num_packs)
    shuffle(order, state)
    return reorder(packs, order)


@compiled
def _fill_packs(sizes: IntArray, order: IntArray, limits: IntArray) -> IntArray:
    """Return where packs begin: samples in this order, a new pack where the next one would break a limit."""
    k = sizes.shape[1]
    starts = np.zeros(len(order), np.int64)
    total = np.zeros(k, np.int64)
    num_packs = 1
    for position in range(len(order)):
        fits = True
        for d in range(k):
            total[d] += sizes[order[position], d]
            if total[d] > limits[d]:
                fits = False
        if not fits:
            starts[num_packs] = position
            num_packs += 1
            for d in range(k):
                total[d] = sizes[order[position], d]
    return starts[:num_packs]


BUFFER = 1000
"""Samples among which a trainer packs: LLaMA-Factory's `preprocessing_batch_size`."""


def pack_greedily(sizes: IntArray, *, limits: tuple[int, ...], seed: int, epoch: int = 0) -> Groups:
    """Pack as ms-swift and LLaMA-Factory do, by tokens: the longest first, each to the fullest that holds it.

    Along a shuffle, `BUFFER` samples at a time. `sizes` are (n, 2) patches and tokens. Those trainers know no limit of
    patches; one that is given is kept. The packs come out in random order. Heuristic: by tokens alone never more than
    11 / 9 of the fewest, and one, in each buffer.
    """
    tokens = sizes[:, 1]
    order = permutation(len(tokens), seed, epoch, 0x677264)
    order = order[np.lexsort((-tokens[order], np.arange(len(order)) // BUFFER))]
    pack = _best_fit(sizes, order, np.array(limits, np.int64))
    packs = Groups(order[np.argsort(pack, kind="stable")], offsets_of(np.bincount(pack)))
    shuffled = np.arange(packs.num_packs)
    shuffle(shuffled, make_stream(seed, epoch, 0x677265))
    return reorder(packs, shuffled)


@compiled
def _best_fit(sizes: IntArray, order: IntArray, limits: IntArray) -> IntArray:
    """The pack of each place of `order`: of the packs of its buffer the one with least tokens left, else a new one."""
    pack, rest = np.empty(len(order), np.int64), np.empty((len(order), 2), np.int64)
    first, num_packs = np.int64(0), np.int64(0)
    for place in range(len(order)):
        if place % BUFFER == 0:
            first = num_packs
        patches, tokens = sizes[order[place], 0], sizes[order[place], 1]
        best = np.int64(-1)
        for p in range(first, num_packs):
            if rest[p, 0] >= patches and rest[p, 1] >= tokens and (best < 0 or rest[p, 1] < rest[best, 1]):
                best = np.int64(p)
        if best < 0:
            best = num_packs
            rest[best, 0], rest[best, 1] = limits[0], limits[1]
            num_packs += 1
        rest[best, 0] -= patches
        rest[best, 1] -= tokens
        pack[place] = best
    return pack


# -- batches as trainers make them without packing: a fixed number of samples, padded to the longest. They are what the
# side by side compares with (OmniBal, arXiv 2407.20761, table 3); limits play no part in them.

MEGA_STEPS = 50
"""Steps among which `device_group` looks for samples of one length: Transformers' `group_by_length` sorts as many."""


def batch_randomly(num_samples: int, *, batch_size: float, dp: int, seed: int, epoch: int = 0) -> Groups:
    """Return batches along a shuffle."""
    return Groups(permutation(num_samples, seed, epoch, 0x726E64), _batch_bounds(num_samples, batch_size, dp))


def batch_by_length(lengths: FloatArray, *, batch_size: float, dp: int, seed: int, epoch: int = 0) -> Groups:
    """Group as LLaVA does: the samples of each step, longest first, each to the rank with the least so far.

    The shuffle decides which samples make a step and ranks get equally many, so nothing of the shuffle is lost.
    """
    order = permutation(len(lengths), seed, epoch, 0x6C656E)
    bounds = _batch_bounds(len(lengths), batch_size, dp)
    step = np.repeat(np.arange(len(bounds) - 1) // dp, np.diff(bounds))
    longest_first = order[np.lexsort((-lengths[order], step))]
    return Groups(_deal_steps(lengths, longest_first, bounds, dp), bounds)


def batch_by_device(lengths: FloatArray, *, batch_size: float, dp: int, seed: int, epoch: int = 0) -> Groups:
    """Return every rank gets samples of one length at the same time: dp neighbours in length, one for each rank.

    `MEGA_STEPS` steps of the shuffle are sorted by length and cut into rows of dp; the rows are shuffled, and a step is
    as many rows as a batch has samples.
    """
    n = len(lengths)
    num_rows = -(-n // dp)
    slots = np.full(num_rows * dp, -1, np.int64)
    slots[:n] = permutation(n, seed, epoch, 0x646576)
    block = max(1, round(MEGA_STEPS * batch_size)) * dp
    # neighbours in length, inside a block of the shuffle
    for number, first in enumerate(range(0, n, block)):
        part = slots[first : min(first + block, n)]
        part[:] = part[np.argsort(lengths[part], kind="stable")]
        rows = slots[first : first + block].reshape(-1, dp)
        rows[:] = rows[permutation(len(rows), seed, epoch, number, 0x726F77)]
    # rows become steps; each rank has the samples of its place
    num_steps = -(-num_rows // max(1, int(batch_size)))
    step_of_row = np.arange(num_rows) * num_steps // num_rows
    batch = (step_of_row[:, None] * dp + np.arange(dp)).reshape(-1)
    by_batch = np.argsort(batch, kind="stable")
    by_batch = by_batch[slots[by_batch] >= 0]
    counts = np.bincount(batch[by_batch], minlength=0)
    return Groups(slots[by_batch], offsets_of(counts[counts > 0]))


def _batch_bounds(num_samples: int, batch_size: float, dp: int) -> IntArray:
    """Return offsets of batches of equal size or one less, a multiple of dp of them where there are samples enough."""
    wanted = int(np.ceil(num_samples / batch_size))
    num_batches = min(num_samples, -(-wanted // dp) * dp)
    return np.arange(num_batches + 1, dtype=np.int64) * num_samples // max(1, num_batches)


@compiled
def _deal_steps(lengths: FloatArray, longest_first: IntArray, bounds: IntArray, dp: int) -> IntArray:
    """Return the samples batch by batch: each of a step to the rank with the least so far that has a place left."""
    num_batches = len(bounds) - 1
    order = np.empty(len(longest_first), np.int64)
    total = np.empty(dp)
    filled = np.empty(dp, np.int64)
    for first in range(0, num_batches, dp):
        last = min(first + dp, num_batches)
        for r in range(dp):
            total[r], filled[r] = 0.0, 0
        for i in range(bounds[first], bounds[last]):
            sample = longest_first[i]
            rank = -1
            for r in range(last - first):
                if filled[r] < bounds[first + r + 1] - bounds[first + r] and (rank < 0 or total[r] < total[rank]):
                    rank = r
            order[bounds[first + rank] + filled[rank]] = sample
            filled[rank] += 1
            total[rank] += lengths[sample]
    return order
