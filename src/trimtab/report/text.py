"""A plan, its prediction and its counted memory as tables in a terminal, 80 columns or wider."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.text import Text

from trimtab.plan.file.check import MemoryCheck
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.predict import Prediction
from trimtab.report.plan_tables import (
    SEARCHED_NOTE,
    packing_note,
    packing_table,
    searched_table,
    stages_table,
    variant_stages,
    variants_table,
    vision_table,
)
from trimtab.report.table import Table, numeric, print_table
from trimtab.report.words import MAX_SUMMARY, clean, error_sentence, idle_sentence, memory_scale, vision_words
from trimtab.units import format_degrees, format_number, format_seconds

MAX_STAGE_ROWS = 16


def print_plan(details: PlanDetails, console: Console) -> None:
    """Summary, before/after table, stages and packing, as wide as the console."""
    decision, found = details.plan.decisions.vision_data_parallel, details.plan.estimates.vision_data_parallel
    console.print(Text(clean(details.plan.summary, limit=MAX_SUMMARY)))
    tables = [
        (variants_table(details), idle_sentence(details.variants[-1])),
        (stages_table(details, most=MAX_STAGE_ROWS), ""),
    ]
    if details.plan.estimates.searched:
        tables.append((searched_table(details), SEARCHED_NOTE))
    if decision is not None and found is not None:
        tables.append((vision_table(found), f"Over {vision_words(decision)}."))
    tables.append((packing_table(details), packing_note(details)))
    for table, note in tables:
        console.print()
        print_table(table, console)
        if note:
            console.print(Text(clean(note)))
    console.print()
    console.print(Text(error_sentence(details), style="dim"))


def prediction_sentences(found: Prediction) -> tuple[str, ...]:
    """Shape, time, memory, waiting and how far to trust them, a sentence or two each."""
    ran = found.variant
    time_band, memory = found.profile.time_error, found.budget
    peak = max(held.total_bytes for held in ran.memory)
    steps = len(ran.step_s)
    return (
        f"{found.cluster.num_devices} {found.cluster.device.name} as {format_degrees(found.dims)}, "
        f"{found.num_microbatches} micro-batches a rank and step ({ran.packs}).",
        f"A step takes {format_seconds(found.mean_step_s)} in the mean, {format_seconds(found.expected_step_s)} with "
        f"jitter of {100 * found.cluster.jitter:g} % a device, {format_seconds(found.p95_step_s)} or more in one of "
        f"20: {format_number(found.samples_per_s)} samples/s, {format_seconds(ran.epoch_s)} for the "
        f"{found.num_samples:,} samples in {steps:,} steps.",
        f"Memory of the fullest device: {memory.band.verdict(peak, memory.total_bytes)}.",
        idle_sentence(ran),
        f"Seconds are within {time_band:.0%}, bytes within {memory.band.half_width:.0%} of measured runs, as far as "
        "is known (docs/costs.md).",
        *found.notes,
    )


def print_prediction(found: Prediction, console: Console) -> None:
    """Sentences, then the stages."""
    for sentence in prediction_sentences(found):
        console.print(Text(clean(sentence)))
    console.print()
    stages = variant_stages(found.model, found.variant, most=MAX_STAGE_ROWS)
    print_table(replace(stages, title="Stages, at the mean micro-batch; memory at the largest"), console)


def print_memory(check: MemoryCheck, console: Console) -> None:
    """One row for each pipeline rank, with the number of its layers computed again; the parts make the peak."""
    budget = check.budget
    scale = memory_scale([budget.total_bytes])
    rows = []
    for rank in check.ranks:
        held = rank.peak.memory
        parts = (
            *(held.state_bytes, held.saved_bytes, held.transient_bytes, held.overhead_bytes),
            *(held.total_bytes, rank.planned.total_bytes),
        )
        rows.append(
            (
                str(rank.rank),
                ", ".join(str(stage.index) for stage in rank.stages),
                str(sum(stage.num_recomputed() for stage in rank.stages)),
                *map(scale.number, parts),
                f"{held.total_bytes / budget.total_bytes:.1%}",
            )
        )
    table = Table(
        title=f"Counted {scale.unit} and expected peak, of which {scale.number(budget.fill_bytes)} of "
        f"{scale.text(budget.total_bytes)} may be filled",
        columns=numeric(
            *("Rank", "Stages", "Again", "State", "Kept", "Transient", "Beside", "Peak", "Planned", "Filled")
        ),
        rows=rows,
        bad=frozenset(number for number, rank in enumerate(check.ranks) if rank.problem is not None),
    )
    print_table(table, console)
    fullest = max(rank.peak.memory.total_bytes for rank in check.ranks)
    console.print(Text(f"Memory of the fullest rank: {budget.band.verdict(fullest, budget.total_bytes)}."))
    for sentence in check.assumptions:
        console.print(Text(clean(sentence, limit=400), style="dim"))
