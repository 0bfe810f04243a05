"""Ranks that share images: what each encodes, without and with sharing, on the page and in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from trimtab.plan.file.details import PlanDetails
from trimtab.plan.plan import VisionDecision, VisionEstimate
from trimtab.report import svg
from trimtab.report.markup import Column, legend, section, table
from trimtab.report.words import Scale, percent, ratio_text, time_scale
from trimtab.units import MIB, format_bytes, format_seconds

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
    columns = (
        Column("Figure"),
        Column("Not shared", True),
        Column("Shared", True),
        Column("Meaning", look="meaning"),
    )
    lines = [(*row[:-1], f'<span class="note">{row[-1]}</span>') for row in _rows(found)]
    return section(
        "Images shared among ranks",
        note,
        legend(((look,), text) for look, text in _PARTS)
        + f'<div class="pair">{panels}</div>'
        + table(columns, lines, caption="Images shared among ranks"),
    )


def vision_lines(details: PlanDetails) -> list[Text]:
    """The same for a terminal, a fact a line; none where no images are shared."""
    decision, found = details.plan.decisions.vision_data_parallel, details.plan.estimates.vision_data_parallel
    if decision is None or found is None:
        return []
    pairs = [("over", vision_words(decision))]
    pairs += [(name.lower(), f"{before} → {now}" if before else now) for name, before, now, _ in _rows(found)]
    width = max(len(name) for name, _ in pairs)
    loads = ", ".join(format_seconds(rank.tower_ms / 1e3) for rank in found.ranks[:16])
    more = f" and {len(found.ranks) - 16} more" if len(found.ranks) > 16 else ""
    pairs.append(("by rank", loads + more))
    return [
        Text("Images shared among ranks (not shared → shared)", style="bold"),
        *(Text.assemble("  ", (f"{name:<{width}}", "dim"), "  ", text) for name, text in pairs),
    ]


def _rows(found: VisionEstimate) -> list[tuple[str, str, str, str]]:
    """Name, not shared, shared, meaning."""
    times = time_scale([found.tower_ms / 1e3, found.tower_without_ms / 1e3])
    over = found.tower_ms / found.ideal_ms if found.ideal_ms > 0 else 1.0
    known = (
        "" if found.sizes_known >= 1 else f"; {percent(found.sizes_known)} of the patches lie in images of known size"
    )
    return [
        (
            "Slowest rank",
            times.text(found.tower_without_ms / 1e3),
            times.text(found.tower_ms / 1e3),
            f"vision tower and projector in a mean step; {ratio_text(over)} equal shares without exchange{known}",
        ),
        (
            "Update",
            format_seconds(found.update_without_ms / 1e3),
            format_seconds(found.update_ms / 1e3),
            "once a step and not in the bars: gradients of these layers exchanged, parameters updated",
        ),
        (
            "Exchange",
            "",
            format_seconds(found.exchange_ms / 1e3),
            "of the slowest rank's time: features and their gradients, with a dispatch also pixels",
        ),
        ("Received", "", format_bytes(found.exchange_mib * MIB), "by a rank in a step, forward and backward"),
        (
            "Features held",
            "",
            format_bytes(found.features_mib * MIB),
            "rows for the language model, of the largest call: sharing does not make them fewer, routing does",
        ),
        (
            "Activations",
            f"{found.activations_without_gib:.2f} GiB",
            f"{found.activations_gib:.2f} GiB",
            "of these layers on the rank that holds most, if none of them recomputed",
        ),
        (
            "State",
            f"{found.state_without_gib:.2f} GiB",
            f"{found.state_gib:.2f} GiB",
            "their parameters, gradients and optimizer",
        ),
    ]


def _panel(name: str, ranks: Sequence[tuple[float, float]], slowest_s: float, span: float) -> str:
    num, top = len(ranks), 22.0
    row = float(min(26, max(7, 420 // num)))
    pad, every = (4.0 if row >= 18 else 1.0), 1 if row >= 13 else 2 if row >= 10 else 8
    bottom, scale = top + row * num, time_scale([span])
    bars, names, values = [svg.grid(span, scale, bottom, max_ticks=5)], [], []
    for i, (own, exchange) in enumerate(ranks):
        middle = f'y="{top + (i + 0.5) * row:g}" dy="0.35em" text-anchor="end"'
        spent = (own, exchange, max(0.0, slowest_s - own - exchange))
        parts = [
            (look, value, f"rank {i} {text}: {format_seconds(value)}")
            for (look, text), value in zip(_PARTS, spent, strict=True)
        ]
        bars.append(svg.stacked_bar(parts, span=span, cap=span, y=top + i * row + pad, height=row - 2 * pad))
        if i % every == 0:
            names.append(f'<text class="name" x="100%" dx="-8" {middle}>rank {i}</text>')
            values.append(f'<text x="100%" {middle}>{scale.text(own)}</text>')
    bars.append(f'<line class="base" x1="0" x2="0" y1="{top:g}" y2="{bottom:g}"/>')
    bars.append(_end_line(slowest_s, span, bottom, scale))
    bars.append(svg.axis(span, scale, label=f"{scale.unit} in a step", y=bottom, max_ticks=5))
    height = bottom + 32
    text = f"{num} ranks, the slowest {scale.text(slowest_s)}."
    return (
        f'<div class="bars"><svg aria-hidden="true" width="66" height="{height:g}">{"".join(names)}</svg>'
        + svg.drawing("".join(bars), height=height, title=name, description=text)
        + f'<svg aria-hidden="true" width="76" height="{height:g}">{"".join(values)}</svg></div>'
    )


def _end_line(end_s: float, span: float, bottom: float, scale: Scale) -> str:
    """When the slowest rank is done."""
    where = end_s / span
    side = ("end", -5) if where > 0.5 else ("start", 5)
    return (
        f'<line class="makespan" x1="{svg.at(where)}" x2="{svg.at(where)}" y1="4" y2="{bottom:g}"/>'
        f'<text class="mark halo" x="{svg.at(where)}" dx="{side[1]}" y="13" text-anchor="{side[0]}">'
        f"{scale.text(end_s)}</text>"
    )
