"""Layers of eight models, whole and as ranks share them: seconds by formula, by a fit, and measured at other sizes.

One layer of each kind with random weights is timed on what the whole model hands it, at four sizes for the fit and at
four others, under sdpa and under flash attention. Blocks and heads are timed as one of 2, 4 and 8 tensor-parallel ranks
has them, too: collectives are neither timed nor predicted. `python -m bench.gpu.refit` takes the formulas' curves of
the device from these lines.
"""

import copy
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from bench.gpu.models import published
from bench.gpu.setting import Case, Setting
from bench.gpu.shares import can_share, cut_to_share

from timed_profile import make_cases
from trimtab.costs.formula.curves import Efficiency
from trimtab.costs.formula.flops import layer_matmuls
from trimtab.costs.formula.layers import COLLECTIVE_S, Gradients, cost_layer, find_gradients
from trimtab.costs.formula.settings import Attention, CostSettings
from trimtab.costs.measured.timed import TimingOptions, measure_device, time_layer
from trimtab.costs.measured.timed_fit import Timing, fit_seconds
from trimtab.costs.measured.timed_model import TimedRun, build_model, has_flash, runs
from trimtab.costs.profile import group_layers
from trimtab.models.describe import describe
from trimtab.specs import DeviceSpec, LayerSpec, ModelSpec, ParallelDims, evaluate

MODELS = (
    "Qwen2.5-VL-3B",
    "Qwen2.5-VL-7B",
    "Qwen3-VL-8B",
    "InternVL3_5-8B",  # InternViT-300M
    "Qwen2.5-VL-32B",
    "Qwen2.5-VL-72B",
    "InternVL3_5-38B",  # InternViT-6B
    "Qwen3-VL-30B-A3B",
)
ATTENTIONS: tuple[Attention, ...] = ("sdpa", "flash")
TENSOR_PARALLEL = (1, 2, 4, 8)
FITTED, HELD_OUT = (1024, 2048, 4096, 8192), (512, 3000, 6000, 12288)
TINY_FITTED, TINY_HELD_OUT = (96, 192, 384), (256,)
LOGIT_BYTES = 16
"""Of one logit while the head's backward runs: bf16, fp32, its softmax and its gradient."""


def cases(setting: Setting) -> list[Case]:
    names = ("tiny",) if setting.tiny else MODELS
    return [
        Case(name=f"{name}, {attention}", run=partial(compare, setting, name, attention))
        for name in names
        for attention in ATTENTIONS
    ]


def model_named(name: str) -> tuple[Mapping[str, Any], ModelSpec]:
    """Configuration and description of one of `MODELS`, or of "tiny"."""
    if name != "tiny":
        return published(name)
    config = make_cases(large=False)[0].config
    tiles = {"min_patches": 1, "max_patches": 12, "size": {"height": 112, "width": 112}}
    return config, describe(copy.deepcopy(config), preprocessor=tiles)


def compare(setting: Setting, name: str, attention: Attention) -> dict[str, Any]:
    if attention == "flash" and (setting.device.type != "cuda" or not has_flash()):
        return {"not_there": "flash attention is not timed: it needs a CUDA device and the package flash-attn"}
    config, model = model_named(name)
    options = TimingOptions(dtype=setting.dtype, attention=attention, repeats=3 if setting.tiny else 9)
    settings, device = options.settings_on(setting.device), measure_device(setting.device, setting.dtype)
    groups = group_layers(model, settings.frozen_towers)
    chosen = sorted({groups.index(group) for group in groups})
    gradients = find_gradients(model.layers, settings.frozen_towers)
    real = build_model(config, model, chosen, settings, setting.device)
    fitted, held_out = sizes_for(setting, model)
    ran = (list(runs(real, fitted)), list(runs(real, held_out)))
    points: list[dict[str, Any]] = []
    for number in chosen:
        layer = model.layers[number]
        split = [[run for run in half if number in run.calls] for half in ran]
        if not all(split):  # a bare parameter
            continue
        for tp in TENSOR_PARALLEL:
            if not can_share(layer, tp):
                continue
            module = copy.deepcopy(real.module.get_submodule(layer.name))
            cut_to_share(module, layer, tp)
            timings = time_layer(module, real, number, gradients[number], [*split[0], *split[1]], options)
            del module
            formula = Formula(layer=layer, gradients=gradients[number], settings=_shared(settings, tp), device=device)
            found = _points(formula, timings, split)
            points += [{"layer": layer.name, "number": number, "tp": tp, **point} for point in found]
    return {
        **errors_of(points),
        "dtype": setting.dtype,
        "device_spec": dataclasses.asdict(device),
        "sizes": [fitted, held_out],
        "points": points,
    }


