"""The plan as tables in a terminal, 80 columns or wider."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from trimtab.plan.file.details import PlanDetails
from trimtab.report.plan_tables import (
    SEARCHED_NOTE,
    packing_note,
    packing_table,
    searched_table,
    stages_table,
    variants_table,
    vision_table,
)
from trimtab.report.table import print_table
from trimtab.report.vision import vision_words
from trimtab.report.words import MAX_SUMMARY, clean, error_sentence, idle_sentence

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
