"""costs/formula/ (host, settings, layers): a pass is the slower of device and host; what a host does is priced."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cost_models import embed, small_model, text_block, vision_block
from partition_cases import ONE, constant, layer, profile_of

from refusals import refused
from trimtab import Lora, split_stages, stage_times
from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.activations import kept_by_layer
from trimtab.costs.formula.host import HOSTS, OTHER_LAYERS
from trimtab.costs.formula.layers import Gradients, cost_layer
from trimtab.costs.formula.settings import CostSettings, settings_of
from trimtab.costs.profile import host_share, mean_seconds, pass_seconds, profile_model, stage_seconds
from trimtab.errors import PartitionError
from trimtab.partition.assess import SplitProblem
from trimtab.partition.layer_table import layer_table
from trimtab.partition.published import rank_cuts
from trimtab.specs import MlpSpec, ParallelDims, RecomputeChoice, Stage

H100 = DEVICES["H100-80GB"]
BOTH = Gradients(inputs=True, weights=True)
SAVED = ((0.0, 10.0), (0.3, 4.0), (1.0, 1.0))


def hosted(i, forward, backward, host_s, **more):
    """A layer of `forward` and `backward` seconds whose host takes `host_s` forward, twice that backward."""
    return replace(layer(i, forward, backward, **more), host_forward_s=host_s, host_backward_s=2 * host_s)


def priced(block, **choices):
    return cost_layer(block, BOTH, H100, settings_of(**choices), group=0)


# -- a pass ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host_s", "tier", "forward", "backward", "again"),
    [
        (0.0, "none", 1.0, 2.0, 0.0),
        (0.5, "none", 1.0, 2.0, 0.0),  # the device is slower
        (3.0, "none", 3.0, 6.0, 0.0),
        (0.0, "full", 1.0, 3.0, 1.0),
        (3.0, "full", 3.0, 9.0, 3.0),  # the host runs the forward once more
        (3.0, "selective", 3.0, 7.0, 1.0),  # a third of it where products stay
        (1.2, "full", 1.2, 3.6, 1.2),
        (0.9, "full", 1.0, 3.0, 1.0),
    ],
)
def test_a_pass_lasts_as_long_as_the_slower_of_device_and_host(host_s, tier, forward, backward, again):
    own = hosted(0, 1.0, 2.0, host_s, saved=SAVED)
    found = pass_seconds(own, own.tier(tier), ONE[None])
    assert [float(x[0]) for x in found] == pytest.approx([forward, backward, 1.0, again])


def test_a_small_layer_before_large_ones_is_bound_by_the_host_alone():
    profile = profile_of([hosted(0, 0.1, 0.2, 1.0), hosted(1, 5.0, 10.0, 1.0)])
    found = stage_seconds(profile, Stage(index=0, start=0, stop=2), ONE[None])
    assert (found.forward[0], found.backward[0]) == (6.0, 12.0)  # the maximum over the stage would be 5.1 and 10.2
    assert host_share(profile, ONE[None]) == pytest.approx(1 - 15.3 / 18.0)


def test_simulator_assessment_and_exact_split_price_the_same_seconds():
    """A host that binds every other layer, with and without recompute."""
    rng = np.random.default_rng(3)
    layers = [hosted(i, *rng.uniform(0.5, 2.0, 2), 1.5 * (i % 2), saved=SAVED) for i in range(8)]
    profile = profile_of(layers)
    stages = (
        Stage(index=0, start=0, stop=3, recompute=(RecomputeChoice(tier="full", layers=(0, 1)),)),
        Stage(index=1, start=3, stop=8, recompute=(RecomputeChoice(tier="selective", layers=(3, 6)),)),
    )
    problem = SplitProblem(profile=profile, num_stages=2, work_mean=ONE, work_max=ONE, num_microbatches=4)
    assessed, times = problem.assess(stages), stage_times(profile, stages, ONE[None])
    assert assessed.forward_s == pytest.approx(times.forward_s[:, 0])
    assert assessed.backward_s == pytest.approx(times.backward_s[:, 0])
    table, (forward, backward) = layer_table(problem), mean_seconds(profile, ONE)
    assert table.time / table.time.sum() == pytest.approx((forward + backward) / (forward + backward).sum())
    best = split_stages(problem)
    ends = [max(float((forward + backward)[a:b].sum()) for a, b in ((0, c), (c, 8))) for c in range(1, 8)]
    assert best.bottleneck_s == pytest.approx(min(ends))
    assert rank_cuts(problem, [4]).spread_ms == pytest.approx(1e3 * np.std([forward[:4].sum(), forward[4:].sum()]))


def test_layers_that_differ_only_on_the_host_recompute_at_their_own_price():
    full = (SAVED[0], SAVED[2])
    first, slow, last = (hosted(i, 1.0, 2.0, host_s, saved=full) for i, host_s in enumerate((0.0, 3.0, 0.0)))
    problem = SplitProblem(
        profile=profile_of([first, replace(slow, tiers=first.tiers), replace(last, tiers=first.tiers)]),
        num_stages=1,
        work_mean=ONE,
        work_max=ONE,
        num_microbatches=1,
        memory_bytes=22.0,  # of 30: two layers must recompute, one of them at a time
    )
    (stage,) = split_stages(problem).stages
    assert [choice.layers for choice in stage.recompute] == [(0, 2)]


def test_stages_that_wait_for_sends_are_busy_at_both_ends():
    profile = replace(
        profile_of([layer(i, 1.0, 2.0, sent=10.0 * (i + 1)) for i in range(3)]), send_wait_bytes_per_s=10.0
    )
    stages = [Stage(index=i, start=i, stop=i + 1) for i in range(3)]
    times = stage_times(profile, stages, ONE[None])
    assert times.forward_s[:, 0].tolist() == [1 + 1, 1 + 1 + 2, 1 + 2]
    assert times.backward_s[:, 0].tolist() == [2 + 1, 2 + 1 + 2, 2 + 2]


# -- what a host does -----------------------------------------------------------------------------------------------


def test_the_hosts_seconds_are_a_constant_of_a_block_and_a_third_of_it_elsewhere():
    model = small_model()
    profile = profile_model(model, H100, host="eager", frozen_towers=frozenset({"vision"}))
    block_s = HOSTS["eager"].block_s
    for spec, found in zip(model.layers, profile.layers, strict=True):
        own = block_s if spec.kind == "block" else OTHER_LAYERS * block_s
        assert found.host_forward_s == own
        assert found.host_backward_s == (0.0 if spec.tower == "vision" else 2 * own)  # frozen: no backward
    settled = profile_model(model, H100, host="eager", host_block_s=9.8e-3)
    assert settled.layers[1].host_forward_s == 9.8e-3
    assert not any(x.host_forward_s for x in profile_model(model, H100, host="recipe").layers)


@pytest.mark.parametrize("expert_products", ["grouped", "loop"])
def test_where_launches_block_a_pass_lasts_as_long_as_device_and_host_together(expert_products):
    block, once = experts() if expert_products == "loop" else text_block(), 0
    apart, blocked = (
        priced(block, host="eager", expert_products=expert_products, blocking_launches=on) for on in (False, True)
    )
    again, again_blocked = (x.tier("full").extra_backward_s[once] for x in (apart, blocked))
    assert blocked.forward_s[once] - apart.forward_s[once] == pytest.approx(apart.host_forward_s)
    assert blocked.backward_s[once] - apart.backward_s[once] == pytest.approx(2 * apart.host_forward_s)
    assert again_blocked - again == pytest.approx(apart.host_forward_s)


def experts(number=16):
    mlp = MlpSpec(intermediate_size=64, gated=True, num_experts=number, experts_per_token=2)
    dense = 128 * 32 * (2 * 4 + 2 * 2) + 128 * number
    params = dense + number * 3 * 128 * 64 + 2 * 128
    return replace(text_block(), mlp=mlp, num_matmul_params=dense + 2 * 3 * 128 * 64, num_params=params)


@pytest.mark.parametrize(
    ("choices", "kernels"),
    [
        ({"host": "megatron"}, 2 * 16),
        ({"host": "megatron", "dims": ParallelDims(dp=4, ep=4)}, 2 * 4),
        ({"host": "megatron", "dtype": "fp8"}, 4 * 16),
        ({"host": "eager", "expert_products": "loop"}, 9 * 16),
    ],
)
def test_every_kernel_of_an_expert_is_launched_by_the_host(choices, kernels):
    host = HOSTS[choices["host"]]
    blocks = (1 + host.routing) * host.block_s  # rows are sent and sorted whatever the number of experts
    assert priced(experts(), **choices).host_forward_s == pytest.approx(blocks + kernels * host.expert_s)


def test_a_fused_mlp_of_experts_launches_and_copies_less():
    on = {"host": "recipe", "dtype": "mxfp8", "dims": ParallelDims(dp=4, ep=4)}
    grouped, fused = (priced(experts(), **on, expert_products=x) for x in ("grouped", "fused"))
    assert priced(experts(), **on) == fused  # what recipes do today
    # no launches; per row: no gate's traffic, no copies of its result, half of the permutation
    assert grouped.forward_s[0] - fused.forward_s[0] == pytest.approx(
        4 * 4 * HOSTS["recipe"].expert_s + 2e-6 * 1, rel=1e-9
    )
    reached = 4 * (1 - math.comb(12, 2) / math.comb(16, 2))
    moved = 6 * 2 * 64 + 4 * 2 * 64 + 0.5 * 2 * 2 * (1 + reached / 2) * 2 * 128
    saved = grouped.forward_s[4] - fused.forward_s[4]
    assert saved == pytest.approx(moved / (H100.memory_bytes_per_s * 0.8))


def test_under_a_recipe_the_device_waits_for_the_launches():
    for number in (16, 32):
        found = priced(experts(number), host="recipe")
        assert found.host_forward_s == 0.0
    few, many = (priced(experts(number), host="recipe") for number in (16, 32))
    assert many.forward_s[0] - few.forward_s[0] == pytest.approx(2 * 16 * HOSTS["recipe"].expert_s, rel=0.05)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("none", (False, False, False, "fp32", "fp32", "alltoall", 1.1, False)),
        ("common", (True, True, True, "fp32", "fp32", "alltoall", 1.1, False)),
        ("eager", (True, True, False, "fp32", "fp32", "alltoall", 1.1, False)),
        ("deepspeed", (True, False, False, "bf16", "fp32", "alltoall", 1.1, False)),
        ("megatron", (True, False, True, "fp32", "same", "alltoall", 1.1, False)),
        ("recipe", (True, False, True, "bf16", "same", "deepep", 1.0, True)),
        ("nanotron", (True, False, False, "fp32", "fp32", "alltoall", 1.1, False)),
    ],
)
def test_what_each_host_does_by_itself(host, expected):
    s = settings_of(host=host)
    found = (s.sequence_parallel, s.vision_sequence_parallel, s.fused_kernels, s.grad_dtype, s.adapters_in)
    assert (*found, s.dispatcher, s.expert_imbalance, s.tp_overlap) == expected


def test_what_is_said_goes_before_what_the_host_does():
    said = {"sequence_parallel": False, "fused_kernels": False, "grad_dtype": "fp32", "dispatcher": "alltoall"}
    assert {name: getattr(settings_of(host="recipe", **said), name) for name in said} == said
    assert settings_of(host="megatron", dtype="fp16").grad_dtype == "fp16"
    assert settings_of(host="megatron", lora=Lora(r=8, weights="fp32")).adapters_in == "fp32"
    assert settings_of(dims=ParallelDims(dp=2, tp=2, ep=2, etp=1), sequence_parallel=False).sequence_parallel
    with refused(PartitionError):
        settings_of(host="jax")
    with refused(PartitionError, "host_block_s", "-1"):
        settings_of(host="eager", host_block_s=-1.0)


# -- bytes of what people run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["sequence_parallel", "vision_sequence_parallel"])
def test_sequence_parallelism_divides_the_rows_of_its_own_tower(which):
    blocks = {"sequence_parallel": text_block(), "vision_sequence_parallel": vision_block()}
    for tower, block in blocks.items():
        kept = {
            on: {
                k.name: k.row_bytes for k in kept_by_layer(block, CostSettings(dims=ParallelDims(tp=2), **{which: on}))
            }
            for on in (False, True)
        }
        assert kept[True]["qkv input"] == kept[False]["qkv input"] / (2 if tower == which else 1)
        assert kept[True]["q, k, v"] == kept[False]["q, k, v"]  # divided by heads either way


def test_fp8_keeps_the_inputs_of_products_in_8_bits():
    names = ("qkv input", "mlp input", "mlp down input")
    wide, narrow = (
        {k.name: k.row_bytes for k in kept_by_layer(text_block(), settings_of(dtype=d))} for d in ("bf16", "fp8")
    )
    assert all(narrow[name] == wide[name] / 2 for name in names)
    assert {name: x for name, x in narrow.items() if name not in names} == {
        name: x for name, x in wide.items() if name not in names
    }


def test_adapters_without_autocast_multiply_and_keep_fp32():
    found = {w: priced(text_block(), lora=Lora(r=8, weights=w)) for w in ("same", "fp32", "fp32_products")}
    tokens = 4  # column of WORK_TERMS
    kept = {w: x.tiers[0].saved_bytes[tokens] for w, x in found.items()}
    assert kept["same"] < kept["fp32"] < kept["fp32_products"]
    widths = 4 * 128 + 2 * 128 + 512  # inputs of q, k, v, o, gate, up and down
    assert kept["fp32_products"] - kept["fp32"] == pytest.approx(2 * (widths + 7 * 8))
    assert found["fp32"].state_bytes == found["fp32_products"].state_bytes
    assert found["fp32_products"].forward_s[tokens] > found["fp32"].forward_s[tokens]


def test_a_layer_of_no_cost_has_no_host_either():
    assert constant(0.0) == priced(replace(embed(), tower="audio", kind="block"), host="eager").forward_s
    assert priced(replace(embed(), tower="audio", kind="block"), host="eager").host_forward_s == 0.0
