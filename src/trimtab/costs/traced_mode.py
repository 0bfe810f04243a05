"""The dispatch mode under which a step is traced: bytes that live, and FLOPs.

Needs torch, loaded when this module is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from trimtab.models.asking.forward import run_operation

aten = torch.ops.aten


class StepMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operation below autograd, in forward and backward.

    `live_bytes`: storages that operations made and that something still holds; storages in `known` (parameters,
    buffers, inputs) are left out. Not seen: workspaces inside kernels. `flops` counts what torch's flop counter
    counts, products and attention, masked pairs included.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.step_peak_bytes = 0
        self.peak_bytes = 0  # since `mark` was last called
        self.flops = 0
        self._live: dict[int, _Storage] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._num_storages = 0

    def mark(self) -> None:
        """`peak_bytes` counts from here."""
        self.peak_bytes = self.live_bytes

    def identify(self, tensor: Tensor) -> int:
        """A number for the storage of `tensor`, never given again: negative for known ones. It counts from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return -int(storage._cdata)
        self._see(tensor)
        return self._live[storage._cdata].number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        result = run_operation(func, args, kwargs)
        if packet in _FLOPS:
            self.flops += _FLOPS[packet](*args, **kwargs, out_val=result)
        self._see(result)
        return result

    def _see(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self._see_storage(result.untyped_storage())
        elif isinstance(result, (tuple, list)):
            for part in result:
                self._see(part)

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or key in self._known:
            return
        self._num_storages += 1
        self._live[key] = _Storage(number=self._num_storages, num_bytes=storage.nbytes())
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.step_peak_bytes = max(self.step_peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key).num_bytes


@dataclass(frozen=True, slots=True)
class _Storage:
    number: int
    num_bytes: int


# -- FLOPs ----------------------------------------------------------------------------------------------------------


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = (x.shape for x in (grad, query, key, value))
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _grouped(a: Any, b: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """Rows times width of the result times width of the product's inner side; groups share the rows, or the inner."""
    return (
        2 * int(a.shape[-1]) * (prod(out_val.shape) if a.dim() == 2 and b.dim() == 3 else int(prod(out_val.shape[-2:])))
    )


def _formulas() -> dict[Any, Callable[..., int]]:
    found: dict[Any, Callable[..., int]] = {
        packet: (lambda formula: lambda *args, out_val, **kwargs: int(formula(*args, **kwargs, out_val=out_val)))(f)
        for packet, f in flop_registry.items()
    }
    found[aten._scaled_dot_product_flash_attention_for_cpu] = _attention
    found[aten._scaled_dot_product_flash_attention_for_cpu_backward] = _attention_backward
    found[aten._grouped_mm] = _grouped
    return found


_FLOPS = _formulas()
