"""Layer counts of serving engines: of placements made for stages, and of training plans."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from placement_cases import small_model

from refusals import refused
from trimtab import describe, place
from trimtab.adapters.servers import (
    Recipe,
    StageCounts,
    count_placed_layers,
    engine_commands,
    export_torchserve,
    read_recipe,
)
from trimtab.errors import ConfigError, UnsupportedPlanError
from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import Workload, machine_of
from trimtab.units import GIB

WORK = Workload(images=((1024, 1024),))


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "InternVL-Chat-V1-5"])
@pytest.mark.parametrize("free", [[40, 40, 40], [24, 40, 16], [60, 20]])
def test_counts_add_up_to_the_decoder_and_follow_the_map(name, free):
    model = describe(name)
    found = place(model, machine_of([x * GIB for x in free]), WORK, objective="pipeline")
    stages = count_placed_layers(found.device_map)
    assert sum(stages.layers) == len(model.indices("language", "block"))
    assert min(stages.layers) >= 1
    assert sorted(stages.gpus) == sorted(use.device for use in found.uses if use.modules)
    for layers, gpu in zip(stages.layers, stages.gpus, strict=True):
        held = next(use for use in found.uses if use.device == gpu).modules
        assert sum(".layers." in x and "vision" not in x for x in held) == layers


def test_the_first_stage_holds_fewer_layers_than_the_middle_ones():
    found = place(describe("Qwen2.5-VL-7B"), machine_of([24 * GIB] * 4), WORK, objective="pipeline")
    layers = count_placed_layers(found.device_map).layers
    assert layers[0] < layers[1]
    assert layers[-1] < layers[1]


def test_a_tied_weight_is_copied_to_the_stage_that_reads_it():
    model = small_model(tied=True, num_layers=6)
    found = place(model, machine_of([GIB] * 2), Workload(), objective="pipeline")
    own = inference_table(model, Workload()).weights.sum()
    assert sum(use.weight_bytes for use in found.uses) == own + 203 * 64 * 2


def test_one_decoder_layer_is_one_stage():
    found = place(small_model(num_layers=1), machine_of([GIB] * 3), Workload(), objective="pipeline")
    assert count_placed_layers(found.device_map).layers == (1,)


def test_the_environment_names_gpus_only_where_they_are_out_of_order():
    plain, turned = StageCounts(layers=(4, 6), gpus=(0, 1)), StageCounts(layers=(4, 6), gpus=(1, 0))
    assert plain.environment("vllm") == {"VLLM_PP_LAYER_PARTITION": "4,6"}
    assert turned.environment("sglang") == {"SGLANG_PP_LAYER_PARTITION": "4,6", "CUDA_VISIBLE_DEVICES": "1,0"}
    assert plain.shell("sglang") == "SGLANG_PP_LAYER_PARTITION=4,6  # with --pp-size 2"
    assert "--pipeline-parallel-size 2" in plain.shell("vllm")


def test_commands_serve_the_same_placement():
    stages = {f"model.language_model.layers.{i}": int(i > 2) for i in range(4)} | {"lm_head": 1}
    vllm, sglang = engine_commands("tiny", "qwen2_5_vl", stages)
    assert vllm == "VLLM_PP_LAYER_PARTITION=3,1 vllm serve tiny --pipeline-parallel-size 2"
    assert sglang == "SGLANG_PP_LAYER_PARTITION=3,1 python -m sglang.launch_server --model-path tiny --pp-size 2"
    assert engine_commands("tiny", "internvl", {"": 0})[0] == engine_commands("tiny", "x", None)[0] == "vllm serve tiny"
    with refused(UnsupportedPlanError):
        engine_commands("tiny", "qwen2_5_vl", {"model": 0, "lm_head": "cpu"})


@pytest.mark.parametrize("family", ["internvl", "internvl_chat", "qwen2_vl", "gemma3", "mllama"])
def test_sglang_gets_tensor_parallelism_where_it_runs_no_stages(family):
    stages = {f"model.language_model.layers.{i}": int(i > 2) for i in range(4)} | {"lm_head": 1}
    vllm, sglang = engine_commands("tiny", family, stages)
    assert "--pipeline-parallel-size 2" in vllm
    assert sglang.endswith("--model-path tiny --tp-size 2 --mm-enable-dp-encoder")
    counts = StageCounts(layers=(3, 1), gpus=(0, 1))
    counts.refuse_stages("vllm", family)
    with refused(UnsupportedPlanError, "--tp-size", "2", "--mm-enable-dp-encoder", family):
        counts.refuse_stages("sglang", family)
    assert counts.by_tensors("vllm") == "--tensor-parallel-size 2 --mm-encoder-tp-mode data"


# -- TorchServe --------------------------------------------------------------------------------------------------------


ARCHIVER = """#!{python}
import pathlib, sys, zipfile
given = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if "=" in word)
out = pathlib.Path(sys.argv[sys.argv.index("--export-path") + 1])
with zipfile.ZipFile(out / (given["model-name"] + ".mar"), "w") as archive:
    for name in ("handler", "extra-files", "config-file"):
        archive.write(given[name], pathlib.Path(given[name]).name)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes(name.encode())
    return model


