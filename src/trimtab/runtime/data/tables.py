"""A plan's packs as the training loop reads them: tables mapped into memory, and a place in any epoch of them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.errors import PlanError, join_problems
from trimtab.files import blake2b, fingerprint_file
from trimtab.plan.file.yaml import load_plan, pack_contents, read_npy, table_path
from trimtab.plan.plan import ContinuedPlan
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
    continues: tuple[str, int] | None = None  # digest and packs a step of a plan whose steps hold the same samples

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
        """Return the rows of the sample table that one pack holds."""
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
            f"the tables in {folder} hold {len(offsets) - 1} packs in {schedule.shape}, not {packing.num_packs} in "
            f"{expected}: copy the whole folder of the plan"
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
        continues=packing.continues,
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
    continues: ContinuedPlan | None = None,
) -> PlanTables:
    whole = all(a.dtype == np.int64 for a in (offsets, indices, schedule))
    if not whole or offsets.ndim != 1 or indices.ndim != 1 or schedule.ndim != 3 or len(offsets) == 0:
        raise PlanError(f"the packs of {origin} have other shapes than a plan's: run `trimtab plan` again")
    if offsets[0] != 0 or offsets[-1] != len(indices):
        raise PlanError(f"the packs of {origin} point outside their samples: run `trimtab plan` again")
    if schedule.size < len(offsets) - 1:
        raise PlanError(f"{origin} has {schedule.size} slots for {len(offsets) - 1} packs: run `trimtab plan` again")
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
        continues=None if continues is None else (blake2b(continues.tables_blake2b.encode()), continues.packs_per_step),
    )


def _map_array(folder: Path, name: str) -> npt.NDArray[np.int64]:
    path = table_path(folder, name)
    return np.asarray(read_npy(path, path, mmap_mode="r"))  # a plain view: a memmap is indexed ten times as slowly


# A plan's packs given to any number of ranks, from any place of any epoch; no torch.
#
# The order of an epoch is one sequence of packs that does not depend on dp: steps of the plan in the epoch's order, in
# each the micro-batches in turn, in each the ranks in turn. dp ranks take dp consecutive packs at a time (a *row*), and
# M rows are a step. The place in it is counted in packs, so that a run may go on with another dp.


_KEYS = ("plan", "epoch", "packs_done", "microbatches_done", "dp", "num_microbatches", "seed", "reshuffle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in a run: what has been consumed of which epoch."""

    epoch: int = 0
    packs_done: int = 0  # places of the epoch's sequence before the current step: the same number for any dp
    microbatches_done: int = 0  # by every rank in the current step


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOrder:
    """Which packs each of dp ranks gets when; every rank gets equally many micro-batches in every step.

    Epoch 0 runs the plan's steps as they stand; with `reshuffle` later epochs run them in another order, decided by
    (seed, epoch) and nothing else; a short last step stays last. The last row may hold fewer packs than ranks: the
    ranks left over get an empty pack, and a last step of fewer rows is filled with rows of empty packs.
    """

    tables: PlanTables
    dp: int
    num_microbatches: int
    reshuffle: bool = True
    seed: int = 0

    @property
    def packs_per_step(self) -> int:
        return self.dp * self.num_microbatches

    def pack_at(self, epoch: int, place: int) -> int | None:
        """The pack at one place of the epoch's sequence; None for an empty slot, and past its end."""
        tables = self.tables
        slots = tables.dp * tables.num_microbatches
        if place >= tables.num_places:
            return None
        step, slot = divmod(place, slots)
        num_moved = len(tables.schedule) - tables.is_last_short
        if epoch > 0 and self.reshuffle and step < num_moved:
            step = int(_order_of_steps(num_moved, self.seed, epoch)[step])
        microbatch, rank = divmod(slot, tables.dp)
        pack = int(tables.schedule[step, rank, microbatch])
        return None if pack < 0 else pack

    def num_microbatches_left(self, cursor: Cursor) -> int:
        """Count the micro-batches of every rank from `cursor` to the end of its epoch."""
        return self.num_steps_left(cursor) * self.num_microbatches - cursor.microbatches_done

    def num_steps_left(self, cursor: Cursor) -> int:
        """Count the steps from `cursor` to the end of its epoch, the one it stands in included."""
        return -(-(self.tables.num_places - cursor.packs_done) // self.packs_per_step)

    def microbatches(self, rank: int, cursor: Cursor) -> Iterator[list[int]]:
        """Yield sample rows of each micro-batch of one rank, from `cursor` to its epoch's end; [] is an empty pack."""
        for number in range(self.num_microbatches_left(cursor)):
            place = cursor.packs_done + (cursor.microbatches_done + number) * self.dp + rank
            pack = self.pack_at(cursor.epoch, place)
            yield [] if pack is None else self.tables.rows(pack)

    def advance(self, cursor: Cursor, num_microbatches: int) -> Cursor:
        """Return where a run stands when every rank has consumed that many micro-batches more, within the epoch.

        The end of an epoch is the beginning of the next.
        """
        left = self.num_microbatches_left(cursor)
        assert 0 <= num_microbatches <= left
        if num_microbatches == left:
            return Cursor(epoch=cursor.epoch + 1)
        steps, microbatches = divmod(cursor.microbatches_done + num_microbatches, self.num_microbatches)
        return Cursor(
            epoch=cursor.epoch,
            packs_done=cursor.packs_done + steps * self.packs_per_step,
            microbatches_done=microbatches,
        )


@lru_cache(maxsize=2)
def _order_of_steps(num_steps: int, seed: int, epoch: int) -> IntArray:
    """Return a permutation that only (seed, epoch) decide; NumPy promises that `RandomState`'s never changes."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch]
    order: IntArray = np.random.RandomState(words).permutation(num_steps)
    return order


def make_order(
    tables: PlanTables,
    *,
    dp: int,
    num_microbatches: int | None = None,
    reshuffle: bool = True,
) -> PackOrder:
    """Return a plan's packs for `dp` ranks; without `num_microbatches`, as many as keep the plan's packs per step.

    Raises `PlanError` for settings that share nothing.
    """
    slots = tables.dp * tables.num_microbatches
    problems = []
    if dp < 1:
        problems.append(f"dp must be at least 1, not {dp}")
    if num_microbatches is not None and num_microbatches < 1:
        problems.append(f"num_microbatches must be at least 1, not {num_microbatches}")
    if num_microbatches is None and dp >= 1 and slots % dp:
        problems.append(f"{dp} ranks do not divide the {slots} packs of a step: give num_microbatches")
    if problems:
        raise PlanError(join_problems(problems))
    return PackOrder(
        tables=tables,
        dp=dp,
        num_microbatches=slots // dp if num_microbatches is None else num_microbatches,
        reshuffle=reshuffle,
        seed=tables.seed,
    )


def cursor_to_state(order: PackOrder, cursor: Cursor) -> dict[str, str | int]:
    """The place as plain text and numbers, for a checkpoint; with what must be the same to go on from it."""
    return {
        "plan": order.tables.digest,
        **asdict(cursor),
        "dp": order.dp,
        "num_microbatches": order.num_microbatches,
        "seed": order.seed,
        "reshuffle": int(order.reshuffle),
    }


def cursor_from_state(order: PackOrder, state: Mapping[str, Any]) -> Cursor:
    """The place a state names; `PlanError` where it belongs to another plan or order.

    dp and the number of micro-batches may differ between the runs if the state was taken between two steps. So may the
    plan, where this one goes on with the steps of that one.
    """
    wrong = [key for key in _KEYS if not isinstance(state.get(key), str if key == "plan" else int)]
    wrong += [key for key in ("epoch", "packs_done", "microbatches_done") if key not in wrong and state[key] < 0]
    if wrong:
        raise PlanError(f"the state has no usable {', '.join(wrong)}: give what state_dict() returned")
    problems, packs_done = [], state["packs_done"]
    if order.tables.continues is not None and state["plan"] == order.tables.continues[0]:
        steps, between = divmod(packs_done, order.tables.continues[1])
        packs_done = steps * order.tables.dp * order.tables.num_microbatches
        if between:
            problems.append("the state was taken inside a step of the plan before: resume from one between two steps")
    elif state["plan"] != order.tables.digest:
        problems.append(
            f"the state is of plan {state['plan']}, not {order.tables.digest}: resume with the plan of the run"
        )
    if state["seed"] != order.seed or bool(state["reshuffle"]) != order.reshuffle:
        problems.append(
            f"the state has seed {state['seed']}, reshuffle {bool(state['reshuffle'])}, not {order.seed}, "
            f"{order.reshuffle}: resume with these"
        )
    same = (state["dp"], state["num_microbatches"]) == (order.dp, order.num_microbatches)
    if state["microbatches_done"] and not same:
        problems.append(
            f"the state lies inside a step of {state['num_microbatches']} micro-batches on {state['dp']} ranks, not "
            f"{order.num_microbatches} on {order.dp}: resume as before"
        )
    cursor = Cursor(epoch=state["epoch"], packs_done=packs_done, microbatches_done=state["microbatches_done"])
    beyond = cursor.packs_done > 0 and cursor.packs_done >= order.tables.num_places
    if not problems and (beyond or cursor.microbatches_done >= order.num_microbatches):
        problems.append(
            f"no step is at place {cursor.packs_done} of {order.tables.num_places}, micro-batch "
            f"{cursor.microbatches_done} of {order.num_microbatches}: resume from another checkpoint"
        )
    if problems:
        raise PlanError(join_problems(problems))
    return cursor
