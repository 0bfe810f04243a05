"""The demo's data set: plain pictures of real sizes, conversations about them, a tokenizer trained on those."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="the demo draws with Pillow: pip install 'trimtab[data]'")
pytest.importorskip("tokenizers", reason="the demo trains a tokenizer: pip install 'trimtab[data]'")

from PIL import Image

from trimtab.demo import SPECIAL_TOKENS, draw_dataset


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_dataset(tmp_path_factory.mktemp("demo"), num_samples=300)


def records(demo: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (demo / "data.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_image_of_every_record_opens_and_has_a_placeholder(demo):
    found = records(demo)
    assert len({record["id"] for record in found}) == len(found) == 300
    assert {x["source"] for x in found} == {"chart", "page", "photo", "screenshot", "multi-image", "text"}
    for record in found:
        image = record.get("image", [])
        paths = [image] if isinstance(image, str) else image
        turns = record["conversations"]
        assert "".join(turn["value"] for turn in turns).count("<image>") == len(paths)
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)
        assert all(turn["value"].strip() for turn in turns)
        assert all((demo / path).is_file() for path in paths)
        assert (len(paths) > 1) == (record["source"] == "multi-image")
        assert (not paths) == (record["source"] == "text")


def test_pictures_differ_and_span_icons_to_scans(demo):
    files = sorted((demo / "images").iterdir())
    assert len({file.read_bytes() for file in files}) == len(files) >= 40
    sizes = []
    for file in files:
        with Image.open(file) as image:
            assert image.format == ("JPEG" if file.suffix == ".jpg" else "PNG")
            image.load()  # whole: Pillow raises on a truncated file
            sizes.append(image.size)
    assert min(map(min, sizes)) <= 32
    assert max(map(max, sizes)) >= 3000
    assert min(width / height for width, height in sizes) < 1 / 6
    assert max(width / height for width, height in sizes) > 6


def test_a_seed_gives_the_same_records_on_every_machine(demo, tmp_path):
    def lines(folder: Path) -> str:
        return hashlib.blake2b((folder / "data.jsonl").read_bytes(), digest_size=8).hexdigest()

    assert lines(demo) == "af768c94b898d0e2"
    assert lines(draw_dataset(tmp_path, num_samples=300, seed=1)) != lines(demo)


def test_tokenizer_is_lossless_and_knows_its_special_tokens(demo):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(12))
    for text in ("Kühlschrank, 冷蔵庫 \N{SLICE OF PIZZA}\n\t x = 3.14;", "The quiet harbor was measured in June 1984."):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user\n<image>").tokens[-1] == "<image>"


def test_chat_template_writes_chatml_in_jinjas_sandbox(demo):
    sandbox = pytest.importorskip("jinja2.sandbox", reason="chat templates need jinja2: pip install 'trimtab[data]'")
    template = sandbox.ImmutableSandboxedEnvironment().from_string(
        json.loads((demo / "tokenizer_config.json").read_text())["chat_template"]
    )
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
