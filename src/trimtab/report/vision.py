"""Ranks that share images: what each encodes, without and with sharing."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.plan.file.details import PlanDetails
from trimtab.plan.plan import VisionDecision
from trimtab.report import svg
from trimtab.report.markup import legend, section
from trimtab.report.plan_tables import vision_table
from trimtab.report.table import on_page
from trimtab.report.words import percent, time_scale
from trimtab.units import format_seconds

MAX_RANKS = 64  # drawn; the plan file has them all
_PARTS = (("state", "encodes"), ("transient", "exchanges"), ("reserve", "waits for the slowest"))


def vision_words(decision: VisionDecision) -> str:
    """The decision in a line: "tp 4, gather, balanced by time, 2 micro-batches a call, gradients averaged"."""
    calls = "each micro-batch by itself" if decision.pooling == 1 else f"{decision.pooling} micro-batches a call"
    runs = "in order, " if decision.rule == "contiguous" else ""
    sums = {"sum": ", gradients summed", "mean": ", gradients averaged", None: ""}[decision.reduction]
    how = f"{decision.exchange}, {runs}balanced by {decision.objective}"
    return f"{decision.group} {decision.degree}, {how}, {calls}{sums}"


def vision_section(details: PlanDetails) -> str:
    """Bars of every rank and a table; empty where no images are shared."""
    decision, found = details.plan.decisions.vision_data_parallel, details.plan.estimates.vision_data_parallel
    if decision is None or found is None:
        return ""
    shown = found.ranks[:MAX_RANKS]
    without = [(rank.tower_without_ms / 1e3, 0.0) for rank in shown]
    with_it = [(rank.tower_ms / 1e3, found.exchange_ms / 1e3) for rank in shown]
    slowest = (found.tower_without_ms / 1e3, found.tower_ms / 1e3)
    span = 1.02 * max(*slowest, *(sum(x) for x in (*without, *with_it)))
    panels = "".join(
        f"<figure><h3>{name}</h3>{_panel(name, parts, end, span)}</figure>"
        for name, parts, end in zip(("Not shared", "Shared"), (without, with_it), slowest, strict=True)
    )
    note = (
        f"Forward and backward of vision tower and projector in a mean step, recompute not counted; each call of the "
        f"tower ends when its slowest rank has. Shared over {vision_words(decision)}. Times ± "
        f"{percent(details.plan.estimates.time_error, digits=0)}, memory ± "
        f"{percent(details.plan.estimates.memory_error, digits=0)}."
    )
    if len(shown) < len(found.ranks):
        note += f" The first {len(shown)} of {len(found.ranks)} ranks are drawn."
    if decision.group == "tp":
        note += " Not shared, tensor parallelism divides the tower; shared, every rank holds it whole."
    return section(
        "Images shared among ranks",
        note,
        legend(((look,), text) for look, text in _PARTS)
        + f'<div class="pair">{panels}</div>'
        + on_page(vision_table(found)),
    )


def _panel(name: str, ranks: Sequence[tuple[float, float]], slowest_s: float, span: float) -> str:
    scale = time_scale([span])
    rows = [
        svg.Bar(
            name=f"rank {i}",
            parts=[
                (look, text, value)
                for (look, text), value in zip(
                    _PARTS, (own, exchange, max(0.0, slowest_s - own - exchange)), strict=True
                )
            ],
            text=scale.text(own),
            cap=span,
        )
        for i, (own, exchange) in enumerate(ranks)
    ]
    label = f"{scale.unit} in a step"
    return svg.bars(
        rows,
        span=span,
        scale=scale,
        label=label,
        title=name,
        show=format_seconds,
        mark="makespan",
        marked=slowest_s,
    )
