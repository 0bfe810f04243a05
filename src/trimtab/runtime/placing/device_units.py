"""A device map read against the model it is for: which module lies where, and where it runs.

A *unit* is a module that lies on one device and is called as a whole. The units of a map are disjoint and hold every
tensor, but for those that a module above them owns itself. A model around other models, or around the embedding, is no
unit whatever the map says: `generate` and the outer forward call its parts past it. No prefix of another name can then
be taken for a unit, also by readers that compare letters instead of path parts (Transformers 5 takes `layers.10` for a
part of `layers.1`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode  # no public way to see the mode on top
from torch.utils._pytree import tree_leaves, tree_map  # nested arguments; torch has no public way to walk them
from transformers import PreTrainedModel

from trimtab.errors import PartitionError, join_problems, quote
from trimtab.placement.bytes import DeviceKey, upwards
from trimtab.runtime.placing.folder import StoredTensor

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUnit:
    """A module of the map: where its weights lie, and where it runs."""

    name: str
    home: DeviceKey  # a GPU's number, "cpu" or "disk"
    runs_on: torch.device

    @property
    def streamed(self) -> bool:
        """Return its weights are copied to where it runs, each time it does."""
        return isinstance(self.home, str) and self.runs_on != CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUnits:
    """A whole model on its devices."""

    units: tuple[DeviceUnit, ...]  # in the map's order
    loose: Mapping[str, torch.device]  # tensors of modules whose parts lie on several devices
    main: torch.device  # where the model's inputs are best: that of the head


def resolve_units(
    model: nn.Module, device_map: Mapping[str, DeviceKey], runs_on: Mapping[str, DeviceKey] | None = None
) -> DeviceUnits:
    """The units of `device_map` on `model`, which may be on the meta device.

    An embedding on "cpu" or "disk" runs in host memory, as only the rows looked up then move. Other modules there run
    where `runs_on` says, or on the GPU of the next module in the map that has one. `PartitionError` names every
    module that has no device, is not there, or asks for a device that is not.
    """
    keys = {key: _device_key(device) for key, device in device_map.items()}
    problems = [*_unknown_devices(keys), *_unknown_devices(runs_on or {}), *_unknown_modules(model, keys)]
    homes: dict[str, DeviceKey] = {}
    loose: dict[str, DeviceKey] = {}
    missing: list[str] = []
    for name, home, is_tensor in _cover(model, keys):
        if home is None:
            missing.append(name)
        else:
            (loose if is_tensor else homes)[name] = home
    if homes or loose:
        problems += [
            f"the device map has no device for {name}: add it, or the module that holds it"
            for name in _topmost(missing, [*homes, *loose])
        ]
    if not problems:
        problems += _torn(model, homes | loose)
    if problems:
        raise PartitionError(join_problems(problems))
    units = _place(model, _in_order(keys, homes), runs_on or {})
    gpus = [unit.runs_on for unit in units if unit.runs_on != CPU]
    fallback = gpus[0] if gpus else CPU
    head = _head_of(model)
    return DeviceUnits(
        units=tuple(units),
        loose={name: _torch_device(home, fallback) for name, home in loose.items()},
        main=next((x.runs_on for x in units if head is not None and _holds(x.name, head)), fallback),
    )


# -- the map ----------------------------------------------------------------------------------------------------------


def _device_key(device: object) -> DeviceKey:
    """Return a number for "cuda:1" and torch.device("cuda", 1) too; anything else as it is."""
    if isinstance(device, torch.device):
        device = str(device)
    if isinstance(device, str) and device not in ("cpu", "disk"):
        kind, _, index = device.partition(":")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None and kind == accelerator.type and (index.isdigit() or not index):
            return int(index or 0)
    return device if isinstance(device, (int, str)) and not isinstance(device, bool) else repr(device)


def _unknown_devices(keys: Mapping[str, DeviceKey]) -> list[str]:
    count = torch.accelerator.device_count()
    there = f"devices are 0 to {count - 1}" if count else "there is no accelerator"
    wrong = {x for x in keys.values() if (x not in ("cpu", "disk") if isinstance(x, str) else not 0 <= x < count)}
    return [
        f"the device map puts {_first_on(keys, device)} on {quote(device)}, but {there}: choose one, cpu or disk"
        for device in sorted(wrong, key=str)
    ]


def _first_on(keys: Mapping[str, DeviceKey], device: DeviceKey) -> str:
    return next(key for key, home in keys.items() if home == device) or "the whole model"


def _unknown_modules(model: nn.Module, keys: Mapping[str, DeviceKey]) -> list[str]:
    known = {name for name, _ in (*model.named_modules(remove_duplicate=False), *_tensors(model))}
    wrong = [key for key in keys if key not in known]
    if keys and len(wrong) == len(keys):
        return [f"the device map is of another model: {type(model).__name__} has none of its {len(keys)} modules"]
    return [f"the device map places {quote(key)}, which {type(model).__name__} lacks: leave it out" for key in wrong]


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _cover(model: nn.Module, keys: Mapping[str, DeviceKey]) -> Iterator[tuple[str, DeviceKey | None, bool]]:
    """Yield units, then what no unit holds: (name, device or None, whether it is a tensor), in module order."""
    above = _around(keys) | _called_past(model)

    def visit(
        name: str, module: nn.Module, inherited: DeviceKey | None
    ) -> Iterator[tuple[str, DeviceKey | None, bool]]:
        device = keys.get(name, inherited)
        whole = name not in above and device is not None
        if whole and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # which nobody calls
            if next(_tensors(module), None) is not None:
                yield name, device, False
            return
        for own, _ in _tensors(module, recurse=False):
            path = f"{name}.{own}".lstrip(".")
            yield path, keys.get(path, device), True
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}".lstrip("."), child, device)

    yield from visit("", model, None)


def _called_past(model: nn.Module) -> set[str]:
    """Find models around models or around the embedding: `self.model.visual(...)`, `get_input_embeddings()(...)`."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return _around(
        name for name, module in model.named_modules() if isinstance(module, PreTrainedModel) or module is embedding
    )


