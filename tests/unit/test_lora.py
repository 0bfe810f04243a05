"""costs/formula/ (adapters), LoRA as an option: what it trains and holds, what a plan keeps, which exports take it."""

from dataclasses import replace

import numpy as np
import pytest

from export_cases import decide
from refusals import refused
from trimtab import (
    GivenRun,
    PlanOptions,
    SampleTable,
    check_plan,
    describe,
    load_plan,
    make_plan,
    parse_cluster,
    write_plan,
)
from trimtab.adapters.frameworks import FRAMEWORKS, find_target
from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.adapters import adapt_layer, count_adapters, layer_linears
from trimtab.costs.measured.saved import refuse_unlike
from trimtab.costs.profile import load_profile, profile_bytes, profile_model, save_profile
from trimtab.errors import PlanError, TrimtabError, UnsupportedPlanError
from trimtab.lora import NF4_BYTES, Lora, parse_lora
from trimtab.plan.layout import refuse_quantised
from trimtab.plan.predict import predict_run
from trimtab.specs import Linear, ParallelDims, Stage

A100 = DEVICES["A100-80GB"]
MODEL = describe("Qwen2.5-VL-7B")
LORA = Lora(r=16)


def test_what_is_typed_is_what_is_said():
    text = "r=8,targets=q_proj+v_proj,towers=language+vision,bits=4,alpha=16,dropout=0.05,weights=same"
    assert str(parse_lora(text)) == text
    assert str(LORA) == "r=16"


def test_unknown_targets_are_named_with_what_there_is():
    with pytest.raises(PlanError) as error:
        profile_model(MODEL, A100, lora=Lora(r=4, targets=("q_proj", "wq", "lm_head")))
    said = str(error.value)
    for name in ("'wq'", "'lm_head'", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"):
        assert name in said
    assert "'q_proj'" not in said


def test_targets_are_names_or_their_ends():
    whole = "model.language_model.layers.0.self_attn.q_proj"
    assert count_adapters(MODEL, Lora(r=1, targets=(whole,))).num_matrices == 1
    assert count_adapters(MODEL, Lora(r=1, targets=("self_attn.q_proj", "q_proj"))).num_matrices == 28
    with pytest.raises(PlanError):  # an end is one behind a dot
        profile_model(MODEL, A100, lora=Lora(r=1, targets=("_proj",)))


def test_experts_and_heads_get_no_adapter():
    count = count_adapters(describe("Qwen3-VL-30B-A3B"), LORA)
    assert count.num_matrices == 48 * 4
    assert not any(layer_linears(x) for x in MODEL.layers if x.kind in ("head", "embed", "norm"))


def test_joined_matrices_compute_several_products():
    block = next(x for x in MODEL.layers if x.kind == "block" and x.tower == "language")
    h, q, kv, f = 3584, 3584, 512, 18944
    widths = {"o": (q, h), "down": (f, h), "gate_up": (h, 2 * f), "qkv": (h, q + 2 * kv), "side": (h, 7)}
    linears = tuple(Linear(name=name, in_width=a, out_width=b) for name, (a, b) in widths.items())
    found = {x.name: x for x in adapt_layer(replace(block, linears=linears), LORA, 2)}
    assert found["qkv"].products == ("q", "k", "v")
    assert found["gate_up"].products == ("gate", "up")
    assert found["side"].products == ()
    assert (found["o"].products, found["o"].in_width, found["o"].out_width) == (("o",), q / 2, h)
    assert (found["qkv"].in_width, found["qkv"].out_width) == (h, (q + 2 * kv) / 2)


@pytest.mark.parametrize(("zero", "dp"), [(0, 1), (1, 4), (2, 4), (3, 4)])
@pytest.mark.parametrize("weights", ["fp32", "same"])
@pytest.mark.parametrize("bits", [16, 4])
def test_state_is_frozen_weights_and_trained_adapters(zero, dp, weights, bits):
    lora = Lora(r=16, weights=weights, bits=bits)
    profile = profile_model(MODEL, A100, dims=ParallelDims(dp=dp), zero_stage=zero, lora=lora)
    count = count_adapters(MODEL, lora)
    assert (count.num_matrices, count.num_params) == (28 * 7, 40_370_176)  # as PEFT prints it
    linear = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944) if bits == 4 else 0
    frozen = 2 * (MODEL.num_params - linear) + NF4_BYTES * linear
    weight, gradient, state = (4, 4, 8) if weights == "fp32" else (2, 4, 12)
    shared = [part / (dp if zero >= stage else 1) for part, stage in ((weight, 3), (gradient, 2), (state, 1))]
    expected = frozen / (dp if zero == 3 else 1) + count.num_params * sum(shared)
    assert sum(x.state_bytes for x in profile.layers) == pytest.approx(expected, rel=1e-12)


