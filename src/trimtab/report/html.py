"""The plan as one HTML page: no network, no library, every text from outside escaped.

The page carries its own style and script and a Content-Security-Policy that forbids everything else, so even a name
that slipped through unescaped could load and run nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from trimtab.partition.schedules import WEIGHT
from trimtab.partition.simulate import Timeline
from trimtab.plan.decide.compare import Variant
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.file.yaml import plan_to_yaml
from trimtab.plan.runs import RunLog
from trimtab.report import drawing
from trimtab.report.plan_tables import (
    SEARCHED_NOTE,
    packing_note,
    packing_table,
    searched_table,
    settings_table,
    stages_table,
    variants_table,
    vision_table,
)
from trimtab.report.run import run_section
from trimtab.report.table import esc, legend, on_page, page, section, tile
from trimtab.report.words import (
    GAIN_NOISE,
    MAX_SUMMARY,
    before_after,
    count_scale,
    error_sentence,
    memory_scale,
    percent,
    time_scale,
    vision_words,
)
from trimtab.units import format_bytes, format_ratio, format_seconds

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


MAX_LINES = 150  # of the plan file
MAX_ASSUMPTIONS = 48  # the plan file has them all
MAX_STAGE_ROWS = 128


def html_report(details: PlanDetails, *, run: RunLog | None = None) -> str:
    """Return one self-contained page, under 500 KB for any plan: same details, same bytes. `run`: one of this plan."""
    sections = (
        _header(details, beside_run=run is not None),
        "" if run is None else run_section(details, run),
        _variants(details),
        _settings(details),
        timelines(details),
        memory_bars(details),
        _vision_section(details),
        _stages(details),
        section("OmniBal's search", SEARCHED_NOTE, on_page(searched_table(details)))
        if details.plan.estimates.searched
        else "",
        section("Packing", esc(packing_note(details)), on_page(packing_table(details))),
        _plan_file(details),
        _assumptions(details),
    )
    return page(f"Plan for {esc(details.plan.inputs.model.name, 80)}", "".join(sections))


# -- head -----------------------------------------------------------------------------------------------------------


def _header(details: PlanDetails, *, beside_run: bool) -> str:
    plan = details.plan
    cluster = plan.inputs.cluster
    num_devices = cluster.num_nodes * cluster.devices_per_node
    return (
        f'<header><p class="eyebrow">Training plan · {num_devices} × {esc(cluster.device, 60)} · '
        f"{esc(plan.created_by, 60)}</p>"
        f"<h1>{esc(plan.inputs.model.name, 120)}</h1>"
        f'<p class="lead">{esc(plan.summary, MAX_SUMMARY)}</p>'
        f'<dl class="tiles">{"".join(_tiles(details))}</dl>'
        f'<p class="note">{escape(error_sentence(details, beside_run=beside_run))} Steps of two variants may hold '
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
    return section("Before and after", note, on_page(variants_table(details)))


def _settings(details: PlanDetails) -> str:
    estimates = details.plan.estimates
    if not estimates.settings:
        return ""
    band = f"{100 * estimates.setting_error:g} % of the fastest"
    rule = f"The simplest of those within {band} was taken" if estimates.setting_error else "The fastest was taken"
    note = (
        "Degrees, ZeRO stage and schedule, fastest first, at their mean packs and about as many samples a step. "
        f"{rule}: it is marked."
    )
    return section("Nearest alternatives", note, on_page(settings_table(estimates)))


def _stages(details: PlanDetails) -> str:
    plan = details.variants[-1]
    total = plan.stage_forward_s + plan.stage_backward_s
    note = "Times of the mean pack, recompute counted in the backward; memory is that of the stage's rank."
    if len(total) > 1 and total.any():
        note += f" The slowest stage is {percent(float(total.max() / total.mean()) - 1)} above the mean."
    return section("Stages", note, on_page(stages_table(details, most=MAX_STAGE_ROWS)), css_class="long")


# -- lists ----------------------------------------------------------------------------------------------------------


def _plan_file(details: PlanDetails) -> str:
    """Inputs and decisions in the plan file's own words: what a reviewer reads is what training reads."""
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
    if decision.group == "replica":
        note += " Every device encodes before and after the pipeline, which holds no tower."
    if decision.group in ("tp", "tp_cp"):
        note += " Not shared, tensor parallelism divides the tower; shared, every rank holds it whole."
    return section("Images shared among ranks", note, on_page(vision_table(found)))
