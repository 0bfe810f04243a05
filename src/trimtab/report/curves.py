"""Drawings of a quantity over the steps of a run: lines of a bounded number of points, as wide as the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.report.plots import levels, plot
from trimtab.report.svg import axis, grid, nice_ticks
from trimtab.report.words import Scale, count_scale
from trimtab.specs import FloatArray

MAX_POINTS = 300  # of a line; of a longer one each point is the mean of its neighbours
_TOP, _PLOT = 10.0, 150.0
_MOST = 1e100  # beyond it a plot's range overflows
_WIDTH = 10_000  # columns of the grid that points lie on


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """One line: a class of report.css, its values, and by how much they may be off, as a share."""

    look: str
    name: str
    values: FloatArray
    band: float = 0.0


def curves(
    steps: FloatArray, lines: Sequence[Curve], *, scale: Scale, title: str, from_zero: bool, description: str
) -> str:
    """Lines over `steps`, one time axis, values in the unit of `scale`; from 0, or from below the smallest.

    Values that are no finite number, or beyond all that a plot can scale, are left out.
    """
    low, high = _range(lines, scale, from_zero=from_zero)
    bottom, span = _TOP + _PLOT, float(steps[-1])
    shown = count_scale([span])

    def y(value: float) -> float:
        return bottom - _PLOT * (min(max(value, low), high) - low) / (high - low)

    lined, names = levels(_ticks(low, high, scale), y, lambda tick: _tick_text(tick, scale))
    parts = [grid(span, shown, bottom), lined]
    shapes = []
    for line in lines:
        drawn = _is_drawn(line.values)
        if not drawn.any():
            continue
        points = list(zip(_thin(steps[drawn]) / span * _WIDTH, _thin(line.values[drawn]), strict=True))
        if line.band:
            upper = [f"{x:.0f} {y(value * (1 + line.band)):.1f}" for x, value in points]
            lower = [f"{x:.0f} {y(value * (1 - line.band)):.1f}" for x, value in reversed(points)]
            shapes.append(f'<path class="band {line.look}" d="M{"L".join(upper + lower)}Z"/>')
        places = [f"{x:.0f} {y(value):.1f}" for x, value in points]
        path = f"M{'L'.join(places)}" if len(places) > 1 else f"M{places[0]}h1"
        shapes.append(f'<path class="line {line.look}" d="{path}" vector-effect="non-scaling-stroke"/>')
    height = bottom + 32
    parts.append(
        f'<svg width="100%" height="{height:g}" viewBox="0 0 {_WIDTH} {height:g}" preserveAspectRatio="none" '
        f'aria-hidden="true">{"".join(shapes)}</svg>'
    )
    parts.append(f'<line class="base" x1="0" x2="100%" y1="{bottom:g}" y2="{bottom:g}"/>')
    parts.append(axis(span, shown, label="step", y=bottom))
    return plot("".join(parts), names, height=height, title=title, description=description)


def _is_drawn(values: FloatArray) -> npt.NDArray[np.bool_]:
    drawn: npt.NDArray[np.bool_] = np.abs(values) < _MOST  # false for NaN
    return drawn


def _range(lines: Sequence[Curve], scale: Scale, *, from_zero: bool) -> tuple[float, float]:
    """Values that the plot shows; a few far off, as the first steps of a run are, are cut at its edge."""
    finite = [(_thin(line.values[_is_drawn(line.values)]), line.band) for line in lines]
    values = np.concatenate([found for found, _ in finite])
    if not len(values):
        return 0.0, scale.factor
    high = float(max(np.max(found * (1 + band)) for found, band in finite if len(found)))
    high = min(high, 2.5 * float(np.quantile(values, 0.9))) if from_zero else high
    low = 0.0 if from_zero else float(values.min())
    room = 0.06 * (high - low) or 0.1 * abs(high) or scale.factor
    return (low if from_zero else low - room), high + room


def _ticks(low: float, high: float, scale: Scale) -> list[float]:
    steps = nice_ticks((high - low) / scale.factor, max_ticks=5)
    width = (steps[1] if len(steps) > 1 else (high - low) / scale.factor) * scale.factor
    first = int(np.ceil(low / width - 1e-9))
    return [i * width for i in range(first, int(np.floor(high / width + 1e-9)) + 1)]


def _tick_text(tick: float, scale: Scale) -> str:
    return f"{tick / scale.factor:.6g} {scale.unit}".strip()


def _thin(values: FloatArray) -> FloatArray:
    """At most `MAX_POINTS` values, each the mean of equally many neighbours but for the last."""
    if len(values) <= MAX_POINTS:
        return values
    each = -(-len(values) // MAX_POINTS)
    starts = np.arange(0, len(values), each)
    means: FloatArray = np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))
    return means
