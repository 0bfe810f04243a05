"""A plan's counted memory as a table: each pipeline rank's peak beside the plan's own estimate and the cap."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from trimtab.plan.measured.check_memory import MemoryCheck
from trimtab.report.table import Table, numeric, print_table
from trimtab.report.words import clean
from trimtab.units import format_bytes


def print_memory(check: MemoryCheck, console: Console) -> None:
    """One row for each pipeline rank, with the number of its layers computed again; parts and reserve make the peak."""
    reserve = check.ranks[0].peak.memory.overhead_bytes
    rows = []
    for rank in check.ranks:
        held = rank.peak.memory
        parts = (held.state_bytes, held.saved_bytes, held.transient_bytes, held.total_bytes, rank.planned.total_bytes)
        rows.append(
            (
                str(rank.rank),
                ", ".join(str(stage.index) for stage in rank.stages),
                str(sum(stage.num_recomputed() for stage in rank.stages)),
                *map(format_bytes, parts),
                f"{held.total_bytes / check.cap_bytes:.1%}",
            )
        )
    table = Table(
        title=f"Counted bytes, reserve of {format_bytes(reserve)} in the peak, cap {format_bytes(check.cap_bytes)}",
        columns=numeric("Rank", "Stages", "Again", "State", "Kept", "Transient", "Peak", "Planned", "Of cap"),
        rows=rows,
        bad=frozenset(number for number, rank in enumerate(check.ranks) if rank.problem is not None),
    )
    print_table(table, console)
    for sentence in check.assumptions:
        console.print(Text(clean(sentence, limit=400), style="dim"))
