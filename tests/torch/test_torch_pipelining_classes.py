"""The classes and ranks that our torch.distributed.pipelining export names are torch's own. Needs torch."""

from __future__ import annotations

import pytest

from trimtab.adapters.running import Decided
from trimtab.adapters.torch_pipelining import SCHEDULE_CLASSES, export
from trimtab.models.describe import describe
from trimtab.specs import ParallelDims, stages_between

MODEL = describe("Qwen2.5-VL-7B")


@pytest.mark.parametrize("schedule", SCHEDULE_CLASSES)
def test_torch_has_the_class_and_lays_the_stages_out_alike(schedule):
    from torch.distributed.pipelining import _utils, schedules

    pp, chunks = 2, 2 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1
    plan = Decided(
        model=MODEL,
        stages=stages_between((*range(0, 10 * pp * chunks, 10), len(MODEL.layers))),
        dims=ParallelDims(pp=pp),
        schedule=schedule,
        num_microbatches=4,
        num_chunks=chunks,
    )
    found = export(plan, None).fields
    assert issubclass(getattr(schedules, found["schedule_class"]), schedules._PipelineSchedule)
    style = "v" if schedule == "ZBVZeroBubble" else "loop"
    ranks = _utils.generate_stage_to_rank_mapping(pp, pp * chunks, style=style)
    assert {stage["stage"]: stage["rank"] for stage in found["stages"]} == ranks
