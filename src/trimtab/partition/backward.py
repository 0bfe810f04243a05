"""How a layer's backward divides into gradients of its inputs (B) and of its weights (W)."""

from __future__ import annotations

import numpy as np

from trimtab.specs import WORK_TERMS, FloatArray, LayerCost, Profile

_PAIR_TERMS = np.array([term.endswith(("_sq", "_windowed")) for term in WORK_TERMS])


def weight_coefficients(layer: LayerCost) -> FloatArray:
    """(len(WORK_TERMS),) seconds of `layer.backward_s` that only weight gradients need.

    As the profile says (`weight_s`); else by FLOPs: of a matrix product, the gradients of inputs and of weights take
    one product each, so half; of attention's pairs, which multiply no weights, none. Elementwise work counts with the
    products then. Recompute runs before either and belongs to B.
    """
    backward = np.asarray(layer.backward_s, np.float64)
    if layer.weight_s:
        return np.minimum(np.asarray(layer.weight_s, np.float64), backward)
    return np.where(_PAIR_TERMS, 0.0, 0.5 * backward)


def weight_matrix(profile: Profile) -> FloatArray:
    """(num_layers, len(WORK_TERMS)) `weight_coefficients` of every layer."""
    return np.array([weight_coefficients(layer) for layer in profile.layers])
