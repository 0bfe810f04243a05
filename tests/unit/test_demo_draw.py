"""The demo's data set: drawn pictures, conversations about them, a tokenizer trained on those."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from random import Random

import pytest

pytest.importorskip("PIL", reason="the demo draws with Pillow: pip install 'trimtab[data]'")
pytest.importorskip("tokenizers", reason="the demo trains a tokenizer: pip install 'trimtab[data]'")

from PIL import Image

from trimtab.demo.draw import DemoData, draw_dataset
from trimtab.demo.pictures import encode
from trimtab.demo.recipe import Picture, make_pictures
from trimtab.demo.samples import Sample, make_sample
from trimtab.demo.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS
from trimtab.errors import TrimtabError

KINDS = ("chart", "page", "photo", "screenshot", "icon")


def draw_samples(num_samples: int, seed: int = 0) -> list[Sample]:
    rng = Random(seed)
    pictures = make_pictures(rng, 320)
    return [make_sample(rng, number, pictures) for number in range(num_samples)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    return draw_dataset(tmp_path_factory.mktemp("demo"), num_samples=120)


def read(demo: DemoData) -> list[dict[str, object]]:
    return [json.loads(line) for line in demo.data.read_text(encoding="utf-8").splitlines()]


def image_paths(record: dict[str, object]) -> list[str]:
    image = record.get("image", [])
    return [image] if isinstance(image, str) else list(image)


# -- on disk --------------------------------------------------------------------------------------------------------


def test_every_image_of_every_record_opens_and_has_a_placeholder(demo):
    records = read(demo)
    assert len(records) == demo.num_samples == 120
    assert len({record["id"] for record in records}) == 120
    for record in records:
        paths = image_paths(record)
        text = "".join(turn["value"] for turn in record["conversations"])
        assert text.count("<image>") == len(paths)
        assert [turn["from"] for turn in record["conversations"]] == ["human", "gpt"] * (
            len(record["conversations"]) // 2
        )
        assert all(turn["value"].strip() for turn in record["conversations"])
        assert all((demo.folder / path).is_file() for path in paths)
        assert (not paths) == (record["source"] == "text")
        assert (len(paths) > 1) == (record["source"] == "multi-image")


def test_drawn_files_are_whole_pngs_and_jpegs_of_the_size_the_recipe_names(demo):
    pictures = make_pictures(Random(0), 40)
    assert sorted(path.name for path in demo.images.iterdir()) == sorted(picture.file for picture in pictures)
    assert demo.num_pictures == len(pictures)
    for picture in pictures:
        with Image.open(demo.images / picture.file) as image:
            assert image.size == (picture.width, picture.height)
            assert image.format == ("JPEG" if picture.kind == "photo" else "PNG")
            assert image.getexif().get(0x0112) == (6 if picture.turned else None)
            image.draft("L", (64, 64))
            image.load()  # whole: Pillow raises on a truncated file


def test_no_samples_is_an_error_that_says_what_to_try(tmp_path):
    with pytest.raises(TrimtabError, match=r"0 samples was asked for, and holds nothing to plan: draw 1 or more"):
        draw_dataset(tmp_path, num_samples=0)


# -- the recipe -----------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_bytes_on_every_machine():
    lines = "".join(sample.line() for sample in draw_samples(200)).encode()
    assert hashlib.blake2b(lines, digest_size=8).hexdigest() == "6d80bf8e22308db8"
    assert lines != "".join(sample.line() for sample in draw_samples(200, seed=1)).encode()


def test_pictures_span_icons_to_scans_and_eight_to_one_both_ways():
    pictures = make_pictures(Random(3), 320)
    assert min(min(p.width, p.height) for p in pictures) == 32
    assert max(max(p.width, p.height) for p in pictures) == 4000
    ratios = [p.width / p.height for p in pictures]
    assert min(ratios) == 1 / 8
    assert max(ratios) == 8
    assert len({p.file for p in pictures}) == len(pictures)
    assert {p.kind for p in pictures} == set(KINDS)
    assert any(p.turned for p in pictures)


# -- pictures -------------------------------------------------------------------------------------------------------


def small(kind: str, width: int = 260, height: int = 200) -> Picture:
    return Picture(
        file=f"x.{'jpg' if kind == 'photo' else 'png'}",
        kind=kind,
        width=width,
        height=height,
        seed=11,
        title="Quiet harbors",
        labels=("Jan", "Feb", "Mar", "Apr"),
        values=(12, 40, 31, 7),
        turned=False,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_painted_at_any_size_and_by_its_seed_alone(kind):
    for width, height in ((260, 200), (150, 700), (1200, 150)):
        picture = small(kind, width, height)
        content = encode(picture)
        assert content == encode(picture)
        assert content != encode(replace(picture, seed=12, title="Broken windows"))
        with Image.open(io.BytesIO(content)) as image:
            assert image.size == (width, height)
            assert image.mode == {"photo": "RGB", "page": "L"}.get(kind, "P")
            low, high = image.convert("L").getextrema()
            assert high - low > 60


# -- the tokenizer --------------------------------------------------------------------------------------------------


def test_tokenizer_is_lossless_and_knows_its_special_tokens(demo):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo.tokenizer))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(12))
    for text in ("Kühlschrank, 冷蔵庫 \N{SLICE OF PIZZA}\n\t x = 3.14;", "The quiet harbor was measured in June 1984."):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user\n<image>").ids[0] == 1
    assert tokenizer.encode("<|im_start|>user\n<image>").tokens[-1] == "<image>"


def test_chat_template_writes_chatml_in_jinjas_sandbox():
    sandbox = pytest.importorskip("jinja2.sandbox", reason="chat templates need jinja2: pip install 'trimtab[data]'")
    template = sandbox.ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A chart."},
    ]
    assert template.render(messages=messages) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is this?<|im_end|>\n"
        "<|im_start|>assistant\nA chart.<|im_end|>\n"
    )
    own_system = [{"role": "system", "content": "Be brief."}, *messages[1:]]
    assert template.render(messages=own_system, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\nA chart.<|im_end|>\n<|im_start|>assistant\n"
    )
