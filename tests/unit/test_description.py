import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from described_configs import DAMAGE, edit
from hypothesis import given, settings
from hypothesis import strategies as st

from refusals import refused
from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.flops import find_ep_problems, find_tp_problems, layer_matmuls
from trimtab.costs.profile import profile_model
from trimtab.errors import ConfigError, PartitionError
from trimtab.models.describe import describe, read_config
from trimtab.models.description import (
    RULES,
    VERSION,
    description_bytes,
    find_layer_problems,
    read_description,
    save_description,
    shipped_models,
)
from trimtab.models.images.rules import UnsettledRule
from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import Workload
from trimtab.specs import NUM_WORK_TERMS, AttentionSpec, LayerSpec, Linear, MeasuredWork, ModelSpec, ParallelDims


def measured(name: str = "model.language_model.layers.0", **changes: object) -> LayerSpec:
    """A block of another make: 1000 FLOPs a token, 10 a pair, and 100 bytes a token."""
    work = MeasuredWork(forward_flops=(0, 0, 0, 0, 1000.0, 10.0, 0), kept_bytes=(0, 0, 0, 0, 100.0, 0, 0))
    fields = {"tower": "language", "kind": "block", "hidden_size": 8, "output_size": 8}
    return LayerSpec(name=name, **(fields | {"num_params": 90, "num_matmul_params": 80, "measured": work} | changes))


def model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(
        name="m", family="widget", layers=layers, image_rule=UnsettledRule(reason="no rule: give text"), vocab_size=10
    )


def written(spec: ModelSpec) -> dict:
    return json.loads(description_bytes(spec))


# -- writing and reading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_models()[::4])
def test_a_description_reads_back_as_it_was_written(name, tmp_path):
    spec = describe(name)
    save_description(spec, tmp_path / "model.json")
    again = describe(tmp_path / "model.json")
    assert again == spec
    assert again.image_rule == spec.image_rule
    assert again.origin.config == str(tmp_path / "model.json")
    assert description_bytes(again) == description_bytes(spec) == (tmp_path / "model.json").read_bytes()


def test_layers_alike_are_written_once():
    layers = written(describe("Qwen2.5-VL-7B"))["layers"]
    assert len(layers) < 20
    assert max(x.get("num_alike", 1) for x in layers) == 27  # with the first of the 28 goes the rotary table
    spec = model(measured("a.0.x"), measured("a.1.x"), measured("a.3.x"), measured("b"))
    assert [x.get("num_alike") for x in written(spec)["layers"]] == [2, None, None]
    assert read_description(written(spec), source="it") == spec


def test_measured_work_and_versions_are_kept():
    spec = replace(model(measured()), asked_of=(("torch", "2.13"),), forbidden_cuts=frozenset())
    again = read_description(written(spec), source="it")
    assert (again.layers, again.asked_of) == (spec.layers, spec.asked_of)
    with refused(ConfigError):
        again.image_rule.count(10, 10)


def test_runs_of_cuts_read_back():
    layers = tuple(measured(f"layers.{i}") for i in range(8))
    spec = replace(model(*layers), forbidden_cuts=frozenset({1, 2, 3, 6}))
    assert written(spec)["forbidden_cuts"] == [[1, 3], [6, 6]]
    assert read_description(written(spec), source="it").forbidden_cuts == {1, 2, 3, 6}


def test_limits_and_names_of_the_user_apply_to_a_description(tmp_path):
    save_description(describe("Qwen2.5-VL-7B"), tmp_path / "model.json")
    spec = describe(tmp_path / "model.json", max_pixels=1003520, name="mine")
    assert spec.name == "mine"
    assert spec.image_rule == describe("Qwen2.5-VL-7B", max_pixels=1003520).image_rule
    with refused(ConfigError):
        describe(tmp_path / "model.json", preprocessor={"min_pixels": 1})
    with refused(ConfigError):
        read_config(tmp_path / "model.json")


