"""Are the stages of a cut model the model? `verify_pipeline` runs them one after the other in this process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from trimtab.errors import UnsupportedPlanError
from trimtab.runtime.data.loss import label_weights, packed_loss
from trimtab.runtime.data.packing_runs import bound_of
from trimtab.runtime.pipeline.cuts import Cuts
from trimtab.runtime.pipeline.flow import Batch, Sealed, arguments_of
from trimtab.runtime.pipeline.module import StageModule
from trimtab.runtime.pipeline.trace import Tracer, layer_order, try_trace

Links: TypeAlias = list[tuple[Tensor, Tensor]]
"""Tensors that one stage sent, and the same as the next one received them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCheck:
    """Relative errors of the stages beside the model's own forward and backward."""

    loss: float
    gradients: float  # of all parameters as one vector
    worst: float  # of one parameter; small ones are held against a thousandth of the largest

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients, self.worst)


def layers_of(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Module paths of all layers in forward order, as plans list them, for a micro-batch with an image.

    Use it to make a `PipelineLayout` by hand; docs/pipeline.md shows it.
    """
    tracer = Tracer(model)
    return layer_order(tracer.units, try_trace(tracer, batch))


def verify_pipeline(model: nn.Module, stages: Sequence[Sequence[str]], batches: Sequence[Batch]) -> PipelineCheck:
    """Whether these stages give the model's own loss and gradients; needs no process group.

    Use it for a model of your own, before a run. docs/pipeline.md shows it.

    `stages`: module paths, as in `PipelineLayout`; `batches`: micro-batches with and without images, as
    `PackedCollator` makes them. The model is small enough to run here; its gradients are used, and None afterwards. A
    model that cannot be cut there, or whose stages compute something else, is refused by an `UnsupportedPlanError`.
    """
    expected_loss, expected = _run(model, lambda batch: _call_model(model, batch), batches)
    ends = list(itertools.accumulate(len(stage) for stage in stages))
    cuts = Cuts(model, [name for stage in stages for name in stage])
    cuts.forbid(ends[:-1])
    parameter = next(model.parameters())
    made = [
        StageModule(model, cuts, start, stop, dtype=parameter.dtype, device=parameter.device)
        for start, stop in itertools.pairwise([0, *ends])
    ]
    try:
        loss, found = _run(model, lambda batch: _call_stages(made, batch), batches)
    finally:
        for stage in made:
            stage.release()
    check = _compare(loss, expected_loss, found, expected)
    # rounding leaves less than this; a layer that is skipped or seen twice is off by 1e-2 and more
    if not check.largest <= bound_of(model):
        raise UnsupportedPlanError(
            f"cut in front of {', '.join(stage[0] for stage in stages[1:])}, this model's loss is {check.loss:.2g} and "
            f"its gradients are {check.gradients:.2g} off the whole model's: something of its forward depends on "
            "layers of other stages in a way that cannot be followed; train without pp"
        )
    return check


def _run(
    model: nn.Module, call: Callable[[Batch], tuple[Tensor, list[Links]]], batches: Sequence[Batch]
) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients of a step."""
    total = sum(float(label_weights(batch).sum()) for batch in batches)
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for batch in batches:
        logits, links = call(batch)
        own = packed_loss(logits, batch, denominator=total)
        loss += float(own.detach())
        own.backward()  # type: ignore[no-untyped-call]
        for link in reversed(links):
            reached = [(sent, received.grad) for sent, received in link if received.grad is not None]
            torch.autograd.backward([x for x, _ in reached], [x for _, x in reached])
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss, found


def _call_model(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Links]]:
    result = model(**arguments_of(batch))
    return (result.logits if hasattr(result, "logits") else result[0]), []


def _call_stages(stages: Sequence[StageModule], batch: Batch) -> tuple[Tensor, list[Links]]:
    links: list[Links] = []
    values: tuple[Tensor, ...] = ()
    for stage in stages:
        made = stage(*values, sealed=Sealed(batch))
        if stage.is_last:
            return made, links
        values = tuple(x.detach().requires_grad_(x.requires_grad) for x in made)
        links.append(list(zip(made, values, strict=True)))
    raise AssertionError("no stage is the last")


def _compare(
    loss: float, expected_loss: float, found: dict[str, Tensor | None], expected: dict[str, Tensor | None]
) -> PipelineCheck:
    none = torch.zeros(())  # a gradient that is None is one of zeros
    rights = [none if x is None else x for x in expected.values()]
    owns = [none if x is None else x for x in (found[name] for name in expected)]
    norms = [float(right.norm()) for right in rights]
    apart = [float((own - right).norm()) for own, right in zip(owns, rights, strict=True)]
    floor = 1e-3 * (max(norms, default=0.0) or 1.0)
    return PipelineCheck(
        loss=abs(loss - expected_loss) / max(abs(expected_loss), 1e-30),
        gradients=math.hypot(*apart) / math.hypot(*norms) if any(norms) else 0.0,
        worst=max((x / max(norm, floor) for x, norm in zip(apart, norms, strict=True)), default=0.0),
    )
