"""plan/file/reload.py: packs as tables, and steps of equal length."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plans import small_plan

from trimtab.plan.decide.steps import even_steps
from trimtab.plan.file.yaml import name_table, pack_contents
from trimtab.plan.plan import PackingDecision
from trimtab.specs import Packing, Schedule

PACKING = Packing(offsets=np.array([0, 2, 3]), indices=np.array([2, 0, 1]), limits=(36864, 8192))
SCHEDULE = Schedule(table=np.array([[[0], [1]]]))


def schedule_of(num_packs: int, dp: int, num_microbatches: int) -> Schedule:
    num_rows = -(-num_packs // dp)
    num_steps = max(1, -(-num_rows // num_microbatches))
    slots = np.full(num_steps * num_microbatches * dp, -1, np.int64)
    slots[:num_packs] = np.arange(num_packs)
    return Schedule(table=slots.reshape(num_steps, num_microbatches, dp).transpose(0, 2, 1))


def sequence(schedule: Schedule) -> list[int]:
    flat = schedule.table.transpose(0, 2, 1).reshape(-1)
    return flat[flat >= 0].tolist()


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9))
def test_even_steps_keep_every_row_in_order_and_waste_less_than_a_step(n: int, dp: int, m: int) -> None:
    before = schedule_of(n, dp, m)
    after = even_steps(before, m)
    assert sequence(after) == sequence(before)
    num_rows = -(-n // dp)
    steps, _, rows = after.table.shape
    assert 0 <= steps * rows - num_rows < rows
    assert (after.table >= 0).any(axis=(1, 2)).all(), "a step is empty"


def written(folder: Path, packing: Packing = PACKING, schedule: Schedule = SCHEDULE) -> PackingDecision:
    contents = pack_contents(packing, schedule)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    tables = {name.removesuffix(".npy"): name_table(name, content) for name, content in contents.items()}
    return dataclasses.replace(small_plan().decisions.packing, **tables)
