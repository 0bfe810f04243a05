"""What has to hold of a model whose layers are offloaded. Needs torch and Transformers."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from live_bytes import LiveBytes
from recompute_checks import count_forwards, gradients, make_model, trace_of
from torch import nn
from traced_families import Family, find_layers

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


def assert_offload_holds(name: str, attention: str) -> None:
    """Every second layer and two neighbours offloaded: bit-equal gradients, one forward each, nothing left behind."""
    family, model = make_model(name, attention)
    expected = gradients(model, family.inputs)
    before = trace_of(model)
    layers = find_layers(model)
    chosen = sorted({*layers[::2], *layers[-2:]}, key=layers.index)
    with apply(model, chosen, granularity="offload") as handle:
        assert handle.granularity == dict.fromkeys(chosen, "offload")
        assert {**trace_of(model), "attributes": None} == {**before, "attributes": None}
        found = gradients(model, family.inputs)
        assert handle.host.most_bytes > 0
        gc.collect()
        assert handle.host.held_bytes == 0
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.equal(found[key], gradient), key
    assert trace_of(model) == before
    with apply(model, chosen, granularity="offload"):
        counts = count_forwards(model, layers)
        gradients(model, family.inputs)
    assert set(counts.values()) == {1}


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
