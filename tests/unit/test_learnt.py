"""What is learnt of a chat: what data and template say, found in the whole text."""

from pathlib import Path
from typing import Any

import pytest
from sample_sets import CHATML, VICUNA, PixelRule, write_jsonl, write_tokenizer

from refusals import refused

pytest.importorskip("tokenizers", reason="the [data] extra is not installed")
pytest.importorskip("jinja2", reason="the [data] extra is not installed")

from trimtab.errors import SampleError
from trimtab.samples.encode import ConversationEncoder, learnt_spans
from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import read_conversation
from trimtab.samples.size import size_samples
from trimtab.samples.tokens import TokenCounter, read_tokenizer

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
FORGETS = (  # earlier thinking; the last answer has a block for it
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content %}"
    "{% if m.role == 'assistant' %}{% if '</think>' in text %}{% set text = text.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}{% if loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}{% endif %}{{ text }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
) + PROMPT
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
) + PROMPT


def say(*turns: Any) -> list[dict[str, Any]]:
    """Turns of user and assistant in turn; a pair has more fields."""
    found = []
    for number, turn in enumerate(turns):
        text, more = turn if isinstance(turn, tuple) else (turn, {})
        found.append({"role": ("user", "assistant")[number % 2], "content": text, **more})
    return found


def learnt(folder: Path, template: str | None, messages: list[dict[str, Any]]) -> list[str]:
    counter = TokenCounter(read_tokenizer(write_tokenizer(folder, template)))
    conversation = read_conversation({"messages": messages})
    text = counter.chat(conversation)
    return [text[span.start : span.stop] for span in learnt_spans(counter, conversation)]


THOUGHT = "<think>\nwhy\n</think>\n\nA1"
CALL: Any = {"tool_calls": [{"function": {"name": "tide"}}]}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML + PROMPT, say("Q1", "A1", "Q2", "A2"), ["A1<|im_end|>", "A2<|im_end|>"]),
        (CHATML, say("Q1", "A1", "Q2", "A2"), ["A1<|im_end|>", "A2<|im_end|>"]),
        (CHATML + PROMPT, say("Q1", ("A1", {"loss": False}), "Q2", "A2"), ["A2<|im_end|>"]),
        (CHATML + PROMPT, say("A1", "A1", "A1", "A1"), ["A1<|im_end|>", "A1<|im_end|>"]),
        (CHATML + PROMPT, say("Q1", "", "Q2", "A2"), ["<|im_end|>", "A2<|im_end|>"]),
        (FORGETS, say("Q1", "A1", "Q2", "A2"), ["A1<|im_end|>", "\n</think>\n\nA2<|im_end|>"]),
        (FORGETS, say("Q1", THOUGHT, "Q2", "A2"), ["A1<|im_end|>", "\n</think>\n\nA2<|im_end|>"]),
        (FORGETS, say("Q1", THOUGHT, "Q2", ("A2", {"train": 0})), ["A1<|im_end|>"]),
        (CALLS, say("Q1", (None, CALL)), ["<tool_call>tide</tool_call><|im_end|>"]),
        (CALLS, say("Q1", ("A1", CALL), "Q2", "A2"), ["A1<tool_call>tide</tool_call><|im_end|>", "A2<|im_end|>"]),
        (MARKED, say("Q1", "A1", "Q2", "A2"), ["A1<|im_end|>", "A2<|im_end|>"]),
        (MARKED, say("Q1", ("A1", {"weight": 0}), "Q2", "A2"), ["A2<|im_end|>"]),
        (VICUNA, say("Q1", "A1", "Q2", "A2"), ["A1</s>", "A2</s>"]),
        (None, say("Q1", "A1", "Q2", "A2"), ["A1", "A2"]),
    ],
)
def test_the_assistants_turns_are_learnt_to_their_ends(tmp_path, template, messages, expected):
    assert learnt(tmp_path, template, messages) == expected


def test_spans_are_found_behind_images_that_are_written_out(tmp_path: Path) -> None:
    files = read_tokenizer(write_tokenizer(tmp_path, CHATML + PROMPT))
    counter, encoder = TokenCounter(files), ConversationEncoder(files)
    talk = say("<image><image>Q1", "A1", "<image>Q2", "A2")
    conversation = read_conversation({"messages": talk, "images": ["a", "b", "c"]})
    images = [PixelRule().count(40, 20 * n) for n in (1, 2, 3)]
    encoded = encoder.encode(conversation, images)
    told = counter.encode(counter.render(conversation, images))
    wanted = [x for x, token in zip(told.ids, told.tokens, strict=True) if token in ("A", "1", "2", "<|im_end|>")]
    assert set(encoded.input_ids[encoded.learnt].tolist()) <= set(wanted)
    assert encoded.learnt.sum() in (4, 6)


def test_what_cannot_be_known_is_refused_when_sized(tmp_path: Path) -> None:
    forgetful = "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}(said)" + (
        "{% else %}{{ m.content }}{% endif %}|{% endfor %}"
    )
    folder = write_tokenizer(tmp_path / "model", forgetful)
    data = write_jsonl(tmp_path / "d.jsonl", [{"messages": say("a", "b")}, {"messages": say("a", "b", "c", "d")}])
    result = size_samples(data, image_rule=PixelRule(), tokenizer=folder, on_bad="skip")
    assert [(bad.line, bad.kind) for bad in result.bad] == [(2, "template")]
    with pytest.raises(SampleError):
        size_samples(data, image_rule=PixelRule(), tokenizer=folder)
    with refused(BadRecordError, "2"):
        learnt(tmp_path / "model", forgetful, say("a", "b", "c", "d"))
