"""The demo's data set on disk: plain images of real sizes, conversations about them, and a tokenizer trained on those.

All choices are of one seeded `random.Random`: the same seed gives the same data.jsonl on every machine. Sizes of images
and lengths of answers, which are what a plan rests on, stand in two tables; what the pictures show does not matter.
"""

# ruff: noqa: S311, SIM905 - draws pictures, guards no secret; words read best as text

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.files import write_atomically

SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<image>", "<img>", "</img>", "<IMG_CONTEXT>"),
)
"""Names that Qwen2-VL and InternVL give them; the first twelve ids, in this order."""

# kind: (its share of the pictures, sizes as (weight, width, height): the first picture of each kind has the first size)
_SIZES: dict[str, tuple[int, tuple[tuple[int, int, int], ...]]] = {
    "chart": (28, ((34, 850, 600), (36, 640, 420), (14, 1200, 700), (8, 600, 900), (2, 1920, 240), (4, 2000, 1300))),
    "page": (
        20,
        ((26, 850, 1100), (26, 1240, 1754), (12, 1654, 2339), (24, 620, 440), (3, 2480, 3508), (3, 300, 2400)),
    ),
    "photo": (32, ((34, 640, 480), (16, 480, 640), (22, 1024, 683), (10, 336, 336), (8, 160, 120), (1, 4000, 3000))),
    "screenshot": (14, ((22, 1280, 800), (22, 1920, 1080), (12, 1170, 2532), (14, 750, 1334), (6, 2560, 1440))),
    "icon": (6, ((3, 32, 32), (7, 128, 128), (1, 96, 48))),
}
# source: (its share of the samples, words of an answer as (weight, fewest, most): the last rows are the tail)
_LENGTHS: dict[str, tuple[int, tuple[tuple[int, int, int], ...]]] = {
    "chart": (24, ((60, 1, 8), (40, 20, 60))),
    "page": (17, ((50, 6, 40), (30, 40, 160), (16, 160, 500), (4, 500, 1100))),
    "photo": (26, ((20, 8, 30), (55, 40, 140), (22, 140, 280), (3, 280, 600))),
    "screenshot": (13, ((45, 8, 40), (40, 40, 140), (15, 140, 400))),
    "multi-image": (8, ((30, 20, 60), (50, 60, 200), (20, 200, 500))),
    "text": (12, ((46, 20, 120), (32, 120, 400), (15, 400, 1100), (5, 1100, 2400), (2, 2400, 3600))),
}
_MAX_MULTI_PIXELS = 900_000  # samples of several images take small ones, as web crawls and comic strips do
_WORDS = (
    "a about after all also and are as at because before blue border boxes by can chart color column each figure first "
    "for from green has here higher image in is it label large left light line lower means more most next number of on "
    "one or other page part picture red right row second shown side since small table text than that the then there "
    "these this title to top two under value were where which while with word year"
).split()


@dataclass(frozen=True, slots=True)
class _Picture:
    file: str
    width: int
    height: int


