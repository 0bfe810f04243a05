"""The tables of a plan, the same on the page and in a terminal; a prediction and counted memory in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from trimtab.plan.decide.compare import Variant
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.plan import Estimates, VariantEstimate, VisionEstimate
from trimtab.report.table import (
    MAX_SUMMARY,
    Cell,
    Cells,
    Column,
    Table,
    balance_rows,
    before_after,
    count_scale,
    describe_layers,
    describe_recompute,
    error_sentence,
    memory_scale,
    numeric,
    percent,
    print_lines,
    print_table,
    relative_spread,
    signed_percent,
    time_scale,
    vision_words,
)
from trimtab.specs import ModelSpec
from trimtab.units import MIB, format_bytes, format_degrees, format_number, format_ratio, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.plan.predict import Prediction
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from trimtab.plan.plan import Plan

SEARCHED_NOTE = (
    "Splits near the one of even forward time, ranked by the squared deviations of the stages' forward times in ms "
    "plus the MiB between stages, then simulated, not run. The exact optimum stands below them."
)


def variants_table(details: PlanDetails) -> Table:
    """Return one row per variant that changes something, the plan's last."""
    rows = shown_variants(details.plan.estimates)
    step, epoch = time_scale(row.step_ms / 1e3 for row in rows), time_scale(row.epoch_s for row in rows)
    rate, best = count_scale(row.samples_per_s for row in rows), max(row.samples_per_s for row in rows)
    against = "baseline" if details.plan.estimates.compared[0].fits else "what fits"
    return Table(
        title="Before and after",
        columns=(
            Column("Variant", look="named"),
            *numeric("Samples\n/s", f"Against\n{against}", f"Step,\n{step.unit}", f"Epoch,\n{epoch.unit}"),
            *numeric("Devices\nidle", "Memory,\nGiB"),
        ),
        rows=[
            (
                Cell(
                    text=row.name[:60], below=f"{row.packs[:80]} · {row.stages[:80]} · recompute {row.recompute[:80]}"
                ),
                Cell(text=rate.number(row.samples_per_s), share=row.samples_per_s / best),
                format_ratio(details.plan.estimates.gain(row)),
                step.number(row.step_ms / 1e3),
                epoch.number(row.epoch_s),
                percent(row.idle_share),
                Cell(text=f"{row.peak_memory_gib:.1f}" + ("" if row.fits else "\ntoo much"), bad=not row.fits),
            )
            for row in rows
        ],
        marked=len(rows) - 1,
    )


def shown_variants(estimates: Estimates) -> tuple[VariantEstimate, ...]:
    """Return the other baselines, the baseline, each decision that changes speed or fits, and the plan."""
    compared, plan = estimates.compared, estimates.variants[-1]
    shown = list(estimates.variants[: len(estimates.variants) - len(compared) + 1])  # the baseline last
    for row in compared[1:]:
        ratio = format_ratio(shown[-1].epoch_s / row.epoch_s)
        if row is plan or ratio != "1.00x" or row.fits != shown[-1].fits:
            shown.append(row)
    return tuple(shown)


def settings_table(estimates: Estimates) -> Table:
    """Return the degrees, ZeRO stages and schedules that came near, the fastest first and this plan's marked."""
    taken = estimates.settings[0]
    rows = sorted(estimates.settings, key=lambda row: -row.samples_per_s)
    step, rate = time_scale(row.step_ms / 1e3 for row in rows), count_scale(row.samples_per_s for row in rows)
    best = max(row.samples_per_s for row in rows)
    return Table(
        title="Nearest alternatives",
        columns=(
            Column("Setting", look="named"),
            *numeric("Samples\n/s", "Against\nplan", f"Step,\n{step.unit}", "Micro-\nbatches", "Memory,\nGiB"),
        ),
        rows=[
            (
                Cell(text=row.label, below=row.kind),
                Cell(text=rate.number(row.samples_per_s), share=row.samples_per_s / best),
                format_ratio(row.samples_per_s / taken.samples_per_s),
                step.number(row.step_ms / 1e3),
                str(row.num_microbatches),
                f"{row.peak_memory_gib:.1f}",
            )
            for row in rows
        ],
        marked=rows.index(taken),
    )


