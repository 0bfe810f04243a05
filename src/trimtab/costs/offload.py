"""The tier "offload" of a profile: a layer's activations go to host memory behind its forward and come back in time."""

from __future__ import annotations

from dataclasses import replace

from trimtab.errors import PartitionError
from trimtab.specs import LayerCost, Profile, RecomputeTier
from trimtab.units import GIGA

LINK_SHARE = 0.78
"""Of the link's rate that pinned copies reach: nvbandwidth gives 24.8 of PCIe Gen4 x16's 31.5 GB/s on each of eight
A100s (forums.developer.nvidia.com, thread 352186). There, copies in both directions at once bring the one to the device
down to 11 GB/s; forwards send and backwards fetch, so that a device mostly does one of them at a time."""


def with_offload(profile: Profile, *, host_bytes_per_s: float) -> Profile:
    """`profile` with the tier "offload" for each layer that offers "full", behind its other tiers.

    Held on the device: what "full" holds, for a layer's inputs stay. The rest, B = none - full, is sent once and
    fetched once by a link of R = LINK_SHARE x `host_bytes_per_s` in each direction. A layer's copies run beside the
    forward of the layer behind it, and beside that layer's backward; offloaded layers stand in runs of one kind, so f
    and b of the layer itself stand for them. What does not fit beneath, and so delays the stage, is

        max(0, B / R - f) + max(0, B / R - b)

    term by term of WORK_TERMS, which keeps it linear: an upper bound, since what attention's squares would hide of a
    copy that grows with the rows is not counted. Not counted either: B / R for the last layer of a run, whose fetch no
    backward before it hides; what copies and kernels take from each other's memory bandwidth; devices that share a
    link. Assumed, not measured on a device.
    """
    if not host_bytes_per_s > 0:
        raise PartitionError(
            f"a host link of {host_bytes_per_s} bytes/s was given, and nothing would ever arrive: give more than 0"
        )
    rate = LINK_SHARE * host_bytes_per_s
    return replace(
        profile,
        layers=tuple(_offer(layer, rate) for layer in profile.layers),
        assumptions=(
            *profile.assumptions,
            f"Offloaded layers are copied at {rate / GIGA:.3g} GB/s each way, {LINK_SHARE:.0%} of the host link; what "
            "the layer's own forward or backward would hide of it costs nothing. Not measured.",
        ),
    )


def _offer(layer: LayerCost, rate: float) -> LayerCost:
    others = tuple(tier for tier in layer.tiers if tier.name != "offload")
    full = layer.tier("full")
    if full is None:
        return replace(layer, tiers=others)
    moved_s = [max(0.0, n - k) / rate for n, k in zip(others[0].saved_bytes, full.saved_bytes, strict=True)]
    extra = tuple(
        max(0.0, s - f) + max(0.0, s - b) for s, f, b in zip(moved_s, layer.forward_s, layer.backward_s, strict=True)
    )
    offload = RecomputeTier(name="offload", extra_backward_s=extra, saved_bytes=full.saved_bytes)
    return replace(layer, tiers=(*others, offload))
