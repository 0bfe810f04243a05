"""Encoded conversations against Transformers 5.23: processors' ids, assistant masks of templates; needs torch."""

import random

import pytest
from sample_sets import CHATML, GEMMA, INTERNVL, SPECIAL, VICUNA, write_tokenizer
from test_tokens_against_transformers import CROPS, fast_tokenizer, gemma, internvl, llava, noise, qwen, talks

from refusals import refused
from trimtab.samples.encode import ConversationEncoder
from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import read_conversation
from trimtab.samples.tokens import MARKUPS, TokenCounter, read_tokenizer

WITH_GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("family", [qwen, internvl, gemma, llava], ids=lambda family: family.__name__)
def test_ids_and_counts_equal_the_processors_with_images(tmp_path, family):
    template = {"qwen": CHATML, "internvl": INTERNVL, "gemma": GEMMA, "llava": VICUNA}[family.__name__]
    own = {"llava": ("<|image_pad|>", "<IMG_CONTEXT>", "<image_soft_token>")}.get(family.__name__, ())
    folder = write_tokenizer(tmp_path, template, special=[t for t in SPECIAL if t not in own], post=True)
    processor, name, rule = family(folder)
    declared, derived = (read_tokenizer(folder, special_tokens="processor", markup=x) for x in (MARKUPS[name], None))
    encoder, counters = ConversationEncoder(declared), [TokenCounter(declared), TokenCounter(derived)]
    rng = random.Random(5)
    for turns in talks(25, with_system=family is not llava, seed=2):
        pictures = [noise(rng.randrange(40, 400), rng.randrange(40, 400)) for _ in range(rng.randrange(3))]
        question = next(turn for turn in turns if turn["role"] == "user")
        text = question["content"]
        question["content"] = "".join(["<image>\n"] * len(pictures)) + text
        conversation = read_conversation({"messages": turns, "images": ["x.png"] * len(pictures)})
        sizes = [rule(*picture.size) for picture in pictures]
        encoded = encoder.encode(conversation, sizes)
        if family is not llava:
            parts = [p for _ in pictures for p in ({"type": "image"}, {"type": "text", "text": "\n"})]
            question["content"] = [*parts, {"type": "text", "text": text}]
        chat = processor.apply_chat_template(turns, tokenize=False)
        options = {gemma: dict(CROPS), internvl: {"crop_to_patches": False}}.get(family, {})
        options |= {"add_special_tokens": False} if chat.startswith("<s>") else {}
        ids = processor(text=[chat], images=pictures or None, **options)["input_ids"][0]
        assert encoded.input_ids.tolist() == list(ids)
        for counter in counters:
            assert counter.count([counter.render(conversation, sizes)]) == [len(ids)], [p.size for p in pictures]
        learnt = processor.tokenizer.decode(encoded.input_ids[encoded.learnt])
        replies = [turn["content"].split() for turn in turns if turn["role"] == "assistant"]
        words = "".join(word for reply in replies for word in reply)
        assert words in learnt.replace(" ", "").replace("\n", "") or len(replies) > 1
        assert 0 < encoded.learnt.sum() < len(encoded.learnt)


def test_learnt_tokens_are_those_of_the_generation_blocks(tmp_path):
    folder = write_tokenizer(tmp_path, WITH_GENERATION)
    theirs = fast_tokenizer(folder)
    theirs.chat_template = WITH_GENERATION
    encoder = ConversationEncoder(read_tokenizer(folder))
    for turns in talks(100, with_system=True, seed=7):
        for turn in turns:
            turn["content"] = turn["content"].strip() or "cat"
        expected = theirs.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        encoded = encoder.encode(read_conversation({"messages": turns}), ())
        assert encoded.input_ids.tolist() == expected["input_ids"]
        assert encoded.learnt.tolist() == [bool(x) for x in expected["assistant_masks"]]


def test_without_a_template_replies_are_lines(tmp_path):
    folder = write_tokenizer(tmp_path, None)
    encoder = ConversationEncoder(read_tokenizer(folder))
    conversation = read_conversation(
        {"conversations": [{"from": "human", "value": "what is"}, {"from": "gpt", "value": "a red cat"}]}
    )
    encoded = encoder.encode(conversation, ())
    theirs = fast_tokenizer(folder)
    assert theirs.decode(encoded.input_ids[encoded.learnt]).strip() == "a red cat"
    assert encoded.input_ids.tolist() == theirs("what is\na red cat", add_special_tokens=False)["input_ids"]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    forgetful = (
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}(said before){% else %}"
        "{{ m.content }}{% endif %}|{% endfor %}"
    )
    encoder = ConversationEncoder(read_tokenizer(write_tokenizer(tmp_path, forgetful)))
    talk = [
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "cat"), ("user", "b"), ("assistant", "x"))
    ]
    assert encoder.encode(read_conversation({"messages": talk[:2]}), ()).learnt.any()
    with refused(BadRecordError, "2") as caught:
        encoder.encode(read_conversation({"messages": talk}), ())
    assert caught.value.kind == "template"
