"""From a plan's tables through loader, collator and Trainer to one step. Needs torch, Transformers and Accelerate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from test_packed_gradients import gradient_alone
from tiny_packs import TinyPacks, make_tiny_packs, trainer_arguments

from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.data.tables import PlanTables, hold_tables
from trimtab.runtime.training.balanced import balanced
from trimtab.specs import Packing, Schedule


@pytest.fixture(scope="module")
def packs() -> TinyPacks:
    return make_tiny_packs("qwen2_5_vl")


def plan_of(packs: list[list[int]], *, num_microbatches: int) -> PlanTables:
    """A plan of one rank that runs `packs` in turn."""
    offsets = np.cumsum([0, *(len(pack) for pack in packs)])
    packing = Packing(offsets=offsets, indices=np.concatenate(packs), limits=(1000, 100))
    return hold_tables(packing, Schedule(table=np.arange(len(packs)).reshape(-1, 1, num_microbatches)))


@pytest.mark.parametrize("weighting", ["token", "sample"])
def test_a_planned_step_of_the_trainer_goes_along_the_gradient_of_the_samples_alone(packs, weighting, tmp_path):
    tables = plan_of([[4, 1, 0, 6], [5, 2, 3]], num_microbatches=2)
    expected = gradient_alone(packs, packs.samples, weighting)
    packs.model.zero_grad(set_to_none=True)
    before = {name: p.detach().clone() for name, p in packs.model.named_parameters()}
    trainer = transformers.Trainer(
        model=packs.model,
        args=trainer_arguments(tmp_path, gradient_accumulation_steps=2, max_steps=1),
        train_dataset=packs.samples,
        data_collator=PackedCollator(packs.model.config, loss_weighting=weighting),
    )
    assert balanced(trainer, tables) is trainer
    trainer.train()
    with torch.no_grad():
        for name, parameter in packs.model.named_parameters():
            if name in expected:
                step = before[name] - parameter
                assert float((step - expected[name]).abs().max()) <= 1e-5 * max(1.0, float(expected[name].abs().max()))
            parameter.copy_(before[name])
