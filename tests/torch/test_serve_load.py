"""Folders that `trimtab serve` takes and refuses. Needs torch, Transformers and [serve]."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="carries the endpoint: pip install 'trimtab[serve]'")

from tiny_chat import save_chat_model

from trimtab.errors import ConfigError
from trimtab.runtime.placing.load import load_placed
from trimtab.serve.chat import ChatProcessor
from trimtab.serve.device_map import read_device_map
from trimtab.serve.limits import ServeLimits
from trimtab.serve.processor import load_processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat") / "tiny")


def test_a_template_that_wants_texts_alone_is_refused_at_the_start(folder: Path) -> None:
    processor = load_processor(folder)
    for written in ("{{ 'USER: ' + m['content'] }}", "USER: {{ m['content'] }}"):
        processor.chat_template = f"{{% for m in messages %}}{written}{{% endfor %}}"
        with pytest.raises(ConfigError, match="cannot write a message whose content is a list of parts"):
            ChatProcessor(processor, ServeLimits(), name="tiny")


def test_a_folder_that_lacks_its_parts_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()  # Transformers makes an empty one
    with pytest.raises(ConfigError, match=r"the tokenizer knows no words\): put its tokenizer\.json"):
        ChatProcessor(load_processor(copy), ServeLimits(), name="tiny")
    (copy / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"the processor in .* cannot be read"):
        load_processor(copy)


def test_a_folder_quantised_is_placed_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    with pytest.raises(ConfigError, match=r"is quantised \(bitsandbytes\).*put it whole on one device"):
        load_placed(copy, {"model": "cpu", "lm_head": "disk"})
    if find_spec("bitsandbytes") is None:
        with pytest.raises(ConfigError, match=r"cannot be loaded .*bitsandbytes"):
            load_placed(copy, {"": "cpu"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "holds no device map"),
        ("[]", "holds no device map"),
        ("{}", "holds no device map"),
        ('{"model": 1.5}', "neither numbers, cpu nor disk"),
        ('{"device_map": {"model": true}}', "neither numbers, cpu nor disk"),
        ('{"device_map": [1]}', "holds no device map"),
        ('{"device_map": {"model": 0}, "runs_on": {"model": null}}', "neither numbers, cpu nor disk"),
        ('{"device_map": {"model": 0}, "run_on_cpu": 1}', "holds no device map"),
        ('{"device_map": {"model": 0}, "run_on_cpu": [null]}', "names something else than modules"),
    ],
)
def test_a_bad_device_map_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_device_map(tmp_path / "map.json")


def test_nothing_of_the_folder_is_executed(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    config = json.loads((copy / "config.json").read_text())
    auto = {"AutoConfig": "evil.C", "AutoModelForImageTextToText": "evil.M", "AutoProcessor": "evil.P"}
    (copy / "config.json").write_text(json.dumps({**config, "auto_map": auto}))
    load_placed(copy, {"": "cpu"})
    load_processor(copy)
    assert not (tmp_path / "ran").exists()
