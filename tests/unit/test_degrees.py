"""Expert and context parallelism: bytes, work and traffic against counting by hand; which degrees are tried.

costs/formula/ (activations, layers, flops), plan/decide/ (degrees).
"""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cost_models import small_model, text_block, vision_block

from trimtab import PlanDetails, PlanOptions, check_plan, describe, make_plan, write_plan
from trimtab.adapters.frameworks import find_target
from trimtab.adapters.running import decided
from trimtab.costs.devices import DEVICES, parse_cluster
from trimtab.costs.formula.activations import expert_launches, layer_traffic
from trimtab.costs.formula.flops import layer_matmuls
from trimtab.costs.formula.layers import Gradients, all_to_all_s, cost_layer
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.formula.state import shares_of
from trimtab.options import Dispatcher, same_fields
from trimtab.plan.decide.setting import link_rates, parallel_dims
from trimtab.plan.decide.work import pad_documents
from trimtab.plan.file.reload import reload_plan
from trimtab.specs import WORK_TERMS, ClusterSpec, LayerSpec, MlpSpec, ParallelDims, SampleTable

A100 = DEVICES["A100-80GB"]
TRAINED = Gradients(inputs=True, weights=True)
HIDDEN, WIDTH = 128, 64


def expert_block(num_experts: int = 4, per_token: int = 2) -> LayerSpec:
    """4 query and 2 key/value heads of 32, experts of three matrices, a router and two norms."""
    attention, expert = HIDDEN * 32 * (2 * 4 + 2 * 2), 3 * HIDDEN * WIDTH
    router = HIDDEN * num_experts
    return replace(
        text_block(),
        mlp=MlpSpec(intermediate_size=WIDTH, gated=True, num_experts=num_experts, experts_per_token=per_token),
        num_matmul_params=attention + router + per_token * expert,
        num_params=attention + router + num_experts * expert + 2 * HIDDEN,
    )


def settings(expert_imbalance: float = 1.0, zero_stage: int = 1, **dims: int) -> CostSettings:
    return CostSettings(dims=ParallelDims(**dims), expert_imbalance=expert_imbalance, zero_stage=zero_stage)


# -- bytes ----------------------------------------------------------------------------------------------------------


def test_a_model_of_four_experts_over_two_devices_holds_what_is_counted_by_hand():
    layer = expert_block()
    dense, experts = 49_152 + 512 + 256, 4 * 24_576
    cost = cost_layer(layer, TRAINED, A100, settings(dp=4, ep=2), group=0)
    assert cost.num_params == dense + experts / 2
    # weight 2 and fp32 gradient 4 on every device; master and moments, 12, over 4 dense copies and over 2 of experts
    assert cost.state_bytes == dense * (6 + 12 / 4) + experts / 2 * (6 + 12 / 2)


