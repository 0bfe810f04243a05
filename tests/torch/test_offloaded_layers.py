"""Offloaded layers: the same gradients, the bytes that were counted, nothing twice. Needs torch and Transformers."""

from __future__ import annotations

import copy
import gc

import pytest

torch = pytest.importorskip("torch", reason="runs tiny models")
pytest.importorskip("transformers", reason="holds the models")

from offload_checks import DeviceBytes, held_behind_forward  # noqa: E402
from real_layers import LAYERS, RealLayer  # noqa: E402
from recompute_checks import assert_recompute_holds, gradients, make_model  # noqa: E402
from test_recompute_memory import profile_of  # noqa: E402
from tiny_packs import one_thread  # noqa: E402, F401
from torch import nn  # noqa: E402
from traced_families import FAMILIES, find_layers, make_family  # noqa: E402

from trimtab.costs.offload import with_offload  # noqa: E402
from trimtab.costs.traced_step import trace_step  # noqa: E402
from trimtab.partition.assess import SplitProblem  # noqa: E402
from trimtab.runtime.recompute.apply import apply  # noqa: E402
from trimtab.specs import RecomputeChoice, Stage  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.filterwarnings("ignore:.*hidden_state.* is deprecated:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_bit_equal_and_nothing_is_left_behind(family):
    assert_recompute_holds(family, "sdpa", "offload")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "gemma3", "qwen3_vl_moe"])
def test_gradients_are_bit_equal_with_eager_attention(family):
    assert_recompute_holds(family, "eager", "offload")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "llama4"])
def test_what_is_moved_leaves_the_device_which_then_holds_no_more_than_under_full_recompute(family):
    made = make_family(family, torch.float32)
    model = made.make_real(dtype=torch.float32, attention="sdpa")
    layers = find_layers(model)
    trace = trace_step(model, layers, made.inputs)
    for chosen in (layers[:1], layers[1:-1:2], layers):
        kept, moved = held_behind_forward(made, model, []), held_behind_forward(made, model, chosen)
        # nothing that stays on the device anyway is moved, and nothing twice
        assert kept.device - moved.device == moved.host
        freed = trace.saved_bytes() - trace.saved_bytes(chosen)
        # recompute holds inputs that nothing saves as well: a little
        assert freed <= moved.host <= 1.06 * freed


# -- what a device holds ----------------------------------------------------------------------------------------------


def peaks_of(layer: RealLayer, rows: int, num_layers: int) -> tuple[int, int]:
    """Most bytes of device and host memory in forward and backward, gradients added in place."""
    layer.module.to(torch.bfloat16)
    layers = nn.ModuleList(copy.deepcopy(layer.module) for _ in range(num_layers))
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    handle = apply(layers, [str(i) for i in range(num_layers)], granularity="offload")
    hidden, arguments = layer.hidden(rows, torch.bfloat16), layer.arguments(rows)
    gc.collect()
    with DeviceBytes(layers) as live:
        live.hold(hidden)
        result = hidden
        for module in layers:
            result = module(result, **arguments)
            result = result[0] if isinstance(result, tuple) else result
        result.backward(torch.ones_like(result))
    return live.device_peak, handle.host.most_bytes


@pytest.mark.parametrize(
    "name",
    ["Qwen2.5-VL-7B ViT", pytest.param("Qwen3-VL-8B text", marks=pytest.mark.integration), "InternViT-300M"],
)
def test_the_double_buffer_is_the_most_that_offloaded_layers_need(name):
    torch.manual_seed(0)
    layer, rows, num_layers = LAYERS[name]("sdpa", 4), 256, 4
    work = [1, *(rows, rows**2, rows**2) * 2]
    profile = with_offload(profile_of(layer, num_layers, "sdpa"), host_bytes_per_s=1e9)
    choice = RecomputeChoice(tier="offload", layers=tuple(range(num_layers)))
    stage = Stage(index=0, start=0, stop=num_layers, recompute=(choice,))
    problem = SplitProblem(profile=profile, num_stages=1, work_mean=work, work_max=work, num_microbatches=1)
    memory = problem.assess([stage]).memory[0]
    device, host = peaks_of(layer, rows, num_layers)
    row = 2 * rows * layer.spec.hidden_size  # the result, which no layer behind them holds as its input
    planned = memory.saved_bytes + memory.transient_bytes + 2 * row
    assert 0.85 * planned <= device <= 1.001 * planned
    assert host == pytest.approx(memory.host_bytes, rel=0.07)


# -- corners ----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Saves views of one storage, its own buffer and weights, its input, and what it then changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("scale", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = x @ torch.cat([self.weight, self.weight, self.weight], dim=1)
        q, k, v = qkv.chunk(3, dim=-1)
        mixed = torch.softmax(q * k, dim=-1) * v * self.scale
        mixed += x  # the sum is a storage whose first version nothing saved
        return mixed.sin()


def test_views_share_one_copy_and_what_is_not_the_layers_own_stays():
    torch.manual_seed(0)
    layers = nn.ModuleList(Odd() for _ in range(3))
    x = torch.randn(16, 8)

    def step() -> list[torch.Tensor]:
        layers.zero_grad(set_to_none=True)
        result = x
        for layer in layers:
            result = layer(result)
        result.square().sum().backward()
        return [p.grad.clone() for p in layers.parameters() if p.grad is not None]

    expected = step()
    with apply(layers, ["0", "1", "2"], granularity="offload") as handle:
        assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
        # a layer: the three weights side by side; qkv; softmax; its product with v; the sum
        row = 4 * 16 * 8
        per_layer = 3 * 4 * 64 + 3 * row + 3 * row
        assert handle.host.most_bytes <= 3 * per_layer
        first = handle.host.most_bytes
        step()
        assert handle.host.most_bytes == first
        assert handle.host.held_bytes == 0


def test_a_graph_may_be_run_through_twice_and_be_dropped():
    torch.manual_seed(0)
    layers = nn.Sequential(Odd(), Odd())
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(layers(x).sum(), x)[0]
    with apply(layers, ["0", "1"], granularity="offload") as handle:
        loss = layers(x).sum()
        for keep in (True, False):
            assert torch.equal(torch.autograd.grad(loss, x, retain_graph=keep)[0], expected)
        del loss
        abandoned = layers(x)
        assert handle.host.held_bytes > 0
        del abandoned
        gc.collect()
        assert handle.host.held_bytes == 0
        with torch.no_grad():
            layers(x)
        assert handle.host.held_bytes == 0


def test_a_graph_made_before_the_removal_still_runs_backward():
    family, model = make_model("internvl", "sdpa")
    expected = gradients(model, family.inputs)
    handle = apply(model, find_layers(model), granularity="offload")
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = model(**family.inputs).loss
    handle.remove()
    loss.backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters() if p.grad is not None)


def test_a_frozen_tower_moves_nothing():
    family, model = make_model("internvl", "sdpa")
    tower = [name for name in find_layers(model) if "language_model" not in name]
    model.model.vision_tower.requires_grad_(False)
    with apply(model, tower, granularity="offload") as handle:
        gradients(model, family.inputs)
        assert handle.host.most_bytes == 0


def test_beside_recompute_gradients_are_bit_equal():
    family, model = make_model("qwen2_5_vl", "sdpa")
    expected = gradients(model, family.inputs)
    layers = find_layers(model)
    apply(model, layers[::2], granularity="offload")
    apply(model, layers[1::4], granularity="full")
    apply(model, layers[3::4], granularity="selective")
    found = gradients(model, family.inputs)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
