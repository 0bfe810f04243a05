"""Which pictures the demo data set holds, decided before anything is drawn.

Integer choices of nothing but one seeded `random.Random`: the same seed gives the same pictures on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from trimtab.demo import words

Kind = Literal["chart", "page", "photo", "screenshot", "icon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One image to draw; its labels and values are known, so that questions about them have true answers."""

    file: str  # below the image folder; its suffix decides the format
    kind: Kind
    width: int
    height: int
    seed: int
    title: str
    labels: tuple[str, ...]
    values: tuple[int, ...]  # as many as labels, all different
    turned: bool  # carries EXIF orientation 6, as a phone held upright writes it; pixels stay as they are


@dataclass(frozen=True, slots=True)
class _Size:
    """Pictures of about this size; `weight` is how often, beyond the first of each."""

    width: int
    height: int
    weight: int
    exact: bool = False  # as screens and scanners have it; else up to 12 % off in each direction


_SIZES: dict[Kind, tuple[_Size, ...]] = {
    "chart": (
        _Size(850, 600, 34),
        _Size(640, 420, 36),
        _Size(1200, 700, 14),
        _Size(600, 900, 8),
        _Size(1920, 240, 2, exact=True),  # 8:1
        _Size(2000, 1300, 4),
        _Size(300, 1700, 2),
    ),
    "page": (
        _Size(850, 1100, 26, exact=True),
        _Size(1240, 1754, 26, exact=True),  # A4 at 150 dpi
        _Size(1654, 2339, 12, exact=True),  # A4 at 200 dpi
        _Size(620, 440, 24),
        _Size(2480, 3508, 3, exact=True),  # A4 at 300 dpi
        _Size(300, 2400, 3, exact=True),  # 1:8
    ),
    "photo": (
        _Size(640, 480, 34),
        _Size(480, 640, 16),
        _Size(1024, 683, 22),
        _Size(336, 336, 10, exact=True),
        _Size(1920, 1080, 4, exact=True),
        _Size(160, 120, 8),
        _Size(4000, 3000, 1, exact=True),
    ),
    "screenshot": (
        _Size(1280, 800, 22, exact=True),
        _Size(1920, 1080, 22, exact=True),
        _Size(1170, 2532, 12, exact=True),
        _Size(750, 1334, 14, exact=True),
        _Size(900, 560, 22),
        _Size(2560, 1440, 6, exact=True),
        _Size(3840, 2160, 1, exact=True),
    ),
    "icon": (_Size(32, 32, 3, exact=True), _Size(128, 128, 7, exact=True), _Size(96, 48, 1, exact=True)),
}
_KIND_WEIGHTS: dict[Kind, int] = {"chart": 28, "page": 20, "photo": 32, "screenshot": 14, "icon": 6}


def make_pictures(rng: Random, num_pictures: int) -> tuple[Picture, ...]:
    """Pictures of all kinds; the first of each kind go once through all its sizes, the others follow the weights."""
    pictures: list[Picture] = []
    for kind, weight in _KIND_WEIGHTS.items():
        sizes = _SIZES[kind]
        for number in range(max(2, num_pictures * weight // sum(_KIND_WEIGHTS.values()))):
            size = sizes[number] if number < len(sizes) else rng.choices(sizes, [s.weight for s in sizes])[0]
            pictures.append(_make_picture(rng, kind, number, size))
    return tuple(pictures)


def _make_picture(rng: Random, kind: Kind, number: int, size: _Size) -> Picture:
    width, height = size.width, size.height
    if not size.exact:
        width, height = width * rng.randint(88, 112) // 100, height * rng.randint(88, 112) // 100
    labels = _labels(rng) if kind in ("chart", "page") else ()
    return Picture(
        file=f"{kind}-{number:03d}.{'jpg' if kind == 'photo' else 'png'}",
        kind=kind,
        width=width,
        height=height,
        seed=rng.getrandbits(31),
        title=words.title(rng),
        labels=labels,
        values=tuple(rng.sample(range(10, 9999), len(labels))),
        turned=kind == "photo" and rng.randint(1, 16) == 1,
    )


def _labels(rng: Random) -> tuple[str, ...]:
    """Months, years or words, all different."""
    first = rng.randint(1990, 2012)
    years = tuple(str(year) for year in range(first, first + rng.randint(5, 12)))
    return rng.choice((words.MONTHS, years, tuple(dict.fromkeys(words.label(rng) for _ in range(8)))))
