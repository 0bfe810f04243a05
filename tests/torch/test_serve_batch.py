"""Requests that are generated together: the tokens of each are those it gets alone. Needs torch and [serve]."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("fastapi", reason="carries the endpoint: pip install 'trimtab[serve]'")
pytest.importorskip("openai", reason="has the types of the answers: pip install 'trimtab[serve]'")

from tiny_chat import FAMILIES, chat_inputs, picture, question, save_chat_model

from trimtab.runtime.placing.load import load_placed
from trimtab.serve.batch import join_rows, rows_agree
from trimtab.serve.chat import ChatProcessor
from trimtab.serve.limits import ServeLimits
from trimtab.serve.processor import load_processor
from trimtab.serve.worker import Job, ModelThread

ALIKE = {"do_sample": False, "max_new_tokens": 8}


class Loaded:
    """A tiny model behind a thread that is not started: a test calls what the thread would."""

    def __init__(self, folder: Path, family: str, **limits: Any) -> None:
        save_chat_model(folder, family)
        self.model, processor = load_placed(folder, {"": "cpu"}), load_processor(folder)
        self.chat = ChatProcessor(processor, ServeLimits(**limits), name=family)
        self.processor = processor
        self.thread = ModelThread(self.model, ServeLimits(**limits))
        self.thread.try_batch(self.chat.examples())

    def inputs(self, text: str, *images: Any) -> Any:
        return chat_inputs(self.processor, text, *images)

    def job(self, inputs: Any, *, seed: int | None = None, **settings: Any) -> Job:
        own = copy.deepcopy(self.model.generation_config)
        own.update(**{**ALIKE, **settings})
        own.seed = seed
        decode = self.processor.tokenizer.decode
        return Job(request_id="it", wanted={"it"}, inputs=inputs, settings=own, decode=decode)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_a_batch_are_those_given_alone(family: str, tmp_path: Path) -> None:
    """No image, one and two; unlike lengths; under a repetition penalty, which looks at padding too."""
    loaded = Loaded(tmp_path, family)
    assert loaded.thread.together
    rows = [
        loaded.inputs("hello"),
        loaded.inputs("what is in the picture? " * 3, picture(1)),
        loaded.inputs("and here?", picture(2, 70, 90), picture(3)),
    ]
    for settings in ({}, {"repetition_penalty": 1.5}):
        jobs = [loaded.job(row, max_new_tokens=6 + 2 * i, **settings) for i, row in enumerate(rows)]
        loaded.thread._generate(jobs)
        for row, job in zip(rows, jobs, strict=True):
            alone = loaded.model.generate(**row, generation_config=job.settings)
            assert job.done.result(0) == job.tokens == alone[0, row["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("batch"), "llava", max_batch=4, max_batch_tokens=200)


def test_a_model_that_reads_padding_answers_one_at_a_time(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = loaded.model.generate

    def deaf(*, attention_mask: Any, **named: Any) -> Any:
        return generate(attention_mask=torch.ones_like(attention_mask), **named)

    monkeypatch.setattr(loaded.model, "generate", deaf)
    assert not rows_agree(loaded.model, loaded.chat.examples())
    monkeypatch.undo()
    assert rows_agree(loaded.model, loaded.chat.examples())
    # rotary frequencies that follow the longest row of a batch
    monkeypatch.setattr(loaded.model.config.get_text_config(), "rope_parameters", {"rope_type": "longrope"})
    assert not rows_agree(loaded.model, loaded.chat.examples())


def test_padding_repeats_the_rows_own_last_token() -> None:
    rows = [
        {"input_ids": torch.tensor([[5, 6]]), "pixels": torch.ones(3, 2)},
        {"input_ids": torch.tensor([[7, 8, 9]]), "token_type_ids": torch.tensor([[0, 1, 0]])},
    ]
    joined = join_rows(rows)
    assert joined["input_ids"].tolist() == [[6, 5, 6], [7, 8, 9]]
    assert joined["token_type_ids"].tolist() == [[0, 0, 0], [0, 1, 0]]
    assert joined["pixels"].shape == (3, 2)


def test_only_like_requests_go_together_and_the_oldest_goes_first(loaded: Loaded) -> None:
    row, long = loaded.inputs("hello"), loaded.inputs("hello " * 60)
    oldest, gone = loaded.job(row), loaded.job(row)
    gone.wanted.clear()
    jobs = {
        "other settings": loaded.job(row, do_sample=True, temperature=0.5),
        "same": loaded.job(row, max_new_tokens=3),
        "a seed": loaded.job(row, seed=1),
        "too long beside the others": loaded.job(long),
        "with a picture": loaded.job(loaded.inputs("hello", picture(1))),
        "n-grams": loaded.job(row, no_repeat_ngram_size=2),
        "same again": loaded.job(row),
        "more than fit": loaded.job(row),
    }
    thread = loaded.thread
    thread._jobs = [gone, oldest, *jobs.values()]
    assert thread._take() == [oldest, jobs["same"], jobs["with a picture"], jobs["same again"]]
    for name in ("other settings", "a seed", "too long beside the others", "n-grams", "more than fit"):
        assert thread._take() == [jobs[name]]
    assert not thread._jobs


def test_a_request_that_fails_fails_alone(loaded: Loaded) -> None:
    wrong = dict(loaded.inputs("hello", picture(1)))
    wrong["pixel_values"] = wrong["pixel_values"][:0]
    jobs = [loaded.job(loaded.inputs("hello")), loaded.job(wrong), loaded.job(loaded.inputs("you", picture(2)))]
    loaded.thread._answer(jobs)
    assert [job.done.exception(0) is None for job in jobs] == [True, False, True]
    assert "log says why" in str(jobs[1].done.exception(0))
    assert loaded.thread._failures == 0


@pytest.mark.parametrize(
    "places", [{"": 0}, {"model.visual": 1, "model.language_model": 0, "lm_head": 0}, {"": "cpu", "lm_head": 1}]
)
def test_a_batch_of_a_placed_model_is_that_of_the_whole_one(tmp_path: Path, places: dict[str, int | str]) -> None:
    """Simulated devices; pixels go straight to the vision tower, all else to the head's device."""
    from simulated_devices import simulated

    whole = Loaded(tmp_path, "qwen2_5_vl")
    rows = [whole.inputs("hello"), whole.inputs("what is it?", picture(5))]
    expected = [whole.job(row) for row in rows]
    whole.thread._generate(expected)
    with simulated():
        model = load_placed(tmp_path, places)
        thread = ModelThread(model, ServeLimits())
        thread.try_batch(rows)
        assert thread.together
        found = [whole.job(row) for row in rows]
        thread._generate(found)
    assert [job.tokens for job in found] == [job.tokens for job in expected]


@pytest.mark.parametrize("places", [{"": "cpu"}, "auto", "balanced_low_0", "sequential"])
def test_torchserves_handler_answers_as_the_model(tmp_path: Path, places: Any) -> None:
    """A batch of three: whole answers, and a refusal with its status."""
    from trimtab.serve.torchserve_handler import ChatHandler

    whole = Loaded(tmp_path / "model", "llava")
    setup = {"model_path": str(tmp_path / "model"), "device_map": places, "max_memory": {"cpu": "1GiB"}}
    setup |= {"runs_on": {}, "torch_dtype": "float32", "offload_folder": None, "max_new_tokens": 8}
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
    rows = [{"body": {**body, "temperature": 0}} for body in asked]
    answers = [json.loads(answer) for answer in handler.handle(rows, context)]
    for answer, row in zip(answers, (whole.inputs("hello"), whole.inputs("?", picture(1))), strict=False):
        tokens = whole.model.generate(**row, **ALIKE)[0, row["input_ids"].shape[1] :]
        text = whole.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        assert answer["choices"][0]["message"]["content"] == text
    assert context.statuses == {2: 400}
    assert answers[2]["error"]["message"] == "max_tokens must be a number from 1 to 8"