def searched_table(details: PlanDetails) -> Table:
    """List splits that OmniBal's search simulated, as they were ranked; the exact optimum last."""
    rows = details.plan.estimates.searched
    scale = time_scale(row.step_ms / 1e3 for row in rows if row.step_ms is not None)
    kept = tuple(stage.stop - stage.start for stage in details.variants[-1].stages)
    *listed, _exact = [row.stages for row in rows]
    return Table(
        title="OmniBal's search",
        columns=(
            Column("Rank"),
            *numeric("Layers of the stages", "Spread of\nforward, ms", "Sent,\nMiB", f"Simulated,\n{scale.unit}"),
        ),
        rows=[
            (
                "exact optimum" if number == len(rows) else str(number),
                "/".join(map(str, row.stages)),
                f"{row.spread_ms:.4g}",
                f"{row.sent_mib:.4g}",
                "does not fit" if row.step_ms is None else scale.number(row.step_ms / 1e3),
            )
            for number, row in enumerate(rows, start=1)
        ],
        marked=listed.index(kept) if kept in listed else None,
    )


def stages_table(details: PlanDetails, *, most: int) -> Table:
    """Return one row per stage of the plan; of more than `most` the first and the last ones."""
    modules = {stage.stage: stage.modules for stage in details.plan.decisions.stages}
    return variant_stages(details.model, details.variants[-1], most=most, modules=modules)


def variant_stages(
    model: ModelSpec, plan: Variant, *, most: int, modules: Mapping[int, Sequence[str]] = MappingProxyType({})
) -> Table:
    """The same of any variant; `modules`: their paths by stage, which the page shows."""
    num = len(plan.stages)
    total = plan.stage_forward_s + plan.stage_backward_s
    mean, slowest = float(total.mean()), max(float(total.max()), 1e-30)
    scale = time_scale([*plan.stage_forward_s.tolist(), *plan.stage_backward_s.tolist()])
    memory = memory_scale(m.total_bytes for m in plan.memory)
    columns = (
        *numeric("Stage"),
        Column("Layers", look="wide"),
        Column("Recompute"),
        *numeric(f"Forward,\n{scale.unit}", f"Backward,\n{scale.unit}", "Against\nmean", f"Memory,\n{memory.unit}"),
    )
    hidden = range(most - 2, num - 1) if num > most else range(0)
    rows: list[Cells] = []
    for i, stage in enumerate(plan.stages):
        if i in hidden:
            if i == hidden.start:
                rows.append(("…", f"{len(hidden)} more stages", *[""] * (len(columns) - 2)))
            continue
        device = plan.timeline.device_of(i)
        layers = describe_layers(model, stage)
        where = f"rank {device}" if num > plan.timeline.num_devices else ""
        spent = float(total[i])
        rows.append(
            (
                str(i),
                Cell(text=layers, below=where, code=", ".join(modules.get(i, ()))[:300]),
                describe_recompute(stage),
                scale.number(float(plan.stage_forward_s[i])),
                scale.number(float(plan.stage_backward_s[i])),
                Cell(text=signed_percent(spent / mean - 1) if mean > 0 else "", share=spent / slowest),
                memory.number(plan.memory[device].total_bytes),
            )
        )
    return Table(title="Stages", columns=columns, rows=rows)


def packing_table(details: PlanDetails) -> Table:
    """Return the sizes of the packs before and after, and how even the plan's are."""
    shown, plan = before_after(details), details.plan
    decision, balance = plan.decisions.packing, plan.estimates.balance
    rows: list[Cells] = [
        (
            "Packs",
            *(f"{len(v.pack_tokens):,}" for v in shown.values()),
            f"at least {balance.lower_bound_packs:,} under these limits",
        ),
        ("Steps", *(f"{len(v.step_s):,}" for v in shown.values()), "of the whole data set"),
    ]
    for of, limit in (("patches", decision.max_patches), ("tokens", decision.max_tokens)):
        sizes = [variant.pack_sizes(of) for variant in shown.values()]
        if limit == 0 or not any(x.any() for x in sizes):
            continue
        spreads = (percent(relative_spread(x)) for x in sizes)
        rows += [
            (f"Largest pack, {of}", *(f"{float(x.max()):,.0f}" for x in sizes), f"limit {limit:,}"),
            (f"Mean pack, {of}", *(percent(float(x.mean()) / limit) for x in sizes), "of the limit"),
            (f"Spread, {of}", *spreads, "standard deviation over mean; 0 = all equal"),
        ]
    blank = [""] * (len(shown) - 1)
    rows += [(name, *blank, value, meaning) for name, value, meaning in balance_rows(balance)]
    columns = (Column("Figure"), *numeric(*shown), Column("Meaning", look="meaning"))
    return Table(title="Packing", columns=columns, rows=rows)


def packing_note(details: PlanDetails) -> str:
    """Return method and limits of the packs."""
    decision = details.plan.decisions.packing
    note = (
        f"Method {decision.method}, order {decision.order}, seed {decision.seed}; at most "
        f"{decision.max_patches:,} patches and {decision.max_tokens:,} tokens in a pack."
    )
    if decision.num_oversize:
        note += f" {decision.num_oversize:,} samples are over a limit by themselves: {decision.oversize}."
    return note


