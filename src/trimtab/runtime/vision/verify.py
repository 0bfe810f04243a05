"""Is vision data parallel right in this setup? Measured on the host's own loss of one small batch, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.exchange import KAPPA_IS_N
from trimtab.runtime.vision.handle import VisionDataParallel
from trimtab.runtime.vision.hooks import Place, find_functions
from trimtab.runtime.vision.inputs import Family, Kind, find_family
from trimtab.runtime.vision.outputs import read_features, rows_of, write_features

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


# Does a family's declaration hold: are images encoded apart what they are encoded together?


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCheck:
    """Relative differences between all images in one call and one call for each atom."""

    num_atoms: int
    features: float
    gradients: float  # of all parameters together, under a random linear loss


def check_family(
    model: nn.Module,
    arguments: dict[str, Any],
    *,
    kind: Kind = "image",
    family: Family | None = None,
    at: Place | None = None,
) -> FamilyCheck:
    """Encode `arguments` (of `get_image_features`, or of the tower) at once and atom by atom; no process group.

    Give several images of different sizes, and for `kind="video"` a clip of several frames. Exact arithmetic would
    give 0; float64 gives about 1e-15.
    """
    function = next(s for s in find_functions(model, at) if s.kind == kind)
    config = function.module.config
    family = family or find_family(config, function.original)
    inputs = family.read(kind, function.bind((), dict(arguments)), config)
    whole = torch.cat(rows_of(function.call(function.bind((), dict(arguments)))), dim=-1)
    atoms = [inputs.take(np.array([atom])) for atom in range(len(inputs))]
    pieces = [read_features(function.call(atom.arguments()), atom) for atom in atoms]
    apart = torch.cat([features.rows for features in pieces])
    num_rows = np.array([int(features.num_rows[0]) for features in pieces])
    ends = np.cumsum(inputs.entries)
    entries = np.add.reduceat(num_rows, ends - inputs.entries)
    rebuilt = torch.cat(rows_of(write_features(pieces[0], apart, entries)), dim=-1)
    assert whole.shape == rebuilt.shape, f"{tuple(rebuilt.shape)} apart, {tuple(whole.shape)} together"
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0)).to(whole)
    return FamilyCheck(
        num_atoms=len(inputs),
        features=_relative(rebuilt.detach(), whole.detach()),
        gradients=_relative(*(_gradient(function.module, (rows * weights).sum()) for rows in (rebuilt, whole))),
    )


def _gradient(module: nn.Module, loss: Tensor) -> Tensor:
    parameters = [p for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([gradient.flatten() for gradient in filled])


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
