"""`trimtab export torchserve`: what it prints, and what it refuses. Needs no torch."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

Run = Any


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "my-vlm"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    return model


def test_the_archive_and_its_command_are_printed(run: Run, folder: Path, tmp_path: Path) -> None:
    written = {"device_map": {"model": 0, "lm_head": "cpu"}, "runs_on": {"lm_head": 0}, "run_on_cpu": []}
    (tmp_path / "map.json").write_text(json.dumps(written))
    result = run("export", "torchserve", folder, "--map", tmp_path / "map.json", "--out", tmp_path / "store")
    assert result.code == 0, result.err
    archive, command = result.out.splitlines()
    assert archive == str(tmp_path / "store" / "my-vlm.mar")
    assert command.endswith(f"--ts-config {tmp_path / 'store' / 'config.properties'}")
    assert "TorchServe is archived" in result.err
    with zipfile.ZipFile(archive) as opened:
        setup = json.loads(opened.read("setup_config.json"))
    assert (setup["device_map"], setup["runs_on"]) == ({"model": 0, "lm_head": "cpu"}, {"lm_head": 0})


def test_accelerates_rules_and_workers_are_the_recipes(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ["--set", "device_map=balanced_low_0", "--set", "dtype=fp16", "--set", "workers=2", "--set", "batch_size=8"]
    assert run("export", "torchserve", folder, "--out", tmp_path, *words).code == 0
    setup = json.loads((tmp_path / "setup_config.json").read_text())
    assert (setup["device_map"], setup["torch_dtype"], setup["runs_on"]) == ("balanced_low_0", "float16", {})
    assert "maxWorkers: 2\nbatchSize: 8\nmaxBatchDelay: 100\n" in (tmp_path / "model-config.yaml").read_text()


def test_memory_limits_and_the_recipes_file_are_written(run: Run, folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"device_map": "sequential", "max_memory": {"0": "9GB"}, "offload_state_dict": true}')
    words = ["export", "torchserve", folder, "--out", tmp_path, "--set", f"setup={recipe}"]
    assert run(*words, "--set", "max_memory=0=20GiB", "--set", "max_memory=cpu=1GiB").code == 0  # options go first
    setup = json.loads((tmp_path / "setup_config.json").read_text())
    assert (setup["device_map"], setup["max_memory"]) == ("sequential", {"0": "20GiB", "cpu": "1GiB"})
    assert setup["max_new_tokens"] == 256


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{missing}"], "holds no config.json"),
        (["{folder}", "--set", "name=a/b"], "cannot stand in a URL"),
        (["{folder}", "--set", "max_memory=gpu"], "names no device"),
        (["{folder}", "--set", "max_memory=0=lots"], "size in bytes"),
        (["{folder}", "--map", "{missing}"], "missing"),
        (["{folder}", "--map", "{config}"], "holds no device map"),
        (["{folder}", "--set", "setup={missing}"], "cannot be read as JSON"),
    ],
)
def test_bad_input_ends_in_one_sentence(
    run: Run, folder: Path, tmp_path: Path, words: list[str], sentence: str
) -> None:
    places = {"folder": folder, "missing": tmp_path / "missing", "config": folder / "config.json"}
    result = run("export", "torchserve", *(x.format(**places) for x in words), "--out", tmp_path / "store")
    assert result.code == 2
    assert sentence in result.err
    assert len(result.err.splitlines()) == 1
    assert not (tmp_path / "store").exists()
