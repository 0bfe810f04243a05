"""Adapters beside real linear layers, as PEFT computes them, for steps that are traced. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.costs.activations import casts_inputs
from trimtab.costs.adapters import adapt_layer
from trimtab.costs.settings import CostSettings
from trimtab.models.asking.layers import read_linears
from trimtab.specs import LayerSpec


class AdaptedLinear(nn.Module):
    """A frozen linear layer with `peft.tuners.lora.layer.Linear` around it; `r` 0: without an adapter.

    dtype: of the adapter's weights. casts: the input is cast for A and back, as under autocast with fp32 adapters.
    unpacks: the weight is stored otherwise, and made anew for the forward and for the backward, as bitsandbytes does.
    """

    def __init__(self, base: nn.Linear, r: int, *, dtype: torch.dtype, casts: bool = False, unpacks: bool = False):
        super().__init__()
        self.base, self.casts, self.unpacks, self.r = base, casts, unpacks, r
        if r:
            self.lora_A = nn.Linear(base.in_features, r, bias=False, dtype=dtype)
            self.lora_B = nn.Linear(r, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        product: Callable[..., Any] = _Unpacked.apply
        result: Tensor = product(x, self.base.weight, self.base.bias) if self.unpacks else self.base(x)
        if not self.r:
            return result
        entering = x.float().to(x.dtype) if self.casts else x.to(self.lora_A.weight.dtype)
        adapted: Tensor = result + self.lora_B(self.lora_A(entering)) * 2.0
        return adapted.to(x.dtype)


class _Unpacked(torch.autograd.Function):
    """A product whose weight exists while it runs alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight.clone(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight.clone(), None, None


def adapt_module(module: nn.Module, layers: Iterable[LayerSpec], settings: CostSettings) -> None:
    """Freeze `module`, and put into each of `layers` the adapters that `settings.lora` gives it."""
    lora = settings.lora
    assert lora is not None, "whoever asks has adapters"
    module.requires_grad_(False)
    for layer in layers:
        part = module.get_submodule(layer.name)
        linears = read_linears(part) if layer.kind in ("block", "projector") else ()
        ranks = {x.name: x.rank for x in adapt_layer(replace(layer, linears=linears), lora, 1)}
        quantised = lora.bits < 16 and layer.tower in lora.towers
        for name in (x.name for x in linears if quantised or x.name in ranks):
            parent, _, own = name.rpartition(".")
            holder = part.get_submodule(parent)
            base = getattr(holder, own)
            with getattr(base.weight, "fake_mode", None) or nullcontext():
                adapted = AdaptedLinear(
                    base,
                    ranks.get(name, 0),
                    dtype=base.weight.dtype,
                    casts=casts_inputs(settings),
                    unpacks=quantised,
                )
            setattr(holder, own, adapted.train())
