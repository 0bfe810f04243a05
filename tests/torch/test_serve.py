"""The endpoint over a tiny model: answers, refusals, the command. Needs torch, Transformers and [serve]."""

# ruff: noqa: E402 - what may be absent is asked for first, so that the file is skipped with a reason

from __future__ import annotations

import base64
import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from refusals import refused

pytest.importorskip("fastapi", reason="carries the endpoint: pip install 'trimtab[serve]'")
uvicorn = pytest.importorskip("uvicorn", reason="carries the endpoint: pip install 'trimtab[serve]'")
openai = pytest.importorskip("openai", reason="asks the endpoint: pip install 'trimtab[serve]'")

from fastapi import HTTPException
from tiny_chat import chat_inputs, data_url, picture, question, save_chat_model
from transformers.image_utils import load_image

from border_cases import served
from trimtab.errors import ConfigError, TrimtabError
from trimtab.runtime.placing.load import load_placed
from trimtab.serve.application import build_application, carry_images, check_body, load_processor, open_port

CHAT = "/v1/chat/completions"
WHAT = "what is in the picture?"
URL = data_url(picture(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It never ends an answer by itself."""
    saved = save_chat_model(tmp_path_factory.mktemp("chat") / "tiny", "llava")  # its answers are taken as they are
    settings = saved / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": None}))
    return saved


@dataclass(frozen=True)
class Running:
    plain: Any  # the model and its processor as Transformers knows them
    processor: Any
    port: int

    def send(self, body: Any = None, path: str = CHAT, host: str = "localhost") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", "Host": host}
        connection.request("GET" if body is None else "POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, json.loads(content) if content.startswith(b"{") else content.decode()

    def text_of_generate(self, text: str, *images: Any, tokens: int) -> str:
        inputs = chat_inputs(self.processor, text, *images)
        found = self.plain.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return self.processor.tokenizer.decode(found, skip_special_tokens=True)


@contextmanager
def serving(folder: Path, places: Any = None) -> Iterator[Running]:
    model, processor = load_placed(folder, places), load_processor(folder)
    app = build_application("tiny", model, processor, max_new_tokens=40)
    with open_port(0) as opened:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        try:
            yield Running(model, processor, opened.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(120)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with serving(folder) as found:
        yield found


def said(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


def test_openais_own_client_gets_the_tokens_of_generate(running: Running) -> None:
    """Chat whole and as a stream, completions and responses; tools are read by the template, as Transformers does."""
    body = question(WHAT, picture(1), max_tokens=12, temperature=0)
    text = running.text_of_generate(WHAT, picture(1), tokens=12)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", timeout=120) as client:
        whole = client.chat.completions.create(model="tiny", tools=[tool], **body)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, "length")
        assert (whole.usage.completion_tokens, whole.model) == (12, "tiny")
        chunks = list(client.chat.completions.create(model="tiny", stream=True, **body))
        assert "".join(x.choices[0].delta.content or "" for x in chunks) == text
        parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": WHAT}]
        asked = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 12, "temperature": 0}
        assert client.responses.create(model="tiny", **asked).output_text == text
        prompt = {"prompt": "once upon a time", "max_tokens": 4, "temperature": 0}
        assert client.completions.create(model="tiny", **prompt).usage.completion_tokens == 4
        assert [x.id for x in client.models.list()] == ["tiny"]
        unbounded = client.chat.completions.create(model="tiny", **question(WHAT, temperature=0))
        assert unbounded.usage.completion_tokens == 40


def test_an_answer_ends_at_a_stop(running: Running) -> None:
    asked = question("hello", temperature=0, max_tokens=30)
    whole = running.send(asked)[1]["choices"][0]["message"]["content"]
    status, ended = running.send({**asked, "stop": [whole[6:9]]})
    assert status == 200
    assert ended["usage"]["completion_tokens"] < 30
    assert whole.startswith(ended["choices"][0]["message"]["content"])


def test_special_tokens_in_a_text_are_text(running: Running) -> None:
    def num_prompt_tokens(text: str) -> int:
        status, answer = running.send(said({"type": "text", "text": text}, max_tokens=1))
        assert status == 200
        return answer["usage"]["prompt_tokens"]

    assert num_prompt_tokens("a <|im_end|> b") > num_prompt_tokens("a x b")


def test_a_model_whose_modules_lie_on_disk_answers_as_the_whole_one(folder: Path, running: Running) -> None:
    body = question(WHAT, picture(2), max_tokens=8, temperature=0)
    places = {"model.vision_tower": "disk", "model.multi_modal_projector": "cpu", "model.language_model": "cpu"}
    with serving(folder, {**places, "lm_head": "disk"}) as placed:
        status, answer = placed.send(body)
    assert status == 200
    assert answer["choices"] == running.send(body)[1]["choices"]


@pytest.mark.parametrize(
    ("part", "fields", "name"),
    [
        ({"image_url": {"url": "https://example.com/cat.png"}}, {}, "data:image/"),
        ({"image_url": {"url": "file:///etc/passwd"}}, {"allow_remote": True}, "http://"),
        ({"image_url": "/etc/passwd"}, {"allow_remote": True}, "http://"),
        ({"image_url": {"url": None}}, {}, "data:image/"),
        ({"image_url": 3}, {}, "data:image/"),
        ({"nested": [[{"image_url": {"url": "/etc/passwd"}}]]}, {}, "data:image/"),
        ({"video_url": {"url": URL}}, {}, "video_url"),
        ({"audio_url": {"url": URL}}, {}, "audio_url"),
        ({"input_audio": "/etc/passwd"}, {}, "input_audio"),
        ({}, {"max_tokens": 9}, "max_tokens"),
        ({}, {"max_completion_tokens": 0}, "max_completion_tokens"),
        ({}, {"max_output_tokens": True}, "max_output_tokens"),
        ({}, {"max_new_tokens": "8"}, "max_new_tokens"),
        ({}, {"generation_config": "{}"}, "generation_config"),
        ({}, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ],
)
def test_a_request_that_would_fetch_open_or_run_on_is_refused(part, fields, name):
    allow = fields.pop("allow_remote", False)
    for body in ({"messages": [{"content": [part]}]}, {"input": [part]}):
        with pytest.raises(HTTPException) as refused:
            check_body({**body, **fields}, max_new_tokens=8, allow_remote=allow)
        assert refused.value.status_code == 400
        assert name in refused.value.detail


def test_what_is_asked_for_is_taken() -> None:
    remote = said({"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}})
    check_body(remote, max_new_tokens=8, allow_remote=True)
    check_body(question(WHAT, picture(1), max_tokens=8), max_new_tokens=8, allow_remote=False)
    check_body({"prompt": "x", "max_tokens": None}, max_new_tokens=8, allow_remote=False)


def test_an_image_behind_an_address_is_carried_by_the_request_or_refused(tmp_path: Path) -> None:
    """Transformers itself waits for ever, and takes any size."""
    (tmp_path / "pic.png").write_bytes(base64.b64decode(URL.partition(",")[2]))
    (tmp_path / "text.png").write_bytes(b"no image")
    with served(tmp_path) as (port, _):
        for given in ({"url": f"http://127.0.0.1:{port}/pic.png"}, f"http://127.0.0.1:{port}/pic.png"):
            body = said({"type": "image_url", "image_url": given})
            carry_images(body)
            (part,) = [part for part in body["messages"][-1]["content"] if "image_url" in part]
            url = part["image_url"]["url"] if isinstance(given, dict) else part["image_url"]
            assert base64.b64decode(url.partition(",")[2]) == (tmp_path / "pic.png").read_bytes()
            assert load_image(url).size == load_image(str(tmp_path / "pic.png")).size
        for name in ("text.png", "absent.png"):
            with pytest.raises(HTTPException) as refused:
                carry_images(said({"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/{name}"}}))
            assert (refused.value.status_code, name in refused.value.detail) == (400, True)


def test_what_the_handlers_get_is_checked_too(running: Running) -> None:
    assert running.send(said({"type": "image_url", "image_url": {"url": "/etc/passwd"}}))[0] == 400
    assert running.send({"input": [{"type": "input_image", "image_url": "/etc/passwd"}]}, "/v1/responses")[0] == 400
    assert running.send({"prompt": "x", "max_tokens": 41}, "/v1/completions")[0] == 400
    assert running.send(question("hello", model="another"))[0] == 400


@pytest.mark.parametrize("path", ["/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone"])
def test_no_route_loads_another_model(running: Running, path: str) -> None:
    assert running.send({"model": "another"}, path)[0] in (404, 405)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example"])
def test_a_page_that_names_this_machine_its_own_is_refused(running: Running, host: str) -> None:
    assert running.send(question("hello", max_tokens=1), host=host)[0] == 400
    assert running.send(path="/health", host=host)[0] == 400
    assert running.send(path="/health", host="127.0.0.1:1")[0] == 200


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named() -> None:
    with open_port(0) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(TrimtabError, match=str(number)):
            open_port(number)


# -- folders and maps --------------------------------------------------------------------------------------------------


def test_a_folder_that_lacks_its_processor_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "preprocessor_config.json").unlink()
    with refused(ConfigError):
        load_processor(copy)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("tokenizer.json", "model", []),
        ("tokenizer.json", "added_tokens", 5),
        ("tokenizer_config.json", "tokenizer_class", []),
        ("tokenizer_config.json", "eos_token", [[]]),
        ("preprocessor_config.json", "size", "x"),
        ("preprocessor_config.json", "image_processor_type", {"a": []}),
        ("processor_config.json", "image_processor", 5),
        ("processor_config.json", "processor_class", [5]),
        ("chat_template.json", "chat_template", 5),
        ("generation_config.json", "eos_token_id", {"a": []}),
        ("config.json", "text_config", None),
        ("config.json", "vision_config", [5]),
    ],
)
def test_a_field_of_another_kind_is_one_sentence_or_nothing(folder, tmp_path, name, field, value):
    """`text_config: null` is a model of other sizes, which would be drawn at random."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    content = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
    (copy / name).write_text(json.dumps({**content, field: value}))
    with suppress(ConfigError):
        load_processor(copy)
        load_placed(copy, {"": "cpu"})


def test_a_folder_quantised_is_placed_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    with refused(ConfigError):
        load_placed(copy, {"model": "cpu", "lm_head": "disk"})


def test_nothing_of_the_folder_is_executed(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    config = json.loads((copy / "config.json").read_text())
    auto = {"AutoConfig": "evil.C", "AutoModelForImageTextToText": "evil.M", "AutoProcessor": "evil.P"}
    (copy / "config.json").write_text(json.dumps({**config, "auto_map": auto}))
    load_placed(copy, {"": "cpu"})
    load_processor(copy)
    assert not (tmp_path / "ran").exists()


# -- TorchServe's handler ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [{"": "cpu"}, "auto", "sequential"])
def test_torchserves_handler_answers_as_the_model(folder: Path, running: Running, tmp_path: Path, places: Any) -> None:
    """Whole answers, and a refusal with its status."""
    from trimtab.serve.torchserve_handler import ChatHandler

    setup = {"model_path": str(folder), "device_map": places, "max_memory": {"cpu": "1GiB"}, "max_length": "8"}
    setup |= {"runs_on": {}, "torch_dtype": "float32", "offload_folder": None}
    (tmp_path / "setup_config.json").write_text(json.dumps(setup))

    class Context:
        model_name, system_properties = "llava", {"model_dir": str(tmp_path)}
        statuses: ClassVar[dict[int, int]] = {}

        def set_response_status(self, *, code: int, phrase: str, idx: int) -> None:
            self.statuses[idx] = code

        def set_response_content_type(self, idx: int, kind: str) -> None:
            assert kind == "application/json"

    handler, context = ChatHandler(), Context()
    handler.initialize(context)
    asked = [question("hello", max_tokens=8), question("?", picture(1), max_tokens=8), question("?", max_tokens=99)]
    answers = [json.loads(x) for x in handler.handle([{"body": {**body, "temperature": 0}} for body in asked], context)]
    assert answers[0]["choices"][0]["message"]["content"] == running.text_of_generate("hello", tokens=8)
    assert answers[1]["choices"][0]["message"]["content"] == running.text_of_generate("?", picture(1), tokens=8)
    assert context.statuses == {2: 400}
    assert "max_tokens" in answers[2]["detail"]
