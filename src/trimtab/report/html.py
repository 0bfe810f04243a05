"""The plan as one HTML page: no network, no library, every foreign string escaped.

The page carries its own style and script and a Content-Security-Policy that forbids everything else, so even a name
that slipped through unescaped could load and run nothing.
"""

from __future__ import annotations

from html import escape

from trimtab.plan.file.details import PlanDetails
from trimtab.plan.measured.run_log import RunLog
from trimtab.plan.plan import VariantEstimate
from trimtab.report.figures import memory_bars, pack_sizes, pack_sizes_section, timelines
from trimtab.report.markup import Column, bar, esc, facts, page, section, table
from trimtab.report.run import run_section
from trimtab.report.vision import vision_section, vision_words
from trimtab.report.words import (
    GAIN_NOISE,
    before_after,
    count_scale,
    describe_layers,
    describe_recompute,
    error_sentence,
    memory_scale,
    percent,
    ratio_text,
    relative_spread,
    shuffle_text,
    signed_percent,
    time_scale,
)
from trimtab.units import format_bytes, format_count

MAX_LISTED = 12  # data files, assumptions' overflow: the plan file has them all
MAX_STAGE_ROWS = 128


def html_report(details: PlanDetails, *, run: RunLog | None = None) -> str:
    """One self-contained page, under 500 KB for any plan: same details, same bytes. `run`: one of this plan."""
    sections = (
        _header(details, beside_run=run is not None),
        "" if run is None else run_section(details, run),
        _variants(details),
        timelines(details),
        memory_bars(details),
        vision_section(details),
        pack_sizes_section(details),
        _stages(details),
        _packing(details),
        _decisions(details),
        _inputs(details),
        _assumptions(details),
        _how_to_read(),
    )
    return page(f"Plan for {esc(details.plan.inputs.model.name, 80)}", "".join(sections))


# -- head -----------------------------------------------------------------------------------------------------------


def _header(details: PlanDetails, *, beside_run: bool) -> str:
    plan, rows = details.plan, details.plan.estimates.variants
    cluster = plan.inputs.cluster
    num_devices = cluster.num_nodes * cluster.devices_per_node
    return (
        f'<header><p class="eyebrow">Training plan · {num_devices} × {esc(cluster.device, 60)} · '
        f"{esc(plan.created_by, 60)}</p>"
        f"<h1>{esc(plan.inputs.model.name, 120)}</h1>"
        f'<p class="lead">{esc(plan.summary, 600)}</p>'
        f'<dl class="tiles">{"".join(_tiles(details))}</dl>'
        f'<p class="note">{escape(error_sentence(details, beside_run=beside_run))}'
        + (
            " Steps of two variants may hold different numbers of samples: compare samples per second."
            * (len(rows) > 1)
        )
        + "</p></header>\n"
    )


def _tiles(details: PlanDetails) -> list[str]:
    estimates = details.plan.estimates
    first, last = estimates.variants[0], estimates.variants[-1]
    compared = len(estimates.variants) > 1
    rate, step = count_scale([last.samples_per_s]), time_scale([first.step_ms / 1e3, last.step_ms / 1e3])
    cap = memory_scale([details.memory_cap_bytes])
    band = f'<span class="nw">± {percent(estimates.time_error, digits=0)}</span>'
    base = '<br>baseline <span class="nw">{}</span>' if compared else ""
    rates = f"{rate.number(last.samples_per_s)} samples/s {band}"
    speed = (
        ratio_text(last.samples_per_s / first.samples_per_s),
        f"{rates}{base.format(rate.number(first.samples_per_s))}",
    )
    alone = (rate.number(last.samples_per_s), rates)
    gains = last.samples_per_s > (1 + GAIN_NOISE) * first.samples_per_s
    fits = "" if first.fits else ' <span class="bad">(does not fit)</span>'
    peak = f"{last.peak_memory_gib:.1f} GiB"
    over = "" if last.fits else ' <span class="bad">does not fit:</span>'
    return [
        _tile("Samples per second, predicted", *(speed if compared else alone), look="main" if gains else ""),
        _tile(
            "Step time, predicted",
            step.text(last.step_ms / 1e3),
            f"{band}{base.format(step.text(first.step_ms / 1e3))}",
        ),
        _tile(
            "Devices idle",
            percent(last.idle_share),
            f"of their time{base.format(percent(first.idle_share))}",
        ),
        _tile(
            "Peak memory per device",
            peak,
            f"{over} of {cap.text(details.memory_cap_bytes)}{base.format(f'{first.peak_memory_gib:.1f} GiB')}"
            + (fits if compared else ""),
        ),
    ]


