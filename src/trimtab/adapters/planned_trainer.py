"""A plan's packs, recompute and loss in launchers that make a Trainer of Transformers: LLaMA-Factory, axolotl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import cached_file

from trimtab.plan.file.yaml import load_plan
from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.data.conversations import open_conversations
from trimtab.runtime.data.dataset import PlanDataset, collate_packs
from trimtab.runtime.data.loss import label_weights, packed_loss
from trimtab.runtime.data.packing import prepare_packing
from trimtab.runtime.data.packing_runs import sharded
from trimtab.runtime.recompute.apply import apply


def planned_packs(plan: Path | str, model: str) -> Any:
    """The `datasets.Dataset` of the plan's packs for the model of this name or folder, tokenized when asked for."""
    folder = Path(str(cached_file(model, "config.json"))).parent
    rows = open_conversations(plan, folder)
    return PlanDataset(rows, rows.records.samples, on_error="filler").as_hf(plan)


def run_as_planned(trainer: Any, plan: Path | str) -> None:
    """Have a Trainer, made with `planned_packs` and without recompute, collate the packs and recompute as planned.

    Its loss becomes that of packs, a mean over the tokens of a step: such hosts take the mean of each micro-batch.
    """
    model = trainer.model
    collator = PackedCollator(model.config, attention=model.config._attn_implementation)
    if not sharded(model):
        prepare_packing(model, collator=collator)
    trainer.data_collator, trainer.compute_loss_func = collate_packs(collator), _loss_of_packs
    apply(model, load_plan(plan))


def _loss_of_packs(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    batch = {"labels": labels}
    denominator = label_weights(batch).sum() if num_items_in_batch is None else num_items_in_batch
    return packed_loss(outputs.logits, batch, denominator=denominator)
