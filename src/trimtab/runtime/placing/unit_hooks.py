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
from accelerate.utils.operations import find_device, send_to_device
from torch import nn

from trimtab.runtime.placing.device_units import CPU, DeviceUnit, DeviceUnits
from trimtab.runtime.placing.meeting import Absent, Copies, Meeting
from trimtab.runtime.placing.stored_weights import StoredTensor


def dispatch(model: Any, placed: DeviceUnits, stored: Mapping[str, StoredTensor]) -> None:
    """Hooks for `placed` on a model whose weights already lie where it says; weights to be streamed in host memory.

    `stored`: tensors of the model that stay on disk and are read each time they are needed.
    """
    if all(device == CPU for device in (*(unit.runs_on for unit in placed.units), *placed.loose.values())):
        return  # nothing has to move
    copies = Copies()
    meeting = Meeting(copies)
    skip_keys = frozenset(_names(getattr(model, "_skip_keys_device_placement", None)))
    for i, unit in enumerate(placed.units):
        module = model.get_submodule(unit.name)
        hook = UnitHook(
            unit.runs_on,
            copies=copies,
            meeting=meeting,
            skip_keys=skip_keys,
            streamed=_streamed(module, unit.name, unit.runs_on, stored) if unit.streamed else (),
            leave_on=_next_gpu(placed.units[i + 1 :]) if unit.runs_on == CPU else None,
        )
        add_hook_to_module(module, hook)
    if model.device != placed.main:  # that of the first parameter, which `generate` takes for that of the inputs
        where = torch.empty(0, dtype=model.dtype, device=placed.main)
        model.register_parameter("_where", nn.Parameter(where, requires_grad=False))
    add_hook_to_module(model, RootHook(placed.main, copies=copies, skip_keys=skip_keys))
    model.forward = meeting.around(model.forward)
    if hasattr(model, "generate"):  # which may call parts of the model itself
        model.generate = meeting.around(model.generate)


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
    absent: Absent

    def bring(self) -> None:
        self.owner._parameters[self.name] = nn.Parameter(self.absent.bring(), requires_grad=False)

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
            source = stored.get(f"{path}.{name}".lstrip("."), parameter.data)
            absent = Absent.of(parameter, source, device)
            found.append(_Streamed(owner, name, absent))
            owner._parameters[name] = absent
    return tuple(found)


class RootHook(ModelHook):  # type: ignore[misc]
    """Inputs to the main device, results back to where they came from; pixels straight to the unit that reads them."""

    def __init__(self, main: torch.device, *, copies: Copies, skip_keys: frozenset[str]) -> None:
        self.execution_device = main
        self._copies, self._skip_keys = copies, skip_keys
        self._came_from: torch.device | None = None

    def pre_forward(
        self,
        _module: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = [kwargs[key] for key in ("input_ids", "inputs_embeds") if kwargs.get(key) is not None]
        self._came_from = find_device([tokens, args, kwargs])
        stays = {key for key in kwargs if key.startswith(PIXELS)} | self._skip_keys
        return self._copies.move_inputs(args, kwargs, self.execution_device, stays)

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
        meeting: Meeting,
        skip_keys: frozenset[str],
        streamed: tuple[_Streamed, ...],
        leave_on: torch.device | None,
    ) -> None:
        self.execution_device = runs_on
        self._copies, self._skip_keys, self._streamed, self._leave_on = copies, skip_keys, streamed, leave_on
        self._meeting, self._paused = meeting, False

    def pre_forward(
        self,
        _module: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._paused = self._meeting.pause()
        for weight in self._streamed:
            weight.bring()
        return self._copies.move_inputs(args, kwargs, self.execution_device, self._skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002
        for weight in self._streamed:
            weight.drop()
        moved = output if self._leave_on is None else self._copies.move(output, self._leave_on)
        if self._paused:
            self._meeting.resume()
        return moved
