"""Transformers' `Trainer` with the loss of packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from trimtab.errors import UnsupportedPlanError
from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.data.loss import label_weights, packed_loss, step_denominator
from trimtab.runtime.data.packing import prepare_packing
from trimtab.runtime.data.packing_runs import sharded


class PackedTrainer(Trainer):  # type: ignore[misc]  # Transformers is untyped
    """A `Trainer` whose loss is `packed_loss` over the whole optimizer step, for any weighting the collator chose.

    Use it, behind `PlanTrainerMixin`, for a model whose batches are packs. docs/howto-trainer.md is a whole run.

    Transformers' own Trainer (5.23) counts labels over the step for llava, llava_next, llava_onevision and internvl.
    The Qwen-VL and Gemma 3 classes say `accepts_loss_kwargs = False`: there it takes the mean of each micro-batch and
    then of those, so that a token weighs more the fewer labels its pack has. It knows no weights per sample.
    """

    verify_packing = True  # before training; a subclass, or the instance, may say False
    loss_is_scaled_for_ga = True  # Trainer must not divide by the number of micro-batches again

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise UnsupportedPlanError(
                "label smoothing or compute_loss_func was asked for, but PackedTrainer computes its own loss: "
                "leave both out, or use Trainer"
            )
        if getattr(self.model.config.get_text_config(), "output_router_logits", False):
            raise UnsupportedPlanError(
                "output_router_logits asks for an experts' balancing loss, which is a mean over a micro-batch and "
                "would be left out: set it to False"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's `train`, once `prepare_packing` has found that the model keeps samples of a pack apart.

        Every rank checks its own copy. A model that is loaded in pieces (FSDP, ZeRO-3) is not checked: call
        `verify_packing` on a copy of it, whole or with fewer layers.
        """
        if self.verify_packing and not sharded(self.model):
            given = self.data_collator
            prepare_packing(self.model, collator=given if isinstance(given, PackedCollator) else None)
        return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one step, and its denominator over all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, step_denominator(batches) if batches else None

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Evaluation gives no denominator: the pack's own weights are taken."""
        batch: dict[str, Any] = {key: inputs[key] for key in ("labels", "loss_weights") if key in inputs}
        outputs = model(**{key: value for key, value in inputs.items() if key not in batch})
        if num_items_in_batch is None or not model.training:
            loss = packed_loss(outputs.logits, batch, denominator=label_weights(batch).sum())
        else:
            ranks = self.accelerator.num_processes
            loss = packed_loss(outputs.logits, batch, denominator=num_items_in_batch, num_ranks=ranks)
        return (loss, outputs) if return_outputs else loss
