"""Modules that stand in for real ones in a traced step: kernels that need a GPU, and adapters as PEFT computes them.

Kernels allocate and keep what the real ones do, and compute nothing: only for weightless models. Needs torch and
Transformers, loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trimtab.costs.formula.activations import casts_inputs
from trimtab.costs.formula.adapters import adapt_layer
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.measured.traced_step import StepMode
from trimtab.models.asking.layers import read_linears
from trimtab.specs import LayerSpec

# -- adapters ---------------------------------------------------------------------------------------------------------


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
        # a 4-bit base is unpacked in every linear layer, adapted or not
        quantised = lora.bits < 16 and layer.tower in lora.towers
        for name in (x.name for x in linears if quantised or x.name in ranks):
            parent, _, own = name.rpartition(".")
            holder = part.get_submodule(parent)
            base = getattr(holder, own)
            # fake weights get fake adapters
            with getattr(base.weight, "fake_mode", None) or nullcontext():
                adapted = AdaptedLinear(
                    base,
                    ranks.get(name, 0),
                    dtype=base.weight.dtype,
                    casts=casts_inputs(settings),
                    unpacks=quantised,
                )
            setattr(holder, own, adapted.train())


# -- stand-ins for kernels --------------------------------------------------------------------------------------------


FLASH = "trimtab_traced_flash"
"""Name of `attend_flash` among Transformers' attention functions; models ask whether the name holds "flash"."""


def register_flash() -> None:
    """Makes `FLASH` known to Transformers; once or more."""
    ALL_ATTENTION_FUNCTIONS.register(FLASH, attend_flash)
    ALL_MASK_ATTENTION_FUNCTIONS.register(FLASH, flash_attention_mask)


def attend_flash(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001  handed by name; segments come as cu_seq_lens_q
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the result (batch, rows, heads, width) of FlashAttention-2: q, k, v, result and fp32 logsumexp are kept.

    k and v are not repeated for grouped queries; v is padded to the width of q and k, as Transformers does. FLOPs:
    all pairs of each segment, masked ones too, as torch counts its own kernels; 2.5 times that in backward.
    """
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = nn.functional.pad(value, [0, query.shape[-1] - width])
    # pairs of whole rows, or of each segment
    if cu_seq_lens_q is None:
        pairs = query.shape[0] * query.shape[2] * key.shape[2]
    else:
        pairs = int((cu_seq_lens_q.diff().long() ** 2).sum())
    flops = 4 * query.shape[1] * query.shape[-1] * pairs
    result: Tensor = _Flash.apply(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), flops)  # type: ignore[no-untyped-call]
    return result[..., :width], None


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, flops: int) -> Tensor:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        result = query.new_empty(query.shape)
        logsumexp = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, logsumexp)
        ctx.flops = flops
        _count(flops)
        return result

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        _count(ctx.flops * 5 // 2)
        return (*(x.new_empty(x.shape) for x in (query, key, value)), None)


def _count(flops: int) -> None:
    mode = _get_current_dispatch_mode()
    if isinstance(mode, StepMode):
        mode.flops += flops


# -- fused norms and gates ------------------------------------------------------------------------------------------


def fuse_kernels(module: Any) -> None:
    """Make single kernels of RMSNorms and gated activations of `module`, as Liger's are.

    A norm keeps its input and one fp32 number for each row, a gate its two inputs and not the activation between.
    Instances are changed, never classes. LayerNorm is one kernel already.
    """
    for part in module.modules():
        # norms; then gated MLPs of two matrices, of one, and of experts
        if type(part).__name__.endswith("RMSNorm") and isinstance(getattr(part, "weight", None), Tensor):
            part.forward = partial(_fused_norm, part)
        elif hasattr(part, "gate_proj") and hasattr(part, "up_proj") and hasattr(part, "down_proj"):
            if isinstance(part.gate_proj, nn.Linear):
                part.forward = partial(_fused_mlp, part)
        elif isinstance(getattr(part, "gate_up_proj", None), nn.Linear) and hasattr(part, "down_proj"):
            part.forward = partial(_fused_joint_mlp, part)
        elif hasattr(part, "_apply_gate"):
            part._apply_gate = _fused_halves


def _fused_norm(part: Any, rows: Tensor) -> Tensor:
    return _Norm.apply(rows, part.weight)  # type: ignore[no-any-return, no-untyped-call]


def _fused_mlp(part: Any, rows: Tensor) -> Any:
    return part.down_proj(_Gate.apply(part.gate_proj(rows), part.up_proj(rows)))  # type: ignore[no-untyped-call]


def _fused_joint_mlp(part: Any, rows: Tensor) -> Any:
    return part.down_proj(_fused_halves(part.gate_up_proj(rows)))


def _fused_halves(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return _Gate.apply(gate, up)  # type: ignore[no-any-return, no-untyped-call]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, rows.new_empty(rows.shape[:-1], dtype=torch.float32))
        return rows.new_empty(rows.shape)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        rows, weight, _ = ctx.saved_tensors
        return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate.new_empty(gate.shape)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        return gate.new_empty(gate.shape), up.new_empty(up.shape)
