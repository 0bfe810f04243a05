"""axolotl's plug-in for plans: `plugins: [trimtab.adapters.axolotl_plugin.PlannedPacks]`, the plan as its data set."""

from __future__ import annotations

from typing import Any

from axolotl.common.datasets import TrainDatasetMeta
from axolotl.integrations.base import BasePlugin

from trimtab.adapters.planned_trainer import planned_packs, run_as_planned
from trimtab.models.describe import describe
from trimtab.plan.file.yaml import load_plan


class PlannedPacks(BasePlugin):
    """The packs of the plan folder that the first entry of `datasets` names, its recompute and its frozen towers."""

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> TrainDatasetMeta:  # noqa: ARG002  # as axolotl calls it
        packs = planned_packs(_plan(cfg), cfg.base_model)
        per_step = load_plan(_plan(cfg)).decisions.parallel.dp * cfg.gradient_accumulation_steps
        num_steps = len(packs) // per_step * int(cfg.num_epochs or 1)
        return TrainDatasetMeta(train_dataset=packs, total_num_steps=num_steps)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        frozen = load_plan(_plan(cfg)).inputs.training.frozen_towers
        for layer in describe(cfg.base_model).layers if frozen else ():
            if layer.tower in frozen:
                model.get_submodule(layer.name).requires_grad_(False)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        run_as_planned(trainer, _plan(cfg))


def _plan(cfg: Any) -> str:
    return str(cfg.datasets[0]["path"])
