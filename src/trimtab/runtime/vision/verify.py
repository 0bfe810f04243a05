"""Is vision data parallel right in this setup? Measured on the host's own loss of one small batch, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.gradients import KAPPA_IS_N
from trimtab.runtime.vision.handle import VisionDataParallel

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest relative difference of gradients that is taken for rounding, by the type of the parameters."""

_STEP = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""How far parameters are moved along the gradient, relative to their norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCheck:
    """What was measured; the same on every rank."""

    loss_error: float  # relative difference of the loss with and without the handle
    gradient_error: float  # of the vision parameters' reduced gradients
    gradient_scale: float | None  # reduced over true gradient: 1; N or 1 / N where losses and reduction disagree
    dtype: torch.dtype

    @property
    def problems(self) -> list[str]:
        found = []
        if not max(self.loss_error, self.gradient_error) <= CLOSE[self.dtype]:
            found.append(
                f"with images shared the loss differs by {self.loss_error:.2g} and the vision gradients by "
                f"{self.gradient_error:.2g}: the family's declaration does not hold for this tower (run check_family), "
                f"or something else exchanges features as well"
            )
        if self.gradient_scale is not None and not 0.7 < self.gradient_scale < 1.4:
            found.append(
                f"reduced gradients are {self.gradient_scale:.3g} times the true ones: losses or reduction are not as "
                f"declared; losses that add up to the whole loss need gradients summed, N times that need the mean"
            )
        return found


def verify_vision_dp(
    handle: VisionDataParallel,
    loss: Callable[[], Tensor],
    *,
    reduce_gradients: Callable[[], None] | None = None,
    over: Any = None,
    raise_problems: bool = True,
) -> VisionCheck:
    """Call this once before a run in a host of your own: are loss and vision gradients those without the handle?

    `loss` runs the host's forward on one fixed batch, without dropout, and returns this rank's loss as it is
    back-propagated. `reduce_gradients` is what the host calls after a backward; None where a wrapper (DDP, FSDP2)
    reduces inside. `over` is the group gradients are reduced over, where that is more than the handle's: data-parallel
    replicas of it. Parameters come back as they were, gradients as None. Six forwards, two backwards.
    examples/vision_data_parallel.py is a whole run.

    The scale is `c = |G|^2 / <∂L/∂θ, G>` for the reduced gradient G, and the product is measured by moving the
    parameters by ±ε G: only forwards, so it holds for sharded parameters too. Not for ZeRO, whose gradients stay
    with DeepSpeed. A dispatch changes no sum over the group: its gradients are compared as sums, and their scale, None,
    is not its business.
    """
    settings = handle.settings
    if handle.sharing is None:
        raise TrimtabError("a group of one shares nothing, so there is nothing to verify: run on two ranks or more")
    is_dispatch = settings.exchange == "dispatch"
    if settings.loss is None and not is_dispatch:
        raise TrimtabError(
            "gradients can be judged where it is known how losses add up: make the handle with loss= and reduction="
        )
    over = over or handle.group
    replicas = dist.get_world_size(over) // handle.num_ranks
    kappa = handle.num_ranks if settings.loss is not None and KAPPA_IS_N[settings.loss] else 1
    parameters = [p for p in handle.vision_parameters() if p.requires_grad]

    def whole_loss() -> float:
        with torch.no_grad():
            total = loss().detach().double()
        dist.all_reduce(total, group=over)
        return float(total) / (kappa * replicas)

    def gradient(own: Callable[[], None] | None) -> list[Tensor | None]:
        handle.model.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]
        for reduce in (reduce_gradients, own):
            if reduce is not None:
                reduce()
        found = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        if is_dispatch:  # whoever encoded has the gradient; what the host has reduced already is multiplied alike
            found = [_sum_over(handle.group, p, gradient) for p, gradient in zip(parameters, found, strict=True)]
        handle.model.zero_grad(set_to_none=True)
        return found

    with handle.paused():
        loss_alone, alone = whole_loss(), gradient(None)
    together = gradient(handle.reduce_gradients if settings.reduction == "none" else None)
    loss_together, square = whole_loss(), _dot(together, together)
    differences = [None if a is None or b is None else a - b for a, b in zip(together, alone, strict=True)]
    scale = None
    if not is_dispatch:
        step = _STEP[parameters[0].dtype] * _dot(list(parameters), list(parameters)) ** 0.5 / max(square**0.5, 1e-30)
        up, down = (_moved(handle.model, parameters, together, sign * step, whole_loss) for sign in (1, -1))
        along = (up - down) / (2 * step)
        scale = square / along if along else float("inf")
    check = VisionCheck(
        loss_error=abs(loss_together - loss_alone) / max(abs(loss_alone), 1e-30),
        gradient_error=(_dot(differences, differences) / max(_dot(alone, alone), 1e-30)) ** 0.5,
        gradient_scale=scale,
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


def _moved(
    model: nn.Module,
    parameters: list[nn.Parameter],
    along: list[Tensor | None],
    step: float,
    loss: Callable[[], float],
) -> float:
    """The loss with every parameter moved, and moved back."""
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, g in zip(parameters, along, strict=True):
            if g is not None:
                p.add_(g, alpha=step)
        _forget_gathered(model)
        found = loss()
        for p, before in zip(parameters, kept, strict=True):
            p.copy_(before)
        _forget_gathered(model)
    return found


def _forget_gathered(model: nn.Module) -> None:
    """FSDP2 keeps some gathered parameters between a forward and the next: they would not show the change."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def _dot(a: list[Any], b: list[Any]) -> float:
    """<a, b>, over all shards of sharded tensors."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        if x is not None and y is not None:
            product = (x.detach().double() * y.detach().double()).sum()
            total += float(product.full_tensor() if hasattr(product, "full_tensor") else product)
    return total
