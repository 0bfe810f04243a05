"""A plan in launchers that make a Trainer of Transformers themselves: LLaMA-Factory, axolotl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.data.conversations import open_conversations
from trimtab.runtime.data.dataset import PlanDataset
from trimtab.runtime.training.balanced import balanced


def planned_samples(plan: Path | str, model: str) -> PlanDataset:
    """The plan's samples for the model of this name or folder, tokenized when asked for; unreadable ones are filled."""
    rows = open_conversations(plan, Path(str(cached_file(model, "config.json"))).parent)
    return PlanDataset(rows, rows.records.samples, on_error="filler")


def run_as_planned(trainer: Any, plan: Path | str) -> None:
    """Have a Trainer that was made with `planned_samples` train as the plan says, its collator set aside."""
    config = trainer.model.config
    trainer.data_collator = PackedCollator(config, attention=config._attn_implementation)
    balanced(trainer, plan)
