"""Copies between host and device: bytes as torch's operations make them, and how many the device's own trace shows."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class CountBytes(TorchDispatchMode):
    """While it is open, `moved_bytes` adds up what is copied from one kind of device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COPIES:
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device.type != result.device.type:
                self.moved_bytes += result.nbytes
        return result


def count_copies(call: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """Copies from and to host memory in one call: pinned ones, which run beside kernels, and pageable ones."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as traced:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    names = [event.name for event in traced.events() or [] if event.name.startswith("Memcpy")]
    return {kind.lower(): sum(kind in name for name in names) for kind in ("Pinned", "Pageable")}
