"""Layers that carry a state along the row (convolutions, Mamba, gated delta): one sample after the other, if need be.

Transformers' fused kernels (causal-conv1d, flash-linear-attention, mamba-ssm) take the samples' borders; its plain
torch code refuses them or, in a few families, overlooks them. `hold_samples_apart` makes such layers run every sample
of a pack by itself: exact, on any device, at the price of one launch a sample.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, nn

BORDERS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of a pack that say where samples start."""

_CARRIES = ("conv1d", "recurrent", "chunk_scan", "selective_scan", "delta_rule", "linear_attn_fn")


def hold_samples_apart(model: nn.Module) -> list[str]:
    """Call this once on a model whose `verify_packing` names a layer with a state. Paths of the layers it changed.

    The layers are the model's own modules with another forward; names, weights and outputs for single samples stay as
    they are. It needs a collator that passes borders (`PackFormat.stateful`, found by itself in Transformers' models).

    >>> hold_samples_apart(torch.nn.Linear(2, 2))
    []
    """
    changed = []
    for name, module in model.named_modules():
        if carries_state(module):
            module.__class__ = _apart(type(module))  # type: ignore[arg-type]  # a class is hashable
            changed.append(name)
    return changed


def carries_state(module: nn.Module) -> bool:
    """Whether the module's own forward, not that of a child, convolves or scans along the row."""
    if runs_apart(module):
        return False
    forward = inspect.unwrap(type(module).forward)
    taken = inspect.signature(forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in taken.values()) or not {"hidden_states", "x"} & set(taken):
        return False
    return any(word in name for name in forward.__code__.co_names for word in _CARRIES)


def runs_apart(module: nn.Module) -> bool:
    """Whether `hold_samples_apart` changed it."""
    return getattr(type(module), "runs_samples_apart", False)


@functools.cache
def _apart(cls: Any) -> type[nn.Module]:
    return type(f"{cls.__name__}Apart", (cls,), {"forward": _run_apart, "runs_samples_apart": True})


def _run_apart(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward on each sample's rows, one after the other, and the rows joined again."""
    forward: Any = type(self).__bases__[0].forward.__get__(self)  # type: ignore[attr-defined]  # a module has one
    offsets = _offsets(kwargs)
    own = {key: value for key, value in kwargs.items() if key not in BORDERS}
    if offsets is None:
        return forward(*args, **own)
    num = offsets[-1]
    parts = [
        forward(
            *(_rows(value, start, end, num) for value in args),
            **{key: _rows(value, start, end, num) for key, value in own.items()},
        )
        for start, end in itertools.pairwise(offsets)
    ]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=1)
    return type(parts[0])(torch.cat(x, dim=1) if isinstance(x[0], Tensor) else x[0] for x in zip(*parts, strict=True))


def _offsets(kwargs: dict[str, Any]) -> list[int] | None:
    offsets = kwargs.get("cu_seq_lens_q")
    if offsets is not None:
        found: list[int] = offsets.tolist()
        return found if len(found) > 2 else None
    numbers = kwargs.get("seq_idx")
    if numbers is None:
        return None
    starts: list[int] = (numbers[0].diff().nonzero()[:, 0] + 1).tolist()
    return [0, *starts, numbers.shape[1]] if starts else None


def _rows(value: Any, start: int, end: int, num: int) -> Any:
    """Rows of (1, tokens, ...) tensors; what has another shape goes to every sample as it is."""
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == num:
        return value[:, start:end]
    return value
