"""Seconds of layers at given work: everybody who needs them asks here, for a pass is the slower of device and host."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from trimtab.costs.profile import chosen_tiers
from trimtab.specs import WORK_TERMS, FloatArray, LayerCost, Profile, RecomputeTier, Stage, evaluate

_PAIR_TERMS = np.array([term.endswith(("_sq", "_windowed")) for term in WORK_TERMS])


class Seconds(NamedTuple):
    """Seconds of a layer or a stage for each of n micro-batches: (n,) each."""

    forward: FloatArray
    backward: FloatArray  # whole, with what is computed again
    weight: FloatArray  # the part of it that only weight gradients need
    again: FloatArray  # the part of it that recompute adds


def pass_seconds(layer: LayerCost, tier: RecomputeTier, work: FloatArray) -> Seconds:
    """Return the seconds of one layer on `tier` for micro-batches `work` (n, len(WORK_TERMS)).

    max(device, host), forward and backward each. A layer that recomputes asks the host for its forward once more.
    The weights' part is the device's own: the host's wait comes before it.
    """
    coefficients = (layer.forward_s, layer.backward_s, tier.extra_backward_s)
    forward, backward, extra = (work @ np.array(terms, np.float64) for terms in coefficients)
    again_s = 0.0 if tier.name == "none" else layer.host_forward_s
    if layer.host_forward_s == 0.0:  # what a fit put below 0 stays there, for the solvers to refuse
        return Seconds(forward, backward + extra, work @ weight_coefficients(layer), extra)
    whole = np.maximum(backward + extra, layer.host_backward_s + again_s)
    return Seconds(
        forward=np.maximum(forward, layer.host_forward_s),
        backward=whole,
        weight=work @ weight_coefficients(layer),
        again=whole - np.maximum(backward, layer.host_backward_s),
    )


def stage_seconds(profile: Profile, stage: Stage, work: FloatArray) -> Seconds:
    """Return the sum of `pass_seconds` over the stage's layers, each on its tier."""
    layers = profile.layers[stage.start : stage.stop]
    kinds: dict[tuple[object, ...], tuple[LayerCost, RecomputeTier]] = {}
    number = Counter[tuple[object, ...]]()
    for layer, tier in zip(layers, chosen_tiers(profile, stage), strict=True):
        kind: tuple[object, ...]
        kind = (layer.forward_s, layer.backward_s, layer.weight_s, layer.host_forward_s, layer.host_backward_s, tier)
        kinds[kind] = layer, tier
        number[kind] += 1
    total = np.zeros((4, len(work)))
    for kind, (layer, tier) in kinds.items():
        total += number[kind] * np.array(pass_seconds(layer, tier, work))
    return Seconds(*total)


def mean_seconds(profile: Profile, work: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (num_layers,) forward and backward seconds of one micro-batch `work`, nothing recomputed."""
    forward, backward = (profile.matrix(term) @ work for term in ("forward_s", "backward_s"))
    if not any(layer.host_forward_s for layer in profile.layers):
        return forward, backward
    host = np.array([(layer.host_forward_s, layer.host_backward_s) for layer in profile.layers])
    return np.maximum(forward, host[:, 0]), np.maximum(backward, host[:, 1])


def host_share(profile: Profile, work: FloatArray) -> float:
    """Return the part of the forward and backward of the mean micro-batches `work` (n, len(WORK_TERMS)) that waits."""
    mean = np.atleast_2d(work).mean(axis=0)
    device = float(sum(np.sum(profile.matrix(term) @ mean) for term in ("forward_s", "backward_s")))
    passed = float(sum(map(np.sum, mean_seconds(profile, mean))))
    return 1.0 - device / passed if passed > 0 else 0.0


def weight_coefficients(layer: LayerCost) -> FloatArray:
    """Return (len(WORK_TERMS),) seconds of `layer.backward_s` that only weight gradients need.

    As the profile says (`weight_s`); else by FLOPs: of a matrix product, the gradients of inputs and of weights take
    one product each, so half; of attention's pairs, which multiply no weights, none. Elementwise work counts with the
    products then. Recompute runs before either and belongs to the gradients of the inputs.
    """
    backward = np.asarray(layer.backward_s, np.float64)
    if layer.weight_s:
        return np.minimum(np.asarray(layer.weight_s, np.float64), backward)
    return np.where(_PAIR_TERMS, 0.0, 0.5 * backward)


def device_seconds(profile: Profile, work: FloatArray) -> FloatArray:
    """Return (n,) seconds of the device for forward and backward of all layers: linear in `work`, without the host."""
    per_term = profile.matrix("forward_s").sum(axis=0) + profile.matrix("backward_s").sum(axis=0)
    return evaluate(per_term, work)