def test_a_described_file_is_planned_without_torch(tmp_path):
    save_description(model(measured(), measured("model.language_model.layers.1")), tmp_path / "model.json")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from trimtab.models.describe import describe; from trimtab.costs.profile import profile_model\n"
        "from trimtab.costs.devices import DEVICES\n"
        f"print(len(profile_model(describe({str(tmp_path / 'model.json')!r}), DEVICES['H200']).layers))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "2"


def test_a_rule_without_a_line_is_not_written():
    class Other:
        name = "other"

    with refused(ConfigError, "Other"):
        description_bytes(replace(model(measured()), image_rule=Other()))
    assert set(RULES) >= {"SmartResize", "DynamicTiling", "UnsettledRule"}


# -- outside data -----------------------------------------------------------------------------------------------------


def places(value: object, prefix: str = "") -> list[str]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [x for k, v in items for x in (f"{prefix}{k}", *places(v, f"{prefix}{k}."))]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_gives_a_model_that_can_be_priced_or_a_sentence(data):
    content = written(describe(data.draw(st.sampled_from(shipped_models()))))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places(content)))
        if not (place.rpartition(".")[2].isdigit()):
            content = edit(content, place, data.draw(st.sampled_from(DAMAGE)))
    if not isinstance(content, dict) or content.get("description_version") != VERSION:
        return
    message = ""
    try:
        profile_model(describe(content), DEVICES["H200"])
    except (ConfigError, PartitionError) as error:  # not readable, or readable without a price
        message = str(error)
    assert len(message) < 8000


# -- prices of measured work ------------------------------------------------------------------------------------------


def test_measured_work_is_what_is_priced():
    spec = model(measured(), measured("model.language_model.layers.1"))
    cost = profile_model(spec, DEVICES["H200"], packed=False).layers[1]
    assert cost.tiers[0].saved_bytes == (0, 0, 0, 0, 100.0, 0, 0)
    assert [tier.name for tier in cost.tiers] == ["none", "full"]
    assert cost.tiers[1].saved_bytes == (0, 0, 0, 0, 16.0, 0, 0)
    twice = replace(
        measured(), measured=MeasuredWork(forward_flops=(0, 0, 0, 0, 1000.0, 20.0, 0), kept_bytes=(0.0,) * 7)
    )
    more = profile_model(model(twice), DEVICES["H200"], packed=False).layers[0]
    pairs = DEVICES["H200"].peak_flops * 0.5
    assert more.forward_s[5] == pytest.approx(20 / pairs)
    assert cost.forward_s[5] == pytest.approx(10 / pairs)
    assert cost.forward_s[4] > 1000 / DEVICES["H200"].peak_flops
    half = profile_model(spec, DEVICES["H200"], dtype="fp32").layers[1]
    assert half.tiers[0].saved_bytes[4] == 200.0


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (4, True)])
def test_measured_blocks_are_divided_over_tp_but_for_what_lies_around_products(tp, sequence_parallel):
    block = replace(
        measured(),
        hidden_size=8,
        num_params=1000,
        num_matmul_params=960,
        linears=(Linear(name="in", in_width=8, out_width=64), Linear(name="gate", in_width=8, out_width=1)),
        measured=MeasuredWork(forward_flops=(0, 0, 0, 0, 1920.0, 40.0, 0), kept_bytes=(0, 0, 0, 0, 528.0, 16.0, 0)),
    )
    given = {"packed": False, "sequence_parallel": sequence_parallel}
    costs = [profile_model(model(block), DEVICES["H200"], dims=ParallelDims(tp=x), **given).layers[0] for x in (1, tp)]
    whole = 16 * 8  # two norms and two inputs of 8 values
    around = whole / tp if sequence_parallel else whole
    assert costs[1].tiers[0].saved_bytes[4:6] == (around + (528 - whole) / tp, 16 / tp)
    assert costs[1].num_params == 40 + 960 / tp
    assert costs[1].forward_s[5] == pytest.approx(costs[0].forward_s[5] / tp)
    assert [sum(x.reduced for x in layer_matmuls(block, n)) for n in (1, tp)] == [0, 2]  # results summed over tp
    flops = [sum(x.flops for x in layer_matmuls(block, n)) for n in (1, tp)]
    assert flops == [1920, 1920 / tp]


