"""Tests of models/ (layer_checks) and of costs/flops: layers that cannot be, experts that cannot be shared."""

from dataclasses import replace

import pytest

from trimtab.costs.formula.flops import find_ep_problems
from trimtab.models.describe import describe
from trimtab.models.description import find_layer_problems
from trimtab.specs import ParallelDims

MODEL = describe("Qwen3-VL-30B-A3B")
BLOCK = next(x for x in MODEL.layers if x.mlp is not None and x.mlp.num_experts)
HEAD = next(x for x in MODEL.layers if x.kind == "head")


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (replace(BLOCK, name=""), "layers: a name has 1 to 400 characters"),
        (replace(BLOCK, name="x" * 401), "layers: a name has 1 to 400 characters"),
        (replace(BLOCK, mlp=replace(BLOCK.mlp, experts_per_token=129)), "experts_per_token is more than num_experts"),
        (replace(HEAD, num_matmul_params=0), "a head multiplies its rows, so num_matmul_params is above 0"),
        (replace(BLOCK, num_matmul_params=5), "num_matmul_params 5"),
    ],
)
def test_a_layer_that_cannot_be_is_told_in_a_sentence(layer, problem):
    assert any(problem in found for found in find_layer_problems(layer))
    assert find_layer_problems(BLOCK) == find_layer_problems(HEAD) == []


@pytest.mark.parametrize(
    ("dims", "problem"),
    [
        (ParallelDims(dp=3, ep=3), "ep 3 cannot share the 128 experts"),
        (ParallelDims(dp=5, etp=5), "etp 5 cannot share the 768 columns of an expert"),
    ],
)
def test_experts_that_cannot_be_shared_are_told_in_a_sentence(dims, problem):
    assert any(problem in found for found in find_ep_problems(BLOCK, dims))
    assert find_ep_problems(BLOCK, ParallelDims(dp=8, ep=4)) == []
