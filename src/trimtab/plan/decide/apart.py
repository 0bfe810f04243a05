"""Data sets packed apart: every pack and every row of ranks holds samples of one set (OmniBal's `multi_group`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.balance.dispatch import fill_table
from trimtab.balance.packing import PackResult, pack_samples
from trimtab.balance.rng import permutation
from trimtab.errors import PlanError
from trimtab.plan.decide.work import select_rows
from trimtab.specs import IntArray, Packing, SampleTable, Schedule


def pack_apart(
    samples: SampleTable,
    *,
    limits: Sequence[tuple[int, int]],
    dp: int = 1,
    num_microbatches: int = 1,
    seed: int = 0,
    how: Mapping[str, Any],
) -> PackResult:
    """Use it where sets differ so much (text alone beside images) that shared limits suit neither.

    Every source of the table is packed for itself under its own pair of `limits` (one pair: the same for all), by
    `pack_samples` with the arguments `how`. A row, what the ranks run at the same time, is of one source; rows of all
    sources are shuffled together. Nothing is dropped or padded with samples that come twice: a source whose packs fill
    no row leaves slots empty, and such rows come last.
    """
    sources = np.unique(samples.source).tolist()
    if len(limits) not in (1, len(sources)):
        raise PlanError(
            f"{len(limits)} pairs of limits were given for {len(sources)} data sets: give one pair, or one for each"
        )
    indices: list[IntArray] = []
    sizes: list[IntArray] = []
    oversize: list[IntArray] = []
    rows: list[IntArray] = []
    num_packs = 0
    for number, source in enumerate(sources):
        own = np.flatnonzero(samples.source == source)
        part = pack_samples(select_rows(samples, own), limits=limits[number % len(limits)], dp=dp, seed=seed, **how)
        table = part.schedule.table[:, :, 0]  # one micro-batch a step: a step is a row
        rows.append(np.where(table >= 0, table + num_packs, -1))
        num_packs += part.packing.num_packs
        indices.append(own[part.packing.indices])
        sizes.append(np.diff(part.packing.offsets))
        oversize.append(own[part.packing.oversize])
    packing = Packing(
        offsets=np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64),
        indices=np.concatenate(indices),
        limits=(max(q for q, _ in limits), max(q for _, q in limits)),
        oversize=np.sort(np.concatenate(oversize)),
        method=how.get("method", "balanced"),
        seed=seed,
    )
    return PackResult(packing=packing, schedule=_mix_rows(rows, num_microbatches, how.get("order", "random"), seed))


def _mix_rows(parts: Sequence[IntArray], num_microbatches: int, order: str, seed: int) -> Schedule:
    """Rows of all sources in random order, those with empty slots last, `num_microbatches` of them a step."""
    rows = np.concatenate(parts)
    rows = rows[permutation(len(rows), seed, 0x6170)]
    rows = rows[np.argsort((rows < 0).any(axis=1), kind="stable")]
    return fill_table(rows.reshape(-1), rows.shape[1], num_microbatches, order)
