"""A plan in a loop that is written around `model(**batch).loss` (Accelerate's examples): the loader brings the loss.

Models of Transformers divide the sum of token losses by `num_items_in_batch` where a batch holds it. Here it is
W / (R M): W labels in the step, R ranks, M micro-batches. The loop divides by M (`accelerator.backward` does) and
gradients are averaged over R ranks, so that the step's loss is sum / W, whatever pack a token lies in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

from trimtab.errors import PlanError, UnsupportedPlanError
from trimtab.runtime.data.dataset import PlanBatchSampler, PlanDataLoader
from trimtab.runtime.data.loss import step_denominator
from trimtab.runtime.data.packing_runs import untouched


class StepLoader(PlanDataLoader):
    """A `PlanDataLoader` that reads a step's micro-batches before it hands out the first, to know the labels in all."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        deal = self._settle().deal
        shares = deal.num_microbatches * deal.dp
        step: list[dict[str, Any]] = []
        for batch in DataLoader.__iter__(self):
            step.append(batch)
            if len(step) < deal.num_microbatches:
                continue
            items = step_denominator(step).cpu() / shares
            for own in step:
                self._num_used += 1
                yield self._placed({**own, "num_items_in_batch": items})
            step = []
        self._settle()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("microbatches_done"):
            raise PlanError(
                "the state was taken inside a step, whose loss needs all of its micro-batches: take states between "
                "steps, after optimizer.step()"
            )
        super().load_state_dict(state)


def refuse_loss_of_its_own(model: Any) -> None:
    """Asks the model: twice the items must give half the loss. Qwen3-VL of Transformers 4.57 to 5.12 reads none."""
    ids = torch.tensor([[1, 2, 3]], device=next(model.parameters()).device)
    with untouched(model), torch.no_grad():
        once, twice = (
            float(model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=torch.tensor(float(items))).loss)
            for items in (1, 2)
        )
    if not math.isclose(once, 2 * twice, rel_tol=0.01):
        raise UnsupportedPlanError(
            f"model(**batch).loss was to be that of whole steps, and {type(model).__name__} of Transformers "
            f"{transformers.__version__} does not read num_items_in_batch: use packed_loss in your loop, or a newer "
            "Transformers"
        )


def step_loader(given: DataLoader[Any], sampler: PlanBatchSampler, collate: Any, device: torch.device) -> StepLoader:
    """The user's loader, of the plan's packs."""
    return StepLoader(
        given.dataset,
        sampler,
        device=device,
        collate_fn=collate,
        num_workers=given.num_workers,
        pin_memory=given.pin_memory,
        persistent_workers=given.persistent_workers,
        prefetch_factor=given.prefetch_factor,
    )