def _tile(name: str, big: str, sub: str, *, look: str = "") -> str:
    return f'<div class="tile {look}"><dt>{name}</dt><dd class="big">{big}</dd><dd class="sub">{sub}</dd></div>'


# -- before and after -----------------------------------------------------------------------------------------------


def _variants(details: PlanDetails) -> str:
    rows = details.plan.estimates.variants
    step, epoch = time_scale(row.step_ms / 1e3 for row in rows), time_scale(row.epoch_s for row in rows)
    rate, best = count_scale(row.samples_per_s for row in rows), max(row.samples_per_s for row in rows)
    columns = (
        Column("Variant"),
        Column("Packs", look="word"),
        Column("Stages", look="word"),
        Column("Recompute", look="word"),
        Column("Samples<br>per second", True),
        Column("Against<br>baseline", True),
        Column(f"Step,<br>{step.unit}", True),
        Column(f"Epoch,<br>{epoch.unit}", True),
        Column("Devices<br>idle", True),
        Column("Peak memory,<br>GiB", True),
    )
    lines = [
        (
            _variant_name(row),
            esc(row.packs, 80),
            esc(row.stages, 80),
            esc(row.recompute, 80),
            rate.number(row.samples_per_s) + bar(row.samples_per_s / best),
            ratio_text(row.samples_per_s / rows[0].samples_per_s),
            step.number(row.step_ms / 1e3),
            epoch.number(row.epoch_s),
            percent(row.idle_share),
            f"{row.peak_memory_gib:.1f}" + ("" if row.fits else '<br><small class="bad">does not fit</small>'),
        )
        for row in rows
    ]
    note = "The whole data set, run once in each way" + (
        "; each row adds one decision to the row above, and the last is this plan." if len(rows) > 1 else "."
    )
    return section(
        "Before and after",
        note,
        table(columns, lines, caption="Before and after", marked=len(lines) - 1, look="lead-column"),
    )


def _variant_name(row: VariantEstimate) -> str:
    """The name, and for narrow screens, which hide the columns of words, the words below it."""
    words = f"{esc(row.packs, 80)} · {esc(row.stages, 80)} · recompute {esc(row.recompute, 80)}"
    look = "nw" if len(row.name) < 24 else ""
    return f'<span class="{look}">{esc(row.name, 60)}</span><small class="words">{words}</small>'


# -- stages ---------------------------------------------------------------------------------------------------------


def _stages(details: PlanDetails) -> str:
    plan = details.variants[-1]
    devices = plan.timeline.num_devices
    total = plan.stage_forward_s + plan.stage_backward_s
    mean, slowest = float(total.mean()), float(total.max())
    scale = time_scale([*plan.stage_forward_s.tolist(), *plan.stage_backward_s.tolist()])
    memory = memory_scale(m.total_bytes for m in plan.memory)
    modules = {stage.stage: stage.modules for stage in details.plan.decisions.stages}
    chunked = len(plan.stages) > devices
    columns = (
        Column("Stage", True),
        *((Column("Rank", True),) if chunked else ()),
        Column("Layers", look="wide"),
        Column("Count", True),
        Column("Recompute", look="nw"),
        Column(f"Forward,<br>{scale.unit}", True),
        Column(f"Backward,<br>{scale.unit}", True),
        Column("Both, against<br>the mean", True),
        Column(f"Memory of<br>its rank, {memory.unit}", True),
    )
    lines = []
    for stage in plan.stages[:MAX_STAGE_ROWS]:
        i = stage.index
        device = plan.timeline.device_of(i)
        paths = esc(", ".join(modules.get(i, ())), 300)
        lines.append(
            (
                str(i),
                *((str(device),) if chunked else ()),
                f"{esc(describe_layers(details.model, stage))}<br><code>{paths}</code>",
                str(stage.stop - stage.start),
                esc(describe_recompute(stage)),
                scale.number(float(plan.stage_forward_s[i])),
                scale.number(float(plan.stage_backward_s[i])),
                (signed_percent(float(total[i]) / mean - 1) if mean > 0 else "")
                + bar(float(total[i]) / max(slowest, 1e-30)),
                memory.number(plan.memory[device].total_bytes),
            )
        )
    left = len(plan.stages) - len(lines)
    note = (
        "Times of the mean pack, recompute counted in the backward. "
        f"The slowest stage is {percent(slowest / mean - 1 if mean > 0 else 0.0)} above the mean."
    )
    more = f'<p class="note after">… and {left} more stages; the plan file has them all.</p>' if left > 0 else ""
    return section("Stages", note, table(columns, lines, caption="Stages of the plan") + more, css_class="long")


