"""What layers with adapters keep for backward, and what their backward holds at most, beside real modules."""

import sys

import numpy as np
import pytest
import torch
from lora_layers import with_adapters
from real_layers import LAYERS, kept_bytes
from test_recompute_memory import BY_VALUE, transient_bytes
from test_traced import profile_of

from refusals import refused
from trimtab import Lora, profile_model
from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.activations import kept_when
from trimtab.costs.formula.adapters import adapt_layer
from trimtab.costs.formula.layers import Gradients, cost_layer
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.measured.stand_ins import AdaptedLinear
from trimtab.errors import UnsupportedPlanError
from trimtab.runtime.training.loop import add_adapters, merged
from trimtab.specs import LayerSpec, ParallelDims

ROWS, RANK, DIVISOR = 64, 4, 4
NAMES = ("Qwen2.5-VL-7B ViT", "Qwen2.5-VL-7B text", "CLIP-L")


def settings_of(spec: LayerSpec, targets: tuple[str, ...], *, weights: str = "same", **more) -> CostSettings:
    lora = Lora(r=RANK, targets=targets, towers=(spec.tower,), weights=weights)
    return CostSettings(dims=ParallelDims(), packed=False, attention="sdpa", lora=lora, **more)


def stated(spec: LayerSpec, chosen: CostSettings) -> float:
    return sum(k.row_bytes * ROWS + k.pair_bytes * ROWS**2 for k in kept_when(spec, chosen, weights=False))


@pytest.mark.parametrize("end", ["", "q", "fc2", "down_proj"])
@pytest.mark.parametrize("name", NAMES)
def test_adapters_keep_their_inputs_once_and_their_middles(name, end):
    layer, names = with_adapters(LAYERS[name]("sdpa", DIVISOR), RANK, torch.float32, end=end)
    if not names:
        pytest.skip(f"{name} has no linear layer named {end}")
    real = kept_bytes(layer, ROWS, torch.float32)
    assert stated(layer.spec, settings_of(layer.spec, names, dtype="fp32")) == real


@pytest.mark.parametrize("name", NAMES[:2])
def test_adapters_in_fp32_under_autocast_keep_copies_of_their_own(name):
    real_layer = LAYERS[name]("sdpa", DIVISOR)
    real_layer.module.to(torch.bfloat16)
    layer, names = with_adapters(real_layer, RANK, torch.float32)
    layer.module.to = lambda *_: layer.module  # adapters stay as they are
    with torch.autocast("cpu", dtype=torch.bfloat16):
        real = kept_bytes(layer, ROWS, torch.bfloat16)
    chosen = settings_of(layer.spec, names, weights="fp32")
    # autocast's copies of the adapters' weights are no part of what grows with rows
    weights = sum(x.num_params for x in adapt_layer(layer.spec, chosen.lora, 1))
    assert stated(layer.spec, chosen) + 2 * weights == real


@pytest.mark.parametrize("rows", [32, 512])
@pytest.mark.parametrize("end", ["", "attn"])
@pytest.mark.parametrize("name", NAMES)
def test_a_backward_with_adapters_needs_no_gradient_of_a_weight(name, end, rows):
    layer, names = with_adapters(LAYERS[name]("sdpa", DIVISOR), RANK, torch.bfloat16, end=end)
    chosen = settings_of(layer.spec, names)
    both = Gradients(inputs=True, weights=True)
    cost = cost_layer(layer.spec, both, DEVICES["H200"], chosen, group=0)
    stated = max(
        moment[0] + rows * max(moment[1], moment[4]) for moment in (cost.transient_bytes, cost.other_transient_bytes)
    )
    assert stated == pytest.approx(transient_bytes(layer, rows, None, by_value=name in BY_VALUE), rel=0.02)


@pytest.mark.parametrize("lora", [Lora(r=2, weights="same"), Lora(r=2), Lora(r=2, bits=4)], ids=str)
def test_a_traced_model_keeps_what_the_formulas_say(lora):
    tiny, found = profile_of("internvl qwen2", "sdpa", lora=lora)
    traced = found.profile
    formulas = profile_model(tiny.spec, DEVICES["H200"], attention="sdpa", lora=lora)
    assert traced.lora == lora
    work = np.array([1.0, 4096, 4096**2 / 16, 4096 * 64, 4096, 4096**2 / 4, 4096**2 / 4])
    first, *others = tiny.spec.indices("language", "block")
    assert traced.layers[first].tiers[0].saved_bytes[4] < formulas.layers[first].tiers[0].saved_bytes[4]  # its norm's
    for place in others:
        counted, stated = traced.layers[place], formulas.layers[place]
        assert counted.tiers[0].saved_bytes == pytest.approx(stated.tiers[0].saved_bytes, rel=1e-4, abs=0.1)
    for place in tiny.spec.indices("vision", "block"):  # frozen, with nothing trainable before it
        assert np.dot(traced.layers[place].tiers[0].saved_bytes, work) == 0


def test_a_run_without_peft_is_refused_in_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft", None)
    with refused(UnsupportedPlanError):
        add_adapters(torch.nn.Linear(2, 2), tmp_path, Lora(r=2))


def test_merged_weights_compute_what_adapters_do():
    torch.manual_seed(0)
    adapted = AdaptedLinear(torch.nn.Linear(6, 5), 3, dtype=torch.float32)
    named = {"x.base_layer.weight": adapted.base.weight, "x.base_layer.bias": adapted.base.bias, "y": torch.ones(1)}
    named |= {f"x.{name}.default.weight": getattr(adapted, name).weight for name in ("lora_A", "lora_B")}
    found = merged(named, Lora(r=3, alpha=6))
    assert found.keys() == {"x.weight", "x.bias", "y"}
    rows = torch.randn(4, 6)
    again = torch.nn.functional.linear(rows, found["x.weight"], found["x.bias"])
    assert torch.allclose(again, adapted(rows), atol=1e-6)
