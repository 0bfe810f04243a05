"""Models with some layers hollow: modules of the same class and fields that hold no weights and compute nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]


def hollow_copy(
    model: nn.Module, hollow: Mapping[str, Forward], *, own: Mapping[int, Any] | None = None, device: torch.device
) -> nn.Module:
    """The model's tree with a shell in place of every layer of `hollow`, whose forward is the function given there.

    All other modules are copied; their parameters, buffers and the configurations are the model's own, or what `own`
    has for them by `id`: whole modules may stand there too. A layer that is a bare parameter becomes a plain tensor
    without weights. A shell's parameters hold one zero in their shape, for code that asks for their dtype.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        memo |= {id(x): x for x in _tensors(module)}
        config = getattr(module, "config", None)
        memo[id(config)] = config
    memo |= own or {}
    bare = []
    for path, forward in hollow.items():
        layer = find_layer(model, path)
        if isinstance(layer, nn.Module):
            memo[id(layer)] = _shell(layer, device)
            memo[id(layer)].forward = forward
        else:
            bare.append(path)
    taken: nn.Module = copy.deepcopy(model, memo)
    for path in bare:
        parent, _, name = path.rpartition(".")
        holder = taken.get_submodule(parent)
        holder._parameters[name] = _weightless_parameter(getattr(holder, name), device)
    return taken


def find_layer(model: nn.Module, path: str) -> nn.Module | nn.Parameter:
    """A layer is a module, or a parameter that lies beside modules."""
    parent, _, name = path.rpartition(".")
    found = getattr(model.get_submodule(parent), name)
    assert isinstance(found, (nn.Module, nn.Parameter))
    return found


def tensors_between(model: nn.Module, layers: Iterable[str]) -> list[Tensor]:
    """Parameters and buffers that belong to none of the layers."""
    inside = {id(x) for name in layers for x in model.get_submodule(name).modules()}
    return [x for module in model.modules() if id(module) not in inside for x in _tensors(module)]


def parameters_of(layer: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return [layer] if isinstance(layer, nn.Parameter) else list(layer.parameters())


def _shell(module: nn.Module, device: torch.device) -> Any:
    """Same class and fields, so that code around it that asks for its type, kind or dtype gets the same answers."""
    shell = module.__class__.__new__(module.__class__)
    nn.Module.__init__(shell)
    fresh = set(vars(shell))
    shell.__dict__.update({name: x for name, x in vars(module).items() if name not in fresh and name != "forward"})
    shell.training = module.training
    for key, hook in module._forward_hooks.items():  # by which Transformers collects hidden states of a tower
        if getattr(hook, "__name__", "") == "output_capturing_hook":
            shell._forward_hooks[key] = hook
    for name, parameter in module._parameters.items():
        shell._parameters[name] = None if parameter is None else _weightless_parameter(parameter, device)
    for name, buffer in module._buffers.items():
        shell._buffers[name] = None if buffer is None else _weightless(buffer, device)
    shell._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        shell._modules[name] = None if child is None else _shell(child, device)
    return shell


def _weightless(tensor: Tensor, device: torch.device) -> Tensor:
    """One zero in that shape."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _weightless_parameter(parameter: Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(_weightless(parameter, device), requires_grad=False)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
