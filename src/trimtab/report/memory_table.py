"""A plan's counted memory as a table: each pipeline rank's peak beside the plan's own estimate and the cap."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from trimtab.plan.measured.check_memory import MemoryCheck
from trimtab.report.table import Table, numeric, print_table
from trimtab.report.words import clean, memory_scale


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
    fullest = max(rank.peak.memory.total_bytes for rank in check.ranks) / budget.total_bytes
    console.print(Text(f"The fullest rank: {budget.band.verdict(fullest)}."))
    for sentence in check.assumptions:
        console.print(Text(clean(sentence, limit=400), style="dim"))