# -- packing --------------------------------------------------------------------------------------------------------


def _packing(details: PlanDetails) -> str:
    shown, plan = before_after(details), details.plan
    decision, balance = plan.decisions.packing, plan.estimates.balance
    last = len(shown) - 1

    def only_plan(text: str) -> tuple[str, ...]:
        return ("",) * last + (text,)

    rows: list[tuple[str, ...]] = [
        (
            "Packs",
            *(f"{len(v.pack_tokens):,}" for v in shown.values()),
            f"at least {balance.lower_bound_packs:,} under these limits",
        ),
        ("Steps", *(f"{len(v.step_s):,}" for v in shown.values()), "of the whole data set"),
    ]
    for of in ("patches", "tokens"):
        limit = decision.max_tokens if of == "tokens" else decision.max_patches
        sizes = [pack_sizes(variant, of) for variant in shown.values()]
        if limit == 0 or not any(x.any() for x in sizes):
            continue
        rows.append((f"Largest pack, {of}", *(f"{float(x.max()):,.0f}" for x in sizes), f"limit {limit:,}"))
        rows.append((f"Mean pack, {of}", *(percent(float(x.mean()) / limit) for x in sizes), "of the limit"))
        spreads = (percent(relative_spread(x)) for x in sizes)
        rows.append((f"Spread, {of}", *spreads, "standard deviation over mean; 0 = all alike"))
    rows += [
        ("Padding", *only_plan(percent(balance.pad_ratio)), "pad ratio: share of the computed rows that holds no data"),
        (
            "Dist ratio, vision",
            *only_plan(f"{balance.dist_ratio_vit:.4f}"),
            "share of rank time spent waiting; 0 = none",
        ),
        ("Dist ratio, language", *only_plan(f"{balance.dist_ratio_llm:.4f}"), "the same for the language model"),
        ("Dist ratio, cost", *only_plan(f"{balance.dist_ratio_cost:.4f}"), "the same for the modelled time of both"),
        (
            "Utilisation",
            *only_plan(percent(balance.utilisation)),
            "useful share of rank time if every micro-step waits",
        ),
        (
            "Shuffle quality",
            *only_plan(shuffle_text(balance.shuffle_chi2)),
            "chi-square of sources per step; 1 = random, more = clustered",
        ),
    ]
    columns = (
        Column("Figure"),
        *(Column(name, True) for name in shown),
        Column("Meaning", look="meaning"),
    )
    lines = [(*row[:-1], f'<span class="note">{row[-1]}</span>') for row in rows]
    note = (
        f"Method {esc(decision.method, 40)}, order {esc(decision.order, 40)}, seed {decision.seed}; at most "
        f"{decision.max_patches:,} patches and {decision.max_tokens:,} tokens in a pack."
    )
    if decision.num_oversize:
        note += f" {decision.num_oversize:,} samples are over a limit by themselves: {esc(decision.oversize)}."
    return section("Packing", note, table(columns, lines, caption="Packing figures"))


# -- lists ----------------------------------------------------------------------------------------------------------


