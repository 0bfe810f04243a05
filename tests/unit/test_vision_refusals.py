"""What no plan can follow of shared images: options, decisions edited by hand, words of the plan file."""

import dataclasses
from pathlib import Path

import pytest
from plan_cases import tile_samples
from vision_cases import CLUSTER, QWEN, TILES, image_samples, with_vision

from refusals import refused
from trimtab.costs.devices import parse_cluster
from trimtab.errors import PlanError
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.file.check import check_plan
from trimtab.plan.file.figures import PlanDetails

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_v1_0_shared_images.yaml"


@pytest.fixture(scope="module")
def shared() -> PlanDetails:
    return make_plan(QWEN, image_samples(120), CLUSTER, with_vision(group="tp", pooling=1))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("degree: 4", "degree: 2", "vision data parallel over tp has degree 2, and the plan has tp 4: make them equal"),
        (
            "exchange: gather",
            "exchange: dispatch",
            "with exchange dispatch and reduction mean: over tp they are gather",
        ),
        ("pooling: 1", "pooling: 3", "choose a number that divides them"),
        ("reduction: mean", "reduction: null", "and reduction null: over tp they are gather and mean"),
    ],
)
def test_an_edited_decision_that_cannot_be_is_found(shared, tmp_path, before, after, message):
    path = write_plan(shared, tmp_path)
    text = path.read_text()
    row = next(line for line in text.splitlines() if line.startswith("  vision_data_parallel: {"))
    path.write_text(text.replace(row, row.replace(before, after)))
    assert any(message in problem for problem in check_plan(tmp_path))


def test_slots_that_the_tables_do_not_have_are_told(shared, tmp_path):
    path = write_plan(shared, tmp_path)
    text = path.read_text()
    assert "num_microbatches: 4" in text
    path.write_text(text.replace("num_microbatches: 4", "num_microbatches: 8"))
    assert any("dp 2 x 8" in problem for problem in check_plan(tmp_path))


def test_pools_of_tiles_are_refused_over_ranks_that_hold_the_same():
    options = with_vision(group="tp", pooling=2)
    with refused(PlanError, "InternVL-Chat-V1-5"):
        make_plan(TILES, tile_samples(), CLUSTER, dataclasses.replace(options, tp=8))
    wide = dataclasses.replace(with_vision(group="tp"), tp=8, max_patches=9225, max_tokens=4352, zero_stage=3)
    chosen = make_plan(TILES, tile_samples(), parse_cluster("16xH200"), wide)
    assert chosen.plan.decisions.vision_data_parallel.pooling == 1
