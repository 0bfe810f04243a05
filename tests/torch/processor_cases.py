"""Sizes, drawn images and real processors of Transformers 5.23 around a word-level tokenizer. Needs torch and Pillow.

The processors are the PIL ones (`*ImageProcessorPil`, what `AutoImageProcessor` picks without torchvision).
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")

from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from trimtab.errors import ImageError
from trimtab.specs import ImageRule

WORDS = [
    "<unk>", "<image>", "<video>", "<|image_pad|>", "<|video_pad|>",
    "<IMG_CONTEXT>", "<img>", "</img>", "<image_soft_token>", "<start_of_image>",
    "<end_of_image>", "<|image|>", "<|video|>", "<|vision_start|>", "<|vision_end|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
]  # fmt: skip


def make_sizes() -> list[tuple[int, int]]:
    """More than 20,000 (width, height): photographs, slivers, ties of every rule, one pixel, gigapixels."""
    rng = random.Random(20)
    sizes = [(rng.randint(1, 5000), rng.randint(1, 5000)) for _ in range(8000)]
    sizes += [(round(10 ** rng.uniform(0, 5)), round(10 ** rng.uniform(0, 5))) for _ in range(6000)]
    edges = sorted({f * k + d for f in (14, 28, 32, 336, 384, 448) for k in (1, 2, 3, 5) for d in (-1, 0, 1)})
    sizes += list(itertools.product(edges, edges))
    # half of a factor (rounding half to even) and whole multiples
    halves = [f * k // 2 for f in (28, 32) for k in range(1, 25)]
    sizes += list(itertools.product(halves, halves))
    # aspect ratios of tilings and the midpoints between them, in several scales
    ratios = [(i, j) for i in range(1, 14) for j in range(1, 14)]
    sizes += [(i * k, j * k) for i, j in ratios for k in (1, 37, 100, 224, 317, 448)]
    sizes += [(i * k + d, 2 * j * k) for i, j in ratios for k in (50, 200) for d in (-1, 0, 1)]
    # around the ratio of 200 that smart_resize refuses
    for short in (1, 2, 3, 5, 7, 10, 27, 28, 29, 50, 101):
        for long in (199 * short, 200 * short - 1, 200 * short, 200 * short + 1, 201 * short, 1000 * short):
            sizes += [(long, short), (short, long)]
    # float products a hair below a whole number, which LLaVA's round(x, 7) lifts
    hair = [(47, 1128), (55, 88), (110, 352), (396, 704), (423, 752), (47, 423), (98, 1323), (294, 1323)]
    sizes += hair + [(height, width) for width, height in hair]
    huge = [1, 2, 27, 28, 99_999, 2**20, 10**7, 2**31 - 1]
    sizes += list(itertools.product(huge, huge))
    return sizes


SIZES = make_sizes()
DRAWN = [(random.Random(i).randint(1, 900), random.Random(-i).randint(1, 900)) for i in range(1, 22)] + [
    (1920, 1080), (1, 1), (1, 150), (150, 1), (448, 448), (28, 5600), (1400, 7), (640, 480), (635, 635), (300, 2700)
]  # fmt: skip


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="<unk>", pad_token="<unk>", extra_special_tokens=special
    )


def make_processor(cls: type, image_processor: object, tokenizer: object, **settings: object):
    """A real processor without its video half, which cannot be built without torchvision."""
    without_video = type(
        cls.__name__, (cls,), {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])}
    )
    return without_video(image_processor=image_processor, tokenizer=tokenizer, **settings)


def draw(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 7919 + height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def assert_same_counts(rule: ImageRule, official) -> None:
    """`official(width, height)` gives (patches, tokens) or raises ValueError; the rule does the same everywhere."""
    refused, wrong = 0, []
    for width, height in SIZES:
        try:
            expected = official(width, height)
        except ValueError:
            refused += 1
            with pytest.raises(ImageError):
                rule.count(width, height)
            continue
        counts = rule.count(width, height)
        if (counts.patches, counts.tokens) != expected:
            wrong.append((width, height, counts, expected))
    assert not wrong, (len(wrong), wrong[:5])
    assert len(SIZES) - refused > 20_000


def assert_full_run(
    processor: Any, rule: ImageRule, token: str, count: Callable[[Any], int], of: str = "tiles", sizes: Any = DRAWN
) -> None:
    """On drawn images: `count` of what the processor makes is the rule's `of`, its placeholders are the tokens."""
    for width, height in sizes:
        counts = rule.count(width, height)
        if counts.patches > 12_000 and of == "patches":
            continue  # a second of drawing each
        out = processor(images=draw(width, height), text=token, return_tensors="np" if of == "patches" else "pt")
        assert count(out) == getattr(counts, of), (rule.name, width, height)
        soft = "<image_soft_token>" if token == "<start_of_image>" else token
        assert int((out["input_ids"] == WORDS.index(soft)).sum()) == counts.tokens, (rule.name, width, height)
