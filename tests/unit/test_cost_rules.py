"""Every documented rule of costs as a row of a table.

costs/ (profile), costs/formula/ (activations, adapters, layers, state, curves, settings).
"""

from dataclasses import replace

import pytest
from cost_models import embed, head, patches, projector, small_model, text_block, vision_block

from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.activations import (
    adapter_item_bytes,
    adapter_traffic,
    attention_result_bytes,
    count_kernels,
    kept_when,
    layer_traffic,
    selective_bytes,
)
from trimtab.costs.formula.curves import Efficiency, product_line, product_rates, weight_line
from trimtab.costs.formula.flops import has_expert_biases, layer_matmuls
from trimtab.costs.formula.layers import COLLECTIVE_S, KERNEL_S, Gradients, cost_layer, expert_tp_bytes, ring_bytes
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.formula.state import Share, added_bytes, bytes_per_param, shares_of, state_bytes, step_seconds
from trimtab.costs.profile import chosen_tiers, price_model, profile_model, weight_coefficients
from trimtab.lora import NF4_BYTES, Lora
from trimtab.specs import WORK_TERMS, MeasuredWork, MlpSpec, ParallelDims, RecomputeChoice, Stage

A100 = DEVICES["A100-80GB"]
PERFECT = Efficiency(matmul=1, outputs=0, depth=0, product_s=0, attention=1, memory=1, link=1)
BOTH = Gradients(inputs=True, weights=True)
ONCE, PATCHES, TOKENS = (WORK_TERMS.index(x) for x in ("microbatches", "patches", "tokens"))
H, F, Q, KV = 128, 512, 4 * 32, 2 * 32  # widths of `text_block`: rows, MLP, queries, keys


def settings(*, tp=1, dp=1, pp=1, cp=1, **more):
    return CostSettings(dims=ParallelDims(tp=tp, dp=dp, pp=pp, cp=cp), efficiency=PERFECT, **more)


def cost(layer, gradients=BOTH, **more):
    return cost_layer(layer, gradients, A100, settings(**more), group=0)


# -- once a step ----------------------------------------------------------------------------------------------------

# (ZeRO, formats, optimizer): bytes exchanged for each parameter over a ring; read and written by the optimizer for each
STEPS = [
    (0, "bf16", "fp32", "adamw", 2 * 4, 2 * (4 + 8) + 4 + 2, 1),
    (1, "bf16", "fp32", "adamw", 4 + 2, 2 * (4 + 8) + 4 + 2, 4),  # each rank updates its share
    (2, "bf16", "fp32", "adamw", 2, 2 * (4 + 8) + 4 + 2, 4),  # gradients went after every micro-batch
    (3, "bf16", "fp32", "adamw", 0, 2 * (4 + 8) + 4 + 2, 4),
    (1, "bf16", "bf16", "adamw", 2 + 2, 2 * (4 + 8) + 2 + 2, 4),
    (1, "fp32", "fp32", "adamw", 4 + 4, 2 * 8 + 4 + 4, 4),  # no master copy
    (1, "bf16", "fp32", "adamw_8bit", 4 + 2, 2 * (4 + 2) + 4 + 2, 4),
    (0, "bf16", "fp32", "sgd", 2 * 4, 2 * 4 + 4 + 2, 1),
]


@pytest.mark.parametrize(("zero", "dtype", "grad", "optimizer", "exchanged", "touched", "among"), STEPS)
def test_a_step_exchanges_gradients_and_updates_the_ranks_share(
    zero, dtype, grad, optimizer, exchanged, touched, among
):
    own = settings(dp=4, zero_stage=zero, dtype=dtype, grad_dtype=grad, optimizer=optimizer)
    share = Share(params=10.0, trained=8.0, stored_bytes=20.0, trained_bytes=16.0, replicas=4, bytes_per_s=1e9)
    expected = 3 / 4 * 8.0 * exchanged / 1e9 + 8.0 / among * touched / A100.memory_bytes_per_s
    assert step_seconds(share, A100, own) == pytest.approx(expected, rel=1e-12)


