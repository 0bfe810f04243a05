"""Makes a model whose weights lie on several devices run: Accelerate's hook mechanism, one hook a unit of the map.

Accelerate's own hooks do the same for every leaf module. Here a unit's weights arrive together and leave together, a
module of host memory may run there, and a tensor that many layers of a device read crosses to it once a forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils.operations import find_device, recursively_apply, send_to_device
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from trimtab.runtime.device_units import CPU, DeviceUnit, DeviceUnits
from trimtab.runtime.weights import StoredTensor


def dispatch(model: Any, placed: DeviceUnits, stored: Mapping[str, StoredTensor]) -> None:
    """Hooks for `placed` on a model whose weights already lie where it says; weights to be streamed in host memory.

    `stored`: tensors of the model that stay on disk and are read each time they are needed.
    """
    if all(device == CPU for device in (*(unit.runs_on for unit in placed.units), *placed.loose.values())):
        return  # nothing has to move
    copies = Copies()
    skip_keys = frozenset(_names(getattr(model, "_skip_keys_device_placement", None)))
    for i, unit in enumerate(placed.units):
        module = model.get_submodule(unit.name)
        hook = UnitHook(
            unit.runs_on,
            copies=copies,
            skip_keys=skip_keys,
            streamed=_streamed(module, unit.name, unit.runs_on, stored) if unit.streamed else (),
            leave_on=_next_gpu(placed.units[i + 1 :]) if unit.runs_on == CPU else None,
        )
        add_hook_to_module(module, hook)
    for name, device in _towers(model, placed.units).items():
        hook = UnitHook(device, copies=copies, skip_keys=skip_keys, streamed=(), leave_on=None)
        add_hook_to_module(model.get_submodule(name), hook)
    if model.device != placed.main:  # that of the first parameter, which `generate` takes for that of the inputs
        where = torch.empty(0, dtype=model.dtype, device=placed.main)
        model.register_parameter("_where", nn.Parameter(where, requires_grad=False))
    add_hook_to_module(model, RootHook(placed.main, copies=copies, skip_keys=skip_keys))


def _towers(model: nn.Module, units: Sequence[DeviceUnit]) -> dict[str, torch.device]:
    """Models within the model that are cut into units, and where their first one runs: their inputs belong there.

    Some towers compute positions of their inputs before the first unit, and add them behind it.
    """
    found: dict[str, torch.device] = {}
    inner = [name for name, module in model.named_modules() if name and isinstance(module, PreTrainedModel)]
    for name in inner:
        held = [i for i, unit in enumerate(units) if unit.name.startswith(f"{name}.")]
        if held and not any(other.startswith(f"{name}.") for other in inner):
            first = units[held[0]]
            gpu = _next_gpu(units[held[0] + 1 :]) if first.runs_on == CPU else None
            found[name] = gpu or first.runs_on
    return found


def _names(keys: object) -> Sequence[str]:
    return [keys] if isinstance(keys, str) else list(keys) if isinstance(keys, (list, tuple, set)) else []


def _next_gpu(units: Sequence[DeviceUnit]) -> torch.device | None:
    return next((unit.runs_on for unit in units if unit.runs_on != CPU), None)


PIXELS = "pixel_values"  # and pixel_values_videos: what the vision tower alone reads, and the largest input by far


@dataclass(frozen=True, slots=True, eq=False)
class _Streamed:
    """A parameter that is on its device only while its unit runs."""

    owner: nn.Module
    name: str
    absent: nn.Parameter  # stands in on the meta device
    source: torch.Tensor | StoredTensor

    def bring(self, device: torch.device) -> None:
        tensor = self.source.map() if isinstance(self.source, StoredTensor) else self.source
        self.owner._parameters[self.name] = nn.Parameter(tensor.to(device), requires_grad=False)

    def drop(self) -> None:
        self.owner._parameters[self.name] = self.absent


def _streamed(
    module: nn.Module, prefix: str, device: torch.device, stored: Mapping[str, StoredTensor]
) -> tuple[_Streamed, ...]:
    """Takes the parameters off a module, and puts its buffers where it runs."""
    found = []
    for path, owner in module.named_modules(prefix=prefix):
        owner._buffers.update({k: b if b is None else b.to(device) for k, b in owner._buffers.items()})
        for name, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            absent = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            source = stored.get(f"{path}.{name}".lstrip("."), parameter.data)
            found.append(_Streamed(owner, name, absent, source))
            owner._parameters[name] = absent
    return tuple(found)


class Copies:
    """Copies on other devices of tensors that are still alive and have not changed since, for one forward."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def move(self, tree: Any, device: torch.device) -> Any:
        """Every tensor in nested lists, tuples and mappings on `device`."""
        return recursively_apply(self._one, tree, device)

    def _one(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        if tensor.is_inference() or tensor.requires_grad:  # no count of changes; a gradient has to find its way back
            return tensor.to(device)
        version, copies = self._of.get(tensor, (None, {}))  # type: ignore[no-untyped-call]
        if version != tensor._version:
            version, copies = tensor._version, {}
        if device not in copies:
            copies[device] = tensor.to(device)
            self._of[tensor] = (version, copies)
        copy: torch.Tensor = copies[device]
        return copy


class RootHook(ModelHook):  # type: ignore[misc]
    """Inputs to the main device, results back to where they came from; pixels straight to the unit that reads them."""

    def __init__(self, main: torch.device, *, copies: Copies, skip_keys: frozenset[str]) -> None:
        self.execution_device = main
        self._copies, self._skip_keys = copies, skip_keys
        self._came_from: torch.device | None = None

    def pre_forward(
        self,
        module: nn.Module,  # noqa: ARG002
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = [kwargs[key] for key in ("input_ids", "inputs_embeds") if kwargs.get(key) is not None]
        self._came_from = find_device([tokens, args, kwargs])
        moved = {
            key: value
            if key in self._skip_keys or key.startswith(PIXELS)
            else self._copies.move(value, self.execution_device)
            for key, value in kwargs.items()
        }
        return self._copies.move(args, self.execution_device), moved

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002
        self._copies.forget()
        return output if self._came_from is None else send_to_device(output, self._came_from, skip_keys=self._skip_keys)


class UnitHook(ModelHook):  # type: ignore[misc] # Accelerate's hooks are untyped
    """Inputs and streamed weights to where the unit runs, before it runs; the weights dropped behind it."""

    def __init__(
        self,
        runs_on: torch.device,
        *,
        copies: Copies,
        skip_keys: frozenset[str],
        streamed: tuple[_Streamed, ...],
        leave_on: torch.device | None,
    ) -> None:
        self.execution_device = runs_on
        self._copies, self._skip_keys, self._streamed, self._leave_on = copies, skip_keys, streamed, leave_on

    def pre_forward(
        self,
        module: nn.Module,  # noqa: ARG002
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for weight in self._streamed:
            weight.bring(self.execution_device)
        moved = {
            key: value if key in self._skip_keys else self._copies.move(value, self.execution_device)
            for key, value in kwargs.items()
        }
        return self._copies.move(args, self.execution_device), moved

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002
        for weight in self._streamed:
            weight.drop()
        return output if self._leave_on is None else self._copies.move(output, self._leave_on)
