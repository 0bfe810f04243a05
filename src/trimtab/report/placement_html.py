"""A placement as one page: bytes of each device by kind against its capacity, ours and the public maps side by side."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.placement.device_bytes import DeviceUse
from trimtab.placement.machine import Machine
from trimtab.placement.placed import Placement
from trimtab.placement.split_model import Assessed
from trimtab.placement.workload import Workload
from trimtab.plan.file.placement import assumptions, image_texts, summary
from trimtab.report import svg
from trimtab.report.markup import esc, facts, legend, page, section
from trimtab.report.placement_tables import KINDS, devices_table, rules_table, used_kinds
from trimtab.report.table import on_page
from trimtab.report.words import memory_scale
from trimtab.specs import ModelSpec
from trimtab.units import format_bytes


def placement_html(
    model: ModelSpec, machine: Machine, workload: Workload, placement: Placement, compared: Sequence[Assessed] = ()
) -> str:
    """One self-contained page: same inputs, same bytes."""
    gpus = f"{len(machine.gpus)} GPU{'s' if len(machine.gpus) > 1 else ''}"
    header = (
        f'<header><p class="eyebrow">Placement for inference · {gpus}</p><h1>{esc(model.name, 120)}</h1>'
        f'<p class="lead">{esc(summary(placement, compared), 800)}</p></header>\n'
    )
    body = (
        header
        + _bars(placement, compared)
        + _rules(placement, compared)
        + section("Devices", "", on_page(devices_table(placement)))
        + _inputs(model, machine, workload)
        + section(
            "Assumptions",
            "",
            '<ul class="plain">' + "".join(f"<li>{esc(x)}</li>" for x in assumptions(machine, placement)) + "</ul>",
        )
    )
    return page(f"Placement of {esc(model.name, 80)}", body)


def _bars(placement: Placement, compared: Sequence[Assessed]) -> str:
    shown = [("This placement", placement), *((x.rule, x.placement) for x in compared if x.placement is not None)]
    uses = [use for _, found in shown for use in found.uses if _is_drawn(use)]
    span = 1.02 * max(max(use.total_bytes, use.capacity_bytes or 0) for use in uses)
    panels = [f"<figure><h3>{esc(name)}</h3>{_panel(name, found, span)}</figure>" for name, found in shown]
    used = used_kinds(uses)
    return section(
        "Memory of each device",
        "At the peak of one batch. The pale bar is what is free on the device; what passes it is outlined in red.",
        legend([*(((look,), text) for look, text, _ in used), (("idle",), "free")])
        + f'<div class="pair">{"".join(panels)}</div>',
    )


def _is_drawn(use: DeviceUse) -> bool:
    """GPUs always; host memory would dwarf them, and a disk has no capacity: the table has both."""
    return isinstance(use.device, int)


def _panel(name: str, placement: Placement, span: float) -> str:
    scale = memory_scale([span])
    rows = [
        svg.Bar(
            name=f"GPU {use.device}",
            parts=[(look, text, float(getattr(use, field))) for look, text, field in KINDS],
            text=f"{100 * use.fraction:.1f} %",
            cap=float(use.capacity_bytes or 0),
            bad=use.fraction > 1,
            track=True,
        )
        for use in placement.uses
        if _is_drawn(use)
    ]
    label = f"{scale.unit} per device"
    return svg.bars(rows, span=span, scale=scale, label=label, title=f"Memory, {name}", show=format_bytes)


def _rules(placement: Placement, compared: Sequence[Assessed]) -> str:
    if not compared:
        return ""
    return section(
        "Beside the public maps",
        "All in the same bytes. Weights that do not fit move over a link for each batch of requests.",
        on_page(rules_table(placement, compared)),
    )


def _inputs(model: ModelSpec, machine: Machine, workload: Workload) -> str:
    gpus = ", ".join(
        f"{x.index}: {x.name + ', ' if x.name else ''}{format_bytes(x.free_bytes)} free" for x in machine.gpus
    )
    images = ", ".join(image_texts(workload)) or "none"
    pairs = [
        ("Model", f"{esc(model.name)} ({esc(model.family)}), {len(model.layers)} layers"),
        ("GPUs", esc(gpus, 1000)),
        ("Host memory", esc(format_bytes(machine.cpu_bytes)) if machine.cpu_bytes else "none"),
        ("Disk", "yes" if machine.disk else "no"),
        ("Batch", f"{workload.batch} sequences"),
        ("Prompt", f"{workload.seq_len} tokens of text; images {esc(images)}"),
        ("New tokens", str(workload.max_new_tokens)),
        ("Numbers", esc(f"{workload.dtype}{', ' + workload.quant if workload.quant else ''}")),
        ("Attention", esc(workload.attention)),
    ]
    return section("What was asked", "", facts(pairs))
