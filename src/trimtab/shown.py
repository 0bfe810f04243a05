"""Specs and results at a prompt and in a notebook: a few lines, and no column or layer of theirs."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimtab.units import format_count, format_degrees

if TYPE_CHECKING:
    from trimtab.specs import IntArray, ModelSpec, Packing, Profile, SampleTable, Schedule


def three_lines(title: str, first: str, second: str) -> str:
    """What `__repr__` says of something with thousands of numbers."""
    return f"{title}\n  {first}\n  {second}"


def html_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """What `_repr_html_` shows in a notebook; every text is escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<p>{html.escape(title)}</p><table>{line(head, 'th')}{body}</table>"


def model_lines(model: ModelSpec) -> str:
    towers = {tower: model.num_tower_params(tower) for tower in dict.fromkeys(x.tower for x in model.layers)}
    return three_lines(
        f"ModelSpec {model.name} ({model.family}), {len(model.layers)} layers",
        f"{format_count(model.num_params)} parameters: "
        + ", ".join(f"{tower} {format_count(count)}" for tower, count in towers.items()),
        f"images cut by {model.image_rule.name}",
    )


def samples_lines(samples: SampleTable) -> str:
    def told(unit: str, column: IntArray) -> str:
        most = int(column.max()) if len(column) else 0
        return f"{unit}: {int(column.sum()):,} in all, {most:,} the most of a sample"

    return three_lines(
        f"SampleTable of {len(samples):,} samples from {len(samples.source_names)} sources",
        told(samples.patch_unit, samples.num_patches),
        told("tokens" if samples.tokens_exact else "tokens, estimated", samples.num_tokens),
    )


def packing_lines(packing: Packing) -> str:
    return three_lines(
        f"Packing of {len(packing.indices):,} samples in {packing.num_packs:,} packs",
        f"at most {' and '.join(f'{limit:,}' for limit in packing.limits)} (patches and tokens) a pack",
        f"method {packing.method}, seed {packing.seed}, {len(packing.oversize):,} samples left out as too large",
    )


def schedule_lines(schedule: Schedule) -> str:
    steps, dp, num_microbatches = schedule.table.shape
    return three_lines(
        f"Schedule of {steps:,} steps, {schedule.order} order",
        f"{dp} ranks x {num_microbatches} micro-batches a step",
        f"{int((schedule.table < 0).sum()):,} empty slots",
    )


def profile_lines(profile: Profile) -> str:
    return three_lines(
        f"Profile of {len(profile.layers)} layers on {profile.device.name}, {profile.method}, {profile.dtype}",
        f"{format_degrees(profile.dims)}, attention {profile.attention}",
        f"seconds within ± {100 * profile.time_error:.0f} %, bytes within ± {100 * profile.memory_error:.0f} %",
    )
