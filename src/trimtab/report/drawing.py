"""Drawings: axes with round ticks, bars and pipeline timelines, of a bounded number of elements.

Across, everything is placed in percent of the drawing, so that it follows the width of the page and text keeps its
size; down, in CSS pixels. Colours are classes of `report.css`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from trimtab.partition.simulate import Timeline
from trimtab.report.words import Scale, clean, time_scale
from trimtab.units import format_seconds

MAX_BLOCKS = 900  # blocks drawn one by one, each with its own tooltip
_COLUMNS = 100  # of a timeline too dense for that
_LABEL_SHARE = 0.019  # share of the width a two-digit label needs at the narrowest drawing (720 px)
_WEIGHT_STEP = 0.08  # micro-batches this much off the median get the lighter or the darker shade

# -- axes -----------------------------------------------------------------------------------------------------------


def nice_ticks(limit: float, *, max_ticks: int = 6) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten from 0 to `limit`, at most `max_ticks` of them."""
    if not limit > 0 or max_ticks < 2:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(limit / (max_ticks - 1)))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0) if limit / (m * power) < max_ticks - 1e-9)
    return [i * step for i in range(int(limit / step + 1e-9) + 1)]


def at(share: float) -> str:
    """Return a share of the width as an attribute value: "12.5%"."""
    return f"{100.0 * share:.2f}".rstrip("0").rstrip(".") + "%"


def _anchor(share: float) -> str:
    return "start" if share < 0.03 else "end" if share > 0.94 else "middle"


def axis(span: float, scale: Scale, *, label: str, y: float, max_ticks: int = 6) -> str:
    """Tick labels below a plot of `span` base units, 30 px high in all; the last tick carries the unit."""
    if span <= 0:
        return ""
    ticks = nice_ticks(span / scale.factor, max_ticks=max_ticks)
    parts = []
    digits = max(_decimals(tick) for tick in ticks)
    for tick in ticks:
        number, where = f"{tick:,.{digits}f}" if tick else "0", tick * scale.factor / span
        parts.append(
            f'<text class="tick" x="{at(where)}" y="{y + 13:g}" text-anchor="{_anchor(where)}">{number}</text>'
        )
    parts.append(f'<text class="tick" x="100%" y="{y + 28:g}" text-anchor="end">{escape(label)}</text>')
    return "".join(parts)


def _decimals(value: float) -> int:
    return next((digits for digits in range(4) if abs(round(value, digits) - value) < 1e-9 * max(1.0, abs(value))), 4)