def test_a_layers_step_is_that_of_its_shares():
    own = settings(dp=4, dp_bytes_per_s=1e9)
    shares = shares_of(text_block(), A100, own, trainable=True)
    assert cost(text_block(), dp=4, dp_bytes_per_s=1e9).step_s == sum(step_seconds(x, A100, own) for x in shares)
    assert cost(text_block(), Gradients(inputs=True, weights=False), dp=4).step_s == 0.0


@pytest.mark.parametrize(
    ("grad", "fused", "expected"),
    [("fp32", False, 8 + 2), ("fp32", True, 8 - 2), ("bf16", False, 4 + 2), ("bf16", True, 2)],
)
def test_a_micro_batchs_gradient_is_added_to_what_earlier_ones_left(grad, fused, expected):
    assert added_bytes(settings(grad_dtype=grad, fused_kernels=fused)) == expected
    plain, more = (cost(text_block(), grad_dtype=g).backward_s[ONCE] for g in ("bf16", "fp32"))
    assert more - plain == pytest.approx(text_block().num_params * 4 / A100.memory_bytes_per_s)


@pytest.mark.parametrize(
    ("stage", "frozen", "trained"), [(0, 2, 18), (1, 2, 6 + 12 / 4), (2, 2, 2 + 16 / 4), (3, 0.5, 18 / 4)]
)
def test_state_is_sharded_by_stage(stage, frozen, trained):
    own = settings(dp=4, zero_stage=stage)
    assert bytes_per_param(own, trainable=True) == trained
    share = Share(params=10.0, trained=4.0, stored_bytes=20.0, trained_bytes=8.0, replicas=4, bytes_per_s=1.0)
    assert state_bytes(share, own) == pytest.approx(6.0 * frozen + 4.0 * trained)


def test_norms_of_queries_and_keys_are_whole_on_every_device_and_biases_of_columns_divided():
    plain = text_block(num_kv_heads=4)
    normed = replace(
        plain,
        attention=replace(plain.attention, qk_norm=True),
        num_params=plain.num_params + 2 * 32 + Q + 2 * 128,  # two norms over a head; biases of q, k and v
    )
    (share,) = shares_of(normed, A100, settings(tp=2), trainable=True)
    assert share.params == plain.num_matmul_params / 2 + 2 * H + 2 * 32 + (Q + 2 * 128) / 2


def test_4_bit_weights_are_stored_by_their_block_and_adapters_beside_them():
    own = settings(lora=Lora(r=8, targets=("q_proj",), bits=4))
    (share,) = shares_of(text_block(), A100, own, trainable=True)
    adapters = 8 * (H + Q)
    assert share.trained == adapters
    assert share.stored_bytes == 2 * 2 * H + NF4_BYTES * text_block().num_matmul_params + share.trained_bytes
    assert share.trained_bytes in (2 * adapters, 4 * adapters)


@pytest.mark.parametrize(("gated", "matrices"), [(True, 3), (False, 2)])
@pytest.mark.parametrize(("rest", "found"), [(-1, False), (0, True)])
def test_experts_have_biases_where_a_block_has_as_many_other_parameters(gated, matrices, rest, found):
    assert not has_expert_biases(text_block())
    mlp, each = MlpSpec(intermediate_size=64, gated=gated, num_experts=8, experts_per_token=2), matrices * H * 64
    layer = replace(text_block(), mlp=mlp, num_matmul_params=2 * each, num_params=8 * (each + H + 64) + rest)
    assert has_expert_biases(layer) == found


def test_a_layer_that_was_measured_without_work_has_no_products():
    none = (0.0,) * len(WORK_TERMS)
    layer = replace(text_block(), measured=MeasuredWork(forward_flops=none, kept_bytes=none), linears=())
    assert [layer_matmuls(layer, tp) for tp in (1, 2)] == [(), ()]


# -- traffic --------------------------------------------------------------------------------------------------------

