"""A plan's packs as the training loop reads them: three tables, mapped into memory and never read whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab.errors import PlanError
from trimtab.files import blake2b, fingerprint_file
from trimtab.plan.file.yaml import load_plan, pack_contents, read_npy, table_path
from trimtab.specs import IntArray, Packing, Schedule

_NAMES = ("offsets.npy", "indices.npy", "schedule.npy")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTables:
    """Which sample rows each pack holds, and the packs of each step.

    A slot may be empty: of a last step, or where a step of few samples has no pack for it. Every pack is in one slot.
    """

    offsets: IntArray  # (num_packs + 1,)
    indices: IntArray  # rows of the sample table
    schedule: IntArray  # (num_steps, dp, num_microbatches), -1 an empty slot
    digest: str  # tells plans apart: of the tables' content
    seed: int  # of the plan's shuffle; later epochs are shuffled from it too
    num_places: int  # slots in the order in which they run, up to the last that holds a pack
    is_last_short: bool  # the last step holds fewer packs or samples than others: it stays the last of every epoch

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1

    @property
    def dp(self) -> int:
        return int(self.schedule.shape[1])

    @property
    def num_microbatches(self) -> int:
        return int(self.schedule.shape[2])

    def rows(self, pack: int) -> list[int]:
        """Rows of the sample table that one pack holds."""
        rows: list[int] = self.indices[self.offsets[pack] : self.offsets[pack + 1]].tolist()
        return rows


def open_tables(folder: Path | str) -> PlanTables:
    """The tables of a plan's folder or file, or of a folder that `trimtab pack --out` wrote, mapped into memory.

    Costs the same for any number of samples: shapes are compared with the plan's, contents are `trimtab check`'s
    business. Raises `PlanError` where the tables are missing or of other shapes.
    """
    path = Path(folder)
    folder = path.parent if path.is_file() or path.name == "plan.yaml" else path
    file = path if path.is_file() else folder / "plan.yaml"
    if not file.is_file():
        arrays = [_map_array(folder, name) for name in _NAMES]
        digest = blake2b("".join(fingerprint_file(folder / name) for name in _NAMES).encode())
        return _tables(*arrays, digest=digest, seed=0, origin=str(folder))
    decisions = load_plan(file).decisions
    packing = decisions.packing
    files = (packing.offsets, packing.indices, packing.schedule)
    offsets, indices, schedule = (_map_array(folder, file.file) for file in files)
    expected = (packing.num_steps, decisions.parallel.dp, decisions.schedule.num_microbatches)
    if schedule.shape != expected or len(offsets) != packing.num_packs + 1:
        raise PlanError(
            f"the plan in {folder} has {packing.num_packs} packs in {expected} steps x dp x micro-batches, its tables "
            f"{len(offsets) - 1} in {schedule.shape}: copy the whole folder that `trimtab plan` wrote"
        )
    digest = blake2b("".join(file.blake2b for file in files).encode())
    return _tables(
        offsets,
        indices,
        schedule,
        digest=digest,
        seed=packing.seed,
        origin=str(folder),
        global_batch=packing.global_batch,
    )


def hold_tables(packing: Packing, schedule: Schedule) -> PlanTables:
    """The tables of packs made in memory; their digest is that of the plan folder they would be written to.

    Use it to give packs to `PlanBatchSampler` or `PlanDataLoader` without a plan folder.

    >>> from trimtab import pack_samples, SampleTable
    >>> packed = pack_samples(SampleTable.of([100, 200], [30, 40]), limits=(400, 100))
    >>> hold_tables(packed.packing, packed.schedule).num_packs
    1
    """
    contents = pack_contents(packing, schedule)
    digest = blake2b("".join(blake2b(contents[name]) for name in _NAMES).encode())
    return _tables(
        packing.offsets, packing.indices, schedule.table, digest=digest, seed=packing.seed, origin="the schedule"
    )


def _tables(
    offsets: IntArray,
    indices: IntArray,
    schedule: IntArray,
    *,
    digest: str,
    seed: int,
    origin: str,
    global_batch: int | None = None,
) -> PlanTables:
    whole = all(a.dtype == np.int64 for a in (offsets, indices, schedule))
    if not whole or offsets.ndim != 1 or indices.ndim != 1 or schedule.ndim != 3 or len(offsets) == 0:
        raise PlanError(f"the packs of {origin} have other shapes than a plan's: run `trimtab plan` again")
    if offsets[0] != 0 or offsets[-1] != len(indices):
        raise PlanError(f"the packs of {origin} point outside their samples: run `trimtab plan` again")
    if schedule.size < len(offsets) - 1:
        raise PlanError(
            f"{origin} has {schedule.size} slots for {len(offsets) - 1} packs, and every pack needs one: run "
            "`trimtab plan` again"
        )
    last = schedule[-1].T.reshape(-1) if len(schedule) else np.empty(0, np.int64)
    num_last = int(np.flatnonzero(last >= 0).max(initial=-1)) + 1
    return PlanTables(
        offsets=offsets,
        indices=indices,
        schedule=schedule,
        digest=digest,
        seed=seed,
        num_places=schedule.size - len(last) + num_last,
        is_last_short=num_last < len(last) or (global_batch is not None and len(indices) % global_batch > 0),
    )


def _map_array(folder: Path, name: str) -> npt.NDArray[np.int64]:
    path = table_path(folder, name)
    return np.asarray(read_npy(path, path, mmap_mode="r"))  # a plain view: a memmap is indexed ten times as slowly
