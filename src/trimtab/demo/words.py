"""English-like text from small word lists: sentences, paragraphs, and questions with their answers.

All choices come from the `random.Random` that is passed in, and no floating point beyond comparisons is involved: the
same seed gives the same text on every machine and every Python.
"""

# ruff: noqa: SIM905 - word lists read best as text

from __future__ import annotations

import re
from random import Random

_NOUNS = """
    anchor archive battery beacon bridge budget cabin camera canal canyon carpet castle catalog cellar chapel
    circuit cloud coast column compass contract copper corridor cottage courier crystal current delta design desert
    diagram dinner district document drawing engine entrance estimate factory farm ferry field figure forest
    fountain frame freight garden gateway glacier grain granite harbor hangar harvest helmet highway hospital index
    instrument invoice island journal journey kettle kitchen ladder lantern laundry ledger lemon lens letter library
    lighthouse line machine magnet manual map marble margin market meadow measure meeting memory message meter
    mirror model monitor morning motor mountain museum network notebook number observer ocean office orchard order
    packet paddle paper parcel passage pattern pebble pencil picture pipeline planet platform pocket portrait
    printer process project pump quarry quarter radio railway rainfall record recipe reservoir review ribbon river
    rocket room route saddle sample scale schedule school screen sensor shadow shelter shipment signal silver sketch
    spring stadium staircase station stone storage storm street student summary surface survey switch table tanker
    target teacher temple theater thermometer ticket timber tower trail trumpet tunnel turbine valley valve vessel
    village violin voltage voyage wagon wall warehouse water weather wheel window winter workshop yard
""".split()

_ADJECTIVES = """
    ancient annual average bitter blue bright broad broken calm careful central certain cheap clear coastal cold
    common complete copper crowded curious daily damp dark deep delicate digital distant double dry early eastern
    empty equal exact faint familiar fast final flat foreign former fragile fresh frozen gentle golden grand green
    heavy hidden hollow humid idle important inner large late light little local lonely long lower main major marine
    middle minor modern narrow new noisy northern novel open ordinary outer pale patient plain possible quiet rapid
    rare recent red remote rough rural safe second secret sharp short silent simple slow small smooth solid southern
    spare steady steep still strange strong sudden tall thin tiny typical unusual upper urban useful usual vast warm
    western wide wild wooden yellow young
""".split()

_VERBS = """
    adjust answer arrange attach borrow carry check clean climb collect compare connect count cover cross deliver
    describe display divide employ enter examine exchange explain explore extend fasten filter finish follow gather
    guard handle inspect install join label launch lift limit load measure melt mention mix notice observe open
    order pack paint pass pick plant polish present print protect pull question reach record reduce repair replace
    report rescue return review sail select sharpen show sketch sort start support test touch trace transfer travel
    turn visit wash watch weigh
""".split()

_ADVERBS = """
    again almost always barely calmly carefully clearly daily easily evenly finally gently gradually hardly likely
    nearly often partly perhaps plainly promptly quickly quietly rarely seldom sharply silently slowly softly
    sometimes soon steadily suddenly twice usually weekly
""".split()

_NAMES = """
    Ada Amara Anton Beatriz Bilal Carmen Chen Dalia Diego Elif Emeka Farah Felix Grace Hana Hugo Ines Ivan Jana
    Jonas Kavya Keiko Lars Leila Lucia Mateo Mei Nadia Noor Olga Omar Pavel Priya Rafael Rosa Samir Sofia Tariq
    Tomas Uma Vera Wanda Yusuf Zoe
""".split()

_PLACES = """
    Ankara Arequipa Bergen Bilbao Cardiff Cusco Dakar Dresden Fukuoka Galway Ghent Goa Halifax Hobart Izmir Jaipur
    Kigali Kyoto Lagos Leipzig Lima Lyon Malmo Mombasa Nantes Oslo Porto Quito Riga Rosario Salzburg Sapporo Seville
    Split Tampere Tartu Tbilisi Trieste Turin Utrecht Valdivia Vilnius York Zadar
""".split()
_TOWN_ENDINGS = ("bridge", "burg", "field", "ford", "haven", "mouth", "stead", "ton", "vale", "wick")
MONTHS = tuple("January February March April May June July August September October November December".split())

