"""Which pictures the demo data set holds, decided before anything is drawn.

Integer choices of one seeded `random.Random` alone: the same seed gives the same pictures on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from trimtab.demo import words

Kind = Literal["chart", "page", "photo", "screenshot", "icon"]

CHART_STYLES = ("bars", "lines", "rows")
PAGE_STYLES = ("letter", "columns", "form")
SCREEN_STYLES = ("editor", "dashboard", "chat")
SCENES = ("dawn", "forest", "desert", "night", "sea", "autumn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One image to draw; a chart's labels and values are known, so that questions about it have true answers."""

    file: str  # below the image folder; its suffix decides the format
    kind: Kind
    style: str
    width: int
    height: int
    seed: int
    title: str
    labels: tuple[str, ...] = ()
    values: tuple[int, ...] = ()
    turned: bool = False  # carries EXIF orientation 6, as a phone held upright writes it; pixels stay as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """Pictures of about this size; `weight` is how often, beyond the first of each."""

    width: int
    height: int
    weight: int
    jitter: bool = True  # up to 12 % off in each direction; screens and scanners have exact sizes


_SIZES: dict[Kind, tuple[_Size, ...]] = {
    "chart": (
        _Size(width=850, height=600, weight=34),
        _Size(width=640, height=420, weight=24),
        _Size(width=1200, height=700, weight=14),
        _Size(width=420, height=320, weight=12),
        _Size(width=600, height=900, weight=8),
        _Size(width=1920, height=240, weight=2, jitter=False),  # 8:1
        _Size(width=2000, height=1300, weight=4),
        _Size(width=300, height=1700, weight=2),
    ),
    "page": (
        _Size(width=850, height=1100, weight=26, jitter=False),
        _Size(width=1240, height=1754, weight=26, jitter=False),  # A4 at 150 dpi
        _Size(width=1654, height=2339, weight=12, jitter=False),  # A4 at 200 dpi
        _Size(width=620, height=440, weight=14),
        _Size(width=2480, height=3508, weight=3, jitter=False),  # A4 at 300 dpi
        _Size(width=400, height=1100, weight=10),
        _Size(width=300, height=2400, weight=3, jitter=False),  # 1:8
        _Size(width=2828, height=4000, weight=1, jitter=False),
    ),
    "photo": (
        _Size(width=640, height=480, weight=34),
        _Size(width=480, height=640, weight=16),
        _Size(width=1024, height=683, weight=14),
        _Size(width=336, height=336, weight=10, jitter=False),
        _Size(width=1280, height=853, weight=8),
        _Size(width=1920, height=1080, weight=4, jitter=False),
        _Size(width=160, height=120, weight=8),
        _Size(width=3200, height=400, weight=2, jitter=False),  # 8:1
        _Size(width=4000, height=3000, weight=1, jitter=False),
    ),
    "screenshot": (
        _Size(width=1280, height=800, weight=22, jitter=False),
        _Size(width=1920, height=1080, weight=22, jitter=False),
        _Size(width=1170, height=2532, weight=12, jitter=False),
        _Size(width=750, height=1334, weight=14, jitter=False),
        _Size(width=900, height=560, weight=22),
        _Size(width=2560, height=1440, weight=6, jitter=False),
        _Size(width=3840, height=2160, weight=1, jitter=False),
    ),
    "icon": (
        _Size(width=32, height=32, weight=3, jitter=False),
        _Size(width=64, height=64, weight=4, jitter=False),
        _Size(width=128, height=128, weight=3, jitter=False),
        _Size(width=96, height=48, weight=1, jitter=False),
    ),
}
_KIND_WEIGHTS: dict[Kind, int] = {"chart": 28, "page": 20, "photo": 32, "screenshot": 14, "icon": 6}


def make_pictures(rng: Random, num_pictures: int) -> tuple[Picture, ...]:
    """Pictures of all kinds; the first of each kind go once through all its sizes, the others follow the weights."""
    pictures: list[Picture] = []
    total = sum(_KIND_WEIGHTS.values())
    for kind, weight in _KIND_WEIGHTS.items():
        sizes = _SIZES[kind]
        for number in range(max(2, num_pictures * weight // total)):
            size = sizes[number] if number < len(sizes) else rng.choices(sizes, [s.weight for s in sizes])[0]
            pictures.append(_make_picture(rng, kind, number, size))
    return tuple(pictures)


def _make_picture(rng: Random, kind: Kind, number: int, size: _Size) -> Picture:
    width, height = size.width, size.height
    if size.jitter:
        width, height = width * rng.randint(88, 112) // 100, height * rng.randint(88, 112) // 100
    labels: tuple[str, ...] = ()
    values: tuple[int, ...] = ()
    turned = False
    if kind == "chart":
        style = (
            "rows"
            if height > width
            else rng.choice(CHART_STYLES[:2])
            if width > 2 * height
            else rng.choice(CHART_STYLES)
        )
        labels = _chart_labels(rng, many=max(width, height) > 1500)
        scale = rng.choice((10, 100, 1000))
        values = tuple(rng.sample(range(scale // 5, scale * 10), len(labels)))  # all different: one highest, one lowest
    elif kind == "page":
        style = "receipt" if height > 2 * width else rng.choice(PAGE_STYLES)
        if style == "form":
            labels = tuple(dict.fromkeys(words.label(rng) for _ in range(rng.randint(4, 9))))
            values = tuple(rng.randint(10, 99999) for _ in labels)
    elif kind == "photo":
        style, turned = rng.choice(SCENES), rng.random() < 0.06
    elif kind == "screenshot":
        style = rng.choice(SCREEN_STYLES)
    else:
        style = "tile"
    return Picture(
        file=f"{kind}-{number:03d}.{'jpg' if kind == 'photo' else 'png'}",
        kind=kind,
        style=style,
        width=width,
        height=height,
        seed=rng.getrandbits(31),
        title=words.title(rng),
        labels=labels,
        values=values,
        turned=turned,
    )


def _chart_labels(rng: Random, *, many: bool) -> tuple[str, ...]:
    if many:
        first = rng.randint(1962, 1990)
        return tuple(str(year) for year in range(first, first + rng.randint(18, 30)))
    choice = rng.randint(0, 2)
    if choice == 0:
        return tuple(month[:3] for month in words.MONTHS[: rng.choice((6, 12))])
    if choice == 1:
        first = rng.randint(1990, 2012)
        return tuple(str(year) for year in range(first, first + rng.randint(5, 12)))
    return tuple(dict.fromkeys(words.label(rng) for _ in range(rng.randint(4, 8))))
