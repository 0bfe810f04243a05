"""A model whose parameters take no memory, of any class of Transformers: its buffers, ids and pixels are real.

Only parameters are fake tensors. What touches them becomes fake; positions, masks and grids stay real, so code that
reads them (`tolist`, boolean indices) runs as ever. Not the `meta` device: its attention falls apart into products and
keeps what no kernel keeps. Needs torch and Transformers (tested with 5.23), loaded when this module is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.costs.traced_kernels import FLASH, fuse_kernels, register_flash


def build_weightless(
    config: Any, *, dtype: torch.dtype, attention: str, fused_kernels: bool = False, idle: Collection[str] = ()
) -> Any:
    """The image-text model of a Transformers configuration in training mode, without weights.

    attention: "sdpa", "eager", or "flash", for which `attend_flash` stands in. fused_kernels: as `fuse_kernels` has
    them. idle: blocks that hand their rows on and cost nothing.
    """
    with torch.device("meta"):
        module = transformers.AutoModelForImageTextToText.from_config(
            config, attn_implementation="sdpa" if attention == "flash" else attention, dtype=dtype
        )
    if attention == "flash":  # set behind Transformers' back, which would look for the package
        register_flash()
        for part in module.modules():
            if isinstance(part, transformers.PreTrainedModel):
                part.config._attn_implementation = FLASH
    for name in idle:
        module.get_submodule(name).forward = _hand_on  # of this instance; its class stays as it is
    make_weightless(module, without=idle)
    if fused_kernels:
        fuse_kernels(module)
    return module.train()


def make_weightless(module: Any, *, without: Collection[str] = ()) -> None:
    """Gives `module` (built on the meta device) fake parameters on the CPU and real buffers, filled by Transformers.

    The modules `without` stay on the meta device.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, nn.Parameter] = {}
    left = tuple(f"{name}." for name in without)
    for path, part in module.named_modules():
        if f"{path}.".startswith(left):
            part._is_hf_initialized = True
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = made.setdefault(id(parameter), _fake_parameter(parameter, fake))
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = torch.zeros_like(buffer, device="cpu")
    module.initialize_weights()


def _fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    return made


def _hand_on(hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return hidden_states
