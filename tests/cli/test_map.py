"""`trimtab map` and the exports of a placement, as a user types them."""

import json
from pathlib import Path
from typing import Any

import pytest

Run = Any

MODEL = "Qwen2.5-VL-7B"
SIZES = ["--gpus", "8GiB,16GiB,8GiB,6GiB", "--images", "1024x1024,2", "--batch", "4"]


def test_a_map_with_the_bytes_of_each_device(run: Run):
    found = run("map", MODEL, *SIZES)
    assert found.code == 0
    assert "GPU 3" in found.out
    assert "Weights" in found.out


def test_json_is_one_object_that_loaders_can_read(run: Run):
    content = run("map", MODEL, *SIZES, "--json").json
    assert content["device_map"]["lm_head"] in range(4)
    assert len([key for key in content["device_map"] if ".layers." in key]) == 28
    assert content["fullest"] == max(x["fraction"] for x in content["devices"])
    assert content["compared"] == []
    for use in content["devices"]:
        kinds = ("weight_bytes", "kv_bytes", "activation_bytes", "streamed_bytes", "reserve_bytes")
        assert sum(use[kind] for kind in kinds) == use["total_bytes"] <= use["capacity_bytes"]


def test_out_holds_the_file_and_the_map(run: Run, tmp_path: Path):
    out = tmp_path / "placed"
    found = run("map", MODEL, *SIZES, "--out", out, "--json")
    assert found.code == 0
    assert sorted(x.name for x in out.iterdir()) == ["map.json", "placement.yaml"]
    assert json.loads((out / "map.json").read_text())["device_map"] == found.json["device_map"]
    text = (out / "placement.yaml").read_text()
    command = "trimtab map Qwen2.5-VL-7B --gpus 8GiB,16GiB,8GiB,6GiB --batch 4 --images 1024x1024,2"
    assert f"command: {command}\n" in text


def test_compare_shows_the_public_maps_or_says_what_is_missing(run: Run):
    content = run("map", MODEL, *SIZES, "--compare", "--json").json
    rules = {x["rule"]: x for x in content["compared"]}
    assert not rules["InternVL split_model(0.5)"]["fits"]
    try:
        import accelerate  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError:
        _, *others = rules.values()
        assert all("is not installed" in other["problems"][0] for other in others)
        return
    assert list(rules) == ["InternVL split_model(0.5)", "Accelerate auto", "Transformers auto"]
    for rule in ("Accelerate auto", "Transformers auto"):
        assert rules[rule]["fullest"] > content["fullest"]
        assert len(rules[rule]["devices"]) == 4


@pytest.mark.parametrize("model", ["InternVL-Chat-V1-5", "InternVL3-1B"])  # InternLM2, Qwen2
def test_models_with_remote_code_are_compared_under_their_own_names(run: Run, model: str):
    pytest.importorskip("transformers", reason="builds models on the meta device")
    pytest.importorskip("accelerate", reason="holds one of the public maps")
    content = run("map", model, "--gpus", "2x40GiB", "--compare", "--json").json
    _, *theirs = content["compared"]
    for other in theirs:
        assert other["problems"] == []
        weights = sum(device["weight_bytes"] for device in other["devices"])
        assert weights == sum(device["weight_bytes"] for device in content["devices"])


def test_quantised_weights_take_their_own_bytes(run: Run):
    full = run("map", MODEL, "--gpus", "24GiB", "--json").json["devices"][0]
    small = run("map", MODEL, "--gpus", "24GiB", "--quant", "bnb-nf4", "--json").json["devices"][0]
    assert small["weight_bytes"] < 0.45 * full["weight_bytes"]
    assert small["kv_bytes"] == full["kv_bytes"]


def test_a_small_model_is_not_spread_without_a_word(run: Run):
    one = run("map", MODEL, "--gpus", "4x80GiB", "--json").json
    assert [x["total_bytes"] > 0 for x in one["devices"]].count(True) == 1
    assert one["notes"] == [
        "It takes 1 GPU, the fullest to 20 %; --for memory spreads it over 4 GPUs, the fullest to 6 %."
    ]
    four = run("map", MODEL, "--gpus", "4x18GiB", "--json").json
    assert [x["total_bytes"] > 0 for x in four["devices"]].count(True) == 4
    assert "--for latency needs only 1 GPU" in four["notes"][0]


def test_a_reserve_stays_free_where_weights_spill(run: Run):
    words = ("map", MODEL, "--gpus", "10GiB", "--cpu", "32GiB", "--json")
    for reserve, share in (([], 0.97), (["--reserve", "0"], 1.0), (["--reserve", "20"], 0.8)):
        fullest = run(*words, *reserve).json["fullest"]
        assert share - 0.06 < fullest <= share


def test_stages_are_exported_to_both_engines(run: Run, tmp_path: Path):
    out = tmp_path / "placed"
    assert run("map", MODEL, "--gpus", "24GiB,16GiB,16GiB", "--for", "pipeline", "--out", out).code == 0
    vllm = run("export", "vllm", out)
    assert vllm.code == 0
    assert vllm.out.startswith("VLLM_PP_LAYER_PARTITION=")
    content = run("export", "sglang", out / "placement.yaml", "--json").json
    assert sum(content["layers"]) == 28
    assert content["environment"]["SGLANG_PP_LAYER_PARTITION"] == ",".join(map(str, content["layers"]))


def test_a_map_that_spills_onto_host_memory_is_no_set_of_stages(run: Run, tmp_path: Path):
    assert run("map", MODEL, "--gpus", "16GiB", "--cpu", "16GiB", "--out", tmp_path / "p").code == 0
    found = run("export", "vllm", tmp_path / "p")
    assert found.code == 2
    assert "lie on cpu" in found.err


def test_export_needs_something_that_was_placed(run: Run, tmp_path: Path):
    found = run("export", "vllm", tmp_path)
    assert found.code == 2
    assert "there is no placement at" in found.err


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_trace_gets_a_layout_its_bound_and_commands(run: Run, tmp_path: Path, engine: str):
    trace = tmp_path / "requests.jsonl"
    line = {"arrival_s": 0, "prompt_tokens": 90, "output_tokens": 20, "images": [[640, 480]]}
    trace.write_text("".join(json.dumps(line | {"arrival_s": i / 4}) + "\n" for i in range(20)))
    asked = ["map", MODEL, "--gpus", "4xH100-80GB", "--trace", trace, "--serve-with", engine]
    found = run(*asked, "--json").json
    best = found["layouts"][0]
    assert best["served"]["requests_per_s"] <= found["bound"]["requests_per_s"] * (1 + 1e-9)
    assert best["layout"]["encoders"] + best["layout"]["engines"] * best["layout"]["tp"] == 4
    assert all(command in run(*asked).out for command in found["commands"])
