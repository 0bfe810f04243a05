"""Analytic bytes, FLOPs and parameters against real Transformers layers on the CPU. Needs torch and Transformers.

First layers beside a description made by hand, at a quarter of their published widths; then every kind of layer of
small whole models beside what `describe` and `profile_model` say.
"""

import gc
import weakref

import pytest
import torch
from cost_models import head
from live_bytes import LiveBytes
from real_layers import LAYERS, ProductResults, RealLayer, kept_bytes
from tiny_models import TinyModel, make_tiny_model
from torch.utils.flop_counter import FlopCounterMode

from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.activations import kept_by_layer, selective_bytes
from trimtab.costs.formula.flops import attention_flops_per_pair, layer_matmuls
from trimtab.costs.formula.layers import cost_layer, find_gradients
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.formula.state import local_params
from trimtab.costs.profile import profile_model
from trimtab.specs import LayerSpec, ParallelDims, Profile, evaluate

ROWS = 64
DIVISOR = 4  # of the published widths: the same tensors, a sixteenth of the bytes


def make(name: str, attention: str) -> RealLayer:
    torch.manual_seed(0)
    return LAYERS[name](attention, DIVISOR)


def settings(**more) -> CostSettings:
    return CostSettings(dims=ParallelDims(), packed=False, **more)


def analytic_bytes(spec: LayerSpec, chosen: CostSettings, *, frozen: bool = False) -> float:
    kept = [k for k in kept_by_layer(spec, chosen) if not (frozen and k.for_weights)]
    return sum(k.row_bytes * ROWS + k.pair_bytes * ROWS**2 for k in kept)


@pytest.mark.parametrize(("attention", "dtype"), [("sdpa", "bf16"), ("sdpa", "fp32"), ("eager", "bf16")])
@pytest.mark.parametrize("name", LAYERS)
def test_kept_bytes_equal_autograd(name, attention, dtype):
    layer = make(name, attention)
    real = kept_bytes(layer, ROWS, torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert analytic_bytes(layer.spec, settings(attention=attention, dtype=dtype)) == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize("name", [n for n in LAYERS if "A3B" not in n])
def test_frozen_layer_keeps_only_what_input_gradients_need(name):
    layer = make(name, "sdpa")
    layer.module.requires_grad_(False)
    real = kept_bytes(layer, ROWS, torch.bfloat16)
    assert analytic_bytes(layer.spec, settings(attention="sdpa"), frozen=True) == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("name", [n for n in LAYERS if "A3B" not in n])
def test_selective_tier_holds_the_results_of_products_and_attention(name):
    layer = make(name, "sdpa")
    layer.module.to(torch.bfloat16)
    hidden = layer.hidden(ROWS, torch.bfloat16)
    with ProductResults() as results:
        layer.module(hidden, **layer.arguments(ROWS))
    real = results.num_bytes + hidden.numel() * hidden.element_size()
    assert selective_bytes(layer.spec, settings(attention="sdpa")) * ROWS == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize("name", [n for n in LAYERS if "A3B" not in n])
def test_flops_equal_the_flop_counter(name):
    layer = make(name, "eager")
    layer.module.to(dtype=torch.float32, device="meta")
    hidden = layer.hidden(ROWS, torch.float32).detach().to("meta").requires_grad_()
    arguments = {
        key: tuple(x.to("meta") for x in value) if isinstance(value, tuple) else value
        for key, value in layer.arguments(ROWS).items()
    }
    ours = sum(p.flops for p in layer_matmuls(layer.spec, 1)) * ROWS
    ours += attention_flops_per_pair(layer.spec.attention, 1) * ROWS**2
    with FlopCounterMode(display=False) as counter:
        result = layer.module(hidden, **arguments)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)
    with FlopCounterMode(display=False) as counter:
        result = result[0] if isinstance(result, tuple) else result
        result.sum().backward()
    assert 2 * ours == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_on_one_device_are_the_module_s(name):
    layer = make(name, "sdpa")
    assert local_params(layer.spec, 1) == sum(p.numel() for p in layer.module.parameters())


