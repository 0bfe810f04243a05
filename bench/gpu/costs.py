"""Layers of eight models: seconds by formula, by a fit, and measured at sizes that the fit has not seen.

One layer of each kind with random weights is timed on what the whole model hands it (`trimtab profile --timed`), at
four sizes for the fit and at four others. Error: predicted / measured - 1 of forward and backward together.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
from bench.gpu.setting import Case, Setting

from timed_profile import make_cases
from trimtab.costs.profile import price_model
from trimtab.costs.timed import TimingOptions, measure_device, profile_timed, time_layers
from trimtab.models.describe import describe
from trimtab.models.shipped import read_shipped
from trimtab.specs import ModelSpec, evaluate

MODELS = (
    "Qwen2.5-VL-3B",
    "Qwen2.5-VL-7B",
    "Qwen3-VL-8B",
    "InternVL3_5-8B",
    "Qwen2.5-VL-32B",
    "Qwen2.5-VL-72B",
    "InternVL3_5-38B",
    "Qwen3-VL-30B-A3B",
)
FITTED, HELD_OUT = (1024, 2048, 4096, 8192), (512, 3000, 6000, 12288)


def cases(setting: Setting) -> list[Case]:
    if setting.tiny:
        config = make_cases(large=False)[0].config
        tiles = {"min_patches": 1, "max_patches": 12, "size": {"height": 112, "width": 112}}
        model = describe(copy.deepcopy(config), preprocessor=tiles)
        return [Case(name="tiny", run=lambda: compare(setting, config, model, (96, 192, 384), (256,)))]
    return [
        Case(name=name, run=lambda name=name: compare(setting, _config_of(name), describe(name), FITTED, HELD_OUT))
        for name in MODELS
    ]


def compare(
    setting: Setting, config: Mapping[str, Any], model: ModelSpec, fitted: tuple[int, ...], held_out: tuple[int, ...]
) -> dict[str, Any]:
    options = TimingOptions(dtype=setting.dtype, attention="sdpa", sizes=fitted, repeats=3 if setting.tiny else 9)
    timed = profile_timed(config, model, setting.device, options)
    formula = price_model(model, measure_device(setting.device, setting.dtype), options.settings_on(setting.device))
    others = TimingOptions(dtype=setting.dtype, attention="sdpa", sizes=held_out, repeats=options.repeats)
    points = []
    for layer in time_layers(config, model, setting.device, others):
        for timing in layer.timings:
            found: dict[str, Any] = {"layer": model.layers[layer.layer].name, "work": timing.work}
            found["measured_s"] = timing.forward_s + timing.backward_s
            for method, profile in (("formula", formula), ("fitted", timed.profile)):
                cost = profile.layers[layer.layer]
                found[f"{method}_s"] = sum(
                    float(evaluate(terms, np.array([timing.work]))[0]) for terms in (cost.forward_s, cost.backward_s)
                )
            points.append(found)
    return {
        "band": timed.profile.time_error,
        "fitted_median_error": _median(points, "fitted"),
        "formula_median_error": _median(points, "formula"),
        "points": points,
    }


def _config_of(name: str) -> Mapping[str, Any]:
    """The published configuration that ships with the description."""
    config: Mapping[str, Any] = read_shipped(name)["config"]
    return config


def _median(points: list[dict[str, Any]], method: str) -> float:
    return statistics.median(abs(point[f"{method}_s"] / point["measured_s"] - 1) for point in points)
