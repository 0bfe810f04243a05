"""The page's drawings, before beside after: timeline, memory, sizes of the packs."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.partition.schedules import WEIGHT
from trimtab.partition.simulate import Timeline
from trimtab.plan.decide.compare import Variant
from trimtab.plan.file.figures import PlanDetails
from trimtab.report import drawing
from trimtab.report.table import esc, legend, section
from trimtab.report.words import before_after, memory_scale, percent, time_scale
from trimtab.units import format_bytes, format_seconds

# -- timeline -------------------------------------------------------------------------------------------------------


def timelines(details: PlanDetails) -> str:
    shown = {name: variant.timeline for name, variant in before_after(details).items()}
    if all(line.num_devices == 1 or not line.makespan_s for line in shown.values()):
        return ""  # nothing waits for anything
    dense = ""
    if any(len(line.stage) > drawing.MAX_BLOCKS for line in shown.values()):
        dense = " Blocks too thin to draw are shown as the share of the time that they take, as height."
    entries = [
        (("f0", "f1", "f2"), "forward of a light, usual, heavy micro-batch"),
        (("b0", "b1", "b2"), "backward, recompute included"),
        (("idle",), "idle"),
    ]
    if any((line.kind == WEIGHT).any() for line in shown.values()):
        entries[1] = (("b0", "b1", "b2"), "backward for the stage before, recompute included")
        entries.insert(2, (("w0", "w1", "w2"), "gradients of the weights"))
    return section(
        "Pipeline timeline",
        "One step on the slowest data-parallel rank, simulated; of all steps the one nearest the median. Both on one "
        "time axis. The gradient exchange and the optimizer come after it and are not drawn. Numbers in blocks are "
        f"micro-batches. Blank is waiting; uneven shades are uneven micro-batches, uneven widths uneven stages.{dense}",
        legend(entries) + stacked_timelines(shown),
    )


def stacked_timelines(shown: Mapping[str, Timeline]) -> str:
    """Timelines by title under one another, on one time axis."""
    span = max(line.makespan_s for line in shown.values())
    parts = []
    for name, line in shown.items():
        sentence = f"{format_seconds(line.makespan_s)}, {percent(line.bubble_ratio)} idle"
        text = f"{line.num_devices} devices, {len(line.stage)} blocks, {sentence}."
        parts.append(f'<h3>{esc(name)} <span class="note">{sentence}</span></h3>')
        parts.append(drawing.device_names(line.num_devices))
        parts.append(drawing.timeline(line, span_s=span, title=f"Pipeline timeline, {esc(name)}", description=text))
    scale = time_scale([span])
    parts.append(
        f'<span></span><svg aria-hidden="true" width="100%" height="32">'
        f"{drawing.axis(span, scale, label=f'time since the start of the step, {scale.unit}', y=0)}</svg>"
    )
    return f'<div class="scroll"><div class="time">{"".join(parts)}</div></div>'


# -- memory ---------------------------------------------------------------------------------------------------------

_MEMORY_PARTS = (
    ("state", "weights, gradients, optimizer", "state_bytes"),
    ("saved", "saved activations", "saved_bytes"),
    ("transient", "transient", "transient_bytes"),
    ("reserve", "context, allocator", "overhead_bytes"),
)


def memory_bars(details: PlanDetails) -> str:
    cap = details.memory_cap_bytes
    shown = before_after(details)
    span = 1.02 * max(cap, max(memory.total_bytes for variant in shown.values() for memory in variant.memory))
    panels = [f"<figure><h3>{name}</h3>{_memory_panel(name, v, span, cap)}</figure>" for name, v in shown.items()]
    return section(
        "Memory of each pipeline rank",
        "Peak of one device when all micro-batches in flight are of the largest size, as expected. What passes "
        "the cap, up to which a plan may fill it at the accepted risk, is outlined.",
        legend(((look,), text) for look, text, _ in _MEMORY_PARTS) + f'<div class="pair">{"".join(panels)}</div>',
    )


def _memory_panel(name: str, variant: Variant, span: float, cap: float) -> str:
    scale = memory_scale([span])
    rows = [
        drawing.Bar(
            name=f"rank {i}",
            parts=[(look, text, getattr(memory, part)) for look, text, part in _MEMORY_PARTS],
            text=scale.text(memory.total_bytes),
        )
        for i, memory in enumerate(variant.memory)
    ]
    label, title = f"{scale.unit} per device", f"Memory, {name}"
    return drawing.bars(rows, span=span, cap=cap, scale=scale, label=label, title=title, show=format_bytes)


# -- packs ----------------------------------------------------------------------------------------------------------


def pack_sizes_section(details: PlanDetails) -> str:
    """Patches against tokens of the packs, before and after, on the same axes."""
    shown, packing = before_after(details), details.plan.decisions.packing
    limits = (float(packing.max_patches), float(packing.max_tokens))
    largest = [max(float(x.pack_sizes(unit).max()) for x in shown.values()) for unit in ("patches", "tokens")]
    span = (1.05 * max(largest[0], limits[0]) if largest[0] else 0.0, 1.05 * max(largest[1], limits[1]))
    panels = []
    for heading, variant in shown.items():
        title, look = f"{heading}: patches and tokens of each pack", "new" if heading == "Plan" else "old"
        drawn = drawing.scatter(
            variant.pack_patches, variant.pack_tokens, limits=limits, span=span, title=title, css_class=look
        )
        panels.append(f"<figure><h3>{title}</h3>{drawn}</figure>")
    note = (
        "A pack is one micro-batch, a dot each. Close together is good: ranks and stages wait for the largest pack. "
        "Near the limits is good: fewer packs for the same data."
    )
    if not largest[0]:
        note += " The data holds no images, so every pack has 0 patches."
    return section("Sizes of the packs", note, f'<div class="pair">{"".join(panels)}</div>')
