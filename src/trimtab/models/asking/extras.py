"""What serving holds beside 16 bits a parameter: buffers, wherever they lie, and parameters that stay in fp32."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trimtab.specs import LayerSpec


def extra_bytes(model: Any) -> dict[str, int]:
    """Bytes of every buffer of `model`, and of each parameter wider than the rest what it takes past 16 bits."""
    wide = {
        name: x.numel() * (x.element_size() - 2)
        for name, x in model.named_parameters()
        if x.dtype != model.dtype and x.element_size() > 2
    }
    return wide | {name: x.numel() * x.element_size() for name, x in model.named_buffers()}


def with_extras(layers: Sequence[LayerSpec], extra: Mapping[str, int]) -> list[LayerSpec]:
    """`layers` with those bytes; what lies in none goes with the first block of the module around it."""
    names = {x.name for x in layers}
    sizes = dict.fromkeys(names, 0)
    beside: dict[str, list[str]] = {}
    for name, size in extra.items():
        own = next((x for x in _around(name) if x in names), None)
        if own is None:
            owner = name.rpartition(".")[0]
            key = name if any(x.startswith(f"{owner}.") for x in names) else owner
            own = _host(layers, key)
            beside.setdefault(own, [])
            beside[own] += [] if key in beside[own] else [key]
        sizes[own] += size
    return [replace(x, extra_bytes=sizes[x.name], beside=tuple(beside.get(x.name, ()))) for x in layers]


def _around(name: str) -> list[str]:
    """The module or tensor itself, then the modules around it, inside out."""
    parts = name.split(".")
    return [".".join(parts[:stop]) for stop in range(len(parts), 0, -1)]


def _host(layers: Sequence[LayerSpec], name: str) -> str:
    for around in [*_around(name)[1:], ""]:
        inside = [x for x in layers if not around or x.name.startswith(f"{around}.")]
        if inside:
            return next((x for x in inside if x.kind == "block" and re.search(r"\.\d+$", x.name)), inside[0]).name
    raise AssertionError("a model without layers")