@pytest.mark.parametrize(("attention", "kept"), [("flash", 0.0), ("sdpa", 16.0), ("eager", 16.0)])
def test_scores_that_were_counted_are_kept_but_under_flash_attention(attention, kept):
    heads = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=4, value_head_dim=4, causal=True)
    work = MeasuredWork(forward_flops=(0, 0, 0, 0, 1920.0, 40.0, 0), kept_bytes=(0, 0, 0, 0, 528.0, 16.0, 0))
    costs = {
        has: profile_model(
            model(replace(measured(), attention=heads if has else None, measured=work)),
            DEVICES["H200"],
            attention=attention,
            packed=False,
        ).layers[0]
        for has in (True, False)
    }
    assert costs[True].tiers[0].saved_bytes[5] == kept
    assert costs[False].tiers[0].saved_bytes[5] == 16.0  # a scan, which no kernel of attention runs
    spared = costs[False].forward_s[5] - costs[True].forward_s[5]
    assert spared == pytest.approx(2 * (16.0 - kept) / (DEVICES["H200"].memory_bytes_per_s * 0.8))


def test_tp_divides_the_inner_widths_of_measured_blocks():
    block = replace(
        measured(), linears=(Linear(name="in", in_width=8, out_width=48), Linear(name="g", in_width=8, out_width=1))
    )
    assert [len(find_tp_problems(block, x)) for x in (1, 2, 3, 5, 16, 32)] == [0, 0, 0, 1, 0, 1]
    assert find_tp_problems(replace(block, linears=None), 5) == []  # not asked


def test_work_that_is_not_known_is_refused_with_the_first_layer():
    spec = model(measured(measured=MeasuredWork()))
    with refused(PartitionError, "1", "layers.0"):
        profile_model(spec, DEVICES["H200"])
    assert inference_table(spec, Workload()).weights.tolist() == [180]  # but it can be placed


def test_audio_towers_have_state_alone():
    audio = measured("audio.0", tower="audio", rows_per_input=0.0, rows_out_per_input=0.0)
    spec = model(replace(audio, measured=None, num_matmul_params=80), measured())
    cost = profile_model(spec, DEVICES["H200"]).layers[0]
    assert cost.state_bytes == 90 * 18
    assert cost.forward_s == cost.backward_s == cost.tiers[0].saved_bytes == (0.0,) * NUM_WORK_TERMS
    table = inference_table(spec, Workload())
    assert (table.weights[0], table.prefill[0], table.runs[0]) == (180, 0, 0)


def test_layers_with_other_work_do_not_pass_for_alike():
    other = replace(measured(), measured=MeasuredWork())
    assert measured().alike != other.alike
    assert repr(measured()) == repr(other)  # plans' fingerprints know names, widths and parameters


def test_the_command_line_writes_and_reads_descriptions(tmp_path):
    out = Path(tmp_path / "model.json")
    run = [sys.executable, "-m", "trimtab", "describe"]
    subprocess.run([*run, "Qwen2.5-VL-7B", "--out", str(out)], check=True, capture_output=True)
    assert describe(out) == describe("Qwen2.5-VL-7B")
    out.write_text(out.read_text().replace('"vocab_size"', '"vocabulary"'))
    bad = subprocess.run([*run, str(out)], check=False, capture_output=True, text=True)
    assert bad.returncode == 2
    assert "vocab_size: missing" in bad.stderr
    assert "Traceback" not in bad.stderr


# -- layers that cannot be, experts that cannot be shared --------------------------------------------------------------


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
