"""Adapters beside the linear layers of a real module. Needs torch."""

from dataclasses import replace

import torch
from real_layers import RealLayer

from trimtab.costs.measured.stand_ins import AdaptedLinear
from trimtab.models.asking.layers import read_linears


def with_adapters(layer: RealLayer, r: int, dtype: torch.dtype, *, end: str = "") -> tuple[RealLayer, tuple[str, ...]]:
    """The layer with adapters beside all linear layers whose names hold `end`, all else frozen; and their names."""
    linears = read_linears(layer.module)
    names = tuple(linear.name for linear in linears if end in linear.name)
    layer.module.requires_grad_(False)
    for name in names:
        parent, _, own = name.rpartition(".")
        holder = layer.module.get_submodule(parent)
        setattr(holder, own, AdaptedLinear(getattr(holder, own), r, dtype=dtype))
    return replace(layer, spec=replace(layer.spec, linears=linears)), names
