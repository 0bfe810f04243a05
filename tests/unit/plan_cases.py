"""Sample sizes like a mixture of chats, photos and many-page documents; shuffled packs; plans that are read back."""

from pathlib import Path

import numpy as np

from trimtab import Packing, PlanDetails, SampleTable, Schedule, check_plan, write_plan
from trimtab.files import write_atomically
from trimtab.plan.decide.steps import even_steps
from trimtab.plan.file.reload import ReloadedPlan, load_details, reload_plan
from trimtab.plan.file.yaml import pack_contents


def tile_samples(num_samples: int = 600, seed: int = 0) -> SampleTable:
    """Sizes in InternVL tiles of 1025 patches: up to 5 tiles, 256 tokens a tile and a heavy-tailed text."""
    rng = np.random.default_rng(seed)
    tiles = rng.choice([0, 1, 3, 5], p=[0.15, 0.2, 0.25, 0.4], size=num_samples).astype(np.int64)
    text = np.minimum(rng.lognormal(5.0, 0.9, size=num_samples), 3000).astype(np.int64) + 10
    return SampleTable.of(
        tiles * 1025,
        tiles * 256 + text,
        patches_sq=tiles * 1025**2,
        source=(tiles == 0).astype(np.int32),
        source_names=("images", "text"),
    )


def packs_of(num_packs: int, *, dp: int, num_microbatches: int, even: bool = False) -> tuple[Packing, Schedule]:
    """Pack p holds 1 + p % 3 rows; packs are dealt in a shuffled order, as schedule_packs deals them."""
    sizes = 1 + np.arange(num_packs) % 3
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    indices = np.random.default_rng(num_packs).permutation(int(offsets[-1])).astype(np.int64)
    num_steps = -(-num_packs // (dp * num_microbatches))
    slots = np.full(num_steps * num_microbatches * dp, -1, np.int64)
    slots[:num_packs] = np.random.default_rng(1).permutation(num_packs)
    table = np.ascontiguousarray(slots.reshape(num_steps, num_microbatches, dp).transpose(0, 2, 1))
    packing = Packing(offsets=offsets, indices=indices, limits=(10, 10), seed=5)
    schedule = Schedule(table=table)
    return packing, even_steps(schedule, num_microbatches) if even else schedule


def write_packs(folder: Path, packing: Packing, schedule: Schedule) -> Path:
    for name, content in pack_contents(packing, schedule).items():
        write_atomically(folder / name, content)
    return folder


def write_checked(made: PlanDetails, folder: Path) -> ReloadedPlan:
    """The plan as it is read back from where it was written; it passes `check_plan`."""
    write_plan(made, folder)
    assert check_plan(folder) == []
    return reload_plan(folder)


def read_back(made: PlanDetails, folder: Path) -> PlanDetails:
    """The same with its details, which simulate to the same figures."""
    write_checked(made, folder)
    loaded = load_details(folder)
    assert loaded.plan == made.plan
    for before, after in zip(made.variants, loaded.variants, strict=True):
        np.testing.assert_array_equal(before.step_s, after.step_s)
        assert before.epoch_s == after.epoch_s
        assert before.stages == after.stages
    return loaded
