"""The TorchServe export: the recipe's file, the settings in the archive, and what is refused. Needs no torch."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from refusals import refused
from trimtab.adapters.servers import Recipe, export_torchserve, read_recipe
from trimtab.errors import ConfigError

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
        *("config.properties", "model-config.yaml", "setup_config.json", "tiny.mar", "torchserve_handler.py"),
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