def draw_dataset(folder: Path, *, num_samples: int = 2000, seed: int = 0) -> Path:
    """Write images/ (one for six samples, 40 to 320), tokenizer.json, tokenizer_config.json and data.jsonl.

    Use it to try something on data that is small and always the same, as examples/plan_a_run.py does.

    Returns `folder`; image paths in data.jsonl are relative to it. A file of the same name is replaced, others stay.
    """
    if num_samples < 1:
        raise TrimtabError(f"num_samples must be at least 1, and is {num_samples}")
    rng = Random(seed)
    pictures = _choose_pictures(rng, min(320, max(40, num_samples // 6)))
    records = [_make_record(rng, number, pictures) for number in range(num_samples)]
    for same in pictures.values():
        for picture in same:
            _write(folder / picture.file, _paint(rng, picture))
    texts = (turn["value"] for record in records for turn in record["conversations"])
    _write(folder / "tokenizer.json", train_tokenizer(texts).encode())
    _write(folder / "tokenizer_config.json", _tiny_model("tokenizer_config.json"))
    _write(folder / "data.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
    return folder


def write_model(folder: Path, drawn: Path) -> Path:
    """Write a Qwen2.5-VL of 1.0 M parameters without weights, and the tokenizer in the folder `drawn`.

    Use it where a model should train on a laptop, as examples/train_on_two_stages.py does. `drawn` is the folder that
    `draw_dataset` wrote. `trimtab train --random-weights` draws its weights.
    """
    for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
        write_atomically(folder / name, _tiny_model(name))
    write_atomically(folder / "tokenizer.json", (drawn / "tokenizer.json").read_bytes())
    return folder


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 4096) -> str:
    """Return a `tokenizer.json`: byte-level BPE over words and single digits, lossless on any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    text: str = tokenizer.to_str(pretty=False)
    return text + "\n"


def _choose_pictures(rng: Random, num_pictures: int) -> dict[str, list[_Picture]]:
    """Return the pictures of each kind; the first ones go once through its sizes, the others follow the weights."""
    found: dict[str, list[_Picture]] = {}
    for kind, (share, sizes) in _SIZES.items():
        found[kind] = []
        for number in range(max(2, num_pictures * share // 100)):
            _, width, height = sizes[number] if number < len(sizes) else _drawn(rng, sizes)
            file = f"images/{kind}-{number:03d}.{'jpg' if kind == 'photo' else 'png'}"
            found[kind].append(
                _Picture(file, width * rng.randint(88, 100) // 100, height * rng.randint(88, 100) // 100)
            )
    return found


def _paint(rng: Random, picture: _Picture) -> bytes:
    """Return the image's file: one colour with a rectangle of another."""
    from PIL import Image

    W, H = picture.width, picture.height
    ground, box = ((rng.randrange(256), rng.randrange(256), rng.randrange(256)) for _ in range(2))
    image = Image.new("RGB", (W, H), ground)
    image.paste(box, (0, 0, rng.randint(1, W), rng.randint(1, H)))
    file = io.BytesIO()
    image.save(file, "JPEG" if picture.file.endswith(".jpg") else "PNG")
    return file.getvalue()


def _make_record(rng: Random, number: int, pictures: dict[str, list[_Picture]]) -> dict[str, Any]:
    """Return a conversation in LLaVA's form, of one to six turns; its images stand before the first question."""
    source, (_, lengths) = rng.choices(list(_LENGTHS.items()), [share for share, _ in _LENGTHS.values()])[0]
    images: list[_Picture] = []
    if source == "multi-image":
        small = [x for same in pictures.values() for x in same if x.width * x.height <= _MAX_MULTI_PIXELS]
        images = rng.choices(small, k=rng.choices((2, 3, 4, 6, 8), (50, 24, 14, 8, 4))[0])
    elif source != "text":
        kinds = ("screenshot", "icon") if source == "screenshot" else (source,)
        images = [rng.choice([x for kind in kinds for x in pictures[kind]])]
    turns = []
    for _ in range(rng.choices((1, 2, 3, 6), (62, 24, 12, 2))[0]):
        answer = rng.randint(*_drawn(rng, lengths)[1:])
        for speaker, num_words in (("human", rng.randint(4, 12)), ("gpt", answer)):
            turns.append({"from": speaker, "value": " ".join(rng.choices(_WORDS, k=num_words))})
    turns[0]["value"] = "<image>\n" * len(images) + turns[0]["value"]
    record: dict[str, Any] = {"id": f"{source}-{number:06d}", "source": source, "conversations": turns}
    paths = [picture.file for picture in images]
    return record | ({"image": paths[0] if len(paths) == 1 else paths} if paths else {})


def _drawn(rng: Random, rows: tuple[tuple[int, int, int], ...]) -> tuple[int, int, int]:
    """Return one of the rows by their weights, which stand first."""
    return rng.choices(rows, [row[0] for row in rows])[0]


def _tiny_model(name: str) -> bytes:
    return resources.files("trimtab.demo").joinpath("tiny_model", name).read_bytes()


def _write(path: Path, content: bytes) -> None:
    """Write without waiting for the disk: a demo can be drawn again."""
    write_atomically(path, content, sync=False)