def grid(span: float, scale: Scale, height: float, *, max_ticks: int = 6) -> str:
    """Vertical lines at the ticks that `axis` labels."""
    if span <= 0:
        return ""
    places = (at(tick * scale.factor / span) for tick in nice_ticks(span / scale.factor, max_ticks=max_ticks))
    return "".join(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{height:g}"/>' for x in places)


def picture(body: str, *, height: float, title: str, description: str, css_class: str = "") -> str:
    """Return an SVG of full width that a screen reader announces by its title and description."""
    return (
        f'<svg class="{css_class}" role="img" width="100%" height="{height:g}"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{body}</svg>"
    )


# -- timeline -------------------------------------------------------------------------------------------------------


def timeline_rows(num_devices: int) -> float:
    """Height of one device's row in pixels: 24 for few devices, never under 7."""
    return float(min(24, max(7, 420 // num_devices)))


def timeline(timeline: Timeline, *, span_s: float, title: str, description: str) -> str:
    """One row per device, forward and backward blocks on an axis of `span_s` seconds, and the end of the step marked.

    Up to `MAX_BLOCKS` blocks are drawn one by one, with the micro-batch's number where there is room. Beyond, a row's
    height at a time is the share of the time around it that the device computes.
    """
    row = timeline_rows(timeline.num_devices)
    pad = 1.0 if row < 10 else 2.0
    height, top = row * timeline.num_devices, 18.0
    parts = [f'<svg y="{top:g}" height="{height:g}" width="100%" overflow="visible">']
    for device in range(timeline.num_devices):
        parts.append(
            f'<rect class="track" x="0" y="{device * row + pad:g}" width="{at(timeline.makespan_s / span_s)}" '
            f'height="{row - 2 * pad:g}"/>'
        )
    unit = time_scale([span_s])
    parts.append(grid(span_s, unit, height))
    if len(timeline.stage) <= MAX_BLOCKS:
        looks, devices = block_looks(timeline), timeline.device
        for i in np.lexsort((timeline.end_s, timeline.start_s)).tolist():
            if timeline.end_s[i] > timeline.start_s[i]:
                parts.append(_block(timeline, i, looks[i], span_s, devices[i] * row + pad, row - 2 * pad))
    else:
        parts.append(_density(timeline, span_s, row, pad, height))
    parts.append("</svg>")
    end = time_scale([timeline.makespan_s]).text(timeline.makespan_s)
    parts.append(mark_line(timeline.makespan_s / span_s, "makespan", y1=2, y2=top + height + 2, text=end))
    return picture("".join(parts), height=top + height + 4, title=title, description=description, css_class="tl")


def _every_name(row: float, fewest: int) -> int:
    """Of how many rows of this height one is named; of the thinnest, one of `fewest`."""
    return 1 if row >= 13 else 2 if row >= 10 else fewest


def device_names(num_devices: int) -> str:
    """The column of names left of a timeline: every device, or every eighth where rows are thin."""
    row, top = timeline_rows(num_devices), 18.0
    every = _every_name(row, 8 if num_devices > 16 else 4)
    texts = (
        f'<text class="name" x="100%" dx="-8" y="{top + (d + 0.5) * row:g}" dy="0.35em" text-anchor="end">'
        f"rank {d}</text>"
        for d in range(0, num_devices, every)
    )
    return f'<svg aria-hidden="true" width="100%" height="{top + row * num_devices + 4:g}">{"".join(texts)}</svg>'


def block_looks(timeline: Timeline) -> list[str]:
    """Class of every block: f or b for its kind, then 0, 1, 2 for a light, usual or heavy micro-batch.

    A micro-batch is heavy when its blocks together take 8 % longer than the median micro-batch, light when 8 % shorter.
    """
    if len(timeline.stage) == 0:
        return []
    spent = np.bincount(timeline.microbatch, weights=timeline.end_s - timeline.start_s)
    usual = float(np.median(spent))
    weight = np.where(spent > usual * (1 + _WEIGHT_STEP), 2, np.where(spent < usual * (1 - _WEIGHT_STEP), 0, 1))
    return [
        f"{'fbw'[kind]}{weight[mb]}"
        for kind, mb in zip(timeline.kind.tolist(), timeline.microbatch.tolist(), strict=True)
    ]


def _block(timeline: Timeline, i: int, look: str, span_s: float, y: float, height: float) -> str:
    number, letter = int(timeline.microbatch[i]), "FBW"[timeline.kind[i]]
    start, spent = float(timeline.start_s[i]), float(timeline.end_s[i] - timeline.start_s[i])
    left, width = start / span_s, spent / span_s
    tip = f"{letter}{number} · stage {timeline.stage[i]} · {format_seconds(spent)}, from {format_seconds(start)}"
    box = (
        f'<rect class="{look}" x="{at(left)}" y="{y:g}" width="{at(width)}" height="{height:g}" '
        f'data-t="{escape(tip)}"/>'
    )
    if height < 14 or width < _LABEL_SHARE * max(1.0, len(str(number)) / 2):
        return box
    return f'{box}<text class="in {look}" x="{at(left + width / 2)}" y="{y + height / 2:g}" dy="0.35em">{number}</text>'


def _density(timeline: Timeline, span_s: float, row: float, pad: float, height: float) -> str:
    """An area for each device and kind of block: its share of the time of each of `_COLUMNS` columns, one on the other.

    A column that two devices fill to 40 and 100 % is drawn 40 and 100 % as high as their rows: no idle time is hidden.
    """
    edges, areas, devices = np.linspace(0.0, span_s, _COLUMNS + 1), list[str](), timeline.device
    for device in range(timeline.num_devices):
        bottom, share, drawn = (device + 1) * row - pad, np.zeros(_COLUMNS), list[str]()
        for kind, look in enumerate(("f1", "b1", "w1")):
            rows = np.flatnonzero((devices == device) & (timeline.kind == kind))
            if not len(rows):
                continue
            rows = rows[np.argsort(timeline.start_s[rows], kind="stable")]
            # seconds computed until each start and end, and from these until each edge
            times = np.stack([timeline.start_s[rows], timeline.end_s[rows]], axis=1).ravel()
            spent = np.cumsum(timeline.end_s[rows] - timeline.start_s[rows])
            until = np.stack([np.append(0.0, spent[:-1]), spent], axis=1).ravel()
            share = share + np.diff(np.interp(edges, times, until)) * _COLUMNS / span_s
            steps = "".join(f"V{y:.1f}h1" for y in (bottom - (row - 2 * pad) * share).tolist())
            drawn.append(f'<path class="{look}" d="M0 {bottom:g}{steps}V{bottom:g}Z"/>')
        areas += reversed(drawn)  # each covers the lower part of the one before
    return (
        f'<svg width="100%" height="{height:g}" viewBox="0 0 {_COLUMNS} {height:g}" preserveAspectRatio="none">'
        f"{''.join(areas)}</svg>"
    )


# -- bars -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a drawing of bars."""

    name: str
    parts: Sequence[tuple[str, str, float]]  # class, what it is, value: side by side
    text: str  # after the bar


def bars(
    rows: Sequence[Bar],
    *,
    span: float,
    cap: float,
    scale: Scale,
    label: str,
    title: str,
    show: Callable[[float], str],
) -> str:
    """Return a bar a row on one axis of `span`, names left and texts right; rows are thin where there are many.

    Parts show their values by `show` when pointed at; what lies past the `cap` is outlined, and its text stands out.
    """
    row = float(min(26, max(7, 420 // len(rows))))
    pad, top, every = (4.0 if row >= 18 else 1.0), 22.0, _every_name(row, 8)
    bottom = top + row * len(rows)
    drawn, names, texts = [grid(span, scale, bottom, max_ticks=5)], [], []
    for i, bar in enumerate(rows):
        y, middle = top + i * row + pad, f'y="{top + (i + 0.5) * row:g}" dy="0.35em" text-anchor="end"'
        drawn.append(stacked_bar(bar, span=span, cap=cap, y=y, height=row - 2 * pad, show=show))
        if i % every == 0:
            bad = ' style="fill:var(--bad);font-weight:600"' if sum(value for *_, value in bar.parts) > cap else ""
            names.append(f'<text class="name" x="100%" dx="-8" {middle}>{escape(bar.name)}</text>')
            texts.append(f'<text x="100%" {middle}{bad}>{bar.text}</text>')
    drawn.append(f'<line class="base" x1="0" x2="0" y1="{top:g}" y2="{bottom:g}"/>')
    drawn.append(mark_line(cap / span, "limit", y1=4, y2=bottom, text=f"cap {scale.text(cap)}"))
    drawn.append(axis(span, scale, label=label, y=bottom, max_ticks=5))
    text = f"{len(rows)} rows, {rows[0].name} to {rows[-1].name}: {', '.join(bar.text for bar in rows[:8])}."
    height = bottom + 32
    return (
        f'<div class="bars"><svg aria-hidden="true" width="66" height="{height:g}">{"".join(names)}</svg>'
        + picture("".join(drawn), height=height, title=title, description=text)
        + f'<svg aria-hidden="true" width="76" height="{height:g}">{"".join(texts)}</svg></div>'
    )


def stacked_bar(bar: Bar, *, span: float, cap: float, y: float, height: float, show: Callable[[float], str]) -> str:
    """The parts side by side on an axis of `span`; what lies past the cap is outlined as too much."""
    shapes, x = [], 0.0
    for look, what, value in bar.parts:
        if value > 0:
            shapes.append(
                f'<rect class="{look}" x="{at(x / span)}" y="{y:g}" width="{at(value / span)}" height="{height:g}" '
                f'data-t="{escape(clean(f"{bar.name}, {what}: {show(value)}"))}"/>'
            )
        x += value
    if x > cap:
        start, past = at(cap / span), at((x - cap) / span)
        shapes.append(f'<rect class="over" x="{start}" y="{y:g}" width="{past}" height="{height:g}"/>')
    return "".join(shapes)


def mark_line(where: float, look: str, *, y1: float, y2: float, text: str) -> str:
    """Return a line of the look "limit" or "makespan" down the plot, named at its top on the side that has room."""
    anchor, dx = ("end", -5) if where > (0.85 if look == "makespan" else 0.5) else ("start", 5)
    return (
        f'<line class="{look}" x1="{at(where)}" x2="{at(where)}" y1="{y1:g}" y2="{y2:g}"/>'
        f'<text class="mark halo" x="{at(where)}" dx="{dx}" y="13" text-anchor="{anchor}">{escape(text)}</text>'
    )
