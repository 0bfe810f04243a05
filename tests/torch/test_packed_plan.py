"""From a plan's tables through loader, collator and Trainer to one step. Needs torch, Transformers and Accelerate."""

from __future__ import annotations

import pytest
import torch
import transformers
from balanced_cases import tables_of
from test_packed_gradients import gradient_alone
from tiny_packs import TinyPacks, make_tiny_packs, trainer_arguments

from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.training.balanced import balanced


@pytest.fixture(scope="module")
def packs() -> TinyPacks:
    return make_tiny_packs("qwen2_5_vl")


@pytest.mark.parametrize("weighting", ["token", "sample"])
def test_a_planned_step_of_the_trainer_goes_along_the_gradient_of_the_samples_alone(packs, weighting, tmp_path):
    tables = tables_of([[4, 1, 0, 6], [5, 2, 3]])
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