def test_head_bytes_equal_autograd_and_the_peak_of_backward():
    from transformers.loss.loss_utils import ForCausalLMLoss

    H, V = 64, 8192
    spec, chosen = head(V, width=H), settings()
    module = torch.nn.Linear(H, V, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(1, ROWS, H, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, V, (1, ROWS))
    gc.collect()
    with LiveBytes() as tracker:
        logits = module(hidden)
        loss = ForCausalLMLoss(logits, labels, V)
        gc.collect()
        held = tracker.live
        loss.backward()
    cost = cost_layer(spec, find_gradients([spec, spec], frozenset())[1], DEVICES["H200"], chosen, group=0)
    saved = sum(cost.tiers[0].saved_bytes) * ROWS
    transient = sum(cost.transient_bytes) * ROWS
    weight_gradient = 2 * H * V
    assert held + hidden.numel() * 2 == pytest.approx(saved, rel=0.02)
    assert tracker.peak == pytest.approx(saved + transient, rel=0.02, abs=weight_gradient)


# -- whole models, described ----------------------------------------------------------------------------------------

DESCRIBED = {  # case -> copies of SDPA's result that a partial rotary embedding costs in the language model
    "llava llama": 0,
    "llava phi3": 1,
    "llava qwen3": 0,
    "llava_next": 0,
    "llava_onevision": 0,
    "internvl qwen2": 0,
    "internvl qwen3, rms, qk norm, mask token, pooled by class token, tied": 0,
    "qwen2_vl": 0,
    "qwen2_5_vl": 0,
    "qwen3_vl": 0,
    "qwen3_vl_moe": 0,
    "gemma3": 0,
    "glm4v_moe": 1,
}
NOT_COUNTED = {
    "gemma3": "model.multi_modal_projector",  # average pooling keeps its input
    "glm4v_moe": "model.visual.merger",  # a gate in the projector
}


class KeptByModule:
    """Bytes that autograd keeps in the forward of one module, without constants made of its weights alone."""

    def __init__(self, module: torch.nn.Module, hidden: torch.Tensor, shared: list[torch.Tensor]) -> None:
        self.rows = hidden.numel() // hidden.shape[-1]
        self.parameters = list(module.parameters())
        self.shared = {t.untyped_storage().data_ptr() for t in [*self.parameters, *shared]}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.shared and not self.is_made_of_a_weight(t):
            self.storages[storage.data_ptr()] = storage  # held, so that no address comes twice
        return t

    def is_made_of_a_weight(self, t: torch.Tensor) -> bool:
        """Gemma's fp32 1 + weight, the fp32 copy of a router's matrix."""
        like = [p for p in self.parameters if t.shape in (p.shape, p.shape[::-1])]
        return any(t.dim() == 1 or (t.dtype != p.dtype and self.rows not in t.shape) for p in like)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes() for x in self.storages.values())


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for x in value for t in tensors_of(x)] if isinstance(value, (list, tuple)) else []


def measure_layers(tiny: TinyModel, dtype: torch.dtype) -> dict[str, tuple[int, bool]]:
    """Layer -> (bytes kept, whether attention was handed a mask), each run alone on what the model hands it."""
    model, calls, measured = tiny.model.to(dtype).train(), {}, {}
    names = [x.name for x in tiny.spec.layers if x.kind in ("block", "norm", "projector")]
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, kwargs, name=name: calls.update({name: (args, kwargs)}), with_kwargs=True
        )
        for name in names
    ]
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tiny.inputs.items()}
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    for name, (args, kwargs) in calls.items():
        module, named = model.get_submodule(name), dict(kwargs)
        hidden = args[0] if args else named.pop("hidden_states")
        kept = KeptByModule(module, hidden, tensors_of(args[1:]) + tensors_of(list(named.values())))
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
            module(hidden.detach().clone().requires_grad_(), *args[1:], **named)
        measured[name] = (kept.num_bytes, isinstance(named.get("attention_mask"), torch.Tensor))
    return measured


