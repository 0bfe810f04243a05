"""Adapters beside the linear layers of a real module, as PEFT computes them. Needs torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from real_layers import RealLayer
from torch import Tensor, nn

from trimtab.models.asking.layers import read_linears


class AdaptedLinear(nn.Module):
    """`peft.tuners.lora.layer.Linear` without dropout; tests/integration/test_lora.py sets it beside the original."""

    def __init__(self, base: nn.Linear, r: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, r, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(r, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        result = result + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * 2.0
        return result.to(x.dtype)


def with_adapters(layer: RealLayer, r: int, dtype: torch.dtype, *, end: str = "") -> tuple[RealLayer, tuple[str, ...]]:
    """The layer with adapters beside all linear layers whose names hold `end`, all else frozen; and their names."""
    linears = read_linears(layer.module)
    names = tuple(linear.name for linear in linears if end in linear.name)
    layer.module.requires_grad_(False)
    for name in names:
        parent, _, own = name.rpartition(".")
        holder = layer.module.get_submodule(parent)
        setattr(holder, own, AdaptedLinear(getattr(holder, own), r, dtype))
    return replace(layer, spec=replace(layer.spec, linears=linears)), names
