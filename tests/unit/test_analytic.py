"""costs/formula/ (flops, activations, layers): hand-computed figures, and what must hold for every layer."""

from dataclasses import replace

import pytest
from cost_models import embed, head, patches, projector, small_model, text_block, vision_block
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.activations import kept_by_layer
from trimtab.costs.formula.curves import efficiency_of, product_line
from trimtab.costs.formula.flops import attention_flops_per_pair, layer_matmuls, local_heads
from trimtab.costs.formula.layers import Gradients, cost_layer, find_gradients
from trimtab.costs.formula.settings import CostSettings, Efficiency
from trimtab.costs.formula.state import bytes_per_param, local_params
from trimtab.specs import WORK_TERMS, MlpSpec, ParallelDims

A100 = DEVICES["A100-80GB"]
PERFECT = Efficiency(matmul=1, outputs=0, depth=0, product_s=0, attention=1, memory=1, link=1)
BOTH = Gradients(inputs=True, weights=True)
TERM = {name: i for i, name in enumerate(WORK_TERMS)}


def settings(*, tp=1, dp=1, pp=1, **more):
    return CostSettings(dims=ParallelDims(tp=tp, dp=dp, pp=pp), efficiency=PERFECT, **more)


def cost(layer, gradients=BOTH, **more):
    return cost_layer(layer, gradients, A100, settings(**more), group=0)


# -- flops ------------------------------------------------------------------------------------------------------


def test_matmul_flops_are_twice_the_weights_each_row_meets():
    for layer in (patches(), vision_block(), projector(), text_block(), head()):
        assert sum(p.flops for p in layer_matmuls(layer, 1)) == 2 * layer.num_matmul_params


def test_tp_divides_the_flops_of_a_block_that_divides():
    for tp in (2, 4):
        assert sum(p.flops for p in layer_matmuls(vision_block(), tp)) == 2 * vision_block().num_matmul_params / tp


def test_heads_that_tp_does_not_divide_are_padded_and_priced():
    layer = vision_block(num_heads=25)
    assert local_heads(layer.attention, 2).query == 13
    assert attention_flops_per_pair(layer.attention, 2) * 2 == attention_flops_per_pair(layer.attention, 1) * 26 / 25
    products = {p.name: p.out_width for p in layer_matmuls(layer, 2)}
    assert products["q"] == 13 * 16


def test_key_value_heads_are_copied_where_tp_exceeds_them():
    assert local_heads(text_block(num_kv_heads=2).attention, 4).kv == 1
    copied = sum(p.flops for p in layer_matmuls(text_block(num_kv_heads=2), 4)) * 4
    assert copied == 2 * text_block(num_kv_heads=2).num_matmul_params + 2 * (2 * 2 * 128 * 32)


def test_experts_cost_what_is_active_and_weigh_what_is_there():
    dense = text_block()
    attention = 128 * 32 * (2 * 4 + 2 * 2)
    layer = replace(
        dense,
        mlp=MlpSpec(intermediate_size=64, gated=True, num_experts=16, experts_per_token=2),
        num_matmul_params=attention + 128 * 16 + 2 * 3 * 128 * 64,
        num_params=attention + 128 * 16 + 16 * 3 * 128 * 64 + 2 * 128,
    )
    assert sum(p.flops for p in layer_matmuls(layer, 1)) == 2 * layer.num_matmul_params
    assert local_params(layer, 1) == layer.num_params
    assert local_params(layer, 2) < layer.num_params / 2 + 128 * 16 + 2 * 128 + 1


# -- seconds ----------------------------------------------------------------------------------------------------


def test_attention_counts_pairs_once_and_half_of_them_when_causal():
    per_pair = 4 * 64 / A100.peak_flops
    assert cost(vision_block()).forward_s[TERM["patches_sq"]] == pytest.approx(per_pair)
    assert cost(vision_block()).backward_s[TERM["patches_sq"]] == pytest.approx(2.5 * per_pair)
    assert cost(text_block()).forward_s[TERM["tokens_sq"]] == pytest.approx(0.5 * 4 * 128 / A100.peak_flops)


def test_windows_are_counted_in_their_own_columns():
    result = cost(vision_block(window=64))
    assert result.forward_s[TERM["patches_sq"]] == 0
    assert result.forward_s[TERM["patches_windowed"]] == cost(vision_block()).forward_s[TERM["patches_sq"]]
    assert cost(text_block(window=512)).forward_s[TERM["tokens_windowed"]] > 0


def test_a_mask_makes_sdpa_compute_the_masked_pairs_too():
    flash, masked = cost(text_block(window=512)), cost(text_block(window=512), attention="sdpa")
    assert masked.forward_s[TERM["tokens_windowed"]] == 0
    assert masked.forward_s[TERM["tokens_sq"]] == pytest.approx(2 * flash.forward_s[TERM["tokens_windowed"]])


