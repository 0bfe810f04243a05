"""What `python -m bench.gpu` times and fits: a rank's share of a layer, and curves that are found again. On a CPU."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import as_saved, make_tiny_model

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from bench.gpu import costs  # noqa: E402
from bench.gpu.copies import CountBytes, count_copies  # noqa: E402
from bench.gpu.costs import MODELS, Formula, sizes_for  # noqa: E402
from bench.gpu.gain import MODEL, SHRUNK, needed_bytes  # noqa: E402
from bench.gpu.gain import sizes_for as gain_sizes  # noqa: E402
from bench.gpu.models import published  # noqa: E402
from bench.gpu.refit import FITTED, Layer, main, refit  # noqa: E402
from bench.gpu.shares import can_share, cut_to_share  # noqa: E402

from gain_models import make_model  # noqa: E402
from trimtab.costs.devices import DEVICES  # noqa: E402
from trimtab.costs.formula import layers as analytic  # noqa: E402
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


def test_all_models_of_the_costs_are_described_and_shrink_to_a_small_device() -> None:
    for name in MODELS:
        config, model = published(name)
        assert config["model_type"] != "internvl_chat", "Transformers builds none"
        setting = dataclasses.make_dataclass("Small", [("tiny", bool), ("memory_bytes", float)])(False, 24e9)
        fitted, held_out = sizes_for(setting, model)  # type: ignore[arg-type]
        assert max(held_out) > max(fitted) >= 64
        assert max(held_out) < 12288


def test_collectives_are_neither_timed_nor_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (analytic, costs):
        monkeypatch.setattr(place, "COLLECTIVE_S", 1.0)
    layer, found = describe("Qwen2.5-VL-7B").layers[-3], []
    for tp in (1, 2):
        terms = [
            Formula(
                layer=layer,
                gradients=find_gradients([layer], frozenset())[0],
                settings=CostSettings(dims=ParallelDims(tp=tp)),
                device=dataclasses.replace(DEVICES["H200"], link_bytes_per_s=rate),
            ).seconds()
            for rate in (1e6, 1e12)
        ]
        assert terms[0] == terms[1]
        found.append(terms[0])
    assert np.array(found[1])[:, 0] == pytest.approx(np.array(found[0])[:, 0], rel=0.5), "no latency of collectives"


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


def test_copies_from_one_device_to_another_are_counted_in_bytes() -> None:
    x = torch.zeros(10, 4)
    with CountBytes() as counting:
        x.to(torch.float64)
        x.clone()
        assert counting.moved_bytes == 0
        x.to("meta")
        torch.empty(10, 4, device="meta").copy_(x)
    assert counting.moved_bytes == 2 * 160
    assert count_copies(lambda: x + 1, CPU) == {"pinned": 0, "pageable": 0}


def test_nothing_measured_is_refused_in_a_sentence(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["refit", "--results", str(tmp_path)])
    assert main() == 2
    assert "run `python -m bench.gpu` first" in capsys.readouterr().out


def test_the_gain_is_that_of_the_published_model_and_shrinks_to_the_device() -> None:
    spec = describe(MODEL)
    assert gain_sizes(spec, 139.7 * 2**30) == (None, 1)
    small = gain_sizes(spec, 24e9)
    assert small in SHRUNK[1:-1]
    assert needed_bytes(spec, *small) <= 0.9 * 24e9 < needed_bytes(spec, None, 1)
    whole = make_model(MODEL, 1, attention="sdpa", dtype=torch.bfloat16, device="meta")
    assert sum(p.numel() for p in whole.module.parameters()) == sum(x.num_params for x in spec.layers)
    draw = torch.Generator().manual_seed(0)
    image = whole.images(3, draw)
    assert image["pixel_values"].shape == (3 * 1024, 1176)
    assert image["image_grid_thw"].prod() == 3 * 1024
    cut = make_model(MODEL, 1, attention="sdpa", dtype=torch.bfloat16, device="meta", text_layers=9)
    assert len(cut.module.model.language_model.layers) == 9