def test_nf4_takes_what_the_paper_says():
    assert pytest.approx(4 + 0.127, abs=0.0005) == 8 * NF4_BYTES  # arXiv 2305.14314, section 3: 0.127 bits of scales


def test_the_frozen_tower_in_front_has_no_backward():
    layers = profile_model(MODEL, A100, lora=LORA).layers
    assert not any(max(x.backward_s) for x in layers if x.tower != "language" or x.kind == "embed")
    blocks = [x for x in layers if x.tower == "language" and x.kind == "block"]
    # of the first block's q, k and v nobody needs the gradient of the input
    assert blocks[0].backward_s[4] < blocks[1].backward_s[4]
    assert blocks[1] == replace(blocks[2], name=blocks[1].name)


def test_work_and_traffic_are_less_than_full_training_s():
    dims = ParallelDims(dp=8)
    full = profile_model(MODEL, A100, dims=dims, zero_stage=3).layers[40]
    lora, four = (
        profile_model(MODEL, A100, dims=dims, zero_stage=3, lora=x).layers[40] for x in (LORA, Lora(r=16, bits=4))
    )
    assert full.forward_s[4] < lora.forward_s[4] < lora.backward_s[4] < full.backward_s[4]
    assert four.forward_s[4] < lora.forward_s[4]  # bitsandbytes' layers cast nothing
    assert lora.step_s < 0.02 * full.step_s
    # gathering weights of 4 bits takes about a quarter, unpacking them less than that saves
    assert four.transient_bytes[0] < lora.transient_bytes[0] < full.transient_bytes[0]
    assert lora.backward_s[0] < full.backward_s[0] / 2
    alone = [profile_model(MODEL, A100, lora=x).layers[40].forward_s[0] for x in (LORA, Lora(r=16, bits=4))]
    linear = 2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944
    per_kernel = 7 * 2 * 2e-6  # two casts of each adapter less, one copy of the result more: `KERNEL_S`
    unpacking = linear * (2 + NF4_BYTES) / (A100.memory_bytes_per_s * 0.80)
    assert alone[1] - alone[0] == pytest.approx(unpacking - per_kernel / 2, rel=0.01)