def test_tensor_parallel_pays_for_two_all_reduces_in_each_block():
    alone, shared = cost(text_block()), cost(text_block(), tp=2)
    ring = 2 * (2 * 128) * (2 - 1) / 2 / A100.link_bytes_per_s
    # residual and norms are not divided: two adds, two RMSNorms of six kernels, 36 bytes a value
    kept_whole = (2 * 6 * 128 + 2 * 36 * 128) / A100.memory_bytes_per_s
    divided = alone.forward_s[TERM["tokens"]] - kept_whole
    assert shared.forward_s[TERM["tokens"]] == pytest.approx(divided / 2 + kept_whole + 2 * ring, rel=1e-9)


# -- frozen towers ----------------------------------------------------------------------------------------------


def test_backward_starts_at_the_first_trainable_layer():
    model = small_model()
    frozen = find_gradients(model.layers, frozenset({"vision"}))
    assert not any(g.any for g, x in zip(frozen, model.layers, strict=True) if x.tower == "vision")
    assert frozen[4] == Gradients(inputs=False, weights=True)  # projector
    assert frozen[6] == Gradients(inputs=True, weights=True)
    only_projector = find_gradients(model.layers, frozenset({"vision", "language"}))
    assert only_projector[5] == Gradients(inputs=False, weights=False)  # token ids have no gradient
    assert only_projector[6] == Gradients(inputs=True, weights=False)


def test_a_frozen_layer_without_gradients_costs_no_backward_and_keeps_nothing():
    result = cost(vision_block(), Gradients(inputs=False, weights=False))
    assert not any(result.backward_s)
    assert not any(result.transient_bytes)
    assert [t.name for t in result.tiers] == ["none"]
    assert not any(result.tiers[0].saved_bytes)
    assert result.state_bytes == 2 * vision_block().num_params


def test_a_frozen_layer_behind_trainable_ones_pays_for_its_inputs_alone():
    layer = text_block()
    half, whole = cost(layer, Gradients(inputs=True, weights=False)), cost(layer)
    products = 2 * layer.num_matmul_params / A100.peak_flops
    assert whole.backward_s[4] - half.backward_s[4] == pytest.approx(products)
    assert half.tiers[0].saved_bytes[4] < whole.tiers[0].saved_bytes[4]


# -- bytes ------------------------------------------------------------------------------------------------------


def test_kept_tensors_of_a_vision_block_by_hand():
    # per value, bf16: 2 norm inputs, 2 norm outputs, q k v, result = 8 x 2 bytes of 64; 2 x 2 bytes of 256;
    # fp32: mean and rstd of two norms, logsumexp of 4 heads
    assert cost(vision_block()).tiers[0].saved_bytes[TERM["patches"]] == 16 * 64 + 4 * 256 + 2 * 8 + 4 * 4


def test_fused_kernels_keep_less():
    names = {k.name for k in kept_by_layer(text_block(), settings(fused_kernels=True))}
    assert "norm input" in names
    assert not any("fp32" in name or "activation output" in name for name in names)
    fused = cost(text_block(), fused_kernels=True).tiers[0].saved_bytes[4]
    assert 0.6 < fused / cost(text_block()).tiers[0].saved_bytes[4] < 0.8


def test_a_packing_mask_copies_keys_and_values_to_every_head():
    plain, packed = (cost(text_block(), attention="sdpa", packed=p).tiers[0].saved_bytes[4] for p in (False, True))
    assert packed - plain == 2 * 2 * (4 - 2) * 32


def test_eager_attention_keeps_scores_quadratically_and_selective_does_not():
    none, selective, full = cost(text_block(), attention="eager").tiers
    assert none.saved_bytes[TERM["tokens_sq"]] == 4 * (4 + 2)
    assert selective.saved_bytes[TERM["tokens_sq"]] == 0
    assert selective.extra_backward_s[TERM["tokens_sq"]] > 0
    assert full.saved_bytes[TERM["tokens_sq"]] == 0
    # their gradients take as much, in one format twice what is kept
    both = [cost(text_block(), attention="eager", dtype=x).transient_bytes for x in ("bf16", "fp32")]
    assert [x[TERM["tokens_sq"]] for x in both] == [4 * (4 + 2), 2 * 4 * 4]


def test_sequence_parallel_divides_what_lies_between_products_in_the_language_model_alone():
    plain, divided = (cost(text_block(), tp=2, sequence_parallel=s) for s in (False, True))
    assert divided.tiers[-1].saved_bytes[4] == plain.tiers[-1].saved_bytes[4] / 2
    assert divided.output_bytes[4] == plain.output_bytes[4] / 2
    assert divided.backward_s[4] > 0
    towers = [cost(vision_block(), tp=2, sequence_parallel=s) for s in (False, True)]
    assert towers[0] == towers[1]


