"""costs/formula/ (state, layers): parameters of a device under tp, biases included; the workspace of a backward."""

from dataclasses import replace

import numpy as np
import pytest
from cost_models import embed, patches, projector, text_block, vision_block

from trimtab import describe, profile_model
from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.layers import Gradients, cost_layer
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.formula.state import local_params
from trimtab.specs import ParallelDims, evaluate

# vision block: h 64, 4 heads of 16, f 256; text block: h 128, 4 heads and 2 kv heads of 32, f 512, gated
VISION_WEIGHTS, VISION_NORMS = 4 * 64 * 64 + 2 * 64 * 256, 2 * 2 * 64
TEXT_NORMS = 2 * 128


@pytest.mark.parametrize(
    ("biases", "divided"),
    [
        (0, 0),
        (3 * 64, 3 * 64),  # q, k, v
        (64 + 256 + 64, 256),  # attention's output, MLP in and out
        (4 * 64 + 256 + 64, 3 * 64 + 256),  # all
        (256, 0),  # MLP in, or q, k, v and attention's output: not settled, whole on each device
        (7, 0),  # no choice of biases has so many: whole on each device
    ],
)
def test_biases_of_column_parallel_products_are_divided(biases, divided):
    layer = replace(vision_block(), num_params=VISION_WEIGHTS + VISION_NORMS + biases)
    assert local_params(layer, 1) == layer.num_params
    assert local_params(layer, 2) == (VISION_WEIGHTS + divided) / 2 + VISION_NORMS + biases - divided


def test_qkv_biases_of_a_text_block_are_divided():
    text = replace(text_block(), attention=replace(text_block().attention, num_kv_heads=4))
    weights = 128 * 32 * 16 + 3 * 128 * 512
    layer = replace(text, num_params=weights + TEXT_NORMS + 12 * 32, num_matmul_params=weights)
    assert local_params(layer, 2) == (weights + 12 * 32) / 2 + TEXT_NORMS


def test_norms_and_layer_scale_are_no_biases():
    scaled = replace(vision_block(), num_params=VISION_WEIGHTS + VISION_NORMS + 2 * 64 + 3 * 64, layer_scale=True)
    assert local_params(scaled, 2) == (VISION_WEIGHTS + 3 * 64) / 2 + VISION_NORMS + 2 * 64


def test_a_projectors_middle_bias_is_divided():
    layer = replace(projector(), num_params=256 * 128 + 128 * 128 + 128 + 128 + 512)
    assert local_params(layer, 2) == (256 * 128 + 128 * 128 + 128) / 2 + 128 + 512


def work(tokens: float) -> np.ndarray:
    return np.array([1, tokens, tokens**2, tokens**2, tokens, tokens**2, tokens**2])


def workspace(layer, settings: CostSettings, tokens: float) -> float:
    """The larger of the two moments of a backward."""
    cost = cost_layer(layer, Gradients(inputs=True, weights=True), DEVICES["H200"], settings, group=0)
    return max(
        float(np.dot(terms, work(tokens))) for terms in (cost.transient_bytes, cost.other_transient_bytes) if terms
    )


def test_the_workspace_of_a_backward_is_its_worst_moment():
    h, f, w = 128, 512, 2
    separate = CostSettings(dims=ParallelDims())
    # many rows: at the gate, gradients of its result and both operands, the product's input being gone
    assert workspace(text_block(), separate, 4096) == w * (4096 * h + 2 * 4096 * f)
    # fewer than the width: at the last product, gradients of its output and input beside its weight's
    assert workspace(text_block(), separate, 100) == w * (100 * h + 100 * f + f * h)


def test_tensor_parallelism_divides_weights_and_inner_rows():
    settings = CostSettings(dims=ParallelDims(tp=2))
    shared = CostSettings(dims=ParallelDims(tp=2), sequence_parallel=True)
    assert workspace(text_block(), settings, 100) == 2 * (100 * 128 + 100 * 256 + 256 * 128)
    assert workspace(text_block(), shared, 4096) == 2 * (4096 * 64 + 2 * 4096 * 256)


@pytest.mark.parametrize("layer", [patches(), projector(), embed()], ids=lambda x: x.name)
def test_only_blocks_have_a_priced_workspace(layer):
    assert workspace(layer, CostSettings(dims=ParallelDims()), 64) == 0.0


# -- Products of 8 bits, and tensor-parallel messages beside products, in the costs -----------------------------------


@pytest.mark.parametrize("dtype", ["fp8", "mxfp8"])
def test_8_bit_products_are_faster_in_blocks_and_nowhere_else(dtype):
    model, device = describe("Qwen2.5-VL-7B"), DEVICES["B200"]
    work = np.array([1, 4096, 4096**2, 4096**2, 8192, 8192**2, 8192**2], dtype=float)
    plain, low = (profile_model(model, device, dtype=name, fused_kernels=True) for name in ("bf16", dtype))
    for a, b in zip(plain.layers, low.layers, strict=True):
        seconds = [float(evaluate(x.forward_s, work)) for x in (a, b)]
        if a.kind == "block" and a.tower == "language":
            assert 0.5 * seconds[0] < seconds[1] < 0.8 * seconds[0]
        elif a.kind != "block":
            assert seconds[0] == seconds[1], a.name
        assert a.state_bytes == b.state_bytes
        less = b.tiers[0].saved_bytes != a.tiers[0].saved_bytes  # inputs of products are kept in 8 bits
        assert less == (a.kind == "block")


def test_mxfp8_pays_for_copies_that_fp8_leaves_to_fused_kernels():
    model = describe("Qwen2.5-VL-7B")
    fp8, mxfp8 = (
        profile_model(model, DEVICES["B200"], dtype=name, fused_kernels=True).matrix("forward_s")[:, 4].sum()
        for name in ("fp8", "mxfp8")
    )
    assert fp8 < mxfp8


def test_of_overlapped_tensor_parallel_messages_one_part_in_tp_is_waited_for():
    model, device = describe("Qwen2.5-VL-7B"), DEVICES["H100-80GB"]
    slow = replace(device, link_bytes_per_s=1e6)  # nothing but messages takes time
    once, overlapped = (
        profile_model(model, slow, dims=ParallelDims(tp=4), tp_overlap=x).matrix("forward_s")[:, 4].sum()
        for x in (False, True)
    )
    assert overlapped == pytest.approx(once / 4, rel=0.01)