# bytes of each value that an unfused kernel of these moves, 16 bits
RMS = (2 + 4) + 8 + 4 + 8 + (4 + 2 + 2 * 2)  # cast; square; mean; scale; cast and weight
TRAFFIC = [
    (text_block(), {}, {"residual": 12 * H, "norm": 2 * RMS * H, "rotary": 18 * (Q + KV), "activation": 10 * F}),
    (
        text_block(),
        {"fused_kernels": True},
        {"residual": 12 * H, "norm": 8 * H, "rotary": 4 * (Q + KV), "activation": 6 * F},
    ),
    (vision_block(), {}, {"residual": 12 * 64, "norm": 8 * 64, "activation": 4 * 256}),
    (head(), {}, {"loss": (2 + 4 + 8) * 1000}),
    (embed(), {}, {"embedding": 4 * 128}),
    (projector(), {}, {"activation": 4 * 128}),
]


@pytest.mark.parametrize(("layer", "given", "expected"), TRAFFIC)
def test_elementwise_kernels_move_what_is_counted_by_hand(layer, given, expected):
    found = dict.fromkeys(expected, 0.0)
    for x in layer_traffic(layer, settings(**given)):
        found[x.name] += x.row_bytes
    assert found == expected


@pytest.mark.parametrize(
    ("layer", "given", "kernels"),
    [
        (text_block(), {}, 2 + 2 * 6 + 10 + 2 + 1),
        (text_block(), {"fused_kernels": True}, 2 + 2 + 2 + 2 + 1),
        (vision_block(), {}, 2 + 2 + 2 + 1),
    ],
)
def test_every_kernel_takes_its_start(layer, given, kernels):
    assert count_kernels(layer_traffic(layer, settings(**given)), layer) == kernels
    assert cost(layer, **given).forward_s[ONCE] == pytest.approx(kernels * KERNEL_S)


@pytest.mark.parametrize(
    ("bits", "weights", "copies", "casts"), [(16, "same", 0, 0), (16, "fp32", 0, 1), (4, "fp32", 1, 0)]
)
def test_adapters_scale_and_add_their_results_and_cast_their_inputs(bits, weights, copies, casts):
    own = settings(lora=Lora(r=8, targets=("q_proj", "down_proj"), bits=bits, weights=weights))
    found = adapter_traffic(text_block(), own)
    expected = [(5 + 2 * copies) * 2 * out + (8 + 2 * 2) * casts * into for into, out in ((H, Q), (F, H))]
    assert [x.row_bytes for x in found] == expected
    assert [x.num_kernels for x in found] == [2 + copies + 2 * casts] * 2


@pytest.mark.parametrize(
    ("layer", "target", "skipped"),
    [
        (projector(), None, 0.25 * 256 * 128),  # of its first product
        *((text_block(), x, H * (Q + 2 * KV) + more) for x, more in (("q_proj", 8 * H), ("o_proj", 0))),
    ],
)
def test_the_first_trained_layer_needs_no_gradient_of_what_enters_it(layer, target, skipped):
    own = {"lora": Lora(r=8, targets=(target,)) if target else None}
    whole, first = (sum(cost(layer, Gradients(inputs=x, weights=True), **own).backward_s) for x in (True, False))
    assert whole - first == pytest.approx(2 * skipped / A100.peak_flops)


def test_backward_moves_twice_the_traffic_and_fused_attention_computes_scores_again():
    found = cost(text_block())
    traffic = sum(x.row_bytes for x in layer_traffic(text_block(), settings())) / A100.memory_bytes_per_s
    products = 2 * text_block().num_matmul_params / A100.peak_flops
    assert found.forward_s[TOKENS] == pytest.approx(products + traffic)
    assert found.backward_s[TOKENS] == pytest.approx(2 * products + 2 * traffic)
    assert found.weight_s[TOKENS] == pytest.approx(products)


# -- kept -----------------------------------------------------------------------------------------------------------


def test_selective_keeps_the_input_and_the_results_of_products_and_attention():
    expected = 2 * (H + Q + 2 * KV + H + 3 * F - F + H) + attention_result_bytes(text_block().attention, settings())
    assert selective_bytes(text_block(), settings()) == expected
    found = {tier.name: tier for tier in cost(text_block()).tiers}
    assert found["full"].saved_bytes[TOKENS] == 2 * H
    assert found["full"].extra_backward_s[TOKENS] == pytest.approx(cost(text_block()).forward_s[TOKENS])
    traffic = sum(x.row_bytes for x in layer_traffic(text_block(), settings())) / A100.memory_bytes_per_s
    assert found["selective"].extra_backward_s[TOKENS] == pytest.approx(traffic)


