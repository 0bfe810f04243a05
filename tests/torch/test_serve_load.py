"""Folders that `trimtab serve` takes and refuses. Needs torch, Transformers and [serve]."""

# ruff: noqa: E402 - what may be absent is asked for first, so that the file is skipped with a reason

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="runs tiny models")
pytest.importorskip("transformers", reason="holds the models that are served")
pytest.importorskip("PIL", reason="pillow is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from tiny_chat import save_chat_model

from trimtab.errors import ConfigError
from trimtab.serve.chat import ChatProcessor
from trimtab.serve.device_map import read_device_map
from trimtab.serve.limits import ServeLimits
from trimtab.serve.load import load_model, load_processor

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat") / "tiny")


def test_a_template_that_wants_texts_alone_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    processor = load_processor(folder)
    processor.chat_template = "{% for m in messages %}{{ 'USER: ' + m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"cannot be used|list of parts"):
        ChatProcessor(processor, ServeLimits(), name="tiny")
    processor.chat_template = "{% for m in messages %}USER: {{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="does not write messages whose content is a list of parts"):
        ChatProcessor(processor, ServeLimits(), name="tiny")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model(tmp_path)


def test_a_folder_that_lacks_its_parts_is_refused(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(folder, tmp_path / "copy")
    torch.save({}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"the weights in .* cannot be read .*safetensors"):
        load_model(copy)
    (copy / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"the processor in .* cannot be read"):
        load_processor(copy)


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("lost", r"holds no weight for lm_head\.weight: download it again"),
        ("cut", r"the weights in .* cannot be read .*header"),
        ("shape", r"up_proj\.weight in another shape than config\.json says"),
        ("quantised", r"cannot be read .*install what a quantised model asks for"),
        ("generation", r"generation_config\.json.* is not a valid JSON"),
        ("outside", r"names '\.\./elsewhere\.safetensors', no file of its own folder"),
        ("layers", r"cannot be read .*num_hidden_layers"),
    ],
)
def test_a_damaged_folder_is_refused_and_nothing_drawn_at_random(
    folder: Path, tmp_path: Path, damage: str, words: str
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    weights, config = copy / "model.safetensors", json.loads((copy / "config.json").read_text())
    text = config["text_config"]
    if damage == "lost":
        save_file({k: v for k, v in load_file(weights).items() if k != "lm_head.weight"}, weights, {"format": "pt"})
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:500])
    elif damage == "shape":
        change_json(copy / "config.json", text_config={**text, "intermediate_size": 72})
    elif damage == "quantised":
        quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        change_json(copy / "config.json", quantization_config=quantised)
        if find_spec("bitsandbytes") is not None:
            pytest.skip("bitsandbytes is installed")
    elif damage == "generation":
        (copy / "generation_config.json").write_text("{")
    elif damage == "outside":
        index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        change_json(copy / "config.json", text_config={**text, "num_hidden_layers": 9})
    with pytest.raises(ConfigError, match=words):
        load_model(copy)


def test_a_tokenizer_without_words_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()  # Transformers makes an empty one
    with pytest.raises(ConfigError, match=r"the tokenizer of tiny knows no words: put tokenizer\.json"):
        ChatProcessor(load_processor(copy), ServeLimits(), name="tiny")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no device map"),
        ("{}", "holds no device map"),
        ('{"model": 1.5}', "places 'model' on 1.5"),
        ('{"device_map": {"model": true}}', "places 'model' on True"),
        ('{"device_map": [1]}', "holds no device map"),
        ('{"device_map": {"model": 0}, "runs_on": {"model": null}}', "places 'model' on None"),
        ('{"device_map": {"model": 0}, "run_on_cpu": "model"}', "run_on_cpu that is no list"),
    ],
)
def test_a_bad_device_map_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        read_device_map(tmp_path / "map.json")


def test_nothing_of_the_folder_is_executed(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    config = json.loads((copy / "config.json").read_text())
    auto = {"AutoConfig": "evil.C", "AutoModelForImageTextToText": "evil.M", "AutoProcessor": "evil.P"}
    (copy / "config.json").write_text(json.dumps({**config, "auto_map": auto}))
    load_model(copy)
    load_processor(copy)
    assert not (tmp_path / "ran").exists()
