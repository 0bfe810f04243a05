"""Several devices on a CPU: tensors with real values that raise on mixed devices, and a count of bytes per link.

A tensor on device "sim:k" wraps the CPU tensor that holds its value. Every operation unwraps its arguments, refuses
tensors of two devices as a GPU does, computes on the CPU and wraps the result: values are bit for bit the CPU's. The
backend for Python in torch (`privateuseone`, experimental: tried with torch 2.13) makes "sim" a device like "cuda":
`.to(1)`, `torch.zeros(..., device="sim:0")` and Accelerate's hooks work unchanged. Not modelled: streams, kernels, an
allocator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"
NUM_DEVICES = 8


@dataclass
class Traffic:
    """Bytes copied from one device to another, by (source, target)."""

    links: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.links.values())

    @property
    def host_to_device(self) -> int:
        return sum(n for (source, target), n in self.links.items() if source == "cpu" and target != "cpu")


_COUNTING: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """What is copied between devices while the context is open."""
    traffic = Traffic()
    _COUNTING.append(traffic)
    try:
        yield traffic
    finally:
        _COUNTING.remove(traffic)


class SimTensor(torch.Tensor):
    """A tensor on device "sim:k" whose value lies in host memory."""

    value: torch.Tensor

    @staticmethod
    def wrap(value: torch.Tensor, device: torch.device) -> SimTensor:
        assert type(value) is not SimTensor
        made = torch.Tensor._make_wrapper_subclass(
            SimTensor,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=device,
            requires_grad=False,
        )
        made.value = value
        return made

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, **_: Any) -> torch.Tensor:
        """`type(parameter)(tensor)`, as Accelerate makes a parameter of the same kind for another device."""
        return torch.nn.Parameter(data, requires_grad=requires_grad)

    def data_ptr(self) -> int:  # by which Accelerate knows tied weights
        return self.value.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"SimTensor({self.value!r}, device='{self.device}')"

    def tolist(self) -> Any:
        return self.value.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:  # chooses its kernel below Python
            return _run(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_aten = torch.ops.aten
_CPU_INDICES = {  # index tensors may lie in host memory
    _aten.index.Tensor,
    _aten.index_put_.default,
    _aten.index_put.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}
_COPIES = {_aten.copy_.default, _aten._copy_from.default, _aten._copy_from_and_resize.default}
_RESIZING = (  # make an empty tensor first and then resize it, which a wrapper cannot follow
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "eye",
    "randperm",
    "tril_indices",
    "triu_indices",
)
_SCALARS = {_aten._local_scalar_dense.default}


def _record(source: torch.device, target: torch.device, value: torch.Tensor) -> None:
    if source != target:
        for traffic in _COUNTING:
            traffic.links[str(source), str(target)] += value.numel() * value.element_size()


def _device_of(func: Any, tensors: Sequence[torch.Tensor]) -> torch.device:
    """The one device of all operands; host scalars go with any."""
    devices = {x.device for x in tensors if type(x) is SimTensor or x.dim() > 0}
    if len(devices) > 1:
        names = ", ".join(sorted(str(x) for x in devices))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {names} in {func}")
    sim = {x.device for x in tensors if type(x) is SimTensor}
    return next(iter(sim), torch.device("cpu"))


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors: list[torch.Tensor] = []
    inner_args, inner_kwargs = _unwrap(args, tensors), _unwrap(kwargs, tensors)
    asked = kwargs.get("device")
    asked = torch.device(asked) if asked is not None else None
    if torch.Tag.inplace_view in getattr(func, "tags", ()):
        raise NotImplementedError(f"{func} changes a simulated tensor's shape in place")
    if func in _COPIES:
        target, source = (args[0], args[1]) if func is _aten.copy_.default else (args[1], args[0])
        _record(source.device, target.device, source)
        device = target.device
    elif func in _CPU_INDICES:
        rest = [args[0], *(x for x in args[2:] if isinstance(x, torch.Tensor))]
        device = _device_of(func, rest)
        if any(x.device not in (device, torch.device("cpu")) for x in tensors):
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({device})"
            )
    else:
        device = _device_of(func, tensors)
    if asked is not None and asked.type == "meta":
        return func(*_on_meta(args), **_on_meta(kwargs))
    if asked is not None:
        if asked.type == NAME and asked.index is None:
            asked = torch.device(NAME, 0)
        for x in tensors:  # _to_copy, new_empty, zeros_like ...; of these only the first copies a value
            if "_to_copy" in str(func):
                _record(x.device, asked, x)
        device = asked
    wrappers = {id(x.value): x for x in tensors if type(x) is SimTensor}
    if asked is not None:
        inner_kwargs["device"] = torch.device("cpu")
    inner_kwargs.pop("pin_memory", None)
    with torch.no_grad():
        if func is _aten.histc.default and not inner_args[0].is_floating_point():  # a GPU counts integers, the CPU not
            result = func(inner_args[0].double(), *inner_args[1:], **inner_kwargs).to(inner_args[0].dtype)
        else:
            result = func(*inner_args, **inner_kwargs)
    if device.type != NAME or func in _SCALARS:
        return result

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        same = wrappers.get(id(x))
        if same is not None and same.shape != x.shape:
            raise NotImplementedError(f"{func} resizes a simulated tensor")
        return SimTensor.wrap(x, device) if same is None else same

    return wrap(result) if isinstance(result, torch.Tensor) else pytree.tree_map(wrap, result)


def _unwrap(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The values of simulated tensors in nested lists, tuples and dicts; all tensors found go into `tensors`."""
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return tree.value if type(tree) is SimTensor else tree
    if isinstance(tree, (list, tuple)):
        return type(tree)([_unwrap(x, tensors) for x in tree])
    if isinstance(tree, dict):
        return {key: _unwrap(x, tensors) for key, x in tree.items()}
    return tree


