"""A config.json from outside: what never reaches a loader. Needs torch and Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refusals import refused
from trimtab.errors import ConfigError
from trimtab.runtime.placing.folder import check_folder


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"dtype": "os.system"}, ("os.system",)),
        ({"text_config": {"torch_dtype": ["float32"]}}, ("torch_dtype",)),
        ({"_attn_implementation": "evil/kernel"}, ("kernel",)),
        ({"text_config": {"_experts_implementation": "evil/kernel"}}, ("kernel",)),
        ({"vision_config": {"hidden_size": 10**9}}, ("hidden_size", "1000000000")),
        ({"num_hidden_layers": 10**12}, ("num_hidden_layers",)),
        ({"model_type": 5}, ("config.json", "model_type")),
    ],
)
def test_a_config_that_asks_for_the_impossible_is_refused(tmp_path: Path, fields: Any, names: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with refused(ConfigError, names):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"dtype": "os.system", "dtype": "float32"}', "key 'dtype' stands twice in one object"),
        ('{"rope_theta": NaN}', "NaN is not a number in JSON"),
        ('{"model_type": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_config_that_a_loader_may_read_otherwise_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with refused(ConfigError, words):
        check_folder(tmp_path)


@pytest.mark.parametrize("text", ["[]", "5", '"text"', "null", "[{}]", "{", "\0"])
@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "tokenizer.json", "vocab.json"])
def test_a_file_that_holds_no_object_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with refused(ConfigError, name):
        check_folder(tmp_path)


def test_a_config_of_a_large_model_is_taken(tmp_path: Path) -> None:
    large = {"hidden_size": 16384, "vocab_size": 262_208, "max_position_embeddings": 10_485_760}
    text = {**large, "dtype": "float8_e4m3fn", "_attn_implementation": "sdpa"}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "text_config": text, "torch_dtype": None}))
    check_folder(tmp_path)
