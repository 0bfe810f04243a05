"""What a suite is run with, and a case of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The device, and how large its cases may be."""

    device: torch.device
    tiny: bool  # the same code on models of a few thousand parameters, for a CPU

    @property
    def memory_bytes(self) -> int:
        """What a case may take: the device's memory, or 2 GiB of a CPU's."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return 2 * 2**30

    @property
    def dtype(self) -> str:
        return "fp32" if self.device.type == "cpu" else "bf16"

    def peak_bytes(self) -> dict[str, int]:
        """The most that torch's allocator gave out and held since `reset_peak`; empty on a CPU."""
        if self.device.type != "cuda":
            return {}
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement: its figures are a line of the record. `name` tells it from all others of its suite."""

    name: str
    run: Callable[[], dict[str, Any]]
