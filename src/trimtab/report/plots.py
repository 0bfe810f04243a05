"""A plot with named levels: a dot for each pack, of a bounded number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from trimtab.report.svg import at, axis, drawing, grid, mark_line, nice_ticks
from trimtab.report.words import count_scale
from trimtab.specs import FloatArray

MAX_DOTS = 800


def levels(ticks: Sequence[float], y: Callable[[float], float], name: Callable[[float], str]) -> tuple[str, str]:
    """Lines across a plot at the ticks, and their names for the column left of it."""
    places = [(y(tick), escape(name(tick))) for tick in ticks]
    lines = "".join(f'<line class="grid" x1="0" x2="100%" y1="{at:.1f}" y2="{at:.1f}"/>' for at, _ in places)
    names = "".join(
        f'<text class="tick" x="100%" dx="-6" y="{at:.1f}" dy="0.35em" text-anchor="end">{text}</text>'
        for at, text in places
    )
    return lines, names


def plot(body: str, names: str, *, height: float, title: str, description: str) -> str:
    """A drawing with the names of its levels in a column left of it, where no mark can hide them."""
    drawn = drawing(body, height=height, title=title, description=description)
    return f'<div class="plot"><svg aria-hidden="true" width="100%" height="{height:g}">{names}</svg>{drawn}</div>'


def scatter(
    patches: FloatArray,
    tokens: FloatArray,
    *,
    limits: tuple[float, float],
    span: tuple[float, float],
    title: str,
    css_class: str,
) -> str:
    """A dot for each pack, patches right and tokens up, both limits marked; of many packs `MAX_DOTS`, evenly chosen.

    `span`: patches and tokens at the ends of the axes; no patches: packs stand in their order.
    """
    chosen = np.unique(np.linspace(0, len(tokens) - 1, num=min(len(tokens), MAX_DOTS)).astype(np.int64))
    top, depth = 20.0, 180.0
    bottom, text_only = top + depth, span[0] <= 0
    places, width = (np.arange(len(tokens)) + 0.5, float(len(tokens))) if text_only else (patches, span[0])
    across, along = count_scale([width]), count_scale([span[1]])

    def y(value: float) -> float:
        return bottom - depth * value / span[1]

    lines, names = levels(nice_ticks(span[1], max_ticks=4)[1:], y, along.number)
    parts = [grid(width, across, bottom, max_ticks=5), lines]
    parts.append(f'<line class="limit" x1="0" x2="100%" y1="{y(limits[1]):.1f}" y2="{y(limits[1]):.1f}"/>')
    parts += [
        f'<circle class="dot {css_class}" cx="{at(x / width)}" cy="{y(count):.1f}" r="2.5"/>'
        for x, count in zip(places[chosen].tolist(), tokens[chosen].tolist(), strict=True)
    ]
    parts.append(f'<line class="base" x1="0" x2="100%" y1="{bottom:g}" y2="{bottom:g}"/>')
    where = (1.0 if text_only else limits[0] / width, "" if text_only else "limit")
    parts.append(mark_line(*where, y1=4, y2=bottom, text=f"limit {limits[1]:,.0f}" if text_only else "limits"))
    label = "packs in their order" if text_only else "patches of a pack; tokens up"
    parts.append(axis(width, across, label=label, y=bottom, max_ticks=5))
    text = f"{len(tokens):,} packs; at most {limits[0]:,.0f} patches and {limits[1]:,.0f} tokens are allowed."
    return plot("".join(parts), names, height=bottom + 32, title=title, description=text)
