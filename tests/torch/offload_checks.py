"""What has to hold of a model whose layers are offloaded. Needs torch and Transformers."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from live_bytes import LiveBytes
from torch import nn
from traced_families import Family

from trimtab.runtime.recompute.apply import apply


class DeviceBytes(LiveBytes):
    """Live bytes of the model's device: copies to host memory are made where no such counter sees them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, [])
        self.device_peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.device_peak = max(self.device_peak, self.live)
        return out


@dataclass(frozen=True)
class Held:
    """Bytes when the forward is over."""

    device: int
    host: int


def held_behind_forward(family: Family, model: nn.Module, chosen: list[str]) -> Held:
    with apply(model, chosen, granularity="offload") as handle, DeviceBytes(model) as live:
        loss = model(**family.inputs).loss
        gc.collect()
        held = Held(device=live.live, host=handle.host.held_bytes)
        loss.backward()
    return held
