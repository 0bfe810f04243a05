"""The page's drawings, before beside after: timeline, memory, sizes of the packs."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.partition.schedules import WEIGHT
from trimtab.partition.simulate import Timeline
from trimtab.plan.decide.compare import Variant
from trimtab.plan.file.figures import PlanDetails
from trimtab.report import plots, svg
from trimtab.report.markup import esc, legend, section
from trimtab.report.words import IDLE_PARTS, Scale, before_after, idle_sentence, memory_scale, percent, time_scale
from trimtab.units import format_bytes, format_seconds

# -- timeline -------------------------------------------------------------------------------------------------------


def timelines(details: PlanDetails) -> str:
    shown = {name: variant.timeline for name, variant in before_after(details).items()}
    if all(line.num_devices == 1 or not line.makespan_s for line in shown.values()):
        return ""  # nothing waits for anything
    dense = ""
    if any(len(line.stage) > svg.MAX_BLOCKS for line in shown.values()):
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
        parts.append(svg.device_names(line.num_devices))
        parts.append(svg.timeline(line, span_s=span, title=f"Pipeline timeline, {esc(name)}", description=text))
    scale = time_scale([span])
    parts.append(
        f'<span></span><svg aria-hidden="true" width="100%" height="32">'
        f"{svg.axis(span, scale, label=f'time since the start of the step, {scale.unit}', y=0)}</svg>"
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
        svg.Bar(
            name=f"rank {i}",
            parts=[(look, text, getattr(memory, part)) for look, text, part in _MEMORY_PARTS],
            text=scale.text(memory.total_bytes),
            cap=cap,
            bad=memory.total_bytes > cap,
        )
        for i, memory in enumerate(variant.memory)
    ]
    label, title = f"{scale.unit} per device", f"Memory, {name}"
    return svg.bars(rows, span=span, scale=scale, label=label, title=title, show=format_bytes, mark="limit", marked=cap)


# -- idle time ------------------------------------------------------------------------------------------------------

_IDLE_LOOKS = ("f1", "b1", "w1", "b2")


def idle_bars(details: PlanDetails) -> str:
    """Why devices wait, before and after."""
    shown = before_after(details)
    most = max(0.01, *(variant.idle_share for variant in shown.values()))
    scale = Scale(unit="%", factor=0.01, digits=1)
    rows = [
        svg.Bar(
            name=name,
            parts=[
                (look, text, getattr(variant.idle, part))
                for look, (part, text) in zip(_IDLE_LOOKS, IDLE_PARTS, strict=True)
            ],
            text=percent(variant.idle_share),
            cap=1.0,
        )
        for name, variant in shown.items()
    ]
    schedule, note = details.plan.decisions.schedule, idle_sentence(shown["Plan"])
    if details.plan.decisions.parallel.pp > 1:
        note += (
            f" The bubble is the bound: what {schedule.name} with {schedule.num_microbatches} micro-batches leaves "
            "when all stages and packs are even. More micro-batches lower it; balancing can take away the other parts."
        )
    return section(
        "Why devices wait",
        esc(note, 600),
        legend(((look,), text) for look, (_, text) in zip(_IDLE_LOOKS, IDLE_PARTS, strict=True))
        + svg.bars(
            rows,
            span=1.1 * most,
            scale=scale,
            label="% of all devices' time",
            title="Idle time of the devices",
            show=percent,
        ),
    )


# -- data-parallel ranks --------------------------------------------------------------------------------------------


def rank_columns(details: PlanDetails) -> str:
    """How long every data-parallel rank's pipeline takes, before and after; nothing of a plan with one rank."""
    shown = before_after(details)
    if all(variant.rank_s.shape[1] == 1 for variant in shown.values()):
        return ""
    span = 1.05 * max(float(variant.rank_s.max()) for variant in shown.values())
    scale, panels = time_scale([span]), []
    for name, variant in shown.items():
        mean = variant.rank_s[1]
        over = f"the slowest {percent(float(mean.max() / mean.mean()) - 1)} above the mean of {mean.size}"
        look = "new" if variant is details.variants[-1] else "old"
        drawn = plots.columns(
            variant.rank_s, span=span, scale=scale, label="rank", title=f"Load of the ranks, {name}", css_class=look
        )
        panels.append(f'<figure><h3>{name} <span class="note">{over}</span></h3>{drawn}</figure>')
    note = (
        "Seconds of each rank's pipeline in a step: the mean, and from the shortest step to the longest as a line or a "
        "pale area. A step ends when its slowest rank does. From up to 256 steps spread over the data set."
    )
    return section("Load of the data-parallel ranks", note, f'<div class="pair">{"".join(panels)}</div>')


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
        drawn = plots.scatter(
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