@pytest.fixture
def archiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that packs what torch-model-archiver would; tests/integration runs the real one."""
    program = tmp_path / "bin" / "torch-model-archiver"
    program.parent.mkdir()
    program.write_text(ARCHIVER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return program


# as pytorch/serve has it, examples/large_models/Huggingface_accelerate
RECIPE = {
    "revision": "main",
    "max_memory": {"0": "10GB", "cpu": "10GB"},
    "low_cpu_mem_usage": True,
    "device_map": "balanced_low_0",
    "offload_folder": "offload",
    "offload_state_dict": True,
    "torch_dtype": "float16",
    "max_length": "80",
}


@pytest.mark.usefixtures("archiver")
def test_the_archive_holds_the_handler_and_every_key_of_the_recipe(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "setup_config.json").write_text(json.dumps(RECIPE | {"model_name": "org/tiny", "model_path": "model"}))
    recipe = Recipe(**read_recipe(tmp_path / "setup_config.json"))  # type: ignore[arg-type]
    archive = export_torchserve(recipe, tmp_path / "store")
    assert archive.name == "tiny.mar"
    with zipfile.ZipFile(archive) as opened:
        assert sorted(opened.namelist()) == ["model-config.yaml", "setup_config.json", "torchserve_handler.py"]
        setup = json.loads(opened.read("setup_config.json"))
    kept = ("max_memory", "device_map", "offload_folder", "torch_dtype", "max_length")
    assert {key: setup[key] for key in kept} == {key: RECIPE[key] for key in kept}
    assert (setup["model_path"], setup["runs_on"]) == (str(folder), {})
    assert sorted(x.name for x in (tmp_path / "store").iterdir()) == [
        *("config.properties", "model-config.yaml", "setup_config.json", "tiny.mar", "torchserve_handler.py")
    ]


def test_without_the_archiver_nothing_is_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(ConfigError):
        export_torchserve(Recipe(model_name="tiny", model_path=str(folder)), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_archiver_that_fails_is_quoted(folder: Path, tmp_path: Path, archiver: Path) -> None:
    archiver.write_text(f"#!{sys.executable}\nraise SystemExit('no space left')\n")
    with refused(ConfigError):
        export_torchserve(Recipe(model_name="tiny", model_path=str(folder)), tmp_path / "store")
    assert not (tmp_path / "store" / "tiny.mar").exists()


def test_exporting_needs_no_torch() -> None:
    code = "import sys, trimtab.adapters.servers, trimtab.placement.placed; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_command_prints_the_archive_and_what_serves_it(folder, tmp_path, archiver, capsys, monkeypatch):
    from trimtab.cli.main import main

    places = {"device_map": {"model": 0, "lm_head": "cpu"}, "runs_on": {"lm_head": 0}, "run_on_cpu": []}
    (tmp_path / "map.json").write_text(json.dumps(places))
    words = ["export", "torchserve", folder, "--map", tmp_path / "map.json", "--out", tmp_path / "store"]
    monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, words), "--set", "name=my-vlm"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (0, None)
    archive, command = capsys.readouterr().out.splitlines()
    assert archive == str(tmp_path / "store" / "my-vlm.mar")
    assert "--models my-vlm=my-vlm.mar" in command
    setup = json.loads((tmp_path / "store" / "setup_config.json").read_text())
    assert (setup["device_map"], setup["runs_on"]) == (places["device_map"], places["runs_on"])
