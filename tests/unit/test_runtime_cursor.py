"""`runtime/data/tables.py`, `tables.py`: a plan's packs dealt to any number of ranks, from any place."""

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import packs_of, write_packs
from plans import small_plan

from refusals import refused
from trimtab.errors import PlanError
from trimtab.files import write_atomically
from trimtab.plan.file.yaml import name_table, plan_to_yaml
from trimtab.runtime.data.tables import (
    Cursor,
    PackOrder,
    PlanTables,
    cursor_from_state,
    cursor_to_state,
    hold_tables,
    make_order,
    open_tables,
)
from trimtab.specs import Packing, Schedule


def tables_of(num_packs: int, *, dp: int = 2, num_microbatches: int = 2, even: bool = False) -> PlanTables:
    return hold_tables(*packs_of(num_packs, dp=dp, num_microbatches=num_microbatches, even=even))


def epoch_of(order: PackOrder, cursor: Cursor) -> list[list[list[int]]]:
    """(rank, micro-batch) -> rows, from the cursor to the end of its epoch."""
    return [list(order.microbatches(rank, cursor)) for rank in range(order.dp)]


def in_order(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Packs in the order of the sequence, empty ones left out."""
    return [pack for row in zip(*ranks, strict=True) for pack in row if pack]


DEALS = st.fixed_dictionaries(
    {
        "num_packs": st.integers(1, 60),
        "plan_dp": st.integers(1, 5),
        "plan_microbatches": st.integers(1, 4),
        "even": st.booleans(),
        "dp": st.integers(1, 9),
        "num_microbatches": st.integers(1, 5),
        "reshuffle": st.booleans(),
        "epoch": st.integers(0, 3),
    }
)


def order_of(case: dict[str, object]) -> PackOrder:
    tables = tables_of(
        case["num_packs"], dp=case["plan_dp"], num_microbatches=case["plan_microbatches"], even=case["even"]
    )
    keys = ("dp", "num_microbatches", "reshuffle")
    return make_order(tables, **{key: case[key] for key in keys})


@settings(max_examples=150, deadline=None)
@given(case=DEALS)
def test_every_row_once_and_equally_many_microbatches_for_any_dp(case) -> None:
    order = order_of(case)
    ranks = epoch_of(order, Cursor(epoch=case["epoch"]))
    assert len({len(own) for own in ranks}) == 1
    rows = [row for own in ranks for pack in own for row in pack]
    assert sorted(rows) == list(range(len(order.tables.indices)))
    num_rows = math.ceil(order.tables.num_packs / order.dp)
    assert len(ranks[0]) == math.ceil(num_rows / order.num_microbatches) * order.num_microbatches


@settings(max_examples=100, deadline=None)
@given(case=DEALS, share=st.floats(0, 1))
def test_resume_after_any_microbatch_equals_going_on(case, share) -> None:
    order = order_of(case)
    start = Cursor(epoch=case["epoch"])
    whole = epoch_of(order, start)
    done = int(share * len(whole[0]))
    resumed = cursor_from_state(order, cursor_to_state(order, order.advance(start, done)))
    if done == len(whole[0]):
        assert resumed == Cursor(epoch=case["epoch"] + 1)
    else:
        assert epoch_of(order, resumed) == [own[done:] for own in whole]
        assert order.num_microbatches_left(resumed) == len(whole[0]) - done


@settings(max_examples=100, deadline=None)
@given(case=DEALS, dps=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=5))
def test_a_run_that_changes_dp_between_steps_sees_every_pack_once_and_in_order(case, dps) -> None:
    first = order_of(case)
    expected = in_order(epoch_of(first, Cursor(epoch=case["epoch"])))
    seen, order, cursor = [], first, Cursor(epoch=case["epoch"])
    for dp, num_steps in dps:
        count = min(num_steps * order.num_microbatches, order.num_microbatches_left(cursor))
        ranks = [own[:count] for own in epoch_of(order, cursor)]
        seen += in_order(ranks)
        state = cursor_to_state(order, order.advance(cursor, count))
        order = order_of({**case, "dp": dp})
        cursor = cursor_from_state(order, state)
        if cursor.epoch > case["epoch"]:
            break
    else:
        seen += in_order(epoch_of(order, cursor))
    assert seen == expected


def step_of(order: PackOrder, epoch: int, step: int, rank: int) -> list[list[int]]:
    """The sample rows of each micro-batch of one rank in one step."""
    cursor = Cursor(epoch=epoch, packs_done=step * order.packs_per_step)
    return list(islice(order.microbatches(rank, cursor), order.num_microbatches))


@pytest.mark.parametrize("dp", [2, 4, 8, 16, 32])
def test_a_plan_for_8_ranks_keeps_its_steps_on_fewer_and_on_more(dp: int) -> None:
    tables = tables_of(320, dp=8, num_microbatches=4)
    order = make_order(tables, dp=dp)
    assert order.num_microbatches * dp == 32
    for step in (0, 7):
        packs = [pack for rank in range(dp) for pack in step_of(order, 0, step, rank)]
        planned = [tables.rows(int(pack)) for pack in tables.schedule[step].reshape(-1)]
        assert sorted(packs) == sorted(planned)


def test_epoch_0_is_the_plan_itself_and_later_epochs_reorder_its_steps() -> None:
    tables = tables_of(43)  # 10 full steps of 4 packs, and a short one
    order = make_order(tables, dp=2, num_microbatches=2)
    steps = [
        [[step_of(order, epoch, step, rank) for rank in range(2)] for step in range(order.num_steps_left(Cursor()))]
        for epoch in range(3)
    ]
    plan = [[[tables.rows(p) if p >= 0 else [] for p in own] for own in step] for step in tables.schedule.tolist()]
    assert steps[0] == plan
    for epoch in (1, 2):
        assert steps[epoch] != plan
        assert sorted(steps[epoch]) == sorted(plan)
        assert steps[epoch][-1] == plan[-1]  # the short step stays last
    assert steps[1] != steps[2]
    again = make_order(tables, dp=2, num_microbatches=2, reshuffle=False)
    assert epoch_of(again, Cursor(epoch=2)) == epoch_of(again, Cursor())
    other = replace(make_order(tables, dp=2, num_microbatches=2), seed=99)
    assert epoch_of(other, Cursor(epoch=1)) != epoch_of(order, Cursor(epoch=1))
    assert epoch_of(other, Cursor()) == epoch_of(order, Cursor())


# -- tables -----------------------------------------------------------------------------------------------------------


def test_tables_of_a_folder_are_those_in_memory(tmp_path: Path) -> None:
    packing, schedule = packs_of(23, dp=2, num_microbatches=3)
    opened, held = open_tables(write_packs(tmp_path, packing, schedule)), hold_tables(packing, schedule)
    deals = [make_order(tables, dp=2) for tables in (opened, held)]
    assert epoch_of(deals[0], Cursor()) == epoch_of(deals[1], Cursor())


def test_the_tables_are_mapped_and_not_read(tmp_path: Path) -> None:
    """What is opened holds on to the files and owns next to nothing, however large they are."""
    tables = open_tables(write_packs(tmp_path, *packs_of(1000, dp=2, num_microbatches=3)))
    for name in ("offsets", "indices", "schedule"):
        base = getattr(tables, name)
        while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap), name


def test_an_empty_slot_inside_an_epoch_is_an_empty_pack() -> None:
    packing = Packing(offsets=np.array([0, 1, 2, 3]), indices=np.arange(3), limits=(1, 1))
    tables = hold_tables(packing, Schedule(table=np.array([[[0], [-1]], [[1], [2]]])))
    assert epoch_of(make_order(tables, dp=2), Cursor()) == [[[0], [1]], [[], [2]]]
    later = epoch_of(make_order(tables, dp=2), Cursor(epoch=1))
    assert sorted(row for rank in later for pack in rank for row in pack) == [0, 1, 2]
    assert sum(pack == [] for rank in later for pack in rank) == 1


def write_plan_folder(folder: Path, *, num_packs: int = 11, **names: str) -> Path:
    """A plan.yaml that names 11 packs in 3 steps of 2 ranks x 2 micro-batches, and its tables."""
    packing, schedule = packs_of(11, dp=2, num_microbatches=2)
    write_packs(folder, packing, schedule)
    plan = small_plan()
    tables = {
        key: name_table(names.get(key, f"{key}.npy"), (folder / f"{key}.npy").read_bytes())
        for key in ("offsets", "indices", "schedule")
    }
    decisions = replace(
        plan.decisions,
        parallel=replace(plan.decisions.parallel, dp=2),
        schedule=replace(plan.decisions.schedule, num_microbatches=2),
        packing=replace(plan.decisions.packing, num_packs=num_packs, num_steps=3, seed=5, **tables),
    )
    write_atomically(folder / "plan.yaml", plan_to_yaml(replace(plan, decisions=decisions)))
    return folder


def test_a_state_of_a_plan_folder_is_one_of_the_same_packs_in_memory(tmp_path: Path) -> None:
    opened = open_tables(write_plan_folder(tmp_path))
    held = tables_of(11)
    assert (opened.digest, opened.seed) == (held.digest, held.seed)
    assert open_tables(tmp_path / "plan.yaml").digest == opened.digest
    order = make_order(opened, dp=2)
    state = cursor_to_state(order, order.advance(Cursor(epoch=2), 2))
    assert cursor_from_state(make_order(held, dp=2), state) == Cursor(epoch=2, packs_done=4)


# -- settings and states ----------------------------------------------------------------------------------------------


def test_a_state_of_another_plan_order_or_kind_is_refused() -> None:
    order = make_order(tables_of(16), dp=2, num_microbatches=2)
    state = cursor_to_state(order, order.advance(Cursor(epoch=1), 4))
    assert cursor_from_state(order, state) == Cursor(epoch=1, packs_done=8)
    with refused(PlanError):
        cursor_from_state(make_order(tables_of(17), dp=2, num_microbatches=2), state)
    with refused(PlanError):
        cursor_from_state(replace(make_order(tables_of(16), dp=2, num_microbatches=2), seed=6), state)
    with refused(PlanError, "packs_done", "state_dict"):
        cursor_from_state(order, {**state, "seed": "5", "packs_done": -1})
    with refused(PlanError, "16"):
        cursor_from_state(order, {**state, "packs_done": 16})


def test_a_state_inside_a_step_needs_the_same_ranks() -> None:
    order = make_order(tables_of(16), dp=2, num_microbatches=2)
    state = cursor_to_state(order, order.advance(Cursor(), 3))
    assert cursor_from_state(order, state) == Cursor(packs_done=4, microbatches_done=1)
    with refused(PlanError, "1", "2"):
        cursor_from_state(make_order(tables_of(16), dp=4, num_microbatches=1), state)
