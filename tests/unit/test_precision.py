"""Products of 8 bits, and tensor-parallel messages beside products, in the costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trimtab.costs.devices import DEVICES
from trimtab.costs.profile import profile_model
from trimtab.models.describe import describe
from trimtab.specs import ParallelDims, evaluate


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