_DIVIDED = " Not shared, tensor parallelism divides the tower; shared, every rank holds it whole."
ABOUT_GROUPS = {
    "replica": " Every device encodes before and after the pipeline: one more micro-batch of the timeline.",
    "own": " The tower's devices are stage 0, the first row of the timeline.",
    "tp": _DIVIDED,
    "tp_cp": _DIVIDED,
}


def vision_table(found: VisionEstimate) -> Table:
    """Return what sharing the images changes on the slowest rank, and on the one that holds most."""
    tower, without = found.tower_ms / 1e3, found.tower_without_ms / 1e3
    times, over = time_scale([tower, without]), format_ratio(found.tower_ms / found.ideal_ms if found.ideal_ms else 1.0)
    known = "" if found.sizes_known >= 1 else f"; {percent(found.sizes_known)} of the patches in images of known size"
    update_s, exchange_s = found.update_ms / 1e3, found.exchange_ms / 1e3
    activations, state = f"{found.activations_gib:.2f} GiB", f"{found.state_gib:.2f} GiB"
    slowest = f"tower and projector in a mean step; {over} as long as equal shares{known}"
    rows = (
        ("Slowest rank", times.text(without), times.text(tower), slowest),
        ("Update", format_seconds(found.update_without_ms / 1e3), format_seconds(update_s), "of these layers, a step"),
        ("Exchange", "", format_seconds(exchange_s), "of the slowest rank's time: features, gradients, pixels"),
        ("Received", "", format_bytes(found.exchange_mib * MIB), "by a rank in a step, forward and backward"),
        ("Features held", "", format_bytes(found.features_mib * MIB), "of the largest call, however shared"),
        ("Activations", f"{found.activations_without_gib:.2f} GiB", activations, "of these layers on the fullest rank"),
        ("State", f"{found.state_without_gib:.2f} GiB", state, "their parameters, gradients and optimizer"),
    )
    columns = (Column("Figure"), *numeric("Not shared", "Shared"), Column("Meaning", look="meaning"))
    return Table(title="Images shared among ranks", columns=columns, rows=rows)


FORMS_NOTE = (
    "The fastest that was found of each grid that the vision tower may have. Bound: equal packs, images shared evenly, "
    "nothing waits. In layers: the devices' time that computes a layer once; the rest is encoding again, cutting the "
    "tower, recompute, updates and waiting."
)


def forms_table(details: PlanDetails) -> Table:
    """Return a row for each form of the tower's grid that was simulated, this plan's marked."""
    rows, decision = details.plan.estimates.forms, details.plan.decisions.vision_data_parallel
    taken = "one-grid" if decision is None else decision.group
    scale = time_scale(row.epoch_s for row in rows)
    figures = numeric("Devices", f"Epoch,\n{scale.unit}", f"Bound,\n{scale.unit}", "In\nlayers", "Memory,\nGiB")
    return Table(
        title="Grids of the vision tower",
        columns=(Column("Form", look="named"), *figures, Column("Runs with", look="meaning")),
        rows=[
            (
                Cell(text=row.form, below=row.setting),
                str(row.devices),
                scale.number(row.epoch_s),
                "" if row.bound_s is None else scale.number(row.bound_s),
                percent(row.busy_share),
                f"{row.peak_gib:.1f}" + ("" if row.tower_gib is None else f", tower {row.tower_gib:.1f}"),
                row.hosts,
            )
            for row in rows
        ],
        marked=next((i for i, row in enumerate(rows) if row.form == taken), None),
    )


MAX_STAGE_ROWS = 16


def print_plan(details: PlanDetails, console: Console) -> None:
    """Print summary, before/after table, stages and packing, as wide as the console."""
    decision, found = details.plan.decisions.vision_data_parallel, details.plan.estimates.vision_data_parallel
    print_lines(console, details.plan.summary, limit=MAX_SUMMARY)
    tables = [(variants_table(details), ""), (stages_table(details, most=MAX_STAGE_ROWS), "")]
    if details.plan.estimates.searched:
        tables.append((searched_table(details), SEARCHED_NOTE))
    if decision is not None and found is not None:
        tables.append((vision_table(found), f"Over {vision_words(decision)}."))
    if details.plan.estimates.forms:
        tables.append((forms_table(details), FORMS_NOTE))
    tables.append((packing_table(details), packing_note(details)))
    for table, note in tables:
        console.print()
        print_table(table, console)
        if note:
            print_lines(console, note)
    console.print()
    print_lines(console, error_sentence(details), limit=MAX_SUMMARY, style="dim")


