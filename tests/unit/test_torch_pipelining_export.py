"""Plans as data for torch.distributed.pipelining."""

from __future__ import annotations

import json

import pytest

from export_cases import by_counts, cut, decide, first_block, make_model
from trimtab.adapters.torch_pipelining import export
from trimtab.specs import ParallelDims, RecomputeChoice

MODEL = make_model(tied=True)
BLOCK = first_block(MODEL)


def test_stages_hold_every_module_once_and_name_their_recompute():
    chosen = {0: [RecomputeChoice(tier="full", layers=(1,)), RecomputeChoice(tier="selective", layers=(2,))]}
    found = export(decide(MODEL, cut(MODEL, 4, BLOCK + 3, recompute=chosen), num_microbatches=6), None)
    read = json.loads(found.text)
    assert read == json.loads(json.dumps(found.fields))
    assert [name for stage in read["stages"] for name in stage["modules"]] == [layer.name for layer in MODEL.layers]
    assert read["stages"][0]["recompute"] == ["visual.blocks.0"]
    assert read["stages"][0]["recompute_selective"] == ["visual.blocks.1"]
    assert (read["schedule_class"], read["num_microbatches"]) == ("Schedule1F1B", 6)
    assert read["tied"] == [["embed_tokens", "lm_head"]]
    assert "all-reduce both before every optimizer step" in str(found.beside)
    assert "one shape for all micro-batches" in str(found.beside)


@pytest.mark.parametrize(("schedule", "ranks"), [("Interleaved1F1B", [0, 1, 0, 1]), ("ZBVZeroBubble", [0, 1, 1, 0])])
def test_virtual_stages_go_round_or_come_back(schedule, ranks):
    given = {"dims": ParallelDims(pp=2), "schedule": schedule, "num_microbatches": 4, "num_chunks": 2}
    found = export(decide(MODEL, by_counts(MODEL, 3, 3, 3, 3), **given), None)
    assert [stage["rank"] for stage in found.fields["stages"]] == ranks


def test_one_rank_needs_no_warning():
    alone = export(decide(MODEL, cut(MODEL)), None)
    assert alone.beside is None
    assert alone.fields["tied"] == []
