"""Plans as data for torch.distributed.pipelining."""

from __future__ import annotations

import json

import pytest
from export_cases import by_counts, cut, first_block, make_model

from trimtab.adapters.torch_pipelining import pipelining_export
from trimtab.errors import UnsupportedPlanError
from trimtab.specs import ParallelDims, RecomputeChoice

MODEL = make_model(tied=True)
BLOCK = first_block(MODEL)


def test_stages_hold_every_module_once_and_name_their_recompute():
    chosen = {0: [RecomputeChoice(tier="full", layers=(1,)), RecomputeChoice(tier="selective", layers=(2,))]}
    stages = cut(MODEL, 4, BLOCK + 3, recompute=chosen)
    export = pipelining_export(model=MODEL, stages=stages, dims=ParallelDims(pp=3), schedule="1F1B", num_microbatches=6)
    assert [name for stage in export.stages for name in stage.modules] == [layer.name for layer in MODEL.layers]
    assert export.stages[0].recompute == ("visual.blocks.0",)
    assert export.stages[0].recompute_selective == ("visual.blocks.1",)
    assert (export.schedule_class, export.num_microbatches) == ("Schedule1F1B", 6)
    assert export.tied == (("embed_tokens", "lm_head"),)
    assert any("all-reduce both before every optimizer step" in w for w in export.warnings)
    assert any("one shape for all micro-batches" in w for w in export.warnings)
    read = json.loads(export.json())
    assert read == json.loads(json.dumps(export.as_dict()))
    assert read["stages"][1]["modules"] == list(export.stages[1].modules)


@pytest.mark.parametrize(("schedule", "ranks"), [("Interleaved1F1B", [0, 1, 0, 1]), ("ZBVZeroBubble", [0, 1, 1, 0])])
def test_virtual_stages_go_round_or_come_back(schedule, ranks):
    export = pipelining_export(
        model=MODEL,
        stages=by_counts(MODEL, 3, 3, 3, 3),
        dims=ParallelDims(pp=2),
        schedule=schedule,
        num_microbatches=4,
        num_chunks=2,
    )
    assert [stage.rank for stage in export.stages] == ranks


def test_one_rank_needs_no_warning_and_an_unknown_schedule_is_refused():
    given = {"model": MODEL, "stages": cut(MODEL), "dims": ParallelDims(), "num_microbatches": 2}
    assert pipelining_export(**given, schedule="1F1B").warnings == ()
    assert pipelining_export(**given, schedule="1F1B").tied == ()
    with pytest.raises(UnsupportedPlanError, match="schedule DualPipe was planned, and torch"):
        pipelining_export(**given, schedule="DualPipe")