def test_rows_that_leave_are_what_the_next_stage_receives():
    assert cost(vision_block()).output_bytes == (0, 2 * 64, 0, 0, 0, 0, 0)
    assert cost(projector()).output_bytes == (0, 0.25 * 2 * 128, 0, 0, 0, 0, 0)
    assert cost(embed()).output_bytes == (0, 0, 0, 0, 2 * 128, 0, 0)


def test_bytes_for_each_parameter_by_format_and_optimizer():
    assert bytes_per_param(settings(dtype="fp32"), trainable=True) == 16
    assert bytes_per_param(settings(grad_dtype="bf16"), trainable=True) == 16
    assert bytes_per_param(settings(optimizer="sgd"), trainable=True) == 10
    assert bytes_per_param(settings(), trainable=False) == 2
    assert bytes_per_param(settings(zero_stage=3, dp=4), trainable=False) == 0.5


def test_a_tied_head_on_another_stage_holds_a_copy():
    assert cost(head(tied=True)).state_bytes == 0
    assert cost(head(tied=True), pp=2).state_bytes == 18 * 1000 * 128


# -- what must always hold --------------------------------------------------------------------------------------


@limits(max_examples=60, deadline=None)
@given(
    layer=st.sampled_from([patches(), vision_block(), projector(), embed(), text_block(), head()]),
    gradients=st.builds(Gradients, inputs=st.booleans(), weights=st.booleans()),
    chosen=st.fixed_dictionaries(
        {
            "tp": st.sampled_from([1, 2]),
            "attention": st.sampled_from(["flash", "sdpa", "eager"]),
            "dtype": st.sampled_from(["bf16", "fp32"]),
            **dict.fromkeys(("packed", "fused_kernels", "sequence_parallel"), st.booleans()),
        }
    ),
)
def test_costs_are_never_negative_and_tiers_trade_bytes_for_seconds(layer, gradients, chosen):
    result = cost(layer, gradients, **chosen)
    for terms in (result.forward_s, result.backward_s, result.output_bytes, result.transient_bytes):
        assert len(terms) == len(WORK_TERMS)
        assert min(terms) >= 0
    assert result.tiers[0].name == "none"
    assert not any(result.tiers[0].extra_backward_s)
    work = (1, 4096, 4096 * 1024, 4096 * 64, 4096, 4096 * 1024, 4096 * 512)
    bytes_ = [sum(c * x for c, x in zip(t.saved_bytes, work, strict=True)) for t in result.tiers]
    seconds = [sum(c * x for c, x in zip(t.extra_backward_s, work, strict=True)) for t in result.tiers]
    assert seconds == sorted(seconds)
    if gradients.weights:
        assert bytes_ == sorted(bytes_, reverse=True)


# -- curves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda x: x.name)
def test_a_product_of_a_layer_takes_what_its_curve_says(device):
    e = efficiency_of(device)
    for rows, width, out in ((256, 4096, 1024), (9225, 3200, 6400), (65536, 8192, 28672)):
        line = product_line(width, out, e, device.peak_flops)
        seconds = line.row * rows + line.once - e.product_s
        flops = 2 * rows * width * out
        assert flops / seconds / device.peak_flops == pytest.approx(e.product_share(rows, width, out))


@limits(max_examples=30, deadline=None)
@given(name=st.sampled_from(["matmul", "attention", "memory", "link"]), share=st.floats(0.05, 0.95))
def test_a_lower_efficiency_never_makes_a_layer_faster(name, share):
    chosen = replace(settings(tp=2), efficiency=replace(PERFECT, **{name: share}))
    slow = cost_layer(text_block(), BOTH, A100, chosen, group=0)
    fast = cost(text_block(), tp=2)
    assert all(s >= f for s, f in zip(slow.forward_s, fast.forward_s, strict=True))
    assert slow.forward_s != fast.forward_s


@pytest.mark.parametrize(
    ("mlp", "summed"),
    [
        ({}, {"o", "down"}),
        ({"num_experts": 8, "experts_per_token": 2}, {"o", "expert down"}),
        (
            {"num_experts": 8, "experts_per_token": 2, "shared_intermediate_size": 64},
            {"o", "expert down", "shared down"},
        ),
    ],
)
def test_products_that_tp_cuts_by_rows_are_summed(mlp, summed):
    layer = text_block()
    weights = 10**9  # more than attention and MLP: what is left is one more product
    layer = replace(layer, mlp=replace(layer.mlp, **mlp), num_matmul_params=weights, num_params=weights)
    assert {p.name for p in layer_matmuls(layer, 2) if p.reduced} == summed
    assert sum(p.in_width * p.out_width * p.visits for p in layer_matmuls(layer, 1)) == pytest.approx(weights)
