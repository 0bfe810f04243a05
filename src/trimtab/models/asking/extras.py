"""What serving holds beside 16 bits a parameter: caches, buffers wherever they lie, parameters that stay in fp32."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trimtab.specs import CacheSpec, LayerSpec

if TYPE_CHECKING:
    from trimtab.models.asking.layers import Passes


def extra_bytes(model: Any) -> dict[str, int]:
    """Bytes of every buffer of `model`, and of each parameter wider than the rest what it takes past 16 bits."""
    wide = {
        name: x.numel() * (x.element_size() - 2)
        for name, x in model.named_parameters()
        if x.dtype != model.dtype and x.element_size() > 2
    }
    return wide | {name: x.numel() * x.element_size() for name, x in model.named_buffers()}


def seen_cache(layer: LayerSpec, passes: Passes) -> CacheSpec | None:
    """What the cache of this layer grew by over both texts, in 16 bits; None where heads and window say the same."""
    if passes.short_cached is None or passes.long_cached is None or layer.tower != "language":
        return None
    S, T = passes.num_short, passes.num_long
    ran = [x.ran.get(layer.name) for x in (passes.short_cached, passes.long_cached)]
    short, long = (0.0 if x is None else x.cache_bytes for x in ran)
    a = layer.attention
    heads = 0 if a is None or a.cross else 2 * a.num_kv_heads * (a.head_dim + a.value_head_dim)
    window = T if a is None or a.window is None else a.window
    if all(abs(seen - heads * min(n, window)) <= heads for seen, n in ((short, S), (long, T))):
        return None  # a sliding cache keeps one token less than its window, for the next one
    if a is not None and (a.cross or (a.window is not None and a.window < T)):
        return None
    per_token = max((long - short) / (T - S), 0.0)
    return CacheSpec(values_per_token=per_token / 2, bytes_per_sequence=max(long - per_token * T, 0.0))


def with_extras(layers: Sequence[LayerSpec], extra: Mapping[str, int]) -> list[LayerSpec]:
    """`layers` with those bytes; what is in none goes with the first layer around it, of a decoder the first block."""
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
            blocks = [x for x in inside if x.kind == "block" and re.search(r"\.\d+$", x.name)]
            return (blocks[0] if blocks and inside[0].tower == "language" else inside[0]).name
    raise AssertionError("a model without layers")
