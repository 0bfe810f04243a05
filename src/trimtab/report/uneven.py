"""Even and uneven pipeline stages under one another, as a page."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.partition.timeline import Timeline
from trimtab.report.figures import stacked_timelines
from trimtab.report.markup import esc, legend, page, section

LEGEND = (
    (("f0", "f1", "f2"), "forward of a micro-batch"),
    (("b0", "b1", "b2"), "backward"),
    (("idle",), "idle"),
)


def timelines_page(model: str, steps: Mapping[str, Timeline]) -> str:
    """One self-contained page: a timeline for each split, on one time axis."""
    title = f"Even and uneven stages of {esc(model, 80)}"
    note = "One step by the FLOPs of the rule at the device's peak; sends, recompute and the optimizer are not counted."
    return page(
        title,
        f"<header><h1>{title}</h1></header>" + section("Timelines", note, legend(LEGEND) + stacked_timelines(steps)),
    )