def test_a_profile_without_lora_has_the_bytes_it_had(tmp_path):
    plain, lora = profile_model(MODEL, A100), profile_model(MODEL, A100, lora=LORA)
    assert b'"lora"' not in profile_bytes(plain)
    save_profile(lora, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == lora
    with refused(TrimtabError, "LoRA", "r=16"):
        refuse_unlike(lora, MODEL, plain)


def samples() -> SampleTable:
    rng = np.random.default_rng(0)
    patches = 4 * rng.integers(64, 1200, 200)
    return SampleTable.of(patches, patches // 4 + rng.integers(20, 600, 200))


def test_one_device_suffices_where_full_training_needs_many(tmp_path):
    table, one = samples(), parse_cluster("1xA100-80GB")
    with refused(TrimtabError):
        make_plan(MODEL, table, one, PlanOptions(global_batch=16))
    made = make_plan(MODEL, table, one, PlanOptions(global_batch=16, lora=Lora(r=16, bits=4)))
    assert "LoRA r 16 on 196 matrices, 40.4 M trainable, 4-bit base" in made.plan.summary
    write_plan(made, tmp_path)
    assert "lora: {r: 16, bits: 4}" in (tmp_path / "plan.yaml").read_text()
    assert load_plan(tmp_path) == made.plan
    assert check_plan(tmp_path) == []
    text = (tmp_path / "plan.yaml").read_text().replace("r: 16, bits: 4", "r: 0, bits: 4")
    (tmp_path / "plan.yaml").write_text(text)
    with refused(PlanError, "training.lora", "0"):
        load_plan(tmp_path)


def test_a_given_run_is_predicted_with_adapters():
    table, cluster = samples(), parse_cluster("2xA100-80GB")
    full, lora = (
        predict_run(MODEL, table, cluster, GivenRun(batch=1, num_microbatches=4, lora=x)).variant for x in (None, LORA)
    )
    assert not full.fits
    assert lora.fits
    assert lora.step_s.mean() < 0.8 * full.step_s.mean()


# -- exports --------------------------------------------------------------------------------------------------------

WHOLE = (Stage(index=0, start=0, stop=len(MODEL.layers)),)
TOLD = {"transformers", "accelerate", "fsdp2", "trl", "ms-swift", "megatron-bridge"}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_is_told_adapters_or_refuses_them_in_a_sentence(name):
    own = "fp32" if name == "llama-factory" else "same"  # as each makes its adapters
    target, lora = find_target(name), Lora(r=16, weights=own)
    if not target.lora:
        assert name not in TOLD
        with refused(UnsupportedPlanError, target.title):
            target.refuse_lora(lora)
        return
    target.refuse_lora(lora)
    plan = decide(MODEL, WHOLE, dims=ParallelDims(), lora=lora, zero_stage=0)
    assert "16" in target.export(plan).text
    if 4 not in target.lora:
        with refused(UnsupportedPlanError, "4"):
            target.refuse_lora(Lora(r=16, bits=4))


def test_python_hosts_are_told_peft_and_bitsandbytes():
    lora = Lora(r=8, alpha=16, bits=4)
    plan = decide(MODEL, WHOLE, dims=ParallelDims(dp=2), lora=lora, zero_stage=3)
    exported = find_target("fsdp2").export(plan)
    assert exported.fields["peft"] == {
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
        "exclude_modules": r"(model\.visual\.patch_embed|model\.visual\.blocks|model\.visual\.merger)(\..*)?",
    }
    skipped = ["lm_head", "model.visual.patch_embed", "model.visual.blocks", "model.visual.merger"]
    assert exported.fields["quantisation"]["llm_int8_skip_modules"] == skipped
    assert "bnb_4bit_quant_storage='bfloat16'" in exported.text  # FSDP shards one dtype
    assert "autocast_adapter_dtype" not in exported.text
    compile(exported.text, "export", "exec")


def test_megatron_hosts_are_told_their_own_layers():
    swift, bridge = find_target("ms-swift"), find_target("megatron-bridge")
    plan = decide(MODEL, WHOLE, dims=ParallelDims(), lora=Lora(r=8, weights="same"), zero_stage=0)
    fields = swift.export(plan).fields
    assert (fields["tuner_type"], fields["lora_rank"], fields["target_modules"]) == ("lora", 8, ("all-linear",))
    assert (fields["freeze_vit"], fields["freeze_aligner"], fields["freeze_llm"]) == (True, True, False)
    text = bridge.export(plan).text
    assert "cfg.peft = CanonicalLoRA(dim=8, alpha=32" in text
    assert all(f"'*language_model*.{name}'" in text for name in ("linear_q", "linear_proj", "mlp.linear_fc1_gate"))
    experts = replace(plan, model=describe("Qwen3-VL-30B-A3B"))
    experts = replace(experts, stages=(Stage(index=0, start=0, stop=len(experts.model.layers)),))
    assert swift.export(experts).fields["target_modules"] == (
        "linear_qkv",
        "linear_proj",
    )  # its all takes experts
    assert "linear_fc" not in bridge.export(experts).text
    one = replace(plan, lora=Lora(r=8, targets=("q_proj", "v_proj"), weights="same"))
    assert "linear_k" not in bridge.export(one).text
    with refused(UnsupportedPlanError):
        swift.export(one)
    alone = replace(plan, lora=Lora(r=8, targets=("layers.3.self_attn.q_proj",), weights="same"))
    with refused(UnsupportedPlanError):
        bridge.export(alone)
    with refused(UnsupportedPlanError, "weights=same,towers=language"):
        bridge.export(replace(plan, lora=Lora(r=8, weights="fp32")))


def test_the_own_loop_refuses_quantised_weights():
    with refused(UnsupportedPlanError, "4-bit", "trimtab train"):
        refuse_quantised(Lora(r=8, bits=4))
    refuse_quantised(LORA)