def prediction_sentences(found: Prediction) -> tuple[str, ...]:
    """Return shape, time, memory, waiting and how far to trust them, a sentence or two each."""
    ran = found.variant
    memory = found.budget
    peak = max(held.total_bytes for held in ran.memory)
    steps = len(ran.step_s)
    return (
        f"{found.cluster.num_devices} {found.cluster.device.name} as {format_degrees(found.dims)}, "
        f"{found.num_microbatches} micro-batches a rank and step ({ran.packs}).",
        f"A step takes {format_seconds(found.mean_step_s)} in the mean, {format_seconds(found.p95_step_s)} or more in "
        f"one of 20: {format_number(found.samples_per_s)} samples/s, {format_seconds(ran.epoch_s)} for the "
        f"{found.num_samples:,} samples in {steps:,} steps.",
        f"Memory of the fullest device: {memory.band.verdict(peak, memory.total_bytes)}.",
        f"Devices are idle for {percent(ran.idle_share)} of the time.",
        f"Bytes are within {memory.band.half_width:.0%} of measured runs, as far as is known (docs/costs.md).",
        *found.notes,
    )


def print_prediction(found: Prediction, console: Console) -> None:
    """Print sentences, then the stages."""
    print_lines(console, *prediction_sentences(found))
    console.print()
    stages = variant_stages(found.model, found.variant, most=MAX_STAGE_ROWS)
    print_table(replace(stages, title="Stages, at the mean micro-batch; memory at the largest"), console)


# -- several plans in one table ---------------------------------------------------------------------------------------


def device_hours(plan: Plan) -> float:
    """Return the devices times hours of one epoch: what a plan costs where all devices have one price."""
    cluster = plan.inputs.cluster
    return cluster.num_nodes * cluster.devices_per_node * plan.estimates.epoch_s / 3600


def figures(plan: Plan) -> dict[str, str]:
    """Return what a plan takes, in words."""
    found, cluster, packing = plan.estimates, plan.inputs.cluster, plan.decisions.packing
    peak = max(stage.memory_gib for stage in found.stages)
    return {
        "devices": f"{cluster.num_nodes * cluster.devices_per_node} {cluster.device}",
        "degrees": format_degrees(plan.decisions.parallel),
        "samples a step": f"{packing.global_batch:,}" if packing.global_batch else "varies",
        "step": format_seconds(found.step_ms / 1e3),
        "samples/s": format_number(found.samples_per_s),
        "epoch": format_seconds(found.epoch_s),
        "device-hours of an epoch": format_number(device_hours(plan)),
        "idle": percent(found.variants[-1].idle_share),
        "memory of the fullest device": f"{peak:.1f} of {cluster.memory_bytes / 2**30:.1f} GiB",
    }


def differences(plans: Mapping[str, Plan]) -> dict[str, tuple[str, ...]]:
    """Return each input and decision that the plans do not share, by its place in the file; "" where one has none."""
    parts = [dict([*_flat(p.inputs, "inputs"), *_flat(p.decisions, "decisions")]) for p in plans.values()]
    places = dict.fromkeys(place for part in parts for place in part)
    rows = {place: tuple(part.get(place, "") for part in parts) for place in places}
    return {place: row for place, row in rows.items() if len(set(row)) > 1}


def compared_table(plans: Mapping[str, Plan], differing: Mapping[str, tuple[str, ...]]) -> Table:
    """Make one column a plan: its figures, then what `differing` holds."""
    columns = [figures(plan) for plan in plans.values()]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    first = next(iter(plans.values())).estimates.samples_per_s
    speeds = (format_ratio(plan.estimates.samples_per_s / first) for plan in plans.values())
    rows.insert(5, ("against the first", *speeds))
    return Table(
        title="Plans compared",
        columns=[Column("Figure"), *map(Column, plans)],
        rows=[*rows, *((place, *values) for place, values in differing.items())],
    )


def _flat(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield every field below `value` with its dotted place; stages and files by their own number or path."""
    if is_dataclass(value):
        for field in fields(value):
            yield from _flat(getattr(value, field.name), f"{place}.{field.name}")
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for item in value:
            names = [field.name for field in fields(item)]
            key = " ".join(str(getattr(item, name)) for name in names if name in ("stage", "granularity"))
            yield from _flat(item, f"{place}[{key or getattr(item, names[0])}]")
    elif place.endswith("blake2b"):
        yield place, str(value)[:8]
    else:
        yield place, ", ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