def kept_by_profile(tiny: TinyModel, profile: Profile) -> dict[str, float]:
    P, T = tiny.num_patches, tiny.num_tokens
    return {x.name: evaluate(x.tiers[0].saved_bytes, [[1, P, 0, 0, T, T**2, T**2]])[0] for x in profile.layers}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", DESCRIBED)
def test_described_layers_keep_what_autograd_keeps(case, dtype):
    torch.manual_seed(0)
    tiny = make_tiny_model(case)
    measured = measure_layers(tiny, torch.bfloat16 if dtype == "bf16" else torch.float32)
    ours = {
        packed: kept_by_profile(
            tiny, profile_model(tiny.spec, DEVICES["H200"], dtype=dtype, attention="sdpa", packed=packed)
        )
        for packed in (False, True)
    }
    checked = set()
    for layer in tiny.spec.layers:
        if layer.name not in measured or layer.name == NOT_COUNTED.get(tiny.spec.family) or layer.unread:
            continue
        real, masked = measured[layer.name]
        expected = ours[masked][layer.name]
        if layer.norm == "layer_norm" and dtype == "bf16":
            # the CPU keeps both statistics in bf16, the devices that train in fp32
            norms = layer.num_norms if layer.kind == "block" else 1
            expected -= 4 * norms * tiny.num_patches * layer.rows_per_input
        experts = layer.mlp is not None and layer.mlp.num_experts is not None
        if layer.attention is not None and layer.tower == "language" and DESCRIBED[case]:
            copied = layer.attention.num_heads * layer.attention.value_head_dim * (2 if dtype == "bf16" else 4)
            expected += tiny.num_tokens * copied
        if experts and tiny.spec.family == "glm4v_moe" and dtype == "bf16":
            expected += tiny.num_tokens * 4 * layer.hidden_size  # its router computes in fp32
        # indices of routed rows are many beside rows this narrow; a merger's norm has four statistics for its row
        assert expected == pytest.approx(real, rel=0.03 if experts or layer.kind == "projector" else 1e-6), layer.name
        checked.add(layer.kind)
    assert checked >= {"block", "norm"}


@pytest.mark.parametrize("case", [*DESCRIBED, "internvl phi3, two states back"])
def test_unread_layers_are_those_that_no_gradient_reaches_and_keep_nothing(case):
    torch.manual_seed(0)
    tiny = make_tiny_model(case)
    model, inside = tiny.model.train(), []
    kept: dict[str, list[weakref.ref]] = {x.name: [] for x in tiny.spec.layers}

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # with its history a result would hold the node that holds it

    def pack(tensor):
        held = Kept(tensor)
        if inside:
            kept[inside[-1]].append(weakref.ref(held))
        return held

    for layer in tiny.spec.layers:
        if layer.kind == "block" or layer.unread:
            module = model.get_submodule(layer.name)
            module.register_forward_pre_hook(lambda m, a, name=layer.name: inside.append(name))
            module.register_forward_hook(lambda m, a, r: inside.pop() and None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        logits = model(**tiny.inputs, use_cache=False).logits
    gc.collect()
    alive = {name for name, refs in kept.items() if any(ref() is not None for ref in refs)}
    assert alive == {x.name for x in tiny.spec.layers if x.kind == "block" and not x.unread}
    logits.sum().backward()
    profile = profile_model(tiny.spec, DEVICES["H200"])
    for layer, cost in zip(tiny.spec.layers, profile.layers, strict=True):
        if layer.name == "model.image_newline" or layer.num_params == 0:
            continue
        reached = any(p.grad is not None for p in model.get_submodule(layer.name).parameters())
        assert reached == (not layer.unread), layer.name
        assert (max(cost.backward_s) == 0) == layer.unread, layer.name
        assert not layer.unread or max(cost.tiers[0].saved_bytes) == 0, layer.name
        assert not layer.unread or min(cost.forward_s[1], cost.state_bytes) > 0, layer.name
