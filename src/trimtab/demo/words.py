"""English-like text from small word lists: headings, sentences and answers of a wanted length.

All choices are integer choices of the `random.Random` that is passed in: the same seed gives the same text on every
machine and every Python.
"""

# ruff: noqa: SIM905 - word lists read best as text

from __future__ import annotations

import re
from functools import cache
from random import Random

# regular words: a noun takes "s" in the plural, a verb "s" and "ed"
_LISTS = {
    "noun": """
        anchor archive beacon bridge budget cabin camera canal canyon carpet castle circuit cloud column compartment
        contract corridor cottage crystal current desert diagram dinner document engine estimate field figure forest
        fountain garden gateway glacier harbor harvest helmet highway hospital instrument invoice island journal kettle
        kitchen ladder lantern ledger letter machine magnet manual market meadow measurement message meter mirror model
        monitor motor mountain museum network notebook number observer ocean office orchard packet paddle paper parcel
        pattern pebble pencil picture pipeline planet platform printer project pump quarter recipe record ribbon river
        rocket room sample schedule school screen sensor shadow shelter shipment signal sketch stadium station stone
        storm student surface table tanker target teacher temple ticket tower trail tunnel valve village violin window
    """.split(),
    "adjective": """
        ancient annual bitter blue bright broad broken calm careful central certain clear coastal cold common crowded
        daily dark deep delicate digital distant double early equal familiar fast final foreign former fragile fresh
        gentle golden green heavy hidden hollow humid important large light local long lower main marine modern narrow
        northern novel open ordinary outer plain quiet rapid rare recent red remote rural safe sharp short silent simple
        slow smooth solid southern steady steep strange strong sudden tall thin typical unusual urban useful vast warm
    """.split(),
    "verb": """
        adjust answer attach borrow check clean collect connect count cover deliver display employ enter explain explore
        extend fasten filter follow gather inspect install join launch lift limit load mention obtain open order paint
        plant present print protect question reach record repair report return select sharpen show sort start support
        test trail transport turn visit wait watch weigh
    """.split(),
    "place": """
        Ankara Arequipa Bergen Bilbao Cardiff Cusco Dakar Dresden Fukuoka Galway Ghent Halifax Hobart Izmir Jaipur
        Kigali Kyoto Lagos Leipzig Lima Lyon Malmo Mombasa Nantes Oslo Porto Quito Riga Rosario Salzburg Sapporo Seville
        Tampere Tartu Tbilisi Trieste Turin Utrecht Valdivia Vilnius York Zadar
    """.split(),
    "town": "bridge burg field ford haven mouth stead ton vale wick".split(),
    "month": "January February March April May June July August September October November December".split(),
}
MONTHS = tuple(_LISTS["month"])
_NUMBERS = {"number": 9999, "percent": 99}
_SENTENCES = (
    "The {adjective} {noun} near {place} was {verb}ed in {month}, and the {noun}s were {verb}ed later.",
    "About {percent} percent of the {noun}s are {adjective}; the others {verb} the {noun}.",
    "Nobody in {place} had {verb}ed such {adjective} {noun}s before the {noun} {verb}ed them.",
    "When the {noun} is {adjective}, {verb} the {noun} first and {verb} the {noun}s later.",
    "Between {place} and {place}{town} there are {number} {adjective} {noun}s.",
    "In {month} the {adjective} {noun}s {verb}ed {number} times, {percent} percent more than in {month}.",
    "Every {noun} should {verb} the {adjective} {noun}, unless the {noun} has been {verb}ed.",
    "Why would the {noun}s of {place}{town} {verb} the {adjective} {noun}?",
)
_STEPS = ("{verb} the {adjective} {noun}", "{verb} {number} {noun}s", "wait until the {noun} is {adjective}")


def fill(rng: Random, template: str) -> str:
    """`template` with a word drawn for every `{slot}`, the first letter in upper case."""
    parts = list(_parts_of(template))
    for i in range(1, len(parts), 2):
        kind = parts[i]
        parts[i] = str(rng.randint(1, _NUMBERS[kind])) if kind in _NUMBERS else rng.choice(_LISTS[kind])
    text = "".join(parts)
    return text[:1].upper() + text[1:]


@cache
def _parts_of(template: str) -> tuple[str, ...]:
    """Text and slots by turns."""
    return tuple(re.split(r"\{(\w+)\}", template))


def title(rng: Random) -> str:
    """Two to four words, as a heading has them."""
    return fill(rng, rng.choice(("{adjective} {noun}s", "{noun}s of {place}", "the {adjective} {noun} of {place}")))


def label(rng: Random) -> str:
    """One word, for an axis or a row."""
    return fill(rng, "{noun}")


def paragraph(rng: Random, num_words: int) -> str:
    """Whole sentences, until they hold `num_words` words or more."""
    sentences: list[str] = []
    while num_words > 0:
        sentences.append(fill(rng, rng.choice(_SENTENCES)))
        num_words -= sentences[-1].count(" ") + 1
    return " ".join(sentences)


def answer(rng: Random, num_words: int) -> str:
    """A reply of about `num_words` words: paragraphs, and now and then a numbered list."""
    parts: list[str] = []
    while num_words > 0:
        if parts and rng.randint(1, 5) == 1:
            steps = [fill(rng, rng.choice(_STEPS)) for _ in range(rng.randint(3, 7))]
            parts.append("\n".join(f"{number}. {step}." for number, step in enumerate(steps, 1)))
        else:
            parts.append(paragraph(rng, min(num_words, rng.randint(30, 110))))
        num_words -= parts[-1].count(" ") + 1
    return "\n\n".join(parts)
