"""The TorchServe export: an archive of known members, the same bytes each time, and settings that open nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from trimtab.adapters.torchserve import ArchiveOptions, export_torchserve, read_recipe
from trimtab.errors import ConfigError
from trimtab.models.describe import read_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "modeling_evil.py", ".gitattributes"):
        (model / name).write_bytes(name.encode() * 100)
    return model


def read_setup(archive: Path) -> dict[str, object]:
    with zipfile.ZipFile(archive) as opened:
        content = json.loads(opened.read("setup_config.json"))
    assert isinstance(content, dict)
    return content


def test_the_archive_holds_handler_and_settings(folder: Path, tmp_path: Path) -> None:
    places = {"model.visual": 0, "model.language_model": 1, "lm_head": "disk"}
    options = ArchiveOptions(
        name="tiny",
        device_map=places,
        runs_on={"lm_head": 1},
        dtype="bf16",
        offload_folder="offload",
        max_new_tokens=9,
        num_workers=2,
        batch_size=4,
        max_batch_delay_ms=50,
    )
    exported = export_torchserve(folder, tmp_path / "store", options)
    with zipfile.ZipFile(exported.archive) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [
            "MAR-INF/MANIFEST.json",
            "model-config.yaml",
            "setup_config.json",
            "torchserve_handler.py",
        ]
        assert json.loads(archive.read("MAR-INF/MANIFEST.json"))["model"] == {
            "modelName": "tiny",
            "handler": "torchserve_handler.py",
            "modelVersion": "1.0",
            "configFile": "model-config.yaml",
        }
        settings = yaml.safe_load(archive.read("model-config.yaml"))
    assert settings["minWorkers"] == settings["maxWorkers"] == 2
    assert (settings["batchSize"], settings["maxBatchDelay"]) == (4, 50)
    assert read_setup(exported.archive) == {
        "model_path": str(folder),
        "device_map": places,
        "runs_on": {"lm_head": 1},
        "torch_dtype": "bfloat16",
        "max_memory": None,
        "offload_folder": "offload",
        "max_new_tokens": 9,
    }
    assert any("archived" in note for note in exported.notes)
    assert any("keep the folder" in note for note in exported.notes)


def test_packed_weights_are_safetensors_alone(folder: Path, tmp_path: Path) -> None:
    options = ArchiveOptions(name="tiny", pack_weights=True, max_memory={"0": "1GiB"})
    exported = export_torchserve(folder, tmp_path / "store", options)
    with zipfile.ZipFile(exported.archive) as archive:
        inside = [name for name in archive.namelist() if name.startswith("model/")]
        assert inside == ["model/config.json", "model/model.safetensors"]
        assert archive.read("model/model.safetensors") == (folder / "model.safetensors").read_bytes()
    setup = read_setup(exported.archive)
    assert (setup["model_path"], setup["device_map"], setup["max_memory"]) == ("model", "auto", {"0": "1GiB"})


def test_the_same_input_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    options = ArchiveOptions(name="tiny", pack_weights=True)
    first = export_torchserve(folder, tmp_path / "a", options).archive.read_bytes()
    assert first == export_torchserve(folder, tmp_path / "b", options).archive.read_bytes()


def test_the_server_is_on_loopback_and_asks_for_tokens(folder: Path, tmp_path: Path) -> None:
    exported = export_torchserve(folder, tmp_path / "store", ArchiveOptions(name="tiny", port=9100))
    lines = dict(line.split("=", 1) for line in exported.config.read_text().splitlines())
    assert lines["inference_address"] == "http://127.0.0.1:9100"
    assert {lines[f"{x}_address"].rpartition(":")[0] for x in ("inference", "management", "metrics")} == {
        "http://127.0.0.1"
    }
    assert lines["disable_token_authorization"] == lines["enable_model_api"] == "false"
    assert lines["load_models"] == "tiny.mar"


def test_what_cannot_be_exported_is_refused(folder: Path, tmp_path: Path) -> None:
    both = ArchiveOptions(name="tiny", device_map={"": 0}, max_memory={"0": "1GiB"})
    with pytest.raises(ConfigError, match=r"max_memory has no say beside a device map, .*: leave one of them out"):
        export_torchserve(folder, tmp_path, both)
    with pytest.raises(ConfigError, match="--offload-folder"):
        export_torchserve(folder, tmp_path, ArchiveOptions(name="tiny", device_map={"": "disk"}))


def test_another_models_map_is_refused_and_so_is_an_unknown_rule(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text(json.dumps(dict(read_config("Qwen2-VL-7B"))))
    with pytest.raises(ConfigError, match=r"says nowhere where lm_head lies \(1 of 65 layers .*another model's"):
        export_torchserve(folder, tmp_path, ArchiveOptions(name="tiny", device_map={"model": 0}))
    with pytest.raises(ConfigError, match="'even' is no rule of Accelerate's: choose one of auto, balanced, "):
        export_torchserve(folder, tmp_path, ArchiveOptions(name="tiny", device_map="even"))  # type: ignore[arg-type]
    assert not list(tmp_path.glob("*.mar"))
    places = {"model.visual": 0, "model.language_model": 1, "lm_head.weight": 1}  # a part of a layer will do
    assert export_torchserve(folder, tmp_path, ArchiveOptions(name="tiny", device_map=places)).archive.exists()


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


def test_every_key_of_the_recipe_is_in_the_archive_or_true_anyway(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "setup_config.json").write_text(json.dumps(RECIPE))
    options = ArchiveOptions(name="tiny", **read_recipe(tmp_path / "setup_config.json"))
    setup = read_setup(export_torchserve(folder, tmp_path / "store", options).archive)
    kept = ("max_memory", "device_map", "offload_folder", "torch_dtype")
    assert {key: setup[key] for key in kept} == {key: RECIPE[key] for key in kept}
    assert setup["max_new_tokens"] == 80


@pytest.mark.parametrize(
    "changed",
    [
        {"low_cpu_mem_usage": False},
        {"offload_state_dict": False},
        {"revision": "v2"},
        {"torch_dtype": "float64"},
        {"max_length": "long"},
        {"parallelType": "pp"},
    ],
)
def test_a_key_that_the_handler_would_not_honour_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    (tmp_path / "setup_config.json").write_text(json.dumps(RECIPE | changed))
    with pytest.raises(ConfigError, match=rf"has {next(iter(changed))} .*, which the handler would not honour: leave"):
        read_recipe(tmp_path / "setup_config.json")


def test_exporting_needs_no_torch() -> None:
    code = "import sys, trimtab.adapters.torchserve, trimtab.serve.device_map; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_folder_of_pickles_alone_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no safetensors: save the model as safetensors"):
        export_torchserve(folder, tmp_path / "store", ArchiveOptions(name="tiny"))
    assert not (tmp_path / "store").exists()
