"""Packs and schedule as three .npy tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trimtab.balance.packing import PackResult
from trimtab.errors import PlanError
from trimtab.plan.decide.mixture import Epoch
from trimtab.plan.file.yaml import array_bytes, load_array, read_table
from trimtab.plan.plan import PackingDecision, Plan, TableFile
from trimtab.samples.table import table_from_bytes
from trimtab.specs import IntArray, Packing, SampleTable, Schedule


def pack_contents(packing: Packing, schedule: Schedule) -> dict[str, bytes]:
    """File name -> content of the three tables."""
    return {
        "offsets.npy": array_bytes(packing.offsets.astype(np.int64)),
        "indices.npy": array_bytes(packing.indices.astype(np.int64)),
        "schedule.npy": array_bytes(schedule.table.astype(np.int64)),
    }


def sizes_file(plan: Plan) -> TableFile:
    """The table of sizes beside the plan."""
    return TableFile(file=plan.inputs.data.table, blake2b=plan.inputs.data.table_blake2b)


def read_samples(plan: Plan, folder: Path) -> SampleTable:
    """The sizes that the plan was made from; refused if they are others."""
    table = sizes_file(plan)
    return table_from_bytes(read_table(folder, table), origin=str(folder / table.file))


def cover_problems(plan: Plan, epoch: Epoch, packed: PackResult) -> Iterator[str]:
    """Unless every sample is in a pack as often as it is drawn, or left out as oversize, and every pack in one slot."""
    packing, table, mixture = packed.packing, packed.schedule.table, plan.inputs.data.mixture
    often = "more often than the weights draw them" if mixture else "more than once"
    if epoch.sources != mixture:
        yield "the mixture has other counts in the plan than its weights give: run `trimtab plan` again"
    missing_times = epoch.times - np.bincount(packing.indices, minlength=len(epoch.times))
    if (missing_times < 0).any():
        yield f"{int((missing_times < 0).sum())} samples are packed {often}: run `trimtab plan` again"
    missing = int(missing_times[missing_times > 0].sum())
    if missing != plan.decisions.packing.num_oversize:
        yield (
            f"{missing} samples are in no pack, and the plan says that {plan.decisions.packing.num_oversize} were left "
            "out: run `trimtab plan` again"
        )
    runs = np.bincount(table[table >= 0], minlength=packing.num_packs)
    if (runs != 1).any():
        yield f"{int((runs != 1).sum())} packs are not run exactly once: run `trimtab plan` again"


def load_packs(folder: Path, decision: PackingDecision, *, times: IntArray) -> PackResult:
    """The tables a plan names; their hashes and shapes are checked before anything indexes with them.

    `times` is how often each sample of the plan's table is in an epoch.
    """
    num_samples = len(times)
    offsets, indices, table = (load_array(folder, t) for t in (decision.offsets, decision.indices, decision.schedule))
    whole = all(a.dtype == np.int64 for a in (offsets, indices, table))
    if not whole or offsets.ndim != 1 or indices.ndim != 1 or table.ndim != 3 or len(offsets) == 0:
        raise PlanError(f"the packs in {folder} have other shapes than a plan's: run `trimtab plan` again")
    ascending = offsets[0] == 0 and offsets[-1] == len(indices) and bool(np.all(np.diff(offsets) > 0))
    in_range = (len(indices) == 0 or (indices.min() >= 0 and indices.max() < num_samples)) and (
        table.size == 0 or (table.min() >= -1 and table.max() < len(offsets) - 1)
    )
    if not (ascending and in_range):
        raise PlanError(f"the packs in {folder} point outside the sample table: run `trimtab plan` again")
    oversize = np.empty(0, np.int64)
    if decision.num_oversize:
        missing = times - np.bincount(indices, minlength=num_samples)
        oversize = np.repeat(np.arange(num_samples), np.maximum(missing, 0))
    packing = Packing(
        offsets=offsets,
        indices=indices,
        limits=(decision.max_patches, decision.max_tokens),
        oversize=oversize,
        method=decision.method,
        seed=decision.seed,
    )
    return PackResult(packing=packing, schedule=Schedule(table=table, order=decision.order))
