"""Expert and context parallelism: bytes, work and traffic against counting by hand; which degrees are tried."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cost_models import small_model, text_block, vision_block

from trimtab.costs.analytic import Gradients, cost_layer
from trimtab.costs.devices import DEVICES
from trimtab.costs.exchange import all_to_all_bytes, expert_tp_bytes, ring_bytes
from trimtab.costs.flops import layer_matmuls
from trimtab.costs.profile import profile_model
from trimtab.costs.settings import CostSettings
from trimtab.costs.state import shares_of
from trimtab.errors import PartitionError, PlanError, TrimtabError
from trimtab.plan.decide.degrees import parallel_dims
from trimtab.plan.decide.work import pad_documents
from trimtab.plan.options import PlanOptions
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


def test_expert_degrees_that_do_not_divide_a_stage_are_refused():
    with pytest.raises(TrimtabError, match=r"ep 4 x etp 2 was asked for, .* dp x cp x tp = 4 devices"):
        ParallelDims(dp=2, tp=2, ep=4)
    model = small_model()
    model = replace(model, layers=tuple(expert_block() if x.name == "language.0" else x for x in model.layers))
    with pytest.raises(PartitionError, match=r"ep 3 cannot share the 4 experts of language.0: use an ep that divides"):
        profile_model(model, A100, dims=ParallelDims(dp=3, ep=3))


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


@pytest.mark.parametrize(("ep", "per_token"), [(2, 1), (2, 2), (4, 2), (4, 3)])
def test_dispatch_sends_what_a_router_without_preference_does(ep, per_token):
    layer, s = expert_block(per_token=per_token), settings(dp=ep, ep=ep)
    choices = list(itertools.combinations(range(4), per_token))
    on_rank_0 = range(4 // ep)
    sent = sum(HIDDEN * 2 for chosen in choices for expert in chosen if expert not in on_rank_0)
    assert all_to_all_bytes(layer, s) == pytest.approx(2 * sent / len(choices))  # and the combine, back


def test_an_expert_of_two_devices_gathers_rows_and_scatters_results():
    layer = expert_block()
    assert expert_tp_bytes(layer, settings(dp=4, ep=2, etp=2)) == 2 * 2 * HIDDEN * 2
    assert expert_tp_bytes(layer, settings(dp=4, tp=2, etp=2)) == 0  # summed as dense layers are
    assert expert_tp_bytes(layer, settings(dp=4, ep=4)) == all_to_all_bytes(text_block(), settings(dp=4)) == 0


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_keys_and_values_go_round_the_ring(cp):
    rows, kv_bytes, sent = 5, 2 * 2 * (32 + 32), 0
    held = list(range(cp))  # whose keys and values each rank has
    for _ in range(cp - 1):
        sent += rows * kv_bytes  # rank 0 hands on what it has
        held = held[-1:] + held[:-1]
    assert rows * ring_bytes(text_block(), settings(cp=cp)) == sent
    assert ring_bytes(vision_block(), settings(cp=cp)) == 0


@pytest.mark.parametrize("cp", [2, 4])
def test_zig_zag_chunks_have_equal_rows_and_causal_pairs(cp):
    chunks = np.arange(2 * cp * 3).reshape(2 * cp, 3) + 1  # row i sees i rows
    pairs = [chunks[r].sum() + chunks[2 * cp - 1 - r].sum() for r in range(cp)]
    assert len(set(pairs)) == 1


@pytest.mark.parametrize(("degree", "stride", "per_node"), [(4, 1, 8), (8, 1, 4), (8, 2, 8), (16, 1, 8), (4, 8, 8)])
def test_all_to_all_takes_the_slower_of_both_links(degree, stride, per_node):
    cluster = ClusterSpec(device=A100, num_nodes=16, devices_per_node=per_node, node_link_bytes_per_s=25e9)
    node = [rank * stride // per_node for rank in range(degree)]
    seconds = max(
        (node.count(node[0]) - 1) / A100.link_bytes_per_s,
        (degree - node.count(node[0])) / cluster.node_link_bytes_per_s,
    )
    assert cluster.all_to_all_bytes_per_s(degree, stride=stride) == pytest.approx((degree - 1) / seconds)


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


def test_degrees_that_do_not_divide_the_devices_are_one_sentence():
    with pytest.raises(PlanError, match=r"dp x pp x tp x cp was asked to be a multiple of 3, and .* 16 devices"):
        tried(cp=3)
    with pytest.raises(PlanError, match=r"'ep': 16.* was asked for on 16 devices, .* leave one of pp, ep out"):
        tried(ep=16, pp=2)