def _on_meta(tree: Any) -> Any:
    return pytree.tree_map(lambda x: torch.empty_like(x.value, device="meta") if type(x) is SimTensor else x, tree)


class _Module:
    """What torch asks of `torch.sim`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return bool(_ACTIVE)

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def device_count(self) -> int:
        return NUM_DEVICES if _ACTIVE else 0


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return bool(_ACTIVE)

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _MakeFromData(TorchFunctionMode):
    """Tensors made of Python numbers: torch fills them below the level at which a Python backend is asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            if device.type == NAME and not (args and isinstance(args[0], torch.Tensor)):
                numbers = pytree.tree_map(lambda x: x.value if type(x) is SimTensor else x, args)
                return func(*numbers, **{**kwargs, "device": "cpu"}).to(device)
        if func is torch.Tensor.new_tensor and type(args[0]) is SimTensor:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(
                kwargs.get("device", args[0].device)
            )
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and type(args[0]) is SimTensor:
            args = (args[0], _with_tensors(args[1]), *args[2:])
        return func(*args, **kwargs)


def _with_tensors(index: Any) -> Any:
    """Lists in an index as host tensors, which is what a GPU takes them for."""
    if isinstance(index, tuple):
        return tuple(_with_tensors(x) for x in index)
    if not isinstance(index, list):
        return index
    return torch.tensor(index) if index else torch.empty(0, dtype=torch.long)


_ACTIVE: list[None] = []
_LIBRARY: list[torch.library.Library] = []


@contextmanager
def simulated() -> Iterator[None]:
    """Devices "sim:0" to "sim:7" are there while the context is open; plain numbers mean them."""
    if not _LIBRARY:  # once a process: there is no way back, but without the context nothing finds them
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), hook=_Hooks())
        library = torch.library.Library("_", "IMPL")
        library.fallback(_factory, "PrivateUse1")
        _LIBRARY.append(library)
        for name in _RESIZING:
            operation = getattr(_aten, name.partition(".")[0])
            overload = getattr(operation, name.partition(".")[2] or "default")
            own = _LIBRARY[0] if _LIBRARY[0].ns == "aten" else torch.library.Library("aten", "IMPL")
            own.impl(name, partial(_factory, overload), "PrivateUse1")
            _LIBRARY.insert(0, own)
    _ACTIVE.append(None)
    try:
        with _MakeFromData():
            yield
    finally:
        _ACTIVE.pop()


def _factory(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Operations that no simulated tensor takes part in, but that shall make one."""
    return _run(func, args, kwargs)
