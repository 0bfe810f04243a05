"""The demo's samples: conversations about drawn pictures, in LLaVA's JSON form.

Choices of nothing but one seeded `random.Random`: the same seed gives the same bytes on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from trimtab.demo import words
from trimtab.demo.recipe import Picture

SOURCES = ("chart", "page", "photo", "screenshot", "multi-image", "text")
_SOURCE_WEIGHTS = (24, 17, 26, 13, 8, 12)
_MAX_MULTI_PIXELS = 900_000  # samples of several images take small ones, as web crawls and comic strips do

# words of an answer: (weight, fewest, most); the last rows are the tail
_LENGTHS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "page": ((50, 6, 40), (30, 40, 160), (16, 160, 500), (4, 500, 1100)),
    "photo": ((20, 8, 30), (55, 40, 140), (22, 140, 280), (3, 280, 600)),
    "screenshot": ((45, 8, 40), (40, 40, 140), (15, 140, 400)),
    "multi-image": ((30, 20, 60), (50, 60, 200), (20, 200, 500)),
    "text": ((46, 20, 120), (32, 120, 400), (15, 400, 1100), (5, 1100, 2400), (2, 2400, 3600)),
}
_QUESTIONS: dict[str, tuple[str, ...]] = {
    "page": ("Summarize this document.", "Transcribe the text of this page.", "Explain the main point of this page."),
    "photo": (
        "Describe this picture in detail.",
        "Which colors stand out?",
        "Write a short story that takes place here.",
    ),
    "screenshot": ("What is on this screen?", "Where would you click to go on?", "Describe it from top to bottom."),
    "multi-image": ("What do these images have in common?", "Which image is the odd one out, and why?"),
    "text": ('Write an essay on "{}".', 'What should I know about "{}"?', 'Tell a story called "{}".'),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation, and the images it shows, in the order of their placeholders."""

    id: str
    source: str
    images: tuple[Picture, ...]
    turns: tuple[tuple[str, str], ...]  # what the user says, what the assistant answers

    def line(self) -> str:
        """The record in LLaVA's JSON form; `image` is a path, a list of paths where there are several, or absent."""
        record: dict[str, object] = {"id": self.id, "source": self.source}
        paths = [f"images/{picture.file}" for picture in self.images]
        if paths:
            record["image"] = paths[0] if len(paths) == 1 else paths
        record["conversations"] = [
            {"from": speaker, "value": value}
            for turn in self.turns
            for speaker, value in zip(("human", "gpt"), turn, strict=True)
        ]
        return json.dumps(record, ensure_ascii=False) + "\n"


def make_sample(rng: Random, number: int, pictures: Sequence[Picture]) -> Sample:
    """A sample of a source drawn by weight; its pictures are some of `pictures`."""
    source = rng.choices(SOURCES, _SOURCE_WEIGHTS)[0]
    images: tuple[Picture, ...] = ()
    if source == "multi-image":
        small = [p for p in pictures if p.width * p.height <= _MAX_MULTI_PIXELS]
        images = tuple(rng.choices(small, k=rng.choices((2, 3, 4, 6, 8), (50, 24, 14, 8, 4))[0]))
    elif source != "text":
        # icons are crops of screens, and are asked about as screens are
        kinds = ("screenshot", "icon") if source == "screenshot" else (source,)
        images = (rng.choice([p for p in pictures if p.kind in kinds]),)
    turns = _read_chart(rng, images[0]) if source == "chart" else _talk(rng, source)
    turns[0] = (_place(rng, turns[0][0], len(images)), turns[0][1])
    return Sample(id=f"{source}-{number:06d}", source=source, images=images, turns=tuple(turns))


def _place(rng: Random, question: str, num_images: int) -> str:
    """The question with its images, in one of the ways in which data sets place them."""
    if num_images == 0:
        return question
    if num_images == 1:
        return f"{question}\n<image>" if rng.randint(1, 7) == 1 else f"<image>\n{question}"
    numbered = "".join(f"Image-{number}: <image>\n" for number in range(1, num_images + 1))
    apart = f"First: {'<image>' * (num_images - 1)} and later: <image>\n"
    return rng.choice((numbered, apart, "<image>" * num_images + "\n")) + question


def _read_chart(rng: Random, picture: Picture) -> list[tuple[str, str]]:
    """One to five questions whose answers stand in the chart."""
    names, values = picture.labels, picture.values
    rows = [f"| {name} | {value} |" for name, value in zip(names, values, strict=True)]
    i, j = rng.sample(range(len(names)), 2)
    questions = [
        (f"What is the value for {names[i]}?", str(values[i])),
        ("Which entry has the highest value?", f"{names[values.index(max(values))]}, with {max(values)}."),
        (f"What is the difference between {names[i]} and {names[j]}?", str(abs(values[i] - values[j]))),
        ("What is the title of the chart?", picture.title),
        ("Turn the chart into a table.", "\n".join(["| entry | value |", "|---|---|", *rows])),
    ]
    return rng.sample(questions, rng.choices((1, 2, 3, 5), (40, 30, 20, 10))[0])


def _talk(rng: Random, source: str) -> list[tuple[str, str]]:
    """One to six turns; now and then only of text, about a long text that the user brings."""
    pairs = []
    for _ in range(rng.choices((1, 2, 3, 6), (62, 24, 12, 2))[0]):
        question = rng.choice(_QUESTIONS[source]).format(words.title(rng))
        if source == "text" and rng.randint(1, 8) == 1:
            question = f"Summarize this text.\n\n{words.answer(rng, _num_words(rng, source))}"
        pairs.append((question, words.answer(rng, _num_words(rng, source))))
    return pairs


def _num_words(rng: Random, source: str) -> int:
    rows = _LENGTHS[source]
    _, fewest, most = rng.choices(rows, [row[0] for row in rows])[0]
    return rng.randint(fewest, most)