_SENTENCES = (
    "The {adjective} {noun} near {place} was {verbed} {adverb}, and the {nouns} were {verbed} in {month}.",
    "{name} {verbed} {number} {adjective} {nouns} before the {noun} could {verb}.",
    "About {percent} percent of the {nouns} are {adjective}; the rest {verb} {adverb}.",
    "Nobody in {place} had {verbed} such a {adjective} {noun} since {year}.",
    "When the {noun} is {adjective}, {verb} the {noun} first and {verb} the {nouns} later.",
    "A {noun} that {verbs} {adverb} needs a {adjective} {noun} and at least {number} {nouns}.",
    "{name} and {name} {verbed} the {noun} between {place} and {place}.",
    "In {month} {year} the {adjective} {nouns} {verbed} {number} times, {percent} percent more than in {month}.",
    "Every {noun} should {verb} the {adjective} {noun}, unless a {noun} has been {verbed}.",
    "The {noun} {verbs} the {noun}, the {noun} {verbs} the {nouns}, and {name} {verbs} both {adverb}.",
    "It is {adjective}, {adjective} and {adverb} {verbed}.",
    "Why would the {nouns} of {place} {verb} a {adjective} {noun}?",
    "First {verb} the {noun}; then {verb} {number} {nouns}; finally, {verb} the {adjective} {noun}.",
    "Seen from the {noun}, the {adjective} {noun} seems to {verb} {adverb}.",
)

_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiou])(?!us[ue])")  # a useful thing, an unusual thing

_STEPS = (
    "{verb} the {adjective} {noun} {adverb}",
    "{verb} {number} {nouns} and {verb} the {noun}",
    "ask {name} to {verb} the {noun}",
    "wait until the {noun} is {adjective}",
)


def _past(verb: str) -> str:
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    doubled = {"plan", "ship", "transfer"}
    return verb + verb[-1] + "ed" if verb in doubled else verb + "ed"


def _with_s(word: str) -> str:
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "es" if word.endswith(("s", "x", "ch", "sh", "z")) else word + "s"


class _Slots(dict[str, str]):
    """Fills each `{slot}` of a template with a fresh draw: `str.format_map` asks for the slots one by one."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def __missing__(self, slot: str) -> str:
        rng = self.rng
        if slot == "number":
            return str(rng.choice((rng.randint(2, 12), rng.randint(13, 99), rng.randint(100, 9999))))
        if slot == "percent":
            return str(rng.randint(1, 99))
        if slot == "year":
            return str(rng.randint(1961, 2024))
        if slot == "place" and rng.random() < 0.5:
            return rng.choice(_NOUNS).capitalize() + rng.choice(_TOWN_ENDINGS)  # rare words, for the tokenizer to split
        if slot in ("nouns", "verbs"):
            return _with_s(rng.choice(_LISTS[slot[:-1]]))
        if slot == "verbed":
            return _past(rng.choice(_VERBS))
        return rng.choice(_LISTS[slot])


_LISTS: dict[str, list[str] | tuple[str, ...]] = {
    "noun": _NOUNS,
    "adjective": _ADJECTIVES,
    "verb": _VERBS,
    "adverb": _ADVERBS,
    "name": _NAMES,
    "place": _PLACES,
    "month": MONTHS,
}


def fill(rng: Random, template: str) -> str:
    """`template` with every `{slot}` filled, first letter in upper case."""
    text = _BEFORE_VOWEL.sub(r"\1n ", template.format_map(_Slots(rng)))
    return text[:1].upper() + text[1:]


def sentence(rng: Random) -> str:
    return fill(rng, rng.choice(_SENTENCES))


def title(rng: Random) -> str:
    """Two to four words, as a heading has them."""
    return fill(rng, rng.choice(("{adjective} {nouns}", "{nouns} of {place}", "The {adjective} {noun} of {place}")))


def label(rng: Random) -> str:
    """One word, for an axis or a button."""
    return rng.choice(rng.choice((_NOUNS, _ADJECTIVES))).capitalize()


def paragraph(rng: Random, num_words: int) -> str:
    """Whole sentences, until they hold `num_words` words or more."""
    sentences: list[str] = []
    while num_words > 0:
        sentences.append(sentence(rng))
        num_words -= sentences[-1].count(" ") + 1
    return " ".join(sentences)


def answer(rng: Random, num_words: int) -> str:
    """An assistant's reply of about `num_words` words: a sentence, paragraphs, or paragraphs with a numbered list."""
    if num_words <= 40:
        return paragraph(rng, num_words)
    parts: list[str] = []
    while num_words > 0:
        part = _steps(rng) if parts and rng.random() < 0.2 else paragraph(rng, rng.randint(30, 110))
        parts.append(part)
        num_words -= part.count(" ") + 1
    return "\n\n".join(parts)


def _steps(rng: Random) -> str:
    steps = (fill(rng, rng.choice(_STEPS)) for _ in range(rng.randint(3, 7)))
    return "\n".join(f"{i}. {step}." for i, step in enumerate(steps, 1))
