"""Is vision data parallel right in this setup? Measured on the host's own loss of one small batch, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.apply import VisionDataParallel

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest relative difference of gradients that is taken for rounding, by the type of the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCheck:
    """What was measured; the same on every rank."""

    loss_error: float  # relative difference of the loss with and without the handle
    gradient_error: float  # of the vision parameters' reduced gradients
    dtype: torch.dtype

    @property
    def problems(self) -> list[str]:
        found = []
        if not max(self.loss_error, self.gradient_error) <= CLOSE[self.dtype]:
            found.append(
                f"with images shared the loss differs by {self.loss_error:.2g}, vision gradients by "
                f"{self.gradient_error:.2g}: give a family= that fits the tower"
            )
        return found


def verify_vision_dp(
    handle: VisionDataParallel,
    loss: Callable[[], Tensor],
    *,
    reduce_gradients: Callable[[], None] | None = None,
    raise_problems: bool = True,
) -> VisionCheck:
    """Call this once before a run in a host of your own: are loss and vision gradients those without the handle?

    `loss` runs the host's forward on one fixed batch, without dropout, and returns this rank's loss as it is
    back-propagated. `reduce_gradients` is what the host calls after a backward; None where a wrapper (DDP, FSDP2)
    reduces inside. Parameters stay as they are, gradients are None afterwards. Two forwards and backwards.
    examples/vision_data_parallel.py is a whole run. Not for ZeRO, whose gradients stay with DeepSpeed.
    """
    if handle.sharing is None:
        raise TrimtabError("a group of one shares nothing: run on two ranks or more")
    is_dispatch = handle.settings.exchange == "dispatch"
    parameters = [p for p in handle.vision_parameters() if p.requires_grad]

    def run() -> tuple[float, list[Tensor | None]]:
        handle.model.zero_grad(set_to_none=True)
        own = loss()
        own.backward()  # type: ignore[no-untyped-call]
        if reduce_gradients is not None:
            reduce_gradients()
        found = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        if is_dispatch:  # whoever encoded has the gradient; what the host has reduced already is multiplied alike
            found = [_sum_over(handle.group, p, gradient) for p, gradient in zip(parameters, found, strict=True)]
        handle.model.zero_grad(set_to_none=True)
        total = own.detach().double()
        dist.all_reduce(total, group=handle.group)
        return float(total), found

    with handle.paused():
        loss_alone, alone = run()
    loss_together, together = run()
    differences = [None if a is None or b is None else a - b for a, b in zip(together, alone, strict=True)]
    check = VisionCheck(
        loss_error=abs(loss_together - loss_alone) / max(abs(loss_alone), 1e-30),
        gradient_error=(_square(differences) / max(_square(alone), 1e-30)) ** 0.5,
        dtype=parameters[0].dtype,
    )
    if raise_problems and check.problems:
        raise TrimtabError("\n".join(check.problems))
    return check


def _sum_over(group: Any, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    """Of a parameter that every rank holds whole; of sharded ones the shard, which is a sum already."""
    if hasattr(parameter, "full_tensor"):
        return gradient
    total = torch.zeros_like(parameter) if gradient is None else gradient
    dist.all_reduce(total, group=group)
    return total


def _square(gradients: list[Tensor | None]) -> float:
    """Return the sum of squares, over all shards of sharded tensors."""
    total = 0.0
    for gradient in gradients:
        if gradient is not None:
            square: Any = gradient.double().square().sum()
            total += float(square.full_tensor() if hasattr(square, "full_tensor") else square)
    return total
