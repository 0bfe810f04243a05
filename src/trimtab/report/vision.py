"""Ranks that share images: what each encodes, without and with sharing."""

from __future__ import annotations

from trimtab.plan.file.details import PlanDetails
from trimtab.plan.plan import VisionDecision
from trimtab.report.markup import section
from trimtab.report.plan_tables import vision_table
from trimtab.report.table import on_page
from trimtab.report.words import percent


def vision_words(decision: VisionDecision) -> str:
    """The decision in a line: "tp 4, gather, balanced by time, 2 micro-batches a call, gradients averaged"."""
    calls = "each micro-batch by itself" if decision.pooling == 1 else f"{decision.pooling} micro-batches a call"
    runs = "in order, " if decision.rule == "contiguous" else ""
    sums = {"sum": ", gradients summed", "mean": ", gradients averaged", None: ""}[decision.reduction]
    how = f"{decision.exchange}, {runs}balanced by {decision.objective}"
    return f"{decision.group} {decision.degree}, {how}, {calls}{sums}"


def vision_section(details: PlanDetails) -> str:
    """What sharing changes on the slowest rank and the fullest one; empty where no images are shared."""
    decision, found = details.plan.decisions.vision_data_parallel, details.plan.estimates.vision_data_parallel
    if decision is None or found is None:
        return ""
    note = (
        f"Forward and backward of vision tower and projector in a mean step, recompute not counted; each call of the "
        f"tower ends when its slowest rank has. Shared over {vision_words(decision)}. Times ± "
        f"{percent(details.plan.estimates.time_error, digits=0)}, memory ± "
        f"{percent(details.plan.estimates.memory_error, digits=0)}."
    )
    if decision.group == "tp":
        note += " Not shared, tensor parallelism divides the tower; shared, every rank holds it whole."
    return section("Images shared among ranks", note, on_page(vision_table(found)))
