"""The steps of an epoch, of exactly N samples each or of filled packs; and some of them, to try settings on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trimtab.balance.packing import PackResult, pack_samples, refuse_empty
from trimtab.balance.schedule import fill_table, offsets_of, schedule_packs
from trimtab.balance.step import pack_steps
from trimtab.compiled import permutation
from trimtab.costs.formula.layers import document_multiple
from trimtab.errors import PackingError, PartitionError
from trimtab.options import Oversize
from trimtab.partition.schedules import microbatch_unit
from trimtab.plan.decide.work import PATCHES, TOKENS, extreme_rows, packed_work, pad_documents, select_rows
from trimtab.plan.options import PlanOptions
from trimtab.specs import FloatArray, IntArray, ParallelDims, SampleTable, Schedule
from trimtab.units import format_number

_TRIED_SAMPLES = 4096  # of the epoch, in whole steps, to see how packs come out
_FILLED_SAMPLES, _FILLED_RANKS = 8192, 8  # the same where packs are filled, and the ranks they are grouped for
_MOST_PACKS = 8192  # of the tried steps, all ranks together
_ROOM = 1.01  # of limits over the largest pack seen, for steps that were not
_PACK_SIZES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # samples per filled pack that are tried
_TOKEN_SLACK = 1.04  # both limits bind at once only if samples are alike: room that lets packs fill in patches
_LARGE = 0.99  # quantile of sizes that open limits must hold, where larger samples may be skipped or go alone
_MOST_OVER = 1.25  # of the global batch, that filled packs may hold in a step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TriedPacks:
    """Packs of some steps of the epoch, and the limits that hold in all of it."""

    limits: tuple[int, int]  # patches and tokens
    packed: PackResult
    samples: SampleTable  # rows that the packs hold
    samples_work: FloatArray  # (num_samples, len(WORK_TERMS)) of them
    extremes: FloatArray  # (few, len(WORK_TERMS)) samples of the epoch that decide the largest pack
    samples_per_step: float
    mean_work: FloatArray  # (len(WORK_TERMS),) of a pack
    slowest_over_mean: float  # cost of a step's most expensive rank, over that of its ranks in the mean

    @property
    def num_microbatches(self) -> int:
        return int(self.packed.schedule.table.shape[2])

    @property
    def samples_per_pack(self) -> float:
        return self.samples_per_step / int(self.packed.schedule.table[0].size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tried:
    """The samples that settings are tried on, and what is known of all of them."""

    samples: SampleTable  # those of some steps, in the order of the epoch
    cost: FloatArray  # of each of them
    every: SampleTable  # all that are packed, in the order of the epoch
    options: PlanOptions
    global_batch: int
    token_window: int | None

    @property
    def starts(self) -> IntArray:
        """Return the first samples of all full steps."""
        return np.arange(max(1, len(self.every) // self.global_batch)) * self.global_batch


def open_steps(
    samples: SampleTable, options: PlanOptions, *, global_batch: int, cost: FloatArray, token_window: int | None
) -> Tried:
    """The samples of up to 4,096 samples' worth of steps, spread over the epoch."""
    # filled packs: a random part of the samples
    if options.fills_packs:
        count = min(len(samples), _FILLED_SAMPLES)
        rng = np.random.Generator(np.random.PCG64(options.seed % 2**128))
        rows = np.sort(rng.choice(len(samples), count, replace=False))
        return Tried(
            samples=select_rows(samples, rows),
            cost=cost[rows],
            every=samples,
            options=options,
            global_batch=global_batch,
            token_window=token_window,
        )
    # whole steps of the shuffle, spread over the epoch
    order = permutation(len(samples), options.seed, 0, 0)
    order = order[~_skipped(samples, options)[order]]
    if len(order) == 0:
        raise _nothing_fits(options)
    num_steps = max(1, len(order) // global_batch)
    count = min(num_steps, max(2, _TRIED_SAMPLES // global_batch))
    steps = np.unique(np.linspace(0, num_steps - 1, num=count).astype(np.int64))
    places = (steps[:, None] * global_batch + np.arange(min(global_batch, len(order)))).reshape(-1)
    return Tried(
        samples=select_rows(samples, order[places]),
        cost=cost[order[places]],
        every=select_rows(samples, order),
        options=options,
        global_batch=min(global_batch, len(order)),
        token_window=token_window,
    )


def _skipped(samples: SampleTable, options: PlanOptions) -> np.ndarray:
    """Return the samples that are left out as too large for a limit that was given, or for 99 % of the samples."""
    if options.oversize != "skip":
        return np.zeros(len(samples), np.bool_)
    # a limit that was left open leaves out one sample of a hundred: one giant would size every buffer
    over = np.zeros(len(samples), np.bool_)
    for sizes, limit in ((samples.num_patches, options.max_patches), (samples.num_tokens, options.max_tokens)):
        over |= sizes > (np.quantile(sizes, _LARGE, method="higher") if limit is None else limit)
    return over


def _nothing_fits(options: PlanOptions) -> PackingError:
    limits = {"max_patches": options.max_patches, "max_tokens": options.max_tokens}
    given = " and ".join(f"{name} {limit}" for name, limit in limits.items() if limit is not None)
    return PackingError(
        f"{given} was given, and hardly a sample is that small: raise it, or leave it out to have it chosen"
    )


# -- steps of exactly N samples -------------------------------------------------------------------------------------


def share_tried(tried: Tried, dims: ParallelDims, num_microbatches: int, *, unit: int = 1) -> TriedPacks:
    """The tried steps, each shared among dp x M packs; limits that were left open hold the largest of the epoch.

    A pack's least size follows for every step of the epoch: its mean, or the largest sample. How far packs are above
    that is seen in the tried steps.
    """
    # the tried steps, under the limits that are given
    options, N = tried.options, tried.global_batch
    part, every = pad_documents(tried.samples, dims), pad_documents(tried.every, dims)
    given = given_limits(options, dims)
    packed = _share_equally(
        part,
        options,
        dims,
        global_batch=N,
        limits=None if None in given else (given[0] or 0, given[1] or 0),
        num_microbatches=num_microbatches,
        cost=tried.cost,
        oversize="alone" if options.oversize == "alone" else "error",
        unit=unit,
    )
    # open limits hold the largest pack of the epoch: its bound, times what the tried packs are above theirs
    limits = []
    for limit, own, all_of in zip(
        given, (part.num_patches, part.num_tokens), (every.num_patches, every.num_tokens), strict=True
    ):
        if limit is None:
            least = _least_sizes(all_of, tried.starts, N, packed.schedule.table[0].size)
            seen = _least_sizes(own, np.arange(0, len(own), N), N, packed.schedule.table[0].size).max()
            most = float(np.asarray(packed.packing.sums(own)).max())
            above = 1.0 if seen == 0 else most / float(seen)
            largest = int(all_of.max(initial=0))
            limit = max(1, largest, math.ceil(float(least.max()) * above * (_ROOM if most > largest else 1.0)))
        limits.append(limit)
    return _tried_packs(
        tried, part, (limits[0], limits[1]), packed, extreme_rows(every.work(token_window=tried.token_window)), float(N)
    )


def _tried_packs(
    tried: Tried,
    part: SampleTable,
    limits: tuple[int, int],
    packed: PackResult,
    extremes: FloatArray,
    samples_per_step: float,
) -> TriedPacks:
    work = part.work(token_window=tried.token_window)
    table = packed.schedule.table
    # how uneven ranks are, and the mean pack as often as it runs
    packs, counts = np.unique(table[table >= 0], return_counts=True)
    by_rank = np.append(packed.packing.sums(tried.cost), 0.0)[table].sum(axis=2)
    return TriedPacks(
        limits=limits,
        packed=packed,
        samples=part,
        samples_work=work,
        extremes=extremes,
        samples_per_step=samples_per_step,
        slowest_over_mean=float(by_rank.max(axis=1).mean() / by_rank.mean()),
        mean_work=np.average(packed_work(packed.packing, work, tried.options.attention)[packs], axis=0, weights=counts),
    )


def too_few_samples(global_batch: int, dp: int) -> PartitionError:
    """Return why steps of so few samples cannot be shared among so many ranks."""
    return PartitionError(
        f"a step of {global_batch} samples leaves {dp - global_batch} of {dp} ranks idle: give {dp} or more, or a "
        "smaller dp"
    )


def given_limits(options: PlanOptions, dims: ParallelDims) -> tuple[int | None, int | None]:
    """The limits that were asked for, of tokens as documents are padded under context parallelism."""
    unit, tokens = document_multiple(dims), options.max_tokens
    return options.max_patches, None if tokens is None else -(-tokens // unit) * unit


def _least_sizes(sizes: IntArray, starts: IntArray, global_batch: int, num_packs: int) -> FloatArray:
    """Return the least that the largest pack of each step can hold."""
    whole = sizes[: starts[-1] + global_batch]
    total, largest = np.add.reduceat(whole, starts), np.maximum.reduceat(whole, starts)
    return np.asarray(np.maximum(total / num_packs, largest), np.float64)


def share_epoch(
    samples: SampleTable,
    options: PlanOptions,
    dims: ParallelDims,
    *,
    global_batch: int,
    num_microbatches: int,
    limits: tuple[int, int],
    cost: FloatArray,
) -> PackResult:
    """The epoch in steps of exactly `global_batch` samples; every slot of a full step has a pack where N allows."""
    packed = _share_equally(
        pad_documents(samples, dims),
        options,
        dims,
        global_batch=global_batch,
        limits=limits,
        num_microbatches=num_microbatches,
        cost=cost,
        oversize=options.oversize,
        unit=microbatch_unit(options.schedule, dims.pp),
    )
    return fill_slots(packed, cost)


def _share_equally(
    samples: SampleTable,
    options: PlanOptions,
    dims: ParallelDims,
    *,
    global_batch: int,
    limits: tuple[int, int] | None,
    num_microbatches: int,
    cost: FloatArray,
    oversize: Oversize,
    unit: int,
) -> PackResult:
    """Run `pack_steps` with as many micro-batches in every step: a multiple of `unit`, M or the least that fits."""
    while True:
        packed = pack_steps(
            samples,
            global_batch=global_batch,
            limits=limits,
            dp=dims.dp,
            num_microbatches=num_microbatches,
            equal_microbatches=True,
            cost=cost,
            oversize=oversize,
            seed=options.seed,
        )
        found = packed.schedule.table.shape[2]
        if found % unit == 0:
            return packed
        num_microbatches = -(-found // unit) * unit


def fill_slots(packed: PackResult, cost: FloatArray) -> PackResult:
    """The same steps without empty slots before a pack: loaders give every rank equally many packs.

    In a full step the cheapest sample of a pack of several gets a pack of its own; packs of a last step that is short
    are moved together, micro-batch by micro-batch.
    """
    packing, table = packed.packing, packed.schedule.table.copy()
    if (table >= 0).all():
        return packed
    packs = [packing.indices[a:b] for a, b in zip(packing.offsets[:-1], packing.offsets[1:], strict=True)]
    # 1. empty slots of steps that have enough samples
    for step in np.flatnonzero((table < 0).any(axis=(1, 2))).tolist():
        slots = table[step].reshape(-1)
        held = sum(len(packs[p]) for p in slots[slots >= 0].tolist())
        if held < len(slots):
            continue
        for slot in np.flatnonzero(slots < 0).tolist():
            several = [p for p in slots[slots >= 0].tolist() if len(packs[p]) > 1]
            source = min(several, key=lambda p: (float(cost[packs[p]].min()), p))
            cheapest = int(cost[packs[source]].argmin())
            slots[slot] = len(packs)
            packs.append(packs[source][cheapest : cheapest + 1])
            packs[source] = np.delete(packs[source], cheapest)
        table[step] = slots.reshape(table[step].shape)
    # 2. packs in the order of their slots, the last step without gaps
    last = table[-1].T.reshape(-1)
    full = np.full_like(last, -1)
    full[: int((last >= 0).sum())] = last[last >= 0]
    table[-1] = full.reshape(table.shape[2], table.shape[1]).T
    order = table[table >= 0]
    table[table >= 0] = np.arange(len(order))
    filled = replace(
        packing,
        offsets=offsets_of([len(packs[p]) for p in order.tolist()]),
        indices=np.concatenate([packs[p] for p in order.tolist()]),
    )
    return PackResult(packing=filled, schedule=replace(packed.schedule, table=table))


# -- filled packs ---------------------------------------------------------------------------------------------------


def fill_tried(tried: Tried, dims: ParallelDims) -> Iterator[tuple[float, PackResult, FloatArray]]:
    """Yield the samples a pack, packs and deciding rows for each pair of limits that is tried, growing."""
    options, samples = tried.options, pad_documents(tried.samples, dims)
    work = pad_documents(tried.every, dims).work(token_window=tried.token_window)
    options = replace(options, max_tokens=given_limits(options, dims)[1])
    found = False
    for limits in candidate_limits(work, options):
        packed = pack_samples(
            samples,
            limits=limits,
            dp=_FILLED_RANKS,
            method=options.method,
            order=options.order,
            cost=tried.cost,
            seed=options.seed,
            oversize=options.oversize if options.oversize != "error" else "skip",
        )
        if packed.packing.num_packs == 0:
            continue
        # samples that these limits leave out decide no row
        fits = work
        if options.oversize == "skip":
            fits = work[(work[:, PATCHES] <= limits[0]) & (work[:, TOKENS] <= limits[1])]
        found = True
        yield len(packed.packing.indices) / packed.packing.num_packs, packed, extreme_rows(fits)
    if not found:
        raise _nothing_fits(options)


def group_tried(
    tried: Tried, packed: PackResult, extremes: FloatArray, dims: ParallelDims, num_microbatches: int
) -> TriedPacks:
    """Return filled packs in steps of dp x M, as many whole steps as there are packs for; one at least."""
    options, packing = tried.options, packed.packing
    columns = np.asarray(packing.sums(np.stack([tried.samples.num_patches, tried.samples.num_tokens, tried.cost], 1)))
    per_step = dims.dp * num_microbatches
    if packing.num_packs < per_step:  # a step of more than there are: each several times
        slots = np.arange(per_step) % packing.num_packs
        schedule = fill_table(slots, dims.dp, num_microbatches, options.order)
    else:
        schedule = schedule_packs(
            columns, dp=dims.dp, num_microbatches=num_microbatches, order=options.order, seed=options.seed
        )
        whole = schedule.table[(schedule.table >= 0).all(axis=(1, 2))]
        schedule = replace(schedule, table=whole[: max(1, _MOST_PACKS // per_step)])
    per_pack = len(packing.indices) / packing.num_packs
    limits = (int(packing.limits[0]), int(packing.limits[1]))
    part, result = pad_documents(tried.samples, dims), PackResult(packing=packing, schedule=schedule)
    return _tried_packs(tried, part, limits, result, extremes, per_pack * per_step)


def refuse_over(options: PlanOptions, dims: ParallelDims, samples_per_pack: float) -> PartitionError | None:
    """Say why filled packs of so many samples make steps far above the batch asked for; None: they do not."""
    if options.global_batch is None or dims.dp * samples_per_pack <= _MOST_OVER * options.global_batch:
        return None
    return PartitionError(
        f"a filled pack of {format_number(samples_per_pack)} samples on each of {dims.dp} ranks is above global_batch "
        f"{options.global_batch}: give a larger batch, a smaller dp, or steps=exact"
    )


def fill_epoch(
    samples: SampleTable,
    options: PlanOptions,
    dims: ParallelDims,
    *,
    num_microbatches: int,
    limits: tuple[int, int],
    cost: FloatArray,
) -> PackResult:
    """Fill packs within the limits, as full as can be; steps are of equal length where their packs were left open."""
    packed = pack_samples(
        pad_documents(samples, dims),
        limits=limits,
        dp=dims.dp,
        num_microbatches=num_microbatches,
        method=options.method,
        order=options.order,
        cost=cost,
        seed=options.seed,
        oversize=options.oversize,
    )
    refuse_empty(packed.packing)
    if not options.leaves_steps_open:
        return packed
    return replace(packed, schedule=even_steps(packed.schedule, num_microbatches))


def even_steps(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The same rows of packs in the same order, in steps of equal length near `num_microbatches` rows.

    A row is what the ranks run at the same time. R rows are cut into about round(R / M) steps of equally many rows, the
    last of them shorter: steps of exactly M rows may leave it almost empty.
    """
    num_rows = int((schedule.table >= 0).any(axis=1).sum())
    per_step = max(1, math.ceil(num_rows / max(1, round(num_rows / num_microbatches))))
    slots = schedule.table.transpose(0, 2, 1).reshape(-1)
    return fill_table(slots[slots >= 0], schedule.table.shape[1], per_step, schedule.order)


def candidate_limits(samples_work: FloatArray, options: PlanOptions) -> Iterator[tuple[int, int]]:
    """Yield the pairs of limits, growing, in the ratio of the mean sample.

    They hold the largest sample; or, where larger ones may be skipped or go alone, 99 % of the samples.
    """
    if options.max_patches is not None and options.max_tokens is not None:
        yield options.max_patches, options.max_tokens
        return
    # the largest sample, or nearly; patches in whole tiles
    mean = samples_work.mean(axis=0)
    quantile = 1.0 if options.oversize == "error" else _LARGE
    least_patches = int(np.quantile(samples_work[:, PATCHES], quantile, method="higher"))
    least_tokens = int(np.quantile(samples_work[:, TOKENS], quantile, method="higher"))
    patches = samples_work[:, PATCHES].astype(np.int64)
    positive = patches[patches > 0]
    unit = int(np.gcd.reduce(positive)) if len(positive) else 1  # rows of one tile, where images come in tiles
    seen = set[tuple[int, int]]()
    for size in _PACK_SIZES:
        # a limit that is given says how many samples a pack holds, if the data has what it limits
        if options.max_patches is not None and mean[PATCHES] > 0:
            size = options.max_patches / mean[PATCHES]
        elif options.max_tokens is not None and mean[TOKENS] > 0:
            size = options.max_tokens / mean[TOKENS]
        # what is open grows with the size
        max_patches, max_tokens = options.max_patches, options.max_tokens
        if max_patches is None:
            max_patches = max(1, math.ceil(size * mean[PATCHES] / unit) * unit, least_patches)
        if max_tokens is None:
            max_tokens = max(1, math.ceil(_TOKEN_SLACK * size * mean[TOKENS]), least_tokens)
        if (max_patches, max_tokens) not in seen:
            seen.add((max_patches, max_tokens))
            yield max_patches, max_tokens
