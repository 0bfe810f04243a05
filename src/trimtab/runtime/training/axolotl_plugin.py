"""axolotl's plug-in for plans, whose data set is then the plan's folder; written for axolotl 0.21.

`plugins: [trimtab.runtime.training.axolotl_plugin.PlannedPacks]`, as `trimtab export axolotl` prints it.
"""

from __future__ import annotations

from typing import Any

from axolotl.common.datasets import TrainDatasetMeta
from axolotl.integrations.base import BasePlugin

from trimtab.models.describe import describe
from trimtab.plan.file.yaml import load_plan
from trimtab.runtime.training.balanced import planned_samples, run_as_planned


class PlannedPacks(BasePlugin):  # type: ignore[misc]  # a class of axolotl, which has no types
    """The packs of the plan folder that the first entry of `datasets` names, its recompute and its frozen towers."""

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> TrainDatasetMeta:  # noqa: ARG002  # as axolotl calls it
        num_steps = load_plan(_plan(cfg)).decisions.packing.num_steps * int(cfg.num_epochs or 1)
        return TrainDatasetMeta(train_dataset=planned_samples(_plan(cfg), cfg.base_model), total_num_steps=num_steps)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        frozen = load_plan(_plan(cfg)).inputs.training.frozen_towers
        for layer in describe(cfg.base_model).layers if frozen else ():
            if layer.tower in frozen:
                model.get_submodule(layer.name).requires_grad_(False)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        run_as_planned(trainer, _plan(cfg))


def _plan(cfg: Any) -> str:
    return str(cfg.datasets[0]["path"])
