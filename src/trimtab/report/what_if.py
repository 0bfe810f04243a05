"""Two sliders, micro-batches and memory cap, and what a step would then take: simulated in the page by `what_if.js`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trimtab.partition.schedules import microbatch_unit, splits_backward
from trimtab.plan.case import Case
from trimtab.plan.decide.what_if import CappedSplit, capped_splits
from trimtab.plan.file.details import PlanDetails, Variant
from trimtab.report.markup import section, tile
from trimtab.specs import FloatArray

_MOST_BLOCKS = 2**16  # that the page simulates in an instant
_OUT = '<span data-out="{}">–</span>'


def what_if_section(details: PlanDetails) -> str:
    """Empty of a plan that was made by hand, and where images are shared: another cap would divide them otherwise."""
    case = details.case
    if case is None or case.vision is not None:
        return ""
    splits = capped_splits(case, details.variants[-1].stages)
    own, dims = case.problem.num_microbatches, case.setting.dims
    unit = microbatch_unit(case.problem.schedule, dims.pp)
    most = min(max(4 * own, 4 * dims.pp), max(own, _MOST_BLOCKS // len(details.variants[-1].stages))) // unit * unit
    caps = len(splits) - 1
    sliders = (
        f"<label>Micro-batches of a rank in a step: <b>{_OUT.format('microbatches')}</b>"
        f'<input type="range" min="{unit}" max="{most}" step="{unit}" value="{own}"></label>'
        f"<label>Memory cap of a device: <b>{_OUT.format('cap')}</b>"
        f'<input type="range" min="0" max="{caps}" value="{caps}"{"" if caps else " disabled"}></label>'
    )
    tiles = (
        tile("Samples per second", _OUT.format("rate"), _OUT.format("samples")),
        tile("Step time", _OUT.format("step"), "pipeline, gradients, optimizer"),
        tile("Devices idle", _OUT.format("idle"), "bubble and uneven stages"),
        tile("Peak memory", _OUT.format("memory"), _OUT.format("fits")),
    )
    note = (
        "Computed in this page: the plan's schedule with micro-batches that are all as the mean one, memory at the "
        "limits. Under a smaller cap stages and recompute are those of the exact split for it. Packs, degrees and ZeRO "
        "stay; uneven packs lower the rate as in the plan."
    )
    data = f'<script type="application/json">{what_if_json(case, splits, details.variants[-1])}</script>'
    body = f'<div class="sliders">{sliders}</div><dl class="tiles" aria-live="polite">{"".join(tiles)}</dl>{data}'
    return section("What if", note, body, name="what-if")


def what_if_json(case: Case, splits: Sequence[CappedSplit], plan: Variant) -> str:
    """All that the script reads: numbers of seven digits and the schedule's name."""
    problem, packing = case.problem, case.packing
    data = {
        "schedule": problem.schedule,
        "apart": splits_backward(problem.schedule),
        "num_devices": problem.num_stages,
        "num_microbatches": problem.num_microbatches,
        "reserve_bytes": problem.overhead_bytes,
        "reserve_share": problem.overhead_share,
        "samples_per_microbatch": case.setting.dims.dp * len(packing.indices) / packing.num_packs,
        "samples_per_s": len(packing.indices) / plan.epoch_s,
        "splits": [asdict(split) for split in splits],
    }
    return json.dumps(data, separators=(",", ":"), default=_digits)


def _digits(values: FloatArray) -> list[Any]:
    return [_digits(x) if x.ndim else float(f"{x:.7g}") for x in values]
