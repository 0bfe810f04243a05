"""Even and uneven pipeline stages under one another, as a page."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.report import svg
from trimtab.report.markup import esc, legend, page, section
from trimtab.report.words import percent, time_scale
from trimtab.specs import Timeline
from trimtab.units import format_seconds

LEGEND = (
    (("f0", "f1", "f2"), "forward of a micro-batch"),
    (("b0", "b1", "b2"), "backward"),
    (("idle",), "idle"),
)


def timelines_page(model: str, steps: Mapping[str, Timeline]) -> str:
    """One self-contained page: a timeline for each split, on one time axis."""
    span = max(step.makespan_s for step in steps.values())
    parts = []
    for name, step in steps.items():
        sentence = f"{format_seconds(step.makespan_s)}, {percent(step.bubble_ratio)} idle"
        parts.append(f'<h3>{esc(name)} <span class="note">{sentence}</span></h3>')
        parts.append(svg.device_names(step.num_devices))
        parts.append(svg.timeline(step, span_s=span, title=f"Pipeline timeline, {esc(name)}", description=sentence))
    scale = time_scale([span])
    label = f"time since the start of the step, {scale.unit}"
    axis = f'<svg aria-hidden="true" width="100%" height="32">{svg.axis(span, scale, label=label, y=0)}</svg>'
    body = f'<div class="scroll"><div class="time">{"".join(parts)}<span></span>{axis}</div></div>'
    title = f"Even and uneven stages of {esc(model, 80)}"
    note = "One step by the FLOPs of the rule at the device's peak; sends, recompute and the optimizer are not counted."
    return page(title, f"<header><h1>{title}</h1></header>" + section("Timelines", note, legend(LEGEND) + body))