@pytest.mark.parametrize(
    "dims", [{"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 2, "cp": 2, "ep": 4}, {"dp": 4, "ep": 2, "etp": 2}]
)
def test_what_all_devices_hold_once_is_the_model(dims):
    layer, s = expert_block(), settings(**dims)
    devices = s.dims.dp * s.dims.cp * s.dims.tp
    assert sum(devices * x.params / x.replicas for x in shares_of(layer, A100, s, trainable=True)) == layer.num_params


def test_experts_of_tensor_parallel_devices_are_divided_by_ep_alone_where_etp_is_1():
    layer = expert_block()
    dense, experts = shares_of(layer, A100, settings(dp=2, tp=2, ep=4, etp=1), trainable=True)
    assert experts.params == 24_576
    assert (dense.replicas, experts.replicas) == (2, 1)
    assert dense.params == shares_of(layer, A100, settings(tp=2), trainable=True)[0].params - 4 * 24_576 / 2


def test_a_pack_of_cp_devices_is_divided_in_the_language_model_alone():
    for layer, share in ((text_block(), 4), (vision_block(), 1)):
        whole, one = (cost_layer(layer, TRAINED, A100, settings(dp=4 // cp, cp=cp), group=0) for cp in (1, 4))
        for term in range(1, len(WORK_TERMS)):
            assert one.tiers[0].saved_bytes[term] * share == pytest.approx(whole.tiers[0].saved_bytes[term])
            assert one.output_bytes[term] * share == pytest.approx(whole.output_bytes[term])
        assert one.state_bytes == whole.state_bytes  # optimizer state over dp x cp


def test_documents_are_padded_to_twice_cp():
    table = SampleTable.of([0, 0, 0], [7, 8, 9])
    assert pad_documents(table, ParallelDims(cp=4)).num_tokens.tolist() == [8, 8, 16]
    assert pad_documents(table, ParallelDims(dp=4)) is table


# -- work and traffic -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [{"dp": 4, "ep": 2}, {"dp": 2, "tp": 2, "ep": 4, "etp": 1}, {"dp": 4, "etp": 2}])
def test_a_device_multiplies_as_much_however_experts_are_divided(dims):
    layer, tp = expert_block(), dims.get("tp", 1)
    divided, plain = (sum(p.flops for p in layer_matmuls(layer, d)) for d in (ParallelDims(**dims), tp))
    assert divided == plain


def test_rows_of_the_busiest_device_are_priced():
    layer, rows = expert_block(), WORK_TERMS.index("tokens")
    even, uneven, alone = (
        cost_layer(layer, TRAINED, A100, settings(imbalance, dp=4, ep=ep), group=0)
        for imbalance, ep in ((1.0, 4), (1.5, 4), (1.5, 1))
    )
    assert uneven.forward_s[rows] > even.forward_s[rows] > alone.forward_s[rows]
    assert uneven.tiers[0].saved_bytes[rows] > even.tiers[0].saved_bytes[rows] == alone.tiers[0].saved_bytes[rows]


PORTS = 10e9  # of a device that shares experts with other nodes


def dispatch_s(ep: int, per_token: int, here: int, dispatcher: Dispatcher) -> float:
    """Seconds a row of device 0, of all choices of `per_token` of 8 experts, in the mean: sent there and back."""
    inside = outside = 0
    choices = list(itertools.combinations(range(8), per_token))
    for chosen in choices:
        devices = [expert * ep // 8 for expert in chosen]
        if dispatcher == "alltoall":
            outside += sum(device >= here for device in devices)
            inside += sum(0 < device < here for device in devices)
        else:  # to the device of place 0 in each node, and from there to the others: so it does with rows of others
            outside += len({device // here for device in devices} - {0})
            inside += len({device for device in devices if device % here})
    return 2 * HIDDEN * 2 * max(inside / A100.link_bytes_per_s, outside / PORTS) / len(choices) / 0.8


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep"])
@pytest.mark.parametrize(("ep", "here"), [(2, 2), (4, 4), (4, 2), (8, 2), (8, 4), (8, 1)])
@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_dispatch_sends_what_a_router_without_preference_does(ep, here, per_token, dispatcher):
    layer = expert_block(8, per_token)
    s = replace(settings(dp=ep, ep=ep), dispatcher=dispatcher, ep_bytes_per_s=PORTS, ep_in_node=here)
    seconds = all_to_all_s(layer, A100, s)
    assert seconds == pytest.approx(dispatch_s(ep, per_token, here, dispatcher))
    assert all_to_all_s(layer, A100, replace(s, expert_imbalance=1.5)) == pytest.approx(1.5 * seconds)


@pytest.mark.parametrize(("etp", "here"), [(1, 8), (2, 4), (8, 1)])
def test_devices_that_share_experts_lie_etp_apart(etp, here):
    rates = link_rates(parse_cluster("32xA100-80GB"), ParallelDims(dp=4, tp=8, ep=32 // etp, etp=etp))
    assert (rates["ep_in_node"], rates["ep_bytes_per_s"]) == (here, 25e9)


def test_rows_sent_beside_products_cost_what_outlasts_them():
    layer, rows = expert_block(8), WORK_TERMS.index("tokens")
    alone, hidden, rest = (
        cost_layer(
            layer, TRAINED, A100, replace(settings(dp=8, ep=8), ep_overlap=x, ep_bytes_per_s=r, ep_in_node=1), group=0
        )
        for x, r in ((False, 1e12), (True, 1e12), (True, 1e6))
    )
    for which in ("forward_s", "backward_s"):
        assert getattr(hidden, which)[rows] < getattr(alone, which)[rows] < getattr(rest, which)[rows]
    sent = all_to_all_s(layer, A100, replace(settings(dp=8, ep=8), ep_bytes_per_s=1e12, ep_in_node=1))
    assert alone.forward_s[rows] - hidden.forward_s[rows] == pytest.approx(sent)


def test_biases_of_experts_are_traffic():
    plain = expert_block(8)
    biased = replace(plain, num_params=plain.num_params + 8 * (2 * WIDTH + HIDDEN))
    found, without = (layer_traffic(x, settings(dp=4, ep=4)) for x in (biased, plain))
    assert {x.name for x in found} - {x.name for x in without} == {"expert biases"}
    assert found[-1].row_bytes == 2 * 2 * (8 * WIDTH + 6 * HIDDEN)
    assert expert_launches(biased, settings(dp=4, ep=4)) == 2 * expert_launches(plain, settings(dp=4, ep=4)) == 8


# -- search ---------------------------------------------------------------------------------------------------------

EXPERTS = replace(small_model(), layers=(*small_model().layers[:-1], replace(expert_block(16), name="experts")))
TWO_NODES = ClusterSpec(device=A100, num_nodes=2, devices_per_node=8)


def tried(model=EXPERTS, *, longest: int = 4096, crowded: bool = False, **options) -> list[ParallelDims]:
    return list(parallel_dims(model, TWO_NODES, PlanOptions(**options), longest=longest, crowded=crowded))


def test_ep_is_tried_inside_a_node_and_over_all_devices_for_experts_alone():
    assert {d.ep for d in tried(pp=1, tp=1)} == {1, 2, 4, 8, 16}
    assert {(d.ep, d.etp) for d in tried(pp=1, tp=2)} == {(1, None), (2, 1), (4, 1), (8, 1), (16, 1)}
    assert {d.ep for d in tried(small_model())} == {1}
    assert {d.ep for d in tried(ep=1)} == {1}
    assert {(d.dp, d.pp, d.ep, d.etp) for d in tried(ep=8, tp=1)} == {(16, 1, 8, None), (8, 2, 8, None)}


def test_cp_is_tried_for_long_documents_or_where_nothing_fits():
    assert {d.cp for d in tried(longest=16_000)} == {1}
    assert {d.cp for d in tried(longest=33_000)} == {1, 2, 4}
    assert {d.cp for d in tried(max_tokens=33_000)} == {1, 2, 4}
    assert {d.cp for d in tried(longest=5_000, crowded=True)} == {2, 4}
    assert tried(longest=1_000, crowded=True) == []
    assert {d.cp for d in tried(cp=2)} == {2}


# -- plans ----------------------------------------------------------------------------------------------------------


def planned(model: str, tokens: list[int], folder: Path, **options) -> PlanDetails:
    """A plan on two nodes of H100, written to `folder`."""
    lengths = np.array(tokens)
    patches = np.minimum(lengths, 2048) // 16 * 16
    samples = SampleTable.of(patches, lengths, patches_sq=patches**2)
    options = {"tp": 1, "num_microbatches": 4, "fused_kernels": True} | options
    details = make_plan(describe(model), samples, parse_cluster("16xH100-80GB"), PlanOptions(**options))
    write_plan(details, folder)
    return details


def test_a_plan_for_experts_takes_ep(tmp_path):
    details = planned("Qwen3-VL-30B-A3B", [600, 1200, 1800, 2400] * 40, tmp_path, pp=2, zero_stage=1)
    parallel = details.plan.decisions.parallel
    assert parallel.ep > 1
    assert f"x ep {parallel.ep}" in details.plan.summary
    assert check_plan(tmp_path) == []
    found = reload_plan(tmp_path)
    assert same_fields(found.case.setting.dims, ParallelDims) == same_fields(parallel, ParallelDims)
    flags = find_target("megatron").export(decided(found, "megatron")).text
    assert f"--expert-model-parallel-size {parallel.ep}" in flags


def test_documents_of_a_plan_with_cp_are_padded_within_its_limits(tmp_path):
    # 33 documents of 1,001 tokens are within the limit, 33 of 1,008 are not
    limits = {"max_tokens": 33_040, "max_patches": 40_000}
    details = planned("Qwen2.5-VL-7B", [1_001] * (33 * 80), tmp_path, cp=4, pp=2, recompute="full", **limits)
    case, packing = reload_plan(tmp_path).case, details.packing
    padded = pad_documents(case.samples, case.setting.dims).num_tokens
    assert packing.sums(padded).max() <= case.setting.max_tokens
    assert case.work[:, WORK_TERMS.index("tokens")].sum() == padded.sum() > case.samples.num_tokens.sum()
    assert check_plan(tmp_path) == []


def test_files_without_the_later_degrees_mean_one(tmp_path):
    planned("Qwen2.5-VL-7B", [600, 1200] * 40, tmp_path, pp=2)
    text = (tmp_path / "plan.yaml").read_text()
    assert "parallel: {dp: 8, pp: 2, tp: 1, cp: 1}" in text
    (tmp_path / "plan.yaml").write_text(text.replace("cp: 1}", "cp: 1, ep: 3}"))
    assert any("ep 3" in problem for problem in check_plan(tmp_path))