def test_recompute_that_stops_early_leaves_the_last_product_out():
    whole, early = (cost(text_block(), early_stop=on).tier("full").extra_backward_s[TOKENS] for on in (False, True))
    assert whole - early == pytest.approx(2 * F * H / A100.peak_flops)
    scaled = replace(text_block(), layer_scale=True)
    whole, early = (cost(scaled, early_stop=on).tier("full").extra_backward_s for on in (False, True))
    assert whole == early


@pytest.mark.parametrize(("weights", "names"), [(True, {"qkv input", "mlp input"}), (False, set())])
def test_what_only_a_weights_gradient_needs_goes_with_it(weights, names):
    kept = {x.name for x in kept_when(text_block(), settings(), weights=weights)}
    assert kept & {"qkv input", "mlp input"} == names
    assert "q, k, v" in kept


@pytest.mark.parametrize(
    ("layer", "given", "kept"),
    [
        (patches(), {}, {"pixels": 2 * 588}),
        (embed(), {}, {"token ids": 8}),
        (projector(), {}, {"projector input": 2 * 256, "activation input": 2 * 128, "activation output": 2 * 128}),
        (head(), {}, {"head input": 2 * H, "logits": 2 * 1000, "log-softmax": 4 * 1000}),
        (head(), {"fused_kernels": True}, {"head input": 2 * H, "log-softmax": 4 * 1000}),
        (head(), {"tp": 2}, {"head input": 2 * H, "logits": 1000, "log-softmax": 2 * 1000}),
        (head(), {"tp": 3}, {"head input": 2 * H, "logits": 2 * 334, "log-softmax": 4 * 334}),
    ],
)
def test_layers_at_the_ends_keep_their_inputs_and_the_head_its_scores(layer, given, kept):
    assert {x.name: x.row_bytes for x in kept_when(layer, settings(**given), weights=True)} == kept


def test_a_shared_expert_keeps_its_share_and_a_fused_head_two_gradients():
    mlp = MlpSpec(intermediate_size=64, gated=True, num_experts=8, experts_per_token=2, shared_intermediate_size=512)
    moe = replace(text_block(), mlp=mlp)
    for tp in (1, 2):
        kept = {x.name: x.row_bytes for x in kept_when(moe, settings(tp=tp), weights=True)}
        alone = {x.name: x.row_bytes for x in kept_when(text_block(), settings(tp=tp), weights=True)}
        assert [kept[x.replace("mlp", "shared")] for x in alone if "mlp" in x and x != "mlp input"] == [
            size for x, size in alone.items() if "mlp" in x and x != "mlp input"
        ]
    plain, fused = cost(head()), cost(head(), fused_kernels=True)
    assert plain.transient_bytes[TOKENS] == 8 * 1000
    assert fused.transient_bytes[TOKENS] == 2 * 1000
    assert fused.other_transient_bytes[TOKENS] == (2 - 4) * 1000 + 2 * 128
    assert fused.other_transient_bytes[ONCE] == 2 * 128 * 1000


@pytest.mark.parametrize(
    ("gated", "quick", "fused", "widths"),
    [
        *((True, False, False, 2), (True, False, True, 2), (False, False, False, 1)),
        *((False, True, False, 2), (False, True, True, 1)),
    ],
)
def test_a_blocks_backward_works_beside_its_last_product_then_beside_its_activation(gated, quick, fused, widths):
    layer = replace(text_block(), mlp=MlpSpec(intermediate_size=F, gated=gated, quick_gelu=quick))
    found = cost(layer, fused_kernels=fused)
    assert (found.transient_bytes[TOKENS], found.transient_bytes[ONCE]) == (2 * (H + F), 2 * F * H)
    assert found.other_transient_bytes[TOKENS] == 2 * (H + widths * F)


def test_without_measured_weight_gradients_half_of_the_products_backward_is_theirs_and_none_of_the_pairs():
    own = replace(cost(text_block()), weight_s=())
    pairs = [name.endswith(("_sq", "_windowed")) for name in WORK_TERMS]
    expected = [0.0 if pair else 0.5 * s for pair, s in zip(pairs, own.backward_s, strict=True)]
    assert weight_coefficients(own).tolist() == expected
    assert weight_coefficients(replace(own, weight_s=(9.0,) * len(WORK_TERMS))).tolist() == list(own.backward_s)


