"""Makes a model whose weights lie on several devices run: Accelerate's own hooks, one for each unit of the map.

Between units a model's own code joins what they made: image features into embedded text, hidden states of several
blocks, a table of positions with the patches. There, and in `generate`, operands that meet go to one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode  # no public way to see the mode on top
from torch.utils._pytree import tree_leaves, tree_map  # nested arguments; torch has no public way to walk them

from trimtab.runtime.placing.device_units import CPU, DeviceUnit, DeviceUnits
from trimtab.runtime.placing.stored_weights import StoredTensor

PIXELS = "pixel_values"  # and pixel_values_videos: what only the vision tower reads, and the largest input by far


def hook_units(model: Any, placed: DeviceUnits, stored: Mapping[str, StoredTensor]) -> None:
    """Hooks for `placed` on a model whose weights already lie where it says; weights to be streamed in host memory.

    `stored`: tensors of the model that stay on disk and are read each time they are needed.
    """
    if all(device == CPU for device in (*(unit.runs_on for unit in placed.units), *placed.loose.values())):
        return  # nothing has to move
    meeting, kept = Meeting(), _names(getattr(model, "_skip_keys_device_placement", None))
    for i, unit in enumerate(placed.units):
        module = model.get_submodule(unit.name)
        weights = _Weights(module, unit.name, stored) if unit.streamed else None
        hook = AlignDevicesHook(
            unit.runs_on, offload=unit.streamed, weights_map=weights, place_submodules=True, skip_keys=kept
        )
        add_hook_to_module(module, hook)
        module.forward = meeting.paused_in(module.forward)
        gpu = _next_gpu(placed.units[i + 1 :])
        if unit.runs_on == CPU and gpu is not None:  # so that many layers do not each fetch what is made of it
            module.register_forward_hook(functools.partial(_leave, gpu))
    if model.device != placed.main:  # that of the first parameter, which `generate` takes for that of the inputs
        where = torch.empty(0, dtype=model.dtype, device=placed.main)
        model.register_parameter("_where", nn.Parameter(where, requires_grad=False))
    root = AlignDevicesHook(placed.main, io_same_device=True, skip_keys=[PIXELS, f"{PIXELS}_videos", *kept])
    add_hook_to_module(model, root)
    model.forward = meeting.open_in(model.forward)
    if hasattr(model, "generate"):  # which may call parts of the model itself
        model.generate = meeting.open_in(model.generate)


def _leave(gpu: torch.device, _: nn.Module, __: Any, output: Any) -> Any:
    return output.to(gpu) if isinstance(output, torch.Tensor) else output


def _names(keys: object) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys) if isinstance(keys, (list, tuple, set)) else []


def _next_gpu(units: Sequence[DeviceUnit]) -> torch.device | None:
    return next((unit.runs_on for unit in units if unit.runs_on != CPU), None)


class _Weights(Mapping[str, torch.Tensor]):
    """Parameters of a unit by their names in it; those that stay on disk are mapped when they are asked for."""

    def __init__(self, module: nn.Module, prefix: str, stored: Mapping[str, StoredTensor]) -> None:
        self._found = {
            name: stored.get(f"{prefix}.{name}".lstrip("."), parameter.data)
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._found[name]
        return found.map() if isinstance(found, StoredTensor) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


# -- between units ----------------------------------------------------------------------------------------------------

_MIXED = frozenset({"to", "copy_", "type_as", "set_", "__get__", "__set__"})  # take tensors of two devices
_IN_PLACE = frozenset({"__setitem__", "__getitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__"})


class Meeting(TorchFunctionMode):
    """Before an operation on tensors of several devices, all go to that of the tensor which it changes, or else of the
    largest. Units move their inputs by themselves, so nothing is watched inside them."""

    def __init__(self) -> None:
        super().__init__()
        self._open = False

    def open_in(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._open:
                return call(*args, **kwargs)
            self._open = True
            try:
                with self:
                    return call(*args, **kwargs)
            finally:
                self._open = False

        return watched

    def paused_in(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def unwatched(*args: Any, **kwargs: Any) -> Any:
            if _get_current_function_mode() is not self:  # type: ignore[no-untyped-call] # another mode lies above it
                return call(*args, **kwargs)
            self.__exit__(None, None, None)
            try:
                return call(*args, **kwargs)
            finally:
                self.__enter__()

        return unwatched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        leaves = [] if name in _MIXED else tree_leaves((args, kwargs))
        operands = [x for x in leaves if _has_a_place(x)]
        if len({x.device for x in operands}) > 1:
            changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
            first = operands[0] if changes else max(operands, key=lambda x: x.numel() * x.element_size())
            args, kwargs = tree_map(lambda x: x.to(first.device) if _has_a_place(x) else x, (args, kwargs))
        return func(*args, **kwargs)


def _has_a_place(x: Any) -> bool:
    """Scalars of the host go with any tensor."""
    return isinstance(x, torch.Tensor) and (x.dim() > 0 or x.device.type != "cpu")
