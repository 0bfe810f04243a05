"""The plan as tables in a terminal, 80 columns or wider."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab.plan.file.details import PlanDetails
from trimtab.report.vision import vision_lines
from trimtab.report.words import (
    before_after,
    clean,
    count_scale,
    describe_layers,
    describe_recompute,
    error_sentence,
    headline,
    memory_scale,
    percent,
    ratio_text,
    relative_spread,
    shuffle_text,
    signed_percent,
    time_scale,
)

WIDE = 96  # columns from which a variant's packs, stages and recompute have columns of their own
MAX_STAGE_ROWS = 16


def print_plan(details: PlanDetails, console: Console) -> None:
    """Summary, before/after table, stages and packing, as wide as the console."""
    plan = details.plan
    console.print(Text(clean(plan.summary, limit=600)))
    console.print(Text(headline(details), style="bold"))
    console.print()
    console.print(variants_table(details, width=console.width))
    console.print()
    console.print(stages_table(details))
    console.print()
    if shared := vision_lines(details):
        for line in shared:
            console.print(line)
        console.print()
    for line in packing_lines(details):
        console.print(line)
    console.print()
    console.print(Text(error_sentence(details), style="dim"))


def plan_text(details: PlanDetails, *, width: int = 100) -> str:
    """What `print_plan` shows, without colours or control codes: for logs and pipes."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    print_plan(details, console)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def variants_table(details: PlanDetails, *, width: int = 100) -> Table:
    """One row per variant; under `WIDE` columns the words stand below the name."""
    rows = details.plan.estimates.variants
    step, epoch = time_scale(row.step_ms / 1e3 for row in rows), time_scale(row.epoch_s for row in rows)
    rate, best = count_scale(row.samples_per_s for row in rows), len(rows) - 1
    wide = width >= WIDE
    table = _table("Before and after")
    table.add_column("variant", min_width=8)
    if wide:
        for head in ("packs", "stages", "recompute"):
            table.add_column(head, min_width=8)
    for head in (
        f"step\n{step.unit}",
        f"epoch\n{epoch.unit}",
        "samples\n/s",
        "against\nbaseline",
        "idle",
        "memory\nGiB",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        words = [clean(word, limit=40) for word in (row.packs, row.stages, row.recompute)]
        name = Text(clean(row.name, limit=40))
        how = [Text(word) for word in words] if wide else []
        if not wide:
            name.append(f"\n{words[0]} · {words[1]} · recompute {words[2]}", style="dim")
        memory = Text(f"{row.peak_memory_gib:.1f}")
        if not row.fits:
            memory = Text(f"{row.peak_memory_gib:.1f}\ntoo much", style="red")
        table.add_row(
            name,
            *how,
            Text(step.number(row.step_ms / 1e3)),
            Text(epoch.number(row.epoch_s)),
            Text(rate.number(row.samples_per_s)),
            Text(ratio_text(row.samples_per_s / rows[0].samples_per_s)),
            Text(percent(row.idle_share)),
            memory,
            style="bold green" if i == best and len(rows) > 1 else "",
        )
    return table


def stages_table(details: PlanDetails) -> Table:
    """One row per stage of the plan; of more than `MAX_STAGE_ROWS` the first and the last ones."""
    plan = details.variants[-1]
    total = plan.stage_forward_s + plan.stage_backward_s
    mean = float(total.mean())
    scale = time_scale([*plan.stage_forward_s.tolist(), *plan.stage_backward_s.tolist()])
    memory = memory_scale(m.total_bytes for m in plan.memory)
    table = _table("Stages")
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("layers", min_width=16)
    table.add_column("recompute")
    for head in (f"forward\n{scale.unit}", f"backward\n{scale.unit}", "against\nmean", f"memory\n{memory.unit}"):
        table.add_column(head, justify="right", no_wrap=True)
    num = len(plan.stages)
    hidden = range(MAX_STAGE_ROWS - 2, num - 1) if num > MAX_STAGE_ROWS else range(0)
    for i, stage in enumerate(plan.stages):
        if i in hidden:
            if i == hidden.start:
                table.add_row("…", Text(f"{len(hidden)} more stages", style="dim"), "", "", "", "", "")
            continue
        device = plan.timeline.device_of(i)
        table.add_row(
            str(i),
            Text(describe_layers(details.model, stage)),
            Text(describe_recompute(stage)),
            scale.number(float(plan.stage_forward_s[i])),
            scale.number(float(plan.stage_backward_s[i])),
            signed_percent(float(total[i]) / mean - 1) if mean > 0 else "",
            memory.number(plan.memory[device].total_bytes),
        )
    return table


def packing_lines(details: PlanDetails) -> list[Text]:
    """Limits, fill, evenness and shuffle quality, a line each."""
    plan, shown = details.plan, before_after(details).values()
    decision, balance = plan.decisions.packing, plan.estimates.balance
    last = details.variants[-1]
    pairs = [
        (
            "packs",
            f"{len(last.pack_tokens):,} in {len(last.step_s):,} steps (at least {balance.lower_bound_packs:,} packs "
            "under these limits)",
        ),
        (
            "limits",
            f"{decision.max_patches:,} patches, {decision.max_tokens:,} tokens; filled to "
            f"{percent(balance.fill_patches)} and {percent(balance.fill_tokens)}",
        ),
        (
            "spread",
            f"patches {_change([relative_spread(v.pack_patches) for v in shown])}, "
            f"tokens {_change([relative_spread(v.pack_tokens) for v in shown])} (deviation over mean)",
        ),
        (
            "dist ratio",
            f"vision {balance.dist_ratio_vit:.4f}, language {balance.dist_ratio_llm:.4f}, cost "
            f"{balance.dist_ratio_cost:.4f}; pad ratio {balance.pad_ratio:.4f}",
        ),
        (
            "shuffle",
            f"order {clean(decision.order)}; chi-square of sources {shuffle_text(balance.shuffle_chi2)} (1 = random)",
        ),
    ]
    if decision.num_oversize:
        pairs.append(("oversize", f"{decision.num_oversize:,} samples over a limit by themselves: {decision.oversize}"))
    return [Text("Packing", style="bold"), *(Text.assemble("  ", (f"{name:<11}", "dim"), text) for name, text in pairs)]


def _change(shares: list[float]) -> str:
    return " → ".join(percent(share) for share in shares)


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        header_style="dim",
    )