def test_a_stages_tiers_are_those_of_its_choices():
    profile = profile_model(small_model(), A100)
    stage = Stage(index=0, start=1, stop=4, recompute=(RecomputeChoice(tier="full", layers=(2,)),))
    assert [x.name for x in chosen_tiers(profile, stage)] == ["none", "full", "none"]


@pytest.mark.parametrize(
    ("more", "named"),
    [({"tp_overlap": True, "tp": 2}, "one part in 2"), ({"zero_stage": 3, "dp": 2}, "ZeRO-3"), ({"cp": 2}, "cp 2")],
)
def test_what_a_launcher_must_switch_on_is_named_once(more, named):
    degrees = {name: more.pop(name) for name in ("tp", "dp", "cp") if name in more}
    plain = price_model(small_model(), A100, settings()).assumptions
    found = price_model(small_model(), A100, settings(**degrees, **more)).assumptions
    assert [named in x for x in found].count(True) == 1
    assert not any(named in x for x in plain)


@pytest.mark.parametrize(
    ("weights", "products", "middle", "inputs"), [("same", 2, 2, []), ("fp32", 2, 2, [2]), ("fp32_products", 4, 4, [4])]
)
def test_adapters_keep_their_middle_and_a_cast_copy_of_their_input(weights, products, middle, inputs):
    own = settings(lora=Lora(r=8, targets=("q_proj",), weights=weights))
    assert adapter_item_bytes(own) == products
    for trained in (True, False):
        kept = kept_when(text_block(), own, weights=trained)
        assert [x.row_bytes for x in kept if x.name == "adapter middle"] == [middle * 8]
        assert [x.row_bytes for x in kept if x.name == "adapter input"] == [x * H for x in inputs]
        assert ("qkv input" in {x.name for x in kept}) == (trained or not inputs)  # what q's adapter multiplies


def test_rows_are_shared_by_cp_in_the_language_model_and_by_tp_where_sequence_parallel():
    own = settings(cp=2, tp=4, sequence_parallel=True)
    assert [own.token_share(x) for x in ("language", "vision", "projector")] == [2, 1, 1]
    assert [own.row_share(x) for x in ("language", "vision")] == [4, 1]
    assert settings(tp=4, vision_sequence_parallel=True).row_share("vision") == 4
    assert settings(tp=4).row_share("language") == 1


# -- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "messages"),
    [(text_block(), 2), (vision_block(), 2), (projector(), 1), (embed(), 1), (head(), 1), (patches(), 0)],
)
def test_tensor_parallel_layers_wait_for_their_messages(layer, messages):
    alone, shared = (cost(layer, tp=tp).forward_s[ONCE] for tp in (1, 2))
    assert shared - alone == pytest.approx(messages * COLLECTIVE_S)


def test_sequence_parallel_gathers_the_inputs_once_more_in_backward():
    def of(**on):
        return cost(text_block(), tp=2, **on)

    plain, gathered = of(), of(sequence_parallel=True)
    ring = 2 * (2 * H) * (2 - 1) / 2 / A100.link_bytes_per_s
    fewer = (12 * H + 2 * RMS * H) / 2 / A100.memory_bytes_per_s  # residuals and norms are divided
    assert plain.forward_s[TOKENS] - gathered.forward_s[TOKENS] == pytest.approx(fewer)
    assert plain.backward_s[TOKENS] - gathered.backward_s[TOKENS] == pytest.approx(2 * fewer - 2 * ring / 2)


def test_zero_3_gathers_in_both_passes_and_scatters_the_gradients():
    plain, sharded = (cost(text_block(), dp=4, zero_stage=stage, dp_bytes_per_s=1e9) for stage in (1, 3))
    each = 3 / 4 * 2 * text_block().num_params / 1e9
    assert sharded.forward_s[ONCE] - plain.forward_s[ONCE] == pytest.approx(each)
    assert sharded.backward_s[ONCE] - plain.backward_s[ONCE] == pytest.approx(2 * each)
    assert sharded.transient_bytes[ONCE] - plain.transient_bytes[ONCE] == 2 * 2 * text_block().num_params
    assert sharded.tiers[-1].extra_backward_s[ONCE] == plain.forward_s[ONCE]  # the gather of backward serves both


