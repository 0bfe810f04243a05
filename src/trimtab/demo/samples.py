"""The demo's samples: conversations about drawn pictures, in LLaVA's JSON form.

Choices of one seeded `random.Random` alone: the same seed gives the same bytes on every machine.
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
    if source == "text":
        turns = _talk(rng)
    elif source == "multi-image":
        small = [p for p in pictures if p.width * p.height <= _MAX_MULTI_PIXELS]
        images = tuple(rng.choices(small, k=rng.choices((2, 3, 4, 6, 8), (50, 24, 14, 8, 4))[0]))
        turns = _compare(rng, images)
    else:
        # icons are crops of screens, and are asked about as screens are
        picture = rng.choice([p for p in pictures if p.kind == source or (p.kind == "icon" and source == "screenshot")])
        images = (picture,)
        turns = _read_chart(rng, picture) if source == "chart" else _look(rng, picture, source)
        place = "{}\n<image>" if rng.random() < 0.15 else "<image>\n{}"
        turns[0] = (place.format(turns[0][0]), turns[0][1])
    return Sample(id=f"{source}-{number:06d}", source=source, images=images, turns=tuple(turns))


def _num_words(rng: Random, source: str) -> int:
    rows = _LENGTHS[source]
    _, fewest, most = rng.choices(rows, [row[0] for row in rows])[0]
    return rng.randint(fewest, most)


def _read_chart(rng: Random, picture: Picture) -> list[tuple[str, str]]:
    """One to five questions whose answers stand in the chart."""
    names, values = picture.labels, picture.values
    highest, lowest = names[values.index(max(values))], names[values.index(min(values))]
    i, j = rng.sample(range(len(names)), 2)
    more = "higher" if values[i] > values[j] else "lower"
    questions = [
        (f"What is the value for {names[i]}?", str(values[i])),
        ("Which entry has the highest value?", f"{highest}, with {max(values)}."),
        ("Which entry has the lowest value?", f"{lowest}, with {min(values)}."),
        (f"Is {names[i]} higher or lower than {names[j]}?", f"{names[i]} is {more}: {values[i]} against {values[j]}."),
        (f"What is the difference between {names[i]} and {names[j]}?", str(abs(values[i] - values[j]))),
        ("How many entries does the chart show?", str(len(names))),
        ("What is the title of the chart?", picture.title),
        (
            "Turn the chart into a table.",
            "\n".join(
                ["| entry | value |", "|---|---|", *(f"| {n} | {v} |" for n, v in zip(names, values, strict=True))]
            ),
        ),
    ]
    return rng.sample(questions, rng.choices((1, 2, 3, 5), (40, 30, 20, 10))[0])


_QUESTIONS: dict[str, tuple[str, ...]] = {
    "page": (
        "Summarize this document.",
        "What does the first paragraph say?",
        "Transcribe the text of this page.",
        "Which dates are mentioned, and what happened then?",
        "Explain the main point to somebody who has not read the page.",
    ),
    "photo": (
        "Describe this picture in detail.",
        "What time of day is it, and how can you tell?",
        "Which colors stand out?",
        "What lies in the distance?",
        "Write a short story that takes place here.",
        "Would this be a good place for a walk? Give reasons.",
    ),
    "screenshot": (
        "What is on this screen?",
        "Where would you click to go on?",
        "Describe the layout from top to bottom.",
        "Which program is this, and what is it used for?",
        "Read out the largest text that you can see.",
    ),
}


def _look(rng: Random, picture: Picture, source: str) -> list[tuple[str, str]]:
    """Questions about a page, a photograph or a screen; what is certain about it opens the first answer."""
    opening = {
        "page": f'The page is headed "{picture.title}".',
        "photo": f"A landscape: {picture.style}, with ridges that fade into the haze.",
        "screenshot": f'A window called "{picture.title}".' if picture.kind == "screenshot" else "A small icon.",
    }[source]
    questions = rng.sample(_QUESTIONS[source], rng.choices((1, 2, 3), (60, 28, 12))[0])
    pairs = [(question, words.answer(rng, _num_words(rng, source))) for question in questions]
    if picture.labels and rng.random() < 0.6:
        i = rng.randrange(len(picture.labels))
        pairs.append((f'What stands in the row "{picture.labels[i]}"?', str(picture.values[i])))
    return [(pairs[0][0], f"{opening} {pairs[0][1]}"), *pairs[1:]]


def _compare(rng: Random, shown: Sequence[Picture]) -> list[tuple[str, str]]:
    """A question over several images, written in one of the three ways in which data sets place them."""
    ask = rng.choice(
        (
            "What do these images have in common?",
            "Describe each image in one sentence.",
            "Which image is the odd one out, and why?",
            "Put the images into a sensible order and tell what happens.",
        )
    )
    form = rng.randint(0, 2)
    if form == 0:
        question = "".join(f"Image-{i}: <image>\n" for i in range(1, len(shown) + 1)) + ask
    elif form == 1:
        question = "<image>" * len(shown) + "\n" + ask
    else:
        half = len(shown) // 2
        question = f"Here is what we saw first: {'<image>' * half} and later: {'<image>' * (len(shown) - half)}\n{ask}"
    listing = " ".join(f"Image {i} is a {p.kind}." for i, p in enumerate(shown, 1))
    return [(question, f"{listing} {words.answer(rng, _num_words(rng, 'multi-image'))}")]


def _talk(rng: Random) -> list[tuple[str, str]]:
    """A conversation without images, one to six turns; now and then about a long text that the user brings."""
    pairs = []
    for _ in range(rng.choices((1, 2, 4, 6), (62, 20, 12, 6))[0]):
        topic = words.title(rng)
        question = rng.choice(
            (
                f'Write an essay on "{topic}".',
                f'What should I know about "{topic}"?',
                f'Give me a plan for "{topic}", step by step.',
                f'Tell a story called "{topic}".',
            )
        )
        if rng.random() < 0.12:
            question = f"Summarize this text.\n\n{words.answer(rng, _num_words(rng, 'text'))}"
        pairs.append((question, words.answer(rng, _num_words(rng, "text"))))
    return pairs
