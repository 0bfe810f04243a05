"""Bytes of a device that a run holds now and held at most.

On CUDA the allocator counts. On the CPU the same is counted operation by operation: live storages, as the allocator
would have them, weights and optimizer state included. Hooks on saved tensors would not do: they do not see what a
recomputed layer computes again, nor gradients.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trimtab.costs.measured.traced_step import StepMode


class CudaMeter:
    """torch's allocator, and beside it what the process and its neighbours take of the device: context, libraries.

    `watch` is a context in which `peak_bytes` is that of the run inside; `static`: all that lives before and after;
    `inputs`: batches, which the loader holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros(1, device=device)  # makes the context
        free, total = torch.cuda.mem_get_info(device)
        self.outside_bytes = total - free - torch.cuda.memory_reserved(device)

    @contextmanager
    def watch(self, static: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[None]:  # noqa: ARG002
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        yield

    @property
    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) + self.outside_bytes

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) + self.outside_bytes


class CpuMeter:
    """The same for the CPU: live storages, counted by a dispatch mode; workspaces inside kernels are not seen."""

    def __init__(self) -> None:
        self._static_bytes = 0
        self._mode: _HostMode | None = None

    @contextmanager
    def watch(self, static: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[None]:
        known = list(static)
        self._static_bytes = storage_bytes(known)
        self._mode = _HostMode([*known, *inputs])
        with self._mode:
            yield

    @property
    def held_bytes(self) -> int:
        assert self._mode is not None, "nothing was watched"
        gc.collect(0)  # models leave tensors in cycles of Python objects
        return self._static_bytes + self._mode.live_bytes

    @property
    def peak_bytes(self) -> int:
        assert self._mode is not None, "nothing was watched"
        return self._static_bytes + self._mode.step_peak_bytes


class _HostMode(StepMode):  # type: ignore[no-untyped-call]
    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":  # of fake tensors, by which sizes across a cut are found
            super()._see_storage(storage)


Meter = CudaMeter | CpuMeter
"""Counts one device; the same numbers mean the same on every kind of it."""


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all their storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def meter_of(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()
