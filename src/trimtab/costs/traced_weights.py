"""A model whose parameters take no memory, of any class of Transformers, in training mode.

Needs torch and Transformers (tested with 5.23), loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from trimtab.costs.traced_kernels import FLASH, fuse_kernels, register_flash
from trimtab.models.asking.build import build
from trimtab.models.asking.weightless import make_weightless


def build_weightless(
    config: Any,
    *,
    dtype: torch.dtype,
    attention: str,
    fused_kernels: bool = False,
    idle: Mapping[str, str] | None = None,
) -> Any:
    """The image-text model of a Transformers configuration in training mode, without weights.

    attention: "sdpa", "eager", or "flash", for which `attend_flash` stands in; eager where the model has no other.
    fused_kernels: as `fuse_kernels` has them. idle: blocks that hand their rows on and cost nothing, each with the
    earlier one that it is like.
    """
    module = build(config, dtype=dtype, attention="sdpa" if attention == "flash" else attention)
    if attention == "flash":  # set behind Transformers' back, which would look for the package
        register_flash()
        for part in module.modules():
            if isinstance(part, transformers.PreTrainedModel) and part.config._attn_implementation == "sdpa":
                part.config._attn_implementation = FLASH
    make_idle(module, idle or {})
    make_weightless(module, without=idle or ())
    if fused_kernels:
        fuse_kernels(module)
    return module.train()


def make_idle(module: nn.Module, idle: Mapping[str, str]) -> None:
    """The blocks named (instances, never classes) hand their rows on, in a tuple where the block they are like has one.

    idle: block -> an earlier block that is real.
    """
    widths: dict[str, int | None] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda _module, _args, result: widths.__setitem__(name, _width(result))

    def hand_on(name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            rows = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            width = widths[name]
            return rows if width is None else (rows, *[None] * (width - 1))

        return forward

    for name in set(idle.values()):
        module.get_submodule(name).register_forward_hook(note(name))
    for name, real in idle.items():
        module.get_submodule(name).forward = hand_on(real)


def _width(result: Any) -> int | None:
    return None if isinstance(result, Tensor) else len(result)
