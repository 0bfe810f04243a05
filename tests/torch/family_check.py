"""Does a family's declaration hold: are images encoded apart what they are encoded together?"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.runtime.vision.hooks import Place, find_functions
from trimtab.runtime.vision.inputs import Family, Kind, find_family, read_features, rows_of, write_features


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
