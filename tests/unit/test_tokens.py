"""Token counts: exact with a tokenizer whatever the template takes, a stated estimate without one."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusals import refused

tokenizers = pytest.importorskip("tokenizers", reason="the [data] extra is not installed")
pytest.importorskip("jinja2", reason="the [data] extra is not installed")

from sample_sets import CHATML, GEMMA, INTERNVL, SPECIAL, VICUNA, talk, write_tokenizer  # noqa: E402

from trimtab.errors import ConfigError  # noqa: E402
from trimtab.samples.problems import BadRecordError  # noqa: E402
from trimtab.samples.rows import read_conversation  # noqa: E402
from trimtab.samples.tokens import CUTTING, MARKUPS, TokenCounter, read_tokenizer  # noqa: E402
from trimtab.specs import ImageCounts, ImageMarkup  # noqa: E402


def image(tokens, tiles=1):
    return ImageCounts(patches=4 * tokens, tokens=tokens, tiles=tiles, patches_sq=0, patches_windowed=0)


def counter_of(folder, template=CHATML, **options):
    keys = ("special", "config", "post")
    write_tokenizer(folder, template, **{key: options.pop(key) for key in keys if key in options})
    return TokenCounter(read_tokenizer(folder, **options))


def count(counter, conversation, *images):
    return counter.count([counter.render(conversation, images)])[0]


def sharegpt(*texts, images=0, **fields):
    return read_conversation({"conversations": talk(*texts), "image": ["x.png"] * images, **fields})


def encoded(folder, text):
    return len(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False))


TEMPLATES = {
    "chatml": (
        CHATML,
        "<|im_start|>user\na {}? b<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n",
        "<|vision_start|>" + "<|image_pad|>" * 7 + "<|vision_end|>",
    ),
    "internvl": (
        INTERNVL,
        "<|im_start|>user\na {}\n? b<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n",
        "<img>" + "<IMG_CONTEXT>" * 7 + "</img>",
    ),
    "vicuna": (VICUNA, "<s>USER: a {}? b ASSISTANT: the cat</s>", "<image>" * 7),
    "gemma": (
        GEMMA,
        "<s><start_of_turn>user\na{}? b<end_of_turn>\n<start_of_turn>model\nthe cat<end_of_turn>\n",
        "\n\n<start_of_image>" + "<image_soft_token>" * 7 + "<end_of_image>\n\n",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_counts_equal_the_written_out_text(tmp_path, name):
    template, text, expanded = TEMPLATES[name]
    special = [
        t for t in SPECIAL if name != "vicuna" or t not in ("<|image_pad|>", "<IMG_CONTEXT>", "<image_soft_token>")
    ]
    counter = counter_of(tmp_path, template, special=special)
    counted = count(counter, sharegpt("a <image>? b", "the cat", images=1), image(7))
    assert counted == encoded(tmp_path, text.format(expanded))
    assert counter.exact
    assert counter.assumptions == []


def test_gemmas_crops_are_written_with_their_sentence(tmp_path):
    counter = counter_of(tmp_path, GEMMA)
    full = "\n\n<start_of_image>" + "<image_soft_token>" * 5 + "<end_of_image>\n\n"
    crops = f"Here is the original image {full} and here are some crops to help you see better {full} {full}"
    text = f"<s><start_of_turn>user\n{crops}what?<end_of_turn>\n"
    assert count(counter, sharegpt("<image>what?", images=1), image(15, tiles=3)) == encoded(tmp_path, text)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(MARKUPS)),
    st.lists(st.tuples(st.text("a cat\n.é<|", max_size=12), st.integers(1, 9)), max_size=4),
    st.text("x \n", max_size=3),
)
def test_one_soft_token_and_a_number_equal_all_soft_tokens(tmp_path_factory, family, images, end):
    folder = tmp_path_factory.getbasetemp() / "soft"
    markup = MARKUPS[family]
    written = markup.written or markup.placeholder
    counter = counter_of(folder, None, markup=markup)
    content = "".join(f"{before}<image>" for before, _ in images) + end
    counted = count(counter, sharegpt(content, images=len(images)), *(image(n) for _, n in images))
    parts = [
        before + written.replace(markup.placeholder, markup.before + markup.soft * n + markup.after)
        for before, n in images
    ]
    assert counted == encoded(folder, "".join(parts) + end)


def test_plain_strings_are_used_where_a_template_takes_nothing_else(tmp_path):
    plain = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + '' }}{% endfor %}"
    counter = counter_of(tmp_path, plain)
    conversation = sharegpt("<image>\nwhat?", images=1)
    pads = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
    assert count(counter, conversation, image(2)) == encoded(tmp_path, f"[user]{pads}\nwhat?")
    typed = read_conversation({"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}]}]})
    assert count(counter, typed) == encoded(tmp_path, "[user]what?")


def test_parts_are_used_where_a_template_takes_nothing_else(tmp_path):
    typed = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] or '<image>' }};{% endfor %}{% endfor %}"
    counter = counter_of(
        tmp_path, typed.replace("c['text'] or '<image>'", "'<image>' if c.type == 'image' else c.text")
    )
    assert count(counter, sharegpt("what?")) == encoded(tmp_path, "what?;")
    assert count(counter, sharegpt("a<image>b", images=1), image(3)) == encoded(tmp_path, "a;<image><image><image>;b;")


def test_tools_reasoning_and_tool_calls_reach_the_template(tmp_path):
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{% if m.content is defined %}{{ m.content }}{% endif %}"
        "{% if m.reasoning_content %}({{ m.thinking }}){% endif %}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    )
    counter = counter_of(tmp_path, template)
    row = {
        "tools": [{"name": "é"}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [{"f": 1}], "reasoning": "cat"},
            {"role": "tool", "content": "sun", "name": None},
        ],
    }
    assert count(counter, read_conversation(row)) == encoded(tmp_path, '[{"name": "é"}]a(cat)[{"f": 1}]sun')


def test_template_extensions_of_transformers_are_there(tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{% set ns = namespace(n=dict(a=3)['a']) %}"
        "{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ strftime_now('%Y')[:0] }}"
    )
    counter = counter_of(tmp_path, template)
    assert count(counter, sharegpt("cat", "sun", "mat")) == encoded(tmp_path, "catsun4")
    assert any("today's date" in note for note in counter.assumptions)


def test_a_template_is_held_in_its_sandbox(tmp_path):
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with refused(ConfigError):
            counter_of(tmp_path, attack + "{{ messages[0].content }}")
        guarded = "{% if messages[0].content == 'attack' %}" + attack + "{% endif %}{{ messages[0].content }}"
        counter = counter_of(tmp_path, guarded)
        if "mro" in attack:  # an unsafe attribute is undefined, and cannot be followed
            with pytest.raises(BadRecordError):
                count(counter, sharegpt("attack"))


def test_a_conversation_the_template_refuses_is_a_bad_sample(tmp_path):
    counter = counter_of(tmp_path, VICUNA)
    with refused(BadRecordError) as caught:
        count(counter, sharegpt("hi", system="be kind"))
    assert caught.value.kind == "template"


def test_the_images_own_token_in_a_text_is_a_bad_sample(tmp_path):
    counter = counter_of(tmp_path)
    with refused(BadRecordError, "2", "1") as caught:
        count(counter, sharegpt("<image> and <|image_pad|>", images=1), image(3))
    assert caught.value.kind == "placeholder"


def test_missing_markers_are_added_and_said(tmp_path):
    counter = counter_of(tmp_path, None, special=("<s>",), markup=MARKUPS["internvl"])
    assert any("no <IMG_CONTEXT> <img> </img>" in note for note in counter.assumptions)
    assert any("no chat template" in note for note in counter.assumptions)
    assert count(counter, sharegpt("<image>", images=1), image(9)) == 11


def test_an_unknown_image_token_is_said(tmp_path):
    counter = counter_of(tmp_path, None, special=("<s>",))
    assert any("names an image token: <image> is taken" in note for note in counter.assumptions)


def test_special_tokens_follow_the_tokenizer_or_the_processor(tmp_path):
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    conversation = sharegpt("cat", "sun")
    alone = encoded(write_tokenizer(tmp_path, bare, post=True), "catsun")
    assert count(counter_of(tmp_path, bare, post=True), conversation) == alone
    assert count(counter_of(tmp_path, bare, post=True, special_tokens="processor"), conversation) == alone + 1
    with_bos = counter_of(tmp_path, "{{ bos_token }}" + bare, post=True, special_tokens="processor")
    assert count(with_bos, conversation) == alone + 1
    both = [with_bos.render(conversation, ()), counter_of(tmp_path, bare, post=True).render(conversation, ())]
    assert with_bos.count(both) == [alone + 1, alone + 1]


def test_truncation_and_padding_of_the_file_do_not_count(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    counted = count(TokenCounter(read_tokenizer(tmp_path)), sharegpt("the cat sits on the mat"))
    write_tokenizer(tmp_path)
    assert counted == encoded(tmp_path, "<|im_start|>user\nthe cat sits on the mat<|im_end|>\n")


@pytest.mark.parametrize("numbers", [None, r"\p{N}", r"\p{N}{1,3}"])
def test_counts_by_words_met_before_equal_those_of_the_text(tmp_path, numbers):
    write_tokenizer(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    split, byte_level = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    if numbers is not None:
        rule = next(rule for rule in CUTTING if rule.count(numbers + "|") == 1)
        levels = [split(tokenizers.Regex(rule), "isolated"), byte_level(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(levels)
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    counter, draw = TokenCounter(read_tokenizer(tmp_path)), random.Random(0)
    few = ["the", "cat", "'s", "1234", "é", "猫!?", "<|im_end|>", *"   \n\t\u00a0\u0301", "  "]
    texts = ["".join(draw.choices(few, k=draw.randrange(1, 30))) for _ in range(300)] * 4
    assert counter.count_by_words(texts) == [encoded(tmp_path, text) for text in texts]
    assert counter.count_by_words([str(number) for number in range(9000, 9050)]) is None  # most are new


@pytest.mark.parametrize("own", [{"lstrip": True}, {"single_word": True}, {"content": "a cat"}])
def test_words_of_other_tokenizers_are_not_counted_apart(tmp_path, own):
    write_tokenizer(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken(**{"content": "<own>"} | own)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TokenCounter(read_tokenizer(tmp_path)).count_by_words(["the cat"] * 9) is None


def test_tokens_of_the_config_are_added(tmp_path):
    config = {
        "added_tokens_decoder": {"9000": {"content": "sits on", "special": False, "lstrip": True}},
        "extra_special_tokens": {"image_token": "<mine>"},
    }
    counter = counter_of(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}", config=config)
    assert count(counter, sharegpt("<mine> sits on<mine>")) == 3


def test_templates_are_found_in_transformers_order(tmp_path):
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write_tokenizer(tmp_path, None, config={"chat_template": "C" + bare})
    found = [read_tokenizer(folder).template]
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D" + bare}]
    write_tokenizer(tmp_path, None, config={"chat_template": named})
    found.append(read_tokenizer(folder / "tokenizer.json").template)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "B" + bare}))
    found.append(read_tokenizer(folder).template)
    (folder / "chat_template.jinja").write_text("A" + bare)
    found.append(read_tokenizer(folder).template)
    (folder / "other.jinja").write_text("O" + bare)
    found.append(read_tokenizer(folder, chat_template=folder / "other.jinja").template)
    assert [template[0] for template in found] == ["C", "D", "B", "A", "O"]


def test_tokens_that_are_no_list_are_none_and_half_characters_are_refused(tmp_path):
    folder = write_tokenizer(tmp_path, config={"extra_special_tokens": 7})
    assert [text for text, _ in read_tokenizer(folder).added] == ["<s>", "</s>"]
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": ["\ud800"]}))
    with refused(ConfigError):
        read_tokenizer(folder)


def test_the_estimate_counts_bytes_turns_and_markers():
    counter = TokenCounter(None)
    assert not counter.exact
    assert len(counter.assumptions) == 1
    assert count(counter, sharegpt("a" * 40, "é" * 20)) == -(-81 // 4) + 2 * 4  # a line end joins the turns
    assert count(counter, sharegpt("<image>" + "a" * 40, images=1), image(50)) == 10 + 4 + 52


def test_a_markup_of_ones_own_counts(tmp_path):
    markup = ImageMarkup(placeholder="<video>", soft="<|video_pad|>", before="<s>")
    counter = counter_of(tmp_path, None, markup=markup)
    assert count(counter, sharegpt("<image>", images=1), image(4)) == 5
