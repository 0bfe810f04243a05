"""One epoch of the data: how often each row of a sample table is in it; sources drawn by weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trimtab.balance.packing import PackResult, describe_oversize
from trimtab.errors import PackingError, PlanError, join_problems
from trimtab.lora import FOUR_BITS, Lora
from trimtab.plan.decide.work import in_patches, select_rows
from trimtab.plan.options import PlanOptions, Weights, weight_problems
from trimtab.plan.plan import MixedSource
from trimtab.specs import FloatArray, IntArray, ModelSpec, SampleTable

TILES_ASSUMPTION = ("The data gives tiles: each is taken as one tile of the model's own image rule.",)
_MOST_REPEATS = 1000  # times as many samples as there are that may be drawn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Epoch:
    """What one epoch is made of: every sample of a table once, or as often as the weight of its source draws it."""

    samples: SampleTable
    times: IntArray  # (num_samples,) how often each row is in it
    sources: tuple[MixedSource, ...] = ()  # none: nothing is drawn, every row is there once
    notes: tuple[str, ...] = ()  # what was assumed of the table

    @property
    def rows(self) -> IntArray:
        """Return the rows of the table, ascending, each as often as it is drawn."""
        return np.repeat(np.arange(len(self.times)), self.times)

    @property
    def num_drawn(self) -> int:
        return int(self.times.sum())

    @property
    def drawn(self) -> SampleTable:
        """The table that is packed, a row for each time a sample is drawn."""
        return select_rows(self.samples, self.rows) if self.sources else self.samples

    def of_table(self, packed: PackResult) -> PackResult:
        """Return the packs of `drawn` as packs of `samples`."""
        packing, rows = packed.packing, self.rows
        return replace(packed, packing=replace(packing, indices=rows[packing.indices], oversize=rows[packing.oversize]))


def open_epoch(model: ModelSpec, samples: SampleTable, options: PlanOptions) -> Epoch:
    """Open one epoch: samples in the model's patches, as often as their weights draw them, none over a limit."""
    if len(samples) == 0:
        raise PlanError("there is no sample to plan: give a data set that holds some")
    refuse_stored(model, options.lora)
    # samples longer than the model's positions train, and the plan names them
    notes = TILES_ASSUMPTION if samples.patch_unit == "tiles" else ()
    most = model.max_positions
    if most is not None and (too_long := int((samples.num_tokens > most).sum())):
        notes = (
            *notes,
            f"{too_long:,} samples have more tokens than the model's {most:,} positions, the longest "
            f"{int(samples.num_tokens.max()):,}.",
        )
    epoch = draw_epoch(
        in_patches(samples, model), options.weights, num_drawn=options.num_drawn, seed=options.seed, notes=notes
    )
    if options.global_batch is not None and options.global_batch > epoch.num_drawn:
        raise PlanError(
            f"the data holds {epoch.num_drawn} samples, not a global_batch of {options.global_batch}: give fewer"
        )
    refuse_oversize(epoch, options)
    return epoch


def refuse_stored(model: ModelSpec, lora: Lora | None) -> None:
    """Refuse to train what lies in fewer bits: only adapters over 4-bit weights have a formula."""
    stored = model.stored_as
    if stored is None or (lora is not None and lora.bits == 4 and stored in FOUR_BITS):
        return
    cure = "the checkpoint in 16 bits that it was made from"
    if stored in FOUR_BITS:
        cure = f"--lora r=16,bits=4, or {cure}"
    raise PlanError(f"{model.name} is stored as {stored}, a format that is not trained: give {cure}")


def refuse_oversize(epoch: Epoch, options: PlanOptions) -> None:
    """Name the samples above limits that were given, before anything is chosen for them."""
    if options.oversize != "error" or options.max_patches is None or options.max_tokens is None:
        return
    samples = epoch.samples
    over = (samples.num_patches > options.max_patches) | (samples.num_tokens > options.max_tokens)
    over &= epoch.times > 0
    if over.any():
        limits = (options.max_patches, options.max_tokens)
        raise PackingError(describe_oversize(samples, np.flatnonzero(over), limits))


def draw_epoch(
    samples: SampleTable,
    weights: Weights,
    *,
    num_drawn: int | None = None,
    seed: int = 0,
    notes: tuple[str, ...] = (),
) -> Epoch:
    """Draw `num_drawn` samples (None: as many as there are), of which a source gets the share w / sum w.

    Exact: shares are met to less than one sample, and rows of one source are drawn equally often or once more. Every
    source of the table needs a weight; 0 leaves it out. Without weights every sample is there once.
    """
    if not weights:
        return Epoch(samples=samples, times=np.ones(len(samples), np.int64), notes=notes)
    # 1. how many rows each source gives
    sizes = np.bincount(samples.source, minlength=len(samples.source_names)).tolist()
    _refuse_names(dict(zip(samples.source_names, sizes, strict=True)), weights, num_drawn)
    weight_of = dict(weights)
    wanted = np.array([weight_of[name] for name in samples.source_names], np.float64)
    counts = share_exactly(len(samples) if num_drawn is None else num_drawn, wanted / float(wanted.sum())).tolist()
    # 2. which rows: all equally often, and the rest drawn
    times = np.zeros(len(samples), np.int64)
    for number, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        if count:
            times[samples.source == number] = _draw(size, count, seed, number)
    return Epoch(
        samples=samples,
        notes=notes,
        times=times,
        sources=tuple(
            MixedSource(name=name, weight=weight_of[name], num_rows=size, num_drawn=count)
            for name, size, count in zip(samples.source_names, sizes, counts, strict=True)
        ),
    )


def share_exactly(total: int, shares: FloatArray) -> IntArray:
    """Find whole numbers that add up to `total`, each within one of its share (largest remainders, first of equals)."""
    exact = total * shares
    counts = np.floor(exact).astype(np.int64)
    order = np.lexsort((np.arange(len(shares)), counts - exact))
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def _draw(num_rows: int, count: int, seed: int, source: int) -> IntArray:
    """Return (num_rows,) how often each row of a source is drawn: the first `count` of its endless shuffle."""
    from trimtab.compiled import permutation

    whole, rest = divmod(count, num_rows)
    times = np.full(num_rows, whole, np.int64)
    times[permutation(num_rows, seed, source, 0x6D6978)[:rest]] += 1
    return times


def _refuse_names(sizes: dict[str, int], weights: Weights, num_drawn: int | None) -> None:
    problems, given = weight_problems(weights), dict(weights)
    known = ", ".join(sizes)
    # every source has a weight, and every weight a source
    problems += [
        f"source {name!r} has a weight and no samples: name one of the sources of the data, {known}"
        for name in given
        if name not in sizes
    ]
    problems += [
        f"source {name!r} has {size} samples and no weight: give it one, or 0 to leave it out"
        for name, size in sizes.items()
        if name not in given
    ]
    problems += [
        f"source {name!r} has weight {given[name]:g} and no sample left: give it weight 0"
        for name, size in sizes.items()
        if size == 0 and given.get(name, 0) > 0
    ]
    # an epoch of some samples, each drawn a thousand times at most
    if num_drawn is not None and num_drawn < 1:
        problems.append(f"num_drawn must be at least 1, not {num_drawn}")
    most = _MOST_REPEATS * sum(sizes.values())
    if num_drawn is not None and num_drawn > most:
        problems.append(f"{num_drawn} samples were to be drawn of {sum(sizes.values())}: draw up to {most:,}")
    if problems:
        raise PlanError(join_problems(problems))
