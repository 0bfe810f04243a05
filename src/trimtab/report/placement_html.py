"""A placement as one page: bytes of each device by kind against its capacity, ours and the public maps side by side."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.placement.device_bytes import DeviceUse
from trimtab.placement.machine import Machine
from trimtab.placement.placed import Placement
from trimtab.placement.split_model import Assessed
from trimtab.placement.workload import Workload
from trimtab.plan.file.modules import fold_modules
from trimtab.plan.file.placement import assumptions, image_texts, summary
from trimtab.report import svg
from trimtab.report.markup import Column, esc, facts, legend, page, section, table
from trimtab.report.words import Scale, memory_scale
from trimtab.specs import ModelSpec
from trimtab.units import format_bytes

_KINDS = (
    ("state", "weights", "weight_bytes"),
    ("cache", "KV cache", "kv_bytes"),
    ("saved", "activations", "activation_bytes"),
    ("transient", "room for streamed weights", "streamed_bytes"),
    ("reserve", "context and allocator", "reserve_bytes"),
)


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
        + _modules(placement)
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
    used = [kind for kind in _KINDS if any(getattr(use, kind[2]) for use in uses)]
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
    uses = [use for use in placement.uses if _is_drawn(use)]
    row, pad, top = 26.0 if len(uses) <= 16 else 14.0, 4.0, 8.0
    bottom = top + row * len(uses)
    scale = memory_scale([span])
    bars, names, values = [svg.grid(span, scale, bottom, max_ticks=5)], [], []
    for i, use in enumerate(uses):
        y, middle, capacity = top + i * row, top + (i + 0.5) * row, float(use.capacity_bytes or 0)
        bars.append(
            f'<rect class="track" x="0" y="{y + pad - 2:g}" width="{svg.at(capacity / span)}" '
            f'height="{row - 2 * pad + 4:g}"/>'
        )
        parts = [
            (look, float(getattr(use, field)), f"GPU {use.device}, {text}: {format_bytes(getattr(use, field))}")
            for look, text, field in _KINDS
        ]
        bars.append(svg.stacked_bar(parts, span=span, cap=capacity, y=y + pad, height=row - 2 * pad))
        bad = ' style="fill:var(--bad);font-weight:600"' if use.fraction > 1 else ""
        names.append(
            f'<text class="name" x="100%" dx="-8" y="{middle:g}" dy="0.35em" text-anchor="end">GPU {use.device}</text>'
        )
        values.append(
            f'<text x="100%" y="{middle:g}" dy="0.35em" text-anchor="end"{bad}>{100 * use.fraction:.1f} %</text>'
        )
    bars.append(f'<line class="base" x1="0" x2="0" y1="{top:g}" y2="{bottom:g}"/>')
    bars.append(svg.axis(span, scale, label=f"{scale.unit} per device", y=bottom, max_ticks=5))
    text = f"{len(uses)} GPUs, the fullest at {100 * placement.fullest:.1f} % of what is free."
    height = bottom + 32
    return (
        f'<div class="bars"><svg aria-hidden="true" width="66" height="{height:g}">{"".join(names)}</svg>'
        + svg.drawing("".join(bars), height=height, title=f"Memory, {name}", description=text)
        + f'<svg aria-hidden="true" width="76" height="{height:g}">{"".join(values)}</svg></div>'
    )


def _rules(placement: Placement, compared: Sequence[Assessed]) -> str:
    if not compared:
        return ""
    rows = [_rule_row("This placement", placement, ())]
    rows += [
        _rule_row(x.rule, x.placement, x.problems)
        if x.placement is not None
        else [esc(x.rule), "-", "-", "-", esc("; ".join(x.problems))]
        for x in compared
    ]
    columns = [
        Column("Map"),
        Column("Fullest GPU", numeric=True),
        Column("GPUs in use", numeric=True),
        Column("Moved per batch", numeric=True),
        Column("What it does"),
    ]
    return section(
        "Beside the public maps",
        "All in the same bytes. Weights that do not fit move over a link for each batch of requests.",
        table(columns, rows, caption="Public maps", marked=0, look="lead-column"),
    )


def _rule_row(name: str, placement: Placement, problems: Sequence[str]) -> list[str]:
    words = list(problems)
    if not placement.fits:
        words.insert(0, "does not fit")
    if placement.spilled:
        words.append(f"{format_bytes(sum(x.weight_bytes for x in placement.spilled))} of weights off the GPUs")
    look = "bad" if placement.fullest > 1 else ""
    used = sum(isinstance(use.device, int) and use.total_bytes > 0 for use in placement.uses)
    return [
        esc(name),
        f'<span class="{look}">{100 * placement.fullest:.1f} %</span>',
        str(used),
        esc(format_bytes(placement.moved_bytes)) if placement.moved_bytes else "0",
        esc("; ".join(words) or "fits"),
    ]


def _modules(placement: Placement) -> str:
    scale = memory_scale([use.total_bytes for use in placement.uses])
    kinds = [kind for kind in _KINDS if any(getattr(use, kind[2]) for use in placement.uses)]
    rows = [
        [
            f'<span class="nw">{esc(_device_name(use))}</span>',
            *(_cell(scale, getattr(use, field)) for _, _, field in kinds),
            scale.number(use.total_bytes),
            "-" if use.capacity_bytes is None else f"{100 * use.fraction:.1f} %",
            f"<code>{esc(', '.join(fold_modules(use.modules)), 1200)}</code>" if use.modules else "nothing",
        ]
        for use in placement.uses
    ]
    columns = [
        Column("Device"),
        *(Column(_HEADS[field], numeric=True) for _, _, field in kinds),
        Column("All", numeric=True),
        Column("Used", numeric=True),
        Column("Modules", look="wide"),
    ]
    return section("Devices", f"Sizes in {scale.unit}.", table(columns, rows, caption="Devices"))


_HEADS = {
    "weight_bytes": "Weights",
    "kv_bytes": "KV cache",
    "activation_bytes": "Activations",
    "streamed_bytes": "Streamed",
    "reserve_bytes": "Reserve",
}


def _cell(scale: Scale, num_bytes: int) -> str:
    return scale.number(num_bytes) if num_bytes else "0"


def _device_name(use: DeviceUse) -> str:
    return f"GPU {use.device}" if isinstance(use.device, int) else {"cpu": "host memory"}.get(use.device, use.device)


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