def sizes_for(setting: Setting, model: ModelSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of the fit and rows held out, halved until weights, gradients and the head's logits fit the device."""
    if setting.tiny:
        return TINY_FITTED, TINY_HELD_OUT
    largest = {x.kind: x for x in sorted(model.layers, key=lambda x: x.num_params)}
    weights = 6 * sum(x.num_params for x in largest.values()) + 4 * max(x.num_params for x in largest.values())
    words = max(x.num_matmul_params // x.hidden_size for x in model.layers if x.kind == "head")
    rows = max((0.8 * setting.memory_bytes - weights) / (LOGIT_BYTES * words), 1.0)
    shrunk = 1
    while max(HELD_OUT) / shrunk > rows and min(HELD_OUT) // (2 * shrunk) >= 64:
        shrunk *= 2
    return tuple(x // shrunk for x in FITTED), tuple(x // shrunk for x in HELD_OUT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """What prices one layer as a rank has it."""

    layer: LayerSpec
    gradients: Gradients
    settings: CostSettings
    device: DeviceSpec

    def seconds(self, efficiency: Efficiency | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Forward and backward per WORK_TERMS, without collectives: a link without end, and no latency."""
        alone = dataclasses.replace(self.device, link_bytes_per_s=1e30)
        settings = dataclasses.replace(self.settings, efficiency=efficiency or self.settings.efficiency)
        cost = cost_layer(self.layer, self.gradients, alone, settings, group=0)
        waits, tp = 0.0, settings.dims.tp
        if tp > 1:
            waits = COLLECTIVE_S * (sum(p.reduced for p in layer_matmuls(self.layer, tp)) or 1)
        forward, backward = cost.forward_s, cost.backward_s
        less = 2 * waits if any(backward) else 0.0
        return (forward[0] - waits, *forward[1:]), (backward[0] - less, *backward[1:])


def _shared(settings: CostSettings, tp: int) -> CostSettings:
    return dataclasses.replace(settings, dims=ParallelDims(tp=tp))


def _points(formula: Formula, timings: Sequence[Timing], split: Sequence[Sequence[TimedRun]]) -> list[dict[str, Any]]:
    """One point for each size: measured, by formula and by a fit to the first half of `split`."""
    told = formula.seconds()
    work = np.array([timing.work for timing in timings])
    measured = np.array([(timing.forward_s, timing.backward_s) for timing in timings])
    known = len(split[0])
    by_fit = [
        fit_seconds(work[:known], measured[:known, i], told[i]).coefficients if measured[:, i].all() else told[i]
        for i in range(2)
    ]
    return [
        {
            "held_out": i >= known,
            "work": list(timing.work),
            "measured_s": measured[i].tolist(),
            "formula_s": _evaluated(told, work[i]),
            "fitted_s": _evaluated(by_fit, work[i]),
        }
        for i, timing in enumerate(timings)
    ]


def _evaluated(terms: Sequence[Sequence[float]], work: np.ndarray) -> list[float]:
    return [float(evaluate(each, work[None, :])[0]) for each in terms]


def errors_of(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the held-out sizes of |predicted / measured - 1|, forward and backward together."""
    held = [point for point in points if point["held_out"]]
    return {
        f"{method}_median_error": statistics.median(
            abs(sum(point[f"{method}_s"]) / sum(point["measured_s"]) - 1) for point in held
        )
        for method in ("formula", "fitted")
    }