def _around(names: Iterable[str]) -> set[str]:
    """The modules around any of `names`."""
    return {above for name in names for above in upwards(name) if above != name}


def _topmost(missing: Sequence[str], held: Sequence[str]) -> list[str]:
    """Return the names without a device, the largest module in which nothing has one standing for all that it holds."""
    covered = {"", *held, *_around(held)}
    tops = ([x for x in upwards(name) if x == name or x not in covered][-1] for name in missing)
    return list(dict.fromkeys(tops))


def _in_order(keys: Mapping[str, DeviceKey], homes: Mapping[str, DeviceKey]) -> dict[str, DeviceKey]:
    """Return the units in the order of the keys that hold them: a map lists modules in forward order."""
    position = {key: i for i, key in enumerate(keys)}
    of = {name: next(position[x] for x in upwards(name) if x in position) for name in homes}
    return {name: homes[name] for name in sorted(homes, key=of.__getitem__)}


def _torn(model: nn.Module, homes: Mapping[str, DeviceKey]) -> list[str]:
    """Return the modules that share a weight but not a device."""
    problems = []
    for borrower, owner in getattr(model, "all_tied_weights_keys", {}).items():
        first, second = _home_of(homes, owner), _home_of(homes, borrower)
        if first != second:
            problems.append(f"{owner} on {first} and {borrower} on {second} are one weight: put both on {first}")
    return problems


def _home_of(homes: Mapping[str, DeviceKey], tensor: str) -> DeviceKey | None:
    return next((homes[x] for x in upwards(tensor) if x in homes), None)


# -- where units run ---------------------------------------------------------------------------------------------------


def _place(model: nn.Module, homes: Mapping[str, DeviceKey], runs_on: Mapping[str, DeviceKey]) -> list[DeviceUnit]:
    names = list(homes)
    gpus = [home if isinstance(home, int) else None for home in homes.values()]
    units = []
    for i, name in enumerate(names):
        home = homes[name]
        at: DeviceKey | None = home
        if isinstance(home, str):
            at = runs_on.get(name)
            if isinstance(model.get_submodule(name), nn.Embedding):
                at = "cpu"
            if at is None:
                nearest = [*gpus[i:], *reversed(gpus[:i])]
                at = next((gpu for gpu in nearest if gpu is not None), "cpu")
        assert at is not None
        units.append(DeviceUnit(name=name, home=home, runs_on=_torch_device(at, CPU)))
    return units


def _torch_device(key: DeviceKey, otherwise: torch.device) -> torch.device:
    if isinstance(key, str):
        return otherwise
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator is not None  # `_unknown_devices` has counted them
    return torch.device(accelerator.type, key)


def _head_of(model: nn.Module) -> str | None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None


def _holds(unit: str, module: str) -> bool:
    return unit in ("", module) or module.startswith(f"{unit}.")


# Makes a model whose weights lie on several devices run: Accelerate's own hooks, one for each unit of the map.
#
# Between units a model's own code joins what they made: image features into embedded text, hidden states of several
# blocks, a table of positions with the patches. There, and in `generate`, operands that meet go to one device.


PIXELS = "pixel_values"  # and pixel_values_videos: what only the vision tower reads, and the largest input by far


def hook_units(model: Any, placed: DeviceUnits, stored: Mapping[str, StoredTensor]) -> None:
    """Put hooks for `placed` on a model whose weights already lie where it says; weights to be streamed in host memory.

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
    """Return whether it has a place: scalars of the host go with any tensor."""
    return isinstance(x, torch.Tensor) and (x.dim() > 0 or x.device.type != "cpu")
