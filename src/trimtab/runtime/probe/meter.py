"""Bytes of a device that a run holds now and held at most, and a limit that it may not pass.

On CUDA the allocator counts and refuses. On the CPU, whose memory nobody limits, the same is counted operation by
operation: live storages, as the allocator would have them, weights and optimizer state included. Hooks on saved tensors
alone would not do: they do not see what a recomputed layer computes again, nor gradients.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trimtab.costs.traced_mode import StepMode


class CudaMeter:
    """torch's allocator, and beside it what the process and its neighbours take of the device: context, libraries.

    `watch` is a context in which `peak_bytes` is that of the run inside; beyond the limit an operation raises
    `torch.OutOfMemoryError`. `static`: all that lives before and after; `inputs`: batches, which the loader holds.
    `lift`: no limit from here to the end of the context, for a run that has failed and only keeps others from waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros(1, device=device)  # makes the context
        free, self._total = torch.cuda.mem_get_info(device)
        self.outside_bytes = self._total - free - torch.cuda.memory_reserved(device)

    @contextmanager
    def watch(self, static: Iterable[Tensor], inputs: Iterable[Tensor], *, limit_bytes: int | None) -> Iterator[None]:  # noqa: ARG002
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        if limit_bytes is not None:
            share = max(0.0, limit_bytes - self.outside_bytes) / self._total
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self._device)
        try:
            yield
        finally:
            self.lift()

    def lift(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)

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
        self._mode: _LimitedMode | None = None

    @contextmanager
    def watch(self, static: Iterable[Tensor], inputs: Iterable[Tensor], *, limit_bytes: int | None) -> Iterator[None]:
        known = list(static)
        self._static_bytes = storage_bytes(known)
        most = None if limit_bytes is None else limit_bytes - self._static_bytes
        self._mode = _LimitedMode([*known, *inputs], most)
        with self._mode:
            yield

    def lift(self) -> None:
        if self._mode is not None:
            self._mode.most_bytes = None

    @property
    def held_bytes(self) -> int:
        assert self._mode is not None, "nothing was watched"
        gc.collect(0)  # models leave tensors in cycles of Python objects
        return self._static_bytes + self._mode.live_bytes

    @property
    def peak_bytes(self) -> int:
        assert self._mode is not None, "nothing was watched"
        return self._static_bytes + self._mode.step_peak_bytes


class _LimitedMode(StepMode):  # type: ignore[no-untyped-call]
    def __init__(self, known: Iterable[Tensor], most_bytes: int | None) -> None:
        super().__init__(known)
        self.most_bytes = most_bytes

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":  # of fake tensors, by which sizes across a cut are found
            return
        super()._see_storage(storage)
        if self.most_bytes is not None and self.live_bytes > self.most_bytes:
            raise torch.OutOfMemoryError(
                f"{self.live_bytes} bytes beside the weights and their state, and the limit leaves {self.most_bytes}"
            )


Meter = CudaMeter | CpuMeter
"""Counts one device; the same numbers mean the same on every kind of it."""


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all their storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def meter_of(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()
