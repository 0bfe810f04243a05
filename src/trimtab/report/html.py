"""The plan as one HTML page: no network, no library, every text from outside escaped.

The page carries its own style and script and a Content-Security-Policy that forbids everything else, so even a name
that slipped through unescaped could load and run nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from trimtab.partition.schedules import WEIGHT
from trimtab.partition.simulate import Timeline
from trimtab.plan.decide.compare import Variant
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.file.yaml import plan_to_yaml
from trimtab.plan.runs import RunLog
from trimtab.report import plan_tables
from trimtab.report.run import run_section
from trimtab.report.table import (
    GAIN_NOISE,
    MAX_SUMMARY,
    Scale,
    before_after,
    clean,
    count_scale,
    error_sentence,
    esc,
    legend,
    memory_scale,
    on_page,
    page,
    percent,
    section,
    tile,
    time_scale,
    vision_words,
)
from trimtab.units import format_bytes, format_ratio, format_seconds

MAX_BLOCKS = 900  # blocks drawn one by one, each with its own tooltip
_COLUMNS = 100  # of a timeline too dense for that
_LABEL_SHARE = 0.019  # share of the width a two-digit label needs at the narrowest drawing (720 px)
_WEIGHT_STEP = 0.08  # micro-batches this much off the median get the lighter or the darker shade

# -- axes -----------------------------------------------------------------------------------------------------------


def nice_ticks(limit: float, *, max_ticks: int = 6) -> list[float]:
    """Return multiples of 1, 2, 2.5 or 5 times a power of ten from 0 to `limit`, at most `max_ticks` of them."""
    if not limit > 0 or max_ticks < 2:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(limit / (max_ticks - 1)))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0) if limit / (m * power) < max_ticks - 1e-9)
    return [i * step for i in range(int(limit / step + 1e-9) + 1)]


def at(share: float) -> str:
    """Return a share of the width as an attribute value: "12.5%"."""
    return f"{100.0 * share:.2f}".rstrip("0").rstrip(".") + "%"


def _anchor(share: float) -> str:
    return "start" if share < 0.03 else "end" if share > 0.94 else "middle"


def axis(span: float, scale: Scale, *, label: str, y: float, max_ticks: int = 6) -> str:
    """Tick labels below a plot of `span` base units, 30 px high in all; the last tick carries the unit."""
    if span <= 0:
        return ""
    ticks = nice_ticks(span / scale.factor, max_ticks=max_ticks)
    parts = []
    digits = max(_decimals(tick) for tick in ticks)
    for tick in ticks:
        number, where = f"{tick:,.{digits}f}" if tick else "0", tick * scale.factor / span
        parts.append(
            f'<text class="tick" x="{at(where)}" y="{y + 13:g}" text-anchor="{_anchor(where)}">{number}</text>'
        )
    parts.append(f'<text class="tick" x="100%" y="{y + 28:g}" text-anchor="end">{escape(label)}</text>')
    return "".join(parts)


def _decimals(value: float) -> int:
    return next((digits for digits in range(4) if abs(round(value, digits) - value) < 1e-9 * max(1.0, abs(value))), 4)


def grid(span: float, scale: Scale, height: float, *, max_ticks: int = 6) -> str:
    """Return vertical lines at the ticks that `axis` labels."""
    if span <= 0:
        return ""
    places = (at(tick * scale.factor / span) for tick in nice_ticks(span / scale.factor, max_ticks=max_ticks))
    return "".join(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{height:g}"/>' for x in places)


def picture(body: str, *, height: float, title: str, description: str, css_class: str = "") -> str:
    """Return an SVG of full width that a screen reader announces by its title and description."""
    return (
        f'<svg class="{css_class}" role="img" width="100%" height="{height:g}"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{body}</svg>"
    )


# -- timeline -------------------------------------------------------------------------------------------------------


def timeline_rows(num_devices: int) -> float:
    """Return the height of one device's row in pixels: 24 for few devices, never under 7."""
    return float(min(24, max(7, 420 // num_devices)))


def timeline(timeline: Timeline, *, span_s: float, title: str, description: str) -> str:
    """Draw one row per device, forward and backward blocks on an axis of `span_s` seconds, the end of the step marked.

    Up to `MAX_BLOCKS` blocks are drawn one by one, with the micro-batch's number where there is room. Beyond, a row's
    height at a time is the share of the time around it that the device computes.
    """
    row = timeline_rows(timeline.num_devices)
    pad = 1.0 if row < 10 else 2.0
    height, top = row * timeline.num_devices, 18.0
    parts = [f'<svg y="{top:g}" height="{height:g}" width="100%" overflow="visible">']
    for device in range(timeline.num_devices):
        parts.append(
            f'<rect class="track" x="0" y="{device * row + pad:g}" width="{at(timeline.makespan_s / span_s)}" '
            f'height="{row - 2 * pad:g}"/>'
        )
    unit = time_scale([span_s])
    parts.append(grid(span_s, unit, height))
    if len(timeline.stage) <= MAX_BLOCKS:
        looks, devices = block_looks(timeline), timeline.device
        for i in np.lexsort((timeline.end_s, timeline.start_s)).tolist():
            if timeline.end_s[i] > timeline.start_s[i]:
                parts.append(_block(timeline, i, looks[i], span_s, devices[i] * row + pad, row - 2 * pad))
    else:
        parts.append(_density(timeline, span_s, row, pad, height))
    parts.append("</svg>")
    end = time_scale([timeline.makespan_s]).text(timeline.makespan_s)
    parts.append(mark_line(timeline.makespan_s / span_s, "makespan", y1=2, y2=top + height + 2, text=end))
    return picture("".join(parts), height=top + height + 4, title=title, description=description, css_class="tl")


def _every_name(row: float, fewest: int) -> int:
    """Return of how many rows of this height one is named; of the thinnest, one of `fewest`."""
    return 1 if row >= 13 else 2 if row >= 10 else fewest


def device_names(num_devices: int) -> str:
    """The column of names left of a timeline: every device, or every eighth where rows are thin."""
    row, top = timeline_rows(num_devices), 18.0
    every = _every_name(row, 8 if num_devices > 16 else 4)
    texts = (
        f'<text class="name" x="100%" dx="-8" y="{top + (d + 0.5) * row:g}" dy="0.35em" text-anchor="end">'
        f"rank {d}</text>"
        for d in range(0, num_devices, every)
    )
    return f'<svg aria-hidden="true" width="100%" height="{top + row * num_devices + 4:g}">{"".join(texts)}</svg>'


def block_looks(timeline: Timeline) -> list[str]:
    """Return the class of every block: f or b for its kind, then 0, 1, 2 for a light, usual or heavy micro-batch.

    A micro-batch is heavy when its blocks together take 8 % longer than the median micro-batch, light when 8 % shorter.
    """
    if len(timeline.stage) == 0:
        return []
    spent = np.bincount(timeline.microbatch, weights=timeline.end_s - timeline.start_s)
    usual = float(np.median(spent))
    weight = np.where(spent > usual * (1 + _WEIGHT_STEP), 2, np.where(spent < usual * (1 - _WEIGHT_STEP), 0, 1))
    return [
        f"{'fbw'[kind]}{weight[mb]}"
        for kind, mb in zip(timeline.kind.tolist(), timeline.microbatch.tolist(), strict=True)
    ]


def _block(timeline: Timeline, i: int, look: str, span_s: float, y: float, height: float) -> str:
    number, letter = int(timeline.microbatch[i]), "FBW"[timeline.kind[i]]
    start, spent = float(timeline.start_s[i]), float(timeline.end_s[i] - timeline.start_s[i])
    left, width = start / span_s, spent / span_s
    tip = f"{letter}{number} · stage {timeline.stage[i]} · {format_seconds(spent)}, from {format_seconds(start)}"
    box = (
        f'<rect class="{look}" x="{at(left)}" y="{y:g}" width="{at(width)}" height="{height:g}" '
        f'data-t="{escape(tip)}"/>'
    )
    if height < 14 or width < _LABEL_SHARE * max(1.0, len(str(number)) / 2):
        return box
    return f'{box}<text class="in {look}" x="{at(left + width / 2)}" y="{y + height / 2:g}" dy="0.35em">{number}</text>'


def _density(timeline: Timeline, span_s: float, row: float, pad: float, height: float) -> str:
    """Draw an area for each device and kind of block: its share of each of `_COLUMNS` columns' time, one on the other.

    A column that two devices fill to 40 and 100 % is drawn 40 and 100 % as high as their rows: no idle time is hidden.
    """
    edges, areas, devices = np.linspace(0.0, span_s, _COLUMNS + 1), list[str](), timeline.device
    for device in range(timeline.num_devices):
        bottom, share, drawn = (device + 1) * row - pad, np.zeros(_COLUMNS), list[str]()
        for kind, look in enumerate(("f1", "b1", "w1")):
            rows = np.flatnonzero((devices == device) & (timeline.kind == kind))
            if not len(rows):
                continue
            rows = rows[np.argsort(timeline.start_s[rows], kind="stable")]
            # seconds computed until each start and end, and from these until each edge
            times = np.stack([timeline.start_s[rows], timeline.end_s[rows]], axis=1).ravel()
            spent = np.cumsum(timeline.end_s[rows] - timeline.start_s[rows])
            until = np.stack([np.append(0.0, spent[:-1]), spent], axis=1).ravel()
            share = share + np.diff(np.interp(edges, times, until)) * _COLUMNS / span_s
            steps = "".join(f"V{y:.1f}h1" for y in (bottom - (row - 2 * pad) * share).tolist())
            drawn.append(f'<path class="{look}" d="M0 {bottom:g}{steps}V{bottom:g}Z"/>')
        areas += reversed(drawn)  # each covers the lower part of the one before
    return (
        f'<svg width="100%" height="{height:g}" viewBox="0 0 {_COLUMNS} {height:g}" preserveAspectRatio="none">'
        f"{''.join(areas)}</svg>"
    )


# -- bars -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a drawing of bars."""

    name: str
    parts: Sequence[tuple[str, str, float]]  # class, what it is, value: side by side
    text: str  # after the bar


def bars(
    rows: Sequence[Bar],
    *,
    span: float,
    cap: float,
    scale: Scale,
    label: str,
    title: str,
    show: Callable[[float], str],
) -> str:
    """Return a bar a row on one axis of `span`, names left and texts right; rows are thin where there are many.

    Parts show their values by `show` when pointed at; what lies past the `cap` is outlined, and its text stands out.
    """
    row = float(min(26, max(7, 420 // len(rows))))
    pad, top, every = (4.0 if row >= 18 else 1.0), 22.0, _every_name(row, 8)
    bottom = top + row * len(rows)
    drawn, names, texts = [grid(span, scale, bottom, max_ticks=5)], [], []
    for i, bar in enumerate(rows):
        y, middle = top + i * row + pad, f'y="{top + (i + 0.5) * row:g}" dy="0.35em" text-anchor="end"'
        drawn.append(stacked_bar(bar, span=span, cap=cap, y=y, height=row - 2 * pad, show=show))
        if i % every == 0:
            bad = ' style="fill:var(--bad);font-weight:600"' if sum(value for *_, value in bar.parts) > cap else ""
            names.append(f'<text class="name" x="100%" dx="-8" {middle}>{escape(bar.name)}</text>')
            texts.append(f'<text x="100%" {middle}{bad}>{bar.text}</text>')
    drawn.append(f'<line class="base" x1="0" x2="0" y1="{top:g}" y2="{bottom:g}"/>')
    drawn.append(mark_line(cap / span, "limit", y1=4, y2=bottom, text=f"cap {scale.text(cap)}"))
    drawn.append(axis(span, scale, label=label, y=bottom, max_ticks=5))
    text = f"{len(rows)} rows, {rows[0].name} to {rows[-1].name}: {', '.join(bar.text for bar in rows[:8])}."
    height = bottom + 32
    return (
        f'<div class="bars"><svg aria-hidden="true" width="66" height="{height:g}">{"".join(names)}</svg>'
        + picture("".join(drawn), height=height, title=title, description=text)
        + f'<svg aria-hidden="true" width="76" height="{height:g}">{"".join(texts)}</svg></div>'
    )


def stacked_bar(bar: Bar, *, span: float, cap: float, y: float, height: float, show: Callable[[float], str]) -> str:
    """The parts side by side on an axis of `span`; what lies past the cap is outlined as too much."""
    shapes, x = [], 0.0
    for look, what, value in bar.parts:
        if value > 0:
            shapes.append(
                f'<rect class="{look}" x="{at(x / span)}" y="{y:g}" width="{at(value / span)}" height="{height:g}" '
                f'data-t="{escape(clean(f"{bar.name}, {what}: {show(value)}"))}"/>'
            )
        x += value
    if x > cap:
        start, past = at(cap / span), at((x - cap) / span)
        shapes.append(f'<rect class="over" x="{start}" y="{y:g}" width="{past}" height="{height:g}"/>')
    return "".join(shapes)


def mark_line(where: float, look: str, *, y1: float, y2: float, text: str) -> str:
    """Return a line of the look "limit" or "makespan" down the plot, named at its top on the side that has room."""
    anchor, dx = ("end", -5) if where > (0.85 if look == "makespan" else 0.5) else ("start", 5)
    return (
        f'<line class="{look}" x1="{at(where)}" x2="{at(where)}" y1="{y1:g}" y2="{y2:g}"/>'
        f'<text class="mark halo" x="{at(where)}" dx="{dx}" y="13" text-anchor="{anchor}">{escape(text)}</text>'
    )


# -- the page ---------------------------------------------------------------------------------------------------------


# -- timeline -------------------------------------------------------------------------------------------------------


def timelines(details: PlanDetails) -> str:
    shown = {name: variant.timeline for name, variant in before_after(details).items()}
    if all(line.num_devices == 1 or not line.makespan_s for line in shown.values()):
        return ""  # nothing waits for anything
    dense = ""
    if any(len(line.stage) > MAX_BLOCKS for line in shown.values()):
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
    """Return the timelines by title under one another, on one time axis."""
    span = max(line.makespan_s for line in shown.values())
    parts = []
    for name, line in shown.items():
        sentence = f"{format_seconds(line.makespan_s)}, {percent(line.bubble_ratio)} idle"
        text = f"{line.num_devices} devices, {len(line.stage)} blocks, {sentence}."
        parts.append(f'<h3>{esc(name)} <span class="note">{sentence}</span></h3>')
        parts.append(device_names(line.num_devices))
        parts.append(timeline(line, span_s=span, title=f"Pipeline timeline, {esc(name)}", description=text))
    scale = time_scale([span])
    parts.append(
        f'<span></span><svg aria-hidden="true" width="100%" height="32">'
        f"{axis(span, scale, label=f'time since the start of the step, {scale.unit}', y=0)}</svg>"
    )
    return f'<div class="scroll"><div class="time">{"".join(parts)}</div></div>'


def uneven_page(model: str, shown: Mapping[str, Timeline]) -> str:
    """Return one self-contained page of even and uneven stages by the published rule, on one time axis."""
    entries = [(("f0", "f1", "f2"), "forward of a micro-batch"), (("b0", "b1", "b2"), "backward"), (("idle",), "idle")]
    note = "By FLOPs at the device's peak; sends, recompute and the optimizer are not counted."
    title = f"Even and uneven stages of {esc(model, 80)}"
    return page(title, section(title, note, legend(entries) + stacked_timelines(shown)))


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
        Bar(
            name=f"rank {i}",
            parts=[(look, text, getattr(memory, part)) for look, text, part in _MEMORY_PARTS],
            text=scale.text(memory.total_bytes),
        )
        for i, memory in enumerate(variant.memory)
    ]
    label, title = f"{scale.unit} per device", f"Memory, {name}"
    return bars(rows, span=span, cap=cap, scale=scale, label=label, title=title, show=format_bytes)


MAX_LINES = 150  # of the plan file
MAX_ASSUMPTIONS = 48  # the plan file has them all
MAX_STAGE_ROWS = 128


def html_report(details: PlanDetails, *, run: RunLog | None = None) -> str:
    """Return one self-contained page, under 500 KB for any plan: same details, same bytes. `run`: one of this plan."""
    sections = (
        _header(details, with_run=run is not None),
        "" if run is None else run_section(details, run),
        _variants(details),
        _settings(details),
        timelines(details),
        memory_bars(details),
        section("Grids of the vision tower", plan_tables.FORMS_NOTE, on_page(plan_tables.forms_table(details)))
        if details.plan.estimates.forms
        else "",
        _vision_section(details),
        _stages(details),
        section("OmniBal's search", plan_tables.SEARCHED_NOTE, on_page(plan_tables.searched_table(details)))
        if details.plan.estimates.searched
        else "",
        section("Packing", esc(plan_tables.packing_note(details)), on_page(plan_tables.packing_table(details))),
        _plan_file(details),
        _assumptions(details),
    )
    return page(f"Plan for {esc(details.plan.inputs.model.name, 80)}", "".join(sections))


# -- head -----------------------------------------------------------------------------------------------------------


def _header(details: PlanDetails, *, with_run: bool) -> str:
    plan = details.plan
    cluster = plan.inputs.cluster
    num_devices = cluster.num_nodes * cluster.devices_per_node
    return (
        f'<header><p class="eyebrow">Training plan · {num_devices} × {esc(cluster.device, 60)} · '
        f"{esc(plan.created_by, 60)}</p>"
        f"<h1>{esc(plan.inputs.model.name, 120)}</h1>"
        f'<p class="lead">{esc(plan.summary, MAX_SUMMARY)}</p>'
        f'<dl class="tiles">{"".join(_tiles(details))}</dl>'
        f'<p class="note">{escape(error_sentence(details, with_run=with_run))} Steps of two variants may hold '
        "different numbers of samples: compare samples per second.</p></header>\n"
    )


def _tiles(details: PlanDetails) -> list[str]:
    estimates = details.plan.estimates
    first, last = estimates.basis, estimates.compared[-1]
    step, cap = time_scale([first.step_ms / 1e3, last.step_ms / 1e3]), memory_scale([details.memory_cap_bytes])
    rate = count_scale([last.samples_per_s])
    band = f'<span class="nw">± {percent(estimates.time_error, digits=0)}</span>'
    over = "" if last.fits else ' <span class="bad">does not fit:</span>'
    misfit = "" if estimates.compared[0].fits else ' <span class="bad">(the baseline does not fit)</span>'

    def compared(words: str, base: str) -> str:
        return f'{words}<br>{esc(first.name, 40)} <span class="nw">{base}</span>'

    return [
        tile(
            "Samples per second, predicted",
            format_ratio(estimates.gain(last)),
            compared(f"{rate.number(last.samples_per_s)} samples/s {band}", rate.number(first.samples_per_s)),
            look="main" if estimates.gain(last) > 1 + GAIN_NOISE else "",
        ),
        tile("Step time, predicted", step.text(last.step_ms / 1e3), compared(band, step.text(first.step_ms / 1e3))),
        tile("Devices idle", percent(last.idle_share), compared("of their time", percent(first.idle_share))),
        tile(
            "Peak memory per device",
            f"{last.peak_memory_gib:.1f} GiB",
            compared(
                f"{over} of {cap.text(details.memory_cap_bytes)} that may be filled", f"{first.peak_memory_gib:.1f} GiB"
            )
            + misfit,
        ),
    ]


# -- tables ---------------------------------------------------------------------------------------------------------


def _variants(details: PlanDetails) -> str:
    note = (
        "The whole data set, run once in each way; each row adds one decision to the row above, unless it changes "
        "nothing, and the last is this plan."
    )
    return section("Before and after", note, on_page(plan_tables.variants_table(details)))


def _settings(details: PlanDetails) -> str:
    estimates = details.plan.estimates
    if not estimates.settings:
        return ""
    band = f"{100 * estimates.setting_error:g} % of the fastest"
    rule = f"The simplest of those within {band} was taken" if estimates.setting_error else "The fastest was taken"
    fastest = max(row.samples_per_s for row in estimates.settings)
    if fastest > (1 + estimates.setting_error) * estimates.settings[0].samples_per_s:
        rule = "The one whose epoch, simulated on its own steps, is shortest was taken"
    note = (
        "Degrees, ZeRO stage and schedule, fastest first, at their mean packs and about as many samples a step. "
        f"{rule}: it is marked."
    )
    return section("Nearest alternatives", note, on_page(plan_tables.settings_table(estimates)))


def _stages(details: PlanDetails) -> str:
    plan = details.variants[-1]
    total = plan.stage_forward_s + plan.stage_backward_s
    note = "Times of the mean pack, recompute counted in the backward; memory is that of the stage's rank."
    if len(total) > 1 and total.any():
        note += f" The slowest stage is {percent(float(total.max() / total.mean()) - 1)} above the mean."
    return section("Stages", note, on_page(plan_tables.stages_table(details, most=MAX_STAGE_ROWS)), css_class="long")


# -- lists ----------------------------------------------------------------------------------------------------------


def _plan_file(details: PlanDetails) -> str:
    """Return the inputs and decisions in the plan file's own words: what a reviewer reads is what training reads."""
    lines = plan_to_yaml(details.plan).partition("\nestimates:")[0].splitlines()
    # two lines in three are inputs; the last ones are the packs' tables
    hidden = range(MAX_LINES * 2 // 3, len(lines) - MAX_LINES // 3) if len(lines) > MAX_LINES else range(0)
    shown = [_indented(line) for number, line in enumerate(lines) if number not in hidden]
    if hidden:
        shown.insert(hidden.start, f"… {len(hidden):,} lines more in the plan file …")
    text = "\n".join(shown)
    return section("Plan file", "", f"<pre>{text}</pre>", css_class="long")


def _indented(line: str) -> str:
    return " " * (len(line) - len(line.lstrip())) + esc(line, 300)


def _assumptions(details: PlanDetails) -> str:
    sentences = details.plan.assumptions
    shown = [f"<li>{esc(sentence)}</li>" for sentence in sentences[:MAX_ASSUMPTIONS]]
    if len(sentences) > len(shown):
        shown.append(f"<li>… and {len(sentences) - len(shown)} more in the plan file.</li>")
    if not shown:
        return ""
    return section("Assumptions", "", f'<ul class="plain">{"".join(shown)}</ul>', css_class="long")


def _vision_section(details: PlanDetails) -> str:
    """Return what sharing changes on the slowest rank and the fullest one; empty where no images are shared."""
    decision, found = details.plan.decisions.vision_data_parallel, details.plan.estimates.vision_data_parallel
    if decision is None or found is None:
        return ""
    note = (
        f"Forward and backward of vision tower and projector in a mean step, recompute not counted; each call of the "
        f"tower ends when its slowest rank has. Shared over {vision_words(decision)}. Times ± "
        f"{percent(details.plan.estimates.time_error, digits=0)}, memory ± "
        f"{percent(details.plan.estimates.memory_error, digits=0)}."
    )
    if "cp" in decision.group:
        note += " Not shared, every rank of cp encodes all images of the packs that they share."
    note += plan_tables.ABOUT_GROUPS.get(decision.group, "")
    return section("Images shared among ranks", note, on_page(plan_tables.vision_table(found)))