@pytest.mark.parametrize(("grad", "sent"), [("fp32", 4), ("bf16", 2)])
def test_zero_2_sends_gradients_after_every_micro_batch(grad, sent):
    plain, sharded = (
        cost(text_block(), dp=4, zero_stage=stage, dp_bytes_per_s=1e9, grad_dtype=grad) for stage in (1, 2)
    )
    seconds = 3 / 4 * sent * text_block().num_params / 1e9
    assert sharded.backward_s[ONCE] - plain.backward_s[ONCE] == pytest.approx(seconds)
    assert plain.step_s - sharded.step_s == pytest.approx(seconds)
    assert sharded.forward_s == plain.forward_s


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_keys_and_values_go_round_the_other_ranks(cp, tp):
    own = settings(cp=cp, tp=tp)
    assert ring_bytes(text_block(), own) == (cp - 1) * 2 * 2 * KV / tp
    assert ring_bytes(vision_block(), own) == 0.0
    slow, fast = (cost(text_block(), cp=cp, tp=tp, cp_bytes_per_s=x).forward_s[TOKENS] for x in (1e9, 2e9))
    assert slow - fast == pytest.approx(ring_bytes(text_block(), own) / cp / 2e9)


def test_experts_on_other_devices_wait_for_two_messages_and_divided_ones_for_two_more():
    def once(num_experts, **dims):
        mlp = MlpSpec(intermediate_size=64, gated=True, num_experts=num_experts, experts_per_token=2)
        own = CostSettings(dims=ParallelDims(dp=2, **dims), efficiency=PERFECT)
        return cost_layer(replace(text_block(), mlp=mlp), BOTH, A100, own, group=0).forward_s[ONCE]

    assert once(16, ep=2) - once(8) == pytest.approx(2 * COLLECTIVE_S)  # as many on a device
    divided, whole = (once(8, tp=2, ep=2, etp=x) for x in (2, 1))
    assert divided - whole == pytest.approx(2 * COLLECTIVE_S)


def test_an_expert_of_several_devices_gathers_its_rows_and_scatters_results():
    mlp = MlpSpec(intermediate_size=64, gated=True, num_experts=8, experts_per_token=2)
    folded = CostSettings(dims=ParallelDims(dp=2, tp=2, ep=2, etp=2))
    assert expert_tp_bytes(replace(text_block(), mlp=mlp), folded) == 2 * 2 * H * 2 / 2 * (2 - 1)
    assert expert_tp_bytes(text_block(), folded) == 0.0
    summed = CostSettings(dims=ParallelDims(dp=4, tp=2, etp=2))  # as dense layers are
    assert expert_tp_bytes(replace(text_block(), mlp=mlp), summed) == 0.0


# -- curves ---------------------------------------------------------------------------------------------------------


def test_a_product_and_its_weights_gradient_are_lines_in_the_rows():
    e = Efficiency(matmul=0.5, outputs=100.0, depth=10.0, product_s=3.0)
    for rows in (1.0, 7.0):
        line = product_line(20.0, 30.0, e, 1000.0)
        assert line.row * rows + line.once == pytest.approx(2 * (rows * 30 + 100) * (20 + 10) / 500 + 3)
        line = weight_line(20.0, 30.0, e, 1000.0)
        assert line.row * rows + line.once == pytest.approx(2 * (20 * 30 + 100) * (rows + 10) / 500 + 3)


def test_other_formats_run_at_their_own_rates():
    e = Efficiency(outputs=100.0, depth=10.0, fp8=2.0)
    assert product_rates(e, 1000.0, "fp32") == (e, 500.0)
    assert product_rates(e, 1000.0, "mxfp8") == (e, 1000.0)
    curve, peak = product_rates(e, 1000.0, "fp8")
    assert (curve.outputs, curve.depth, peak) == (200.0, 20.0, 2000.0)
