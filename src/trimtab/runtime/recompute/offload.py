"""What a layer keeps for its backward, in host memory until then: copied behind its forward, fetched before it is used.

On CUDA, pinned memory and two streams beside the computing one: the copies of a layer leave while the layer behind it
runs, and come back while that one's backward does, so that at most two layers' bytes are on the device at a time. On
other devices, plain copies at once: the bytes are those of a device's run, the time is not. The CUDA part was written
from torch's documentation and has not been run.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes  # private, torch 2.13


class HostMemory:
    """Bytes of offloaded layers in host memory, and the copies to and from it."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.most_bytes = 0
        self._leaving: deque[_Leaving] = deque()  # of the last layers; none on the CPU
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def begin_layer(self) -> None:
        """The copies of the layer before last are waited for: computing runs no further ahead of them."""
        self.settle(keep=1)
        self._leaving.append(_Leaving())

    def settle(self, *, keep: int = 0) -> None:
        """The computing stream waits for all copies but those of the last `keep` layers."""
        while len(self._leaving) > keep:
            leaving = self._leaving.popleft()
            if leaving.done is not None:
                torch.cuda.current_stream(leaving.device).wait_event(leaving.done)

    def send(self, storage: torch.UntypedStorage, device: torch.device) -> Moved:
        """Copies a storage, which the layer may let go of at once."""
        on_cuda = device.type == "cuda"
        source = _as_bytes(storage, device)
        with _disable_current_modes():  # what counts a device's bytes must not see the host's, on the CPU least of all
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_cuda)
            if not on_cuda:
                copy.copy_(source)
        if on_cuda:
            stream = self._streams_of(device)[0]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                copy.copy_(source, non_blocking=True)
            source.record_stream(stream)  # not given to others before the copy has ended
            leaving = self._leaving[-1]
            leaving.device, leaving.done = device, stream.record_event()
        source_ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        moved = Moved(copy, source_ref, device)
        self.held_bytes += copy.nbytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        weakref.finalize(moved, self._drop, copy.nbytes)
        return moved

    def fetch(self, moved: Moved) -> None:
        """Begins to copy back, unless that was done."""
        if moved.fetched is not None:
            return
        # made on the computing stream, which frees it as well; the copying one waits until it may be written
        back = torch.empty(moved.copy.nbytes, dtype=torch.uint8, device=moved.device)
        if moved.device.type == "cuda":
            stream = self._streams_of(moved.device)[1]
            stream.wait_stream(torch.cuda.current_stream(moved.device))
            with torch.cuda.stream(stream):
                back.copy_(moved.copy, non_blocking=True)
            moved.arrived = stream.record_event()
        else:
            back.copy_(moved.copy)
        moved.fetched = back.untyped_storage()

    def _drop(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes

    def _streams_of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = tuple(torch.cuda.Stream(device) for _ in range(2))  # type: ignore[assignment, no-untyped-call]
        return self._streams[device]


class _Leaving:
    """The end of one layer's copies, which may still run."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.done: torch.cuda.Event | None = None


class Moved:
    """One storage in host memory, as long as a node of the graph wants it."""

    def __init__(self, copy: Tensor, source: StorageWeakRef, device: torch.device) -> None:
        self.copy = copy
        self.source = source  # while it lives no other storage is given the same address, by which it is known
        self.device = device
        self.fetched: torch.UntypedStorage | None = None
        self.arrived: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor, as a view of what was moved."""

    moved: Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class OffloadedLayer:
    """Runs the forwards of one layer so that what they save leaves the device.

    What stays: parameters and buffers; the tensors the layer was handed, which are somebody else's; tensors on other
    devices, and subclasses of tensors. A storage is moved once, however many views of it are saved.
    """

    def __init__(self, layer: nn.Module, host: HostMemory) -> None:
        self.layer = layer
        self.host = host
        self.before: OffloadedLayer | None = None  # whose backward comes next, where that layer is offloaded too
        self.latest: weakref.ref[_Call] | None = None

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.host.begin_layer()
        before = None if self.before is None or self.before.latest is None else self.before.latest()
        call = _Call(self.layer, self.host, list(tensors_in((args, kwargs))), before)
        self.latest = weakref.ref(call)
        with saved_tensors_hooks(call.pack, call.unpack):
            return forward(*args, **kwargs)


class _Call:
    """One forward of a layer and its backward."""

    def __init__(self, layer: nn.Module, host: HostMemory, inputs: list[Tensor], before: _Call | None) -> None:
        own = [*layer.parameters(), *layer.buffers()]
        self.host = host
        self.layer = layer
        self.device = own[0].device if own else inputs[0].device if inputs else torch.device("cpu")
        self.staying = {x.untyped_storage()._cdata for x in (*own, *inputs) if type(x) in (Tensor, nn.Parameter)}
        # weights that are gathered within the layer (FSDP2 around its parts) are not its plain parameters yet
        self.gathers = any(type(x) not in (Tensor, nn.Parameter) for x in own)
        self.moved: weakref.WeakValueDictionary[tuple[int, int], Moved] = weakref.WeakValueDictionary()
        self.before = None if before is None else weakref.ref(before)
        self.in_backward = False

    def pack(self, tensor: Tensor) -> Tensor | _View:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != self.device:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or tensor.is_conj() or tensor.is_neg() or self._stays(storage._cdata):
            return tensor
        key = storage._cdata, tensor._version
        moved = self.moved.get(key)
        if moved is None:
            moved = self.moved[key] = self.host.send(storage, self.device)
        return _View(moved, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not self.in_backward:
            self.in_backward = True
            self.host.settle()
            self.fetch()
            before = None if self.before is None else self.before()
            if before is not None:
                before.fetch()
        moved = packed.moved
        self.host.fetch(moved)  # done, but for a graph that is run through once more
        if moved.arrived is not None:
            torch.cuda.current_stream(moved.device).wait_event(moved.arrived)
        assert moved.fetched is not None
        empty = torch.empty(0, dtype=packed.dtype, device=moved.device)
        return empty.set_(moved.fetched, packed.offset, packed.size, packed.stride)

    def fetch(self) -> None:
        for moved in list(self.moved.values()):
            self.host.fetch(moved)

    def _stays(self, key: int) -> bool:
        if key in self.staying:
            return True
        return self.gathers and any(
            x.untyped_storage()._cdata == key for x in self.layer.parameters() if type(x) is nn.Parameter
        )


def link_neighbours(layers: Mapping[str, OffloadedLayer]) -> None:
    """Tells every layer of a list ("layers.7") of the one before it, where that is offloaded as well."""
    for name, layer in layers.items():
        parent, _, number = name.rpartition(".")
        if number.isdecimal():
            layer.before = layers.get(f"{parent}.{int(number) - 1}" if parent else str(int(number) - 1))


def tensors_in(given: object) -> Iterator[Tensor]:
    """Tensors in nested mappings, tuples and lists."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        for value in given.values():
            yield from tensors_in(value)
    elif isinstance(given, (tuple, list)):
        for value in given:
            yield from tensors_in(value)


def _as_bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
