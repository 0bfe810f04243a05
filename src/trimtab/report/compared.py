"""Several plans in one table: what each takes, device-hours included, and where their inputs and decisions differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from trimtab.plan.plan import Plan
from trimtab.report.table import Column, Table
from trimtab.report.words import percent
from trimtab.units import format_degrees, format_number, format_ratio, format_seconds


def device_hours(plan: Plan) -> float:
    """Devices times hours of one epoch: what a plan costs where all devices have one price."""
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
    """One column a plan: its figures, then what `differing` holds."""
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
