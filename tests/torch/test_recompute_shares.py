"""What a stage holds while layers recompute in a share of its micro-batches, beside what was predicted. Needs torch."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="runs real layers")
pytest.importorskip("transformers", reason="holds the layers")

from live_bytes import LiveBytes  # noqa: E402
from real_layers import LAYERS, RealLayer  # noqa: E402
from tiny_packs import one_thread  # noqa: E402, F401
from torch import nn  # noqa: E402

from trimtab.costs.devices import DEVICES  # noqa: E402
from trimtab.partition.assess import assess_stages  # noqa: E402
from trimtab.partition.schedules import FORWARD, block_order, peak_in_flight  # noqa: E402
from trimtab.plan.plan import RecomputeDecision  # noqa: E402
from trimtab.runtime.recompute import AppliedRecompute, apply  # noqa: E402
from trimtab.specs import (  # noqa: E402
    NUM_WORK_TERMS,
    LayerCost,
    MicrobatchShare,
    ParallelDims,
    Profile,
    RecomputeChoice,
    RecomputeTier,
    Stage,
)

pytestmark = pytest.mark.torch

ROWS = 128


def make_layers(layer: RealLayer, num_layers: int) -> nn.ModuleList:
    layer.module.to(torch.float32)
    layers = nn.ModuleList(copy.deepcopy(layer.module) for _ in range(num_layers))
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return layers


def run_stage(
    layer: RealLayer, layers: nn.ModuleList, handle: AppliedRecompute | None, stage: int, P: int, M: int
) -> tuple[int, list[torch.Tensor]]:
    """One step of one stage in the order of 1F1B: the most bytes held between its blocks, and its gradients."""
    order = block_order("1F1B", num_devices=P, num_microbatches=M)
    torch.manual_seed(1)
    inputs = [layer.hidden(ROWS, torch.float32) for _ in range(M)]
    arguments = layer.arguments(ROWS)
    results: dict[int, torch.Tensor] = {}
    held = []
    for parameter in layers.parameters():
        parameter.grad.zero_()
    with LiveBytes(layers, []) as live:
        for microbatch, kind in zip(order.microbatch[stage].tolist(), order.kind[stage].tolist(), strict=True):
            if kind == FORWARD:
                if handle is not None:
                    handle.begin_microbatch(microbatch)
                result = inputs[microbatch]
                for module in layers:
                    result = module(result, **arguments)
                    result = result[0] if isinstance(result, tuple) else result
                results[microbatch] = result
            else:
                result = results.pop(microbatch)
                inputs[microbatch].grad = None
                result.backward(torch.ones_like(result))
                inputs[microbatch].grad = None
            del result
            # a result that waits for its backward belongs to the stage behind
            held.append(live.live - sum(x.nbytes for x in results.values()))
    return max(held), [p.grad.clone() for p in layers.parameters()]


def profile_holding(whole: int, least: int, num_layers: int) -> Profile:
    """Layers that hold so many bytes a micro-batch, and so many when recomputed in full."""

    def constant(value: float) -> tuple[float, ...]:
        return (float(value), *(0.0,) * (NUM_WORK_TERMS - 1))

    tiers = (("none", whole), ("full", least))
    cost = LayerCost(
        name="layer",
        tower="vision",
        kind="block",
        forward_s=constant(1),
        backward_s=constant(2),
        output_bytes=constant(0),
        state_bytes=0.0,
        num_params=0.0,
        tiers=tuple(RecomputeTier(name=x, extra_backward_s=constant(0), saved_bytes=constant(n)) for x, n in tiers),
        transient_bytes=constant(0),
        group=0,
    )
    return Profile(
        layers=(cost,) * num_layers,
        method="traced",
        device=DEVICES["H200"],
        dims=ParallelDims(),
        dtype="bf16",
        time_error=0.0,
        memory_error=0.0,
    )


@pytest.mark.parametrize(
    ("name", "stage", "num"),
    [("InternViT-300M", 0, 3), ("Qwen2.5-VL-7B ViT", 2, 1)],
)
def test_bytes_of_micro_batches_in_flight_are_the_predicted_ones(name, stage, num):
    """Two layers, the first of which recomputes in `num` of the micro-batches that the stage of four holds."""
    torch.manual_seed(0)
    P, M = 4, 7
    layer = LAYERS[name]("sdpa", 4)
    k = int(peak_in_flight("1F1B", num_devices=P, num_microbatches=M)[stage])
    layers = make_layers(layer, 2)
    # what one micro-batch holds, on the last stage; recomputed, the state of the random numbers too
    whole, _ = run_stage(layer, layers, None, P - 1, P, M)
    with apply(layers, ["0"]) as always:
        least, _ = run_stage(layer, layers, always, P - 1, P, M)
    assert least < 0.7 * whole
    choice = RecomputeChoice(tier="full", layers=(0,), share=MicrobatchShare(num=num, of=k))
    stages = [Stage(index=i, start=i, stop=i + 1) for i in range(P)]
    stages[stage] = Stage(index=stage, start=stage, stop=stage + 1, recompute=(replace(choice, layers=(stage,)),))
    once = np.eye(NUM_WORK_TERMS)[0]
    ask = {"work_mean": once, "work_max": once, "num_microbatches": M}
    planned = assess_stages(profile_holding(whole, least, P), stages, **ask).memory[stage].saved_bytes

    _, expected = run_stage(layer, layers, None, stage, P, M)
    decision = RecomputeDecision(stage=0, granularity="full", modules=("0",), num_microbatches=num, every=k)
    with apply(layers, [decision]) as handle:
        found, gradients = run_stage(layer, layers, handle, stage, P, M)
    assert found == planned
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_without_a_number_all_micro_batches_recompute():
    layer = LAYERS["InternViT-300M"]("sdpa", 4)
    layers = make_layers(layer, 2)
    decision = RecomputeDecision(stage=0, granularity="full", modules=("0",), num_microbatches=1, every=2)
    counts = []
    layers[0].register_forward_pre_hook(lambda *_: counts.append("call"))
    next(layers[0].children()).register_forward_pre_hook(lambda *_: counts.append("run"))
    with apply(layers, [decision]) as handle:
        for number in (None, 0, 1, 2, 3):
            if number is not None:
                handle.begin_microbatch(number)
            counts.clear()
            run = layers[0](layer.hidden(8, torch.float32), **layer.arguments(8))
            (run[0] if isinstance(run, tuple) else run).sum().backward()
            assert counts.count("run") == (2 if number in (None, 1, 3) else 1), number
