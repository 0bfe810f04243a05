"""Plots with named levels: a dot for each pack, a column for each rank, of a bounded number of elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from trimtab.report.svg import at, axis, drawing, grid, mark_line, nice_ticks
from trimtab.report.words import Scale, count_scale
from trimtab.specs import FloatArray

MAX_DOTS = 800
MAX_COLUMNS = 32  # drawn one by one
MAX_RANKS = 256  # drawn at all
_WIDEST = 0.08  # column, as a share of the width


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


def columns(values: FloatArray, *, span: float, scale: Scale, label: str, title: str, css_class: str) -> str:
    """A column for each of n places: `values` (3, n) least, mean and most of `span`, the mean filled, the range pale.

    Up to `MAX_COLUMNS` columns stand apart, each with a tooltip; more are drawn as one area, of more than `MAX_RANKS`
    the neighbours together.
    """
    top, depth, count = 8.0, 110.0, values.shape[1]
    bottom = top + depth
    said = (
        f"{count} columns; the highest mean is {scale.text(values[1].max())}, the least {scale.text(values[1].min())}."
    )
    if count > MAX_RANKS:
        starts = np.unique(np.linspace(0, count, num=MAX_RANKS, endpoint=False).astype(np.int64))
        sizes = np.diff(np.append(starts, count))
        mean = np.add.reduceat(values[1], starts) / sizes
        values = np.array([np.minimum.reduceat(values[0], starts), mean, np.maximum.reduceat(values[2], starts)])
    low, mean, high = (np.round(bottom - depth * x / span, 1).tolist() for x in values)

    lines, names = levels(
        [tick * scale.factor for tick in nice_ticks(span / scale.factor, max_ticks=4)[1:]],
        lambda tick: bottom - depth * tick / span,
        scale.text,
    )
    n, wide = len(mean), min(0.8 / len(mean), _WIDEST)
    if n <= MAX_COLUMNS:
        shapes = "".join(
            f'<rect class="{css_class}" x="{at((i + 0.5) / n - wide / 2)}" y="{mean[i]:g}" width="{at(wide)}" '
            f'height="{bottom - mean[i]:g}" data-t="rank {i}: {scale.text(values[1, i])}, from '
            f'{scale.text(values[0, i])} to {scale.text(values[2, i])}"/>'
            f'<line class="base" x1="{at((i + 0.5) / n)}" x2="{at((i + 0.5) / n)}" y1="{high[i]:g}" y2="{low[i]:g}"/>'
            for i in range(n)
        )
    else:
        area = "".join(f"V{y:g}h1" for y in mean)
        over, under = "".join(f"V{y:g}h1" for y in high), "".join(f"V{y:g}h-1" for y in reversed(low))
        shapes = (
            f'<svg width="100%" height="{bottom:g}" viewBox="0 0 {n} {bottom:g}" preserveAspectRatio="none">'
            f'<path class="{css_class}" d="M0 {bottom:g}{area}V{bottom:g}Z"/>'
            f'<path class="band {css_class}" d="M0 {high[0]:g}{over}{under}Z"/></svg>'
        )
    if n > MAX_COLUMNS:
        numbers = axis(float(count), count_scale([float(count)]), label=label, y=bottom)
    else:
        ticks = ((at((i + 0.5) / n), "middle", i, 13) for i in range(0, n, -(-n // 8)))
        numbers = "".join(
            f'<text class="tick" x="{x}" y="{bottom + y:g}" text-anchor="{anchor}">{text}</text>'
            for x, anchor, text, y in (*ticks, ("100%", "end", label, 28))
        )
    base = f'<line class="base" x1="0" x2="100%" y1="{bottom:g}" y2="{bottom:g}"/>'
    body = lines + shapes + base + numbers
    return plot(body, names, height=bottom + 32, title=title, description=said)
