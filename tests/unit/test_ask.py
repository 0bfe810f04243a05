"""The side of asking that needs no torch: what is remembered, what is said where nobody can answer."""

import json
import subprocess

import pytest

from trimtab.errors import ConfigError, UnknownModelError
from trimtab.models import ask
from trimtab.models.describe import describe
from trimtab.models.images import image_rule_by_processor

CONFIG = {"model_type": "widget"}


@pytest.fixture
def child(monkeypatch, tmp_path):
    """A child that answers as told, and counts."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ask, "_versions", lambda: ["0", "1", "2"])
    asked: list[str] = []
    reply = {"content": b'{"answer": {"a": 1}}'}

    def run(request: str) -> bytes:
        asked.append(request)
        return reply["content"]

    monkeypatch.setattr(ask, "_run_child", run)
    return asked, reply


def test_without_transformers_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ask, "_versions", lambda: None)
    for config in (CONFIG, {"model_type": "qwen3_5"}):
        with pytest.raises(UnknownModelError, match=r"pip install 'trimtab\[torch\]'.*or give a description file"):
            describe(config)
    with pytest.raises(ConfigError, match=r"lacks .*only Transformers fills them in .*pip install 'trimtab\[torch\]'"):
        describe({"model_type": "llava", "vision_config": {}, "text_config": {}})
    with pytest.raises(UnknownModelError, match=r"is not known without help: install Transformers"):
        ask.ask(CONFIG, "describe")


def test_an_answer_is_remembered_by_content_question_and_versions(child, monkeypatch):
    asked, _ = child
    assert ask.ask(CONFIG, "describe") == {"a": 1}
    assert ask.ask(dict(reversed(list({**CONFIG, "b": 2}.items()))), "describe") == {"a": 1}
    assert ask.ask({"b": 2, **CONFIG}, "describe") == {"a": 1}
    assert len(asked) == 2
    ask.ask(CONFIG, "complete")
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


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b'{"refused": "no: try", "unknown": false}', ConfigError, "^no: try$"),
        (b'{"refused": "no: try", "unknown": true}', UnknownModelError, "^no: try$"),
        (b"", ConfigError, "gave no answer on model_type 'widget': check that `import torch, transformers` works"),
        (b"Traceback", ConfigError, "gave no answer"),
        (b'{"answer": 3}', ConfigError, "gave no answer"),
    ],
)
def test_what_a_child_refuses_is_said_and_not_remembered(child, content, kind, words):
    _, reply = child
    reply["content"] = content
    with pytest.raises(ConfigError, match=words) as error:
        ask.ask(CONFIG, "describe")
    assert type(error.value) is kind
    assert not ask.cache_dir().exists()


def test_an_answer_that_is_no_description_is_refused(child):
    with pytest.raises(ConfigError, match=r"the answer on model_type 'widget' has description_version None"):
        describe(CONFIG)


def test_a_child_that_hangs_is_ended(monkeypatch):
    def hang(*args, **kwargs):
        raise subprocess.TimeoutExpired(args[0], kwargs["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(ConfigError, match=r"did not end within 60 s of CPU time and 8 GiB"):
        ask._run_child("[]")


def test_the_child_gets_no_network_and_an_empty_home(monkeypatch):
    seen = {}

    def look(command, **options):
        seen.update(options, command=command)
        return subprocess.CompletedProcess(command, 0, stdout=b"{}")

    monkeypatch.setattr(subprocess, "run", look)
    ask._run_child("[]")
    assert seen["env"]["HF_HUB_OFFLINE"] == seen["env"]["TRANSFORMERS_OFFLINE"] == "1"
    assert seen["env"]["HF_HOME"] == seen["cwd"]
    assert "-P" in seen["command"]  # modules of the folder one stands in are not imported
    assert seen["timeout"] == ask.MAX_WALL_S


def test_images_of_an_asked_family_are_counted_where_a_known_processor_cuts_them():
    config = {"model_type": "qwen3_5", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
    limits = {"shortest_edge": 65536, "longest_edge": 16777216}
    settings = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2, "size": limits}
    rule = image_rule_by_processor(config, settings)
    assert rule.count(640, 480).tokens == 300
    assert image_rule_by_processor(config, {**settings, "image_processor_type": "CLIPImageProcessor"}) is None
    assert image_rule_by_processor(config, None) is None
    lacking = image_rule_by_processor({**config, "model_type": "glm4v"}, None)
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        lacking.count(640, 480)
