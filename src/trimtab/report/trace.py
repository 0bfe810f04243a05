"""The simulated step as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Format: "Trace Event Format" of the Chromium project, JSON object form, complete ("X") and metadata ("M") events.
"""

from __future__ import annotations

import json

import numpy as np

from trimtab.plan.decide.compare import Variant
from trimtab.plan.file.figures import PlanDetails
from trimtab.report.words import before_after, clean

Event = dict[str, object]

_KINDS = (("F", "forward"), ("B", "backward"), ("W", "weight gradients"))


def chrome_trace(details: PlanDetails) -> str:
    """JSON text: one process per variant (baseline, plan), one track per pipeline rank, one event per block.

    Times are microseconds with three decimals. Start and end are rounded to whole nanoseconds before the duration is
    taken, so blocks that touch in the simulation still touch and never overlap.
    """
    events: list[Event] = []
    for process, (title, variant) in enumerate(before_after(details).items(), start=1):
        events.extend(_names(process, title, variant))
        events.extend(_blocks(process, variant))
    plan = details.plan
    header = {"created_by": clean(plan.created_by), "model": clean(plan.inputs.model.name)}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms",\n"otherData":{json.dumps(header)},\n"traceEvents":[\n{lines}\n]}}\n'


def _names(process: int, title: str, variant: Variant) -> list[Event]:
    name = f"{title}: packs {clean(variant.packs)}; stages {clean(variant.stages_rule)}"
    events: list[Event] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
    ]
    for device in range(variant.timeline.num_devices):
        track = {"ph": "M", "pid": process, "tid": device + 1}
        events.append({**track, "name": "thread_name", "args": {"name": f"rank {device}"}})
        events.append({**track, "name": "thread_sort_index", "args": {"sort_index": device}})
    return events


def _blocks(process: int, variant: Variant) -> list[Event]:
    blocks = variant.timeline
    device = blocks.device
    start_ns = np.rint(blocks.start_s * 1e9).astype(np.int64)
    end_ns = np.rint(blocks.end_s * 1e9).astype(np.int64)
    events: list[Event] = []
    for i in np.lexsort((end_ns, start_ns, device)).tolist():
        (letter, category), microbatch = _KINDS[blocks.kind[i]], int(blocks.microbatch[i])
        events.append(
            {
                "ph": "X",
                "pid": process,
                "tid": int(device[i]) + 1,
                "name": f"{letter}{microbatch}",
                "cat": category,
                "ts": int(start_ns[i]) / 1000,
                "dur": int(end_ns[i] - start_ns[i]) / 1000,
                "args": {"stage": int(blocks.stage[i]), "microbatch": microbatch},
            }
        )
    return events
