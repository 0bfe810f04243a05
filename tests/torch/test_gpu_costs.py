"""What `python -m bench.gpu` times and fits: a rank's share of a layer, and curves that are found again. On a CPU."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import as_saved, make_tiny_model

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from bench.gpu.costs import Formula  # noqa: E402
from bench.gpu.refit import FITTED, Layer, main, refit  # noqa: E402
from bench.gpu.shares import can_share, cut_to_share  # noqa: E402

from trimtab.costs.devices import DEVICES  # noqa: E402
from trimtab.costs.formula.curves import Efficiency, efficiency_of  # noqa: E402
from trimtab.costs.formula.flops import layer_matmuls  # noqa: E402
from trimtab.costs.formula.layers import find_gradients  # noqa: E402
from trimtab.costs.formula.settings import CostSettings  # noqa: E402
from trimtab.costs.measured.timed import TimingOptions, time_layer  # noqa: E402
from trimtab.costs.measured.timed_model import build_model, runs  # noqa: E402
from trimtab.costs.profile import group_layers  # noqa: E402
from trimtab.models.describe import describe  # noqa: E402
from trimtab.specs import ParallelDims  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "case",
    [
        "qwen2_5_vl",
        "qwen3_vl tied, biased, taps out of order",
        "internvl qwen3, rms, qk norm, mask token, pooled by class token, tied",
        "qwen3_vl_moe",
    ],
)
def test_a_rank_s_share_has_the_weights_that_the_formulas_count_and_runs(case: str) -> None:
    torch.manual_seed(0)
    tiny = make_tiny_model(case)
    model, options = tiny.spec, TimingOptions(dtype="fp32", attention="sdpa", sizes=(16,), repeats=1)
    groups = group_layers(model, frozenset())
    chosen = sorted({groups.index(group) for group in groups})
    gradients = find_gradients(model.layers, frozenset())
    real = build_model(as_saved(tiny.model.config), model, chosen, CostSettings(attention="sdpa", dtype="fp32"), CPU)
    ran = list(runs(real, (16,)))
    shared = [i for i in chosen if can_share(model.layers[i], 2) and model.layers[i].num_params]
    assert {model.layers[i].tower for i in shared} == {"vision", "language"}
    for number in shared:
        layer = model.layers[number]
        module = real.module.get_submodule(layer.name)
        whole = _products(module)
        cut_to_share(module, layer, 2)
        assert whole - _products(module) == _counted(layer, 1) - _counted(layer, 2) > 0
        those = [run for run in ran if number in run.calls]
        timings = time_layer(module, real, number, gradients[number], those, options)
        assert all(timing.forward_s > 0 for timing in timings)


def _products(module: torch.nn.Module) -> int:
    """Weights of matrices, those of experts too."""
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)


def _counted(layer, tp: int) -> int:
    experts = layer.mlp.num_experts or 1 if layer.mlp is not None else 1
    products = layer_matmuls(layer, tp)
    return round(sum(p.in_width * p.out_width * (experts if p.name.startswith("expert ") else 1) for p in products))


def test_the_curves_that_made_the_seconds_are_found_again() -> None:
    true = Efficiency(matmul=0.6, outputs=0.9e6, depth=300.0, product_s=8e-6, attention=0.3, memory=0.7)
    model, device = describe("Qwen2.5-VL-7B"), DEVICES["H200"]
    gradients, r = find_gradients(model.layers, frozenset()), np.random.default_rng(0)
    layers = []
    for number in (1, 35, len(model.layers) - 1):
        for tp in (1, 4):
            settings = CostSettings(attention="sdpa", dims=ParallelDims(tp=tp))
            formula = Formula(layer=model.layers[number], gradients=gradients[number], settings=settings, device=device)
            rows = np.array([64.0, 256, 1024, 2048, 4096, 8192])
            work = np.stack([np.ones(6), rows, rows**2, rows * 64, rows, rows**2, rows**2], axis=1)
            layer = Layer(
                formula=formula, attention="sdpa", work=work, measured_s=np.ones((6, 2)), held_out=np.arange(6) == 4
            )
            measured = layer.predict(true) * r.normal(1, 0.002, (6, 2))
            layers.append(dataclasses.replace(layer, measured_s=measured))
    found = refit(layers, efficiency_of(device))
    for name in FITTED:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1), name
    before, after = (max(abs(x.errors(e)[x.held_out]).max() for x in layers) for e in (None, found))
    assert after < 0.02 < before


def test_nothing_measured_is_refused_in_a_sentence(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["refit", "--results", str(tmp_path)])
    assert main() == 2
    assert "run `python -m bench.gpu` first" in capsys.readouterr().out
