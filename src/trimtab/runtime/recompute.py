"""Layers whose activations are computed again in the backward, by torch's non-reentrant checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Granularity = Literal["full", "selective"]

_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
"""Results that "selective" holds: of matrix products and of fused attention. The rest costs no FLOPs to make again."""


def recompute(model: nn.Module, names: Sequence[str], *, granularity: Granularity = "full") -> None:
    """From now on the named layers of `model` keep their inputs alone ("full"), or what `_KEPT` lists ("selective").

    Exactly these layers, in training and in eval mode; gradients stay bit for bit the same, for the random state is
    restored as well. The layer's instance is changed, never its class; a layer's hooks stay outside. Attention kernels
    from outside torch (flash_attention_2) run again under "selective" too.
    """
    for name in names:
        layer = model.get_submodule(name)
        layer.forward = _Recomputed(layer.forward, granularity)


class _Recomputed:
    """A `forward` under a checkpoint."""

    def __init__(self, forward: Callable[..., Any], granularity: Granularity) -> None:
        self.forward = forward
        self.options: dict[str, Any] = {"use_reentrant": False}
        if granularity == "selective":
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, **self.options, **kwargs)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
