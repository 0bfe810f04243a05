"""The side of asking that needs no torch: what is remembered, what is said where nobody can answer."""

import json
from typing import Any

import pytest

from refusals import refused
from trimtab import ask
from trimtab.errors import ConfigError, ImageError, UnknownModelError
from trimtab.models.describe import describe, image_rule_by_processor
from trimtab.models.images.asked import STANDARD, AskedImages
from trimtab.models.images.rules import FixedImage, SmartResize

CONFIG = {"model_type": "widget"}


@pytest.fixture
def child(monkeypatch, tmp_path):
    """A child that answers as told, and counts."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ask, "_versions", lambda: ["0", "1", "2"])
    asked: list[str] = []
    reply = {"content": b'{"a": 1}'}

    def run(question: str, config: Any) -> bytes:
        asked.append(json.dumps([question, config]))
        return reply["content"]

    monkeypatch.setattr(ask, "_run_child", run)
    return asked, reply


def test_without_transformers_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ask, "_versions", lambda: None)
    for config in (CONFIG, {"model_type": "qwen3_5"}):
        with refused(UnknownModelError):
            describe(config)
    with refused(ConfigError):
        describe({"model_type": "qwen2_vl", "vision_config": {}, "text_config": {}})
    with refused(UnknownModelError):
        ask.ask(CONFIG, "describe")


def test_an_answer_is_remembered_by_content_question_and_versions(child, monkeypatch):
    asked, _ = child
    assert ask.ask(CONFIG, "describe") == {"a": 1}
    assert ask.ask(dict(reversed(list({**CONFIG, "b": 2}.items()))), "describe") == {"a": 1}
    assert ask.ask({"b": 2, **CONFIG}, "describe") == {"a": 1}
    assert len(asked) == 2
    ask.ask(CONFIG, "images")
    assert len(asked) == 3
    monkeypatch.setattr(ask, "_versions", lambda: ["0", "1", "3"])
    ask.ask(CONFIG, "describe")
    assert len(asked) == 4
    assert len(list(ask.cache_dir().iterdir())) == 4


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_spoilt_memory_is_asked_again(child, content):
    asked, _ = child
    ask.ask(CONFIG, "describe")
    (path,) = ask.cache_dir().iterdir()
    path.write_bytes(content)
    assert ask.ask(CONFIG, "describe") == {"a": 1}
    assert len(asked) == 2
    assert json.loads(path.read_bytes()) == {"a": 1}


def test_a_home_that_cannot_be_written_to_costs_time_alone(child, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "file" / "below"))
    assert ask.ask(CONFIG, "describe") == {"a": 1}


def test_the_cache_lies_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.delenv("TRIMTAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ask.cache_dir() == tmp_path / "trimtab" / "asked"
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "mine"))
    assert ask.cache_dir() == tmp_path / "mine"


@pytest.mark.parametrize("content", [b"", b"Traceback", b"3"])
def test_what_is_no_answer_is_said_and_not_remembered(child, content):
    _, reply = child
    reply["content"] = content
    with refused(ConfigError, "model_type", "widget", "import torch, transformers"):
        ask.ask(CONFIG, "describe")
    assert not ask.cache_dir().exists()


def test_an_answer_that_is_no_description_is_refused(child):
    with refused(ConfigError, "model_type", "description_version", "widget"):
        describe(CONFIG)


def test_the_child_gets_no_network_an_empty_home_and_no_module_of_the_working_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setattr(ask, "ANSWER", "limited_cases:surroundings")
    (tmp_path / "torchvision.py").write_text("")
    found = json.loads(ask._run_child("describe", CONFIG))
    assert found["offline"] == ["1", "1"]
    assert found["home"] == found["folder"] != str(tmp_path)
    assert str(tmp_path) not in found["path"]
    assert not found["files"]


PROCESSOR = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
FILES = {"preprocessor_config.json": PROCESSOR}


def answered(rows, texts=("",), **more):
    common = {"patch_size": 16, "extra_rows": 0, "token": "<i>", "soft": "<i>", "markup": None, "by_sample": False}
    return json.dumps({**common, "rows": rows, "texts": list(texts), **more}).encode()


def test_a_formula_is_taken_where_it_equals_the_processor_on_every_standard_size(child):
    _, reply = child
    config = {"model_type": "qwen3_5", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
    formula = SmartResize(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)
    rows = [[c.patches, c.tokens, 1, c.patches_sq, 1] for c in (formula.count(*size) for size in STANDARD)]
    reply["content"] = answered(rows)
    assert image_rule_by_processor(config, FILES, PROCESSOR) == (formula, None)
    other = {**config, "vision_config": {**config["vision_config"], "depth": 1}}  # asked anew
    rows[7][1] += 1
    reply["content"] = answered(rows)
    rule, _ = image_rule_by_processor(other, FILES, PROCESSOR)
    assert isinstance(rule, AskedImages)
    assert rule.count(*STANDARD[7]).tokens == rows[7][1]


def test_equal_counts_of_every_size_are_a_constant_rule(child):
    _, reply = child
    reply["content"] = answered([[576, 144, 1, 576**2, 1]] * len(STANDARD))
    assert image_rule_by_processor(CONFIG, FILES, PROCESSOR)[0] == FixedImage(rows=576, tokens=144)


def test_missing_sizes_are_asked_in_one_question_and_refusals_are_theirs_alone(child, monkeypatch):
    asked, reply = child
    rule = AskedImages(question=json.dumps({**CONFIG, "files": FILES}), patch_size=16, extra_rows=0)
    reply["content"] = answered([[4, 1, 1, 16, 2], "too long", [8, 2, 1, 64, 1]], ("", "<a><i>"))
    rule.prepare([(10, 10), (1, 999), (20, 10), (10, 10)])
    assert len(asked) == 1
    assert (rule.count(10, 10).text, rule.count(20, 10).text, rule.count(20, 10).tokens) == ("<a><i>", None, 2)
    with refused(ImageError, "1", "999"):
        rule.count(1, 999)
    assert len(asked) == 1
    monkeypatch.setattr(ask, "_versions", lambda: None)
    with refused(ConfigError, "3", "7"):
        rule.count(7, 7)


def test_images_that_share_a_sample_are_asked_as_such(child):
    asked, reply = child
    rule = AskedImages(question=json.dumps(CONFIG), patch_size=16, extra_rows=0, by_sample=True)
    reply["content"] = answered([[4, 1, 1, 16, 1]])
    rule.prepare([(10, 10)])
    assert sorted(json.loads(x)[1]["copies"] for x in asked) == [1, 2]
    assert rule.in_sample(1) is rule
    assert rule.in_sample(5).count(10, 10).tokens == 1
    assert len(asked) == 2