def _decisions(details: PlanDetails) -> str:
    parallel, schedule = details.plan.decisions.parallel, details.plan.decisions.schedule
    recompute = sum(stage.num_recomputed() for stage in details.variants[-1].stages)
    vision = details.plan.decisions.vision_data_parallel
    offloaded = sum(stage.num_offloaded() for stage in details.variants[-1].stages)
    pairs = (
        ("Data parallel", f"{parallel.dp}"),
        ("Pipeline parallel", f"{parallel.pp}"),
        ("Tensor parallel", f"{parallel.tp}"),
        ("Context parallel", f"{parallel.cp}"),
        ("Schedule", esc(schedule.name)),
        ("Micro-batches", f"{schedule.num_microbatches} per rank and step"),
        ("Virtual stages", f"{schedule.num_chunks} per device"),
        ("Recompute", f"{recompute} of {len(details.model.layers)} layers"),
        *((("Offload", f"{offloaded} of {len(details.model.layers)} layers"),) if offloaded else ()),
        *((("Images shared", vision_words(vision)),) if vision is not None else ()),
    )
    return section("Decisions", "", facts(pairs, look="two"))


def _inputs(details: PlanDetails) -> str:
    given = details.plan.inputs
    data, cluster, training = given.data, given.cluster, given.training
    names = [f"<code>{esc(f.path, 160)}</code> ({format_bytes(f.num_bytes)})" for f in data.files[:MAX_LISTED]]
    if len(data.files) > MAX_LISTED:
        names.append(f"… and {len(data.files) - MAX_LISTED:,} more")
    skipped = f", {data.num_skipped:,} skipped" if data.num_skipped else ""
    counted = "counted by the tokenizer" if data.tokens_exact else "estimated without a tokenizer"
    frozen = ", ".join(esc(tower, 40) for tower in training.frozen_towers) or "none"
    pairs = (
        ("Model", f"{esc(given.model.name, 120)} ({esc(given.model.family, 60)})"),
        ("Described from", f"<code>{esc(given.model.config, 160)}</code>"),
        ("Size", f"{format_count(given.model.num_params)} parameters in {given.model.num_layers} layers"),
        ("Data", "<br>".join(names) or "none"),
        ("Samples", f"{data.num_samples:,}{skipped}"),
        ("Tokens", counted),
        ("Cluster", f"{cluster.num_nodes} × {cluster.devices_per_node} {esc(cluster.device, 60)}"),
        (
            "Memory",
            f"{format_bytes(cluster.memory_bytes)} per device, {format_bytes(cluster.reserve_bytes)} in reserve",
        ),
        ("Number format", esc(training.dtype, 40)),
        ("Optimizer", f"{esc(training.optimizer, 40)}, ZeRO stage {training.zero_stage}"),
        ("Attention", esc(training.attention, 40)),
        ("Frozen towers", frozen),
        ("Costs", esc(training.costs, 40)),
        ("Command", f"<code>{esc(details.plan.command)}</code>"),
    )
    return section("Inputs", "", facts(pairs), css_class="long")


def _assumptions(details: PlanDetails) -> str:
    sentences = details.plan.assumptions
    shown = [f"<li>{esc(sentence)}</li>" for sentence in sentences[: 4 * MAX_LISTED]]
    if len(sentences) > len(shown):
        shown.append(f"<li>… and {len(sentences) - len(shown)} more in the plan file.</li>")
    if not shown:
        return ""
    return section("Assumptions", "", f'<ul class="plain">{"".join(shown)}</ul>', css_class="long")


def _how_to_read() -> str:
    sentences = (
        "<b>Pack</b>: the samples that one micro-batch holds. <b>Stage</b>: the layers one pipeline rank runs. "
        "<b>Recompute</b>: activations dropped in the forward and computed again in the backward, time for memory.",
        "<b>Timeline</b>: time runs to the right. Blank is waiting. Uneven shades mean uneven micro-batches, uneven "
        "widths from row to row mean uneven stages; an even plan looks like a woven band with blank corners only.",
        "<b>Idle</b> counts the blank corners, which a pipeline with few micro-batches cannot avoid, and all waiting "
        "inside.",
        "<b>Error bands</b> are half-widths: 100 ms ± 20 % means 80 to 120 ms. Measured profiles narrow them.",
    )
    items = "".join(f"<li>{sentence}</li>" for sentence in sentences)
    return section("How to read this page", "", f'<ul class="plain">{items}</ul>')
