"""A plan's counted memory as a table: each pipeline rank's peak beside the plan's own estimate and the cap."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab.plan.measured.check_memory import MemoryCheck
from trimtab.report.words import clean
from trimtab.units import format_bytes


def print_memory(check: MemoryCheck, console: Console) -> None:
    """One row for each pipeline rank, with the number of its layers computed again; parts and reserve make the peak."""
    reserve = check.ranks[0].peak.memory.overhead_bytes
    title = f"Counted bytes, reserve of {format_bytes(reserve)} in the peak, cap {format_bytes(check.cap_bytes)}"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for name in ("Rank", "Stages", "Again", "State", "Kept", "Transient", "Peak", "Planned", "Of cap"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in check.ranks:
        held = rank.peak.memory
        parts = (held.state_bytes, held.saved_bytes, held.transient_bytes, held.total_bytes)
        table.add_row(
            str(rank.rank),
            ", ".join(str(stage.index) for stage in rank.stages),
            str(sum(stage.num_recomputed() for stage in rank.stages)),
            *(format_bytes(x) for x in (*parts, rank.planned.total_bytes)),
            f"{held.total_bytes / check.cap_bytes:.1%}",
            style="bold red" if rank.problem is not None else None,
        )
    console.print(table)
    for sentence in check.assumptions:
        console.print(Text(clean(sentence, limit=400), style="dim"))
