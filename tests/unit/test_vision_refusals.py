"""What no plan can follow of shared images: options, decisions edited by hand, words of the plan file."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from plan_cases import tile_samples
from vision_cases import CLUSTER, QWEN, TILES, image_samples, table_of, with_vision

from trimtab.costs.devices import parse_cluster
from trimtab.errors import PartitionError, PlanError
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.file.check import check_plan
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.file.yaml import plan_from_yaml
from trimtab.plan.options import PlanOptions, VisionChoice

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_v1_0_shared_images.yaml"


@pytest.fixture(scope="module")
def shared() -> PlanDetails:
    return make_plan(QWEN, image_samples(120), CLUSTER, with_vision(group="tp", pooling=1))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"group": "ep"}, "group (--vision-dp) 'ep' was asked for: choose one of none, auto, tp, dp"),
        (
            {"group": "tp", "rule": "random"},
            "(--set vision_rule) 'random' was asked for: choose one of balanced, contiguous",
        ),
        (
            {"group": "tp", "objective": "fun"},
            "(--set vision_objective) 'fun' was asked for: choose one of time, memory",
        ),
        ({"group": "tp", "pooling": 0}, "pooling (--set vision_pooling) 0 was asked for: give 1 or more"),
        ({"pooling": 2}, "described without a group to share the images: give --vision-dp too"),
    ],
)
def test_choices_that_no_plan_can_follow_are_refused(choice, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        PlanOptions(vision=VisionChoice(**choice))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (with_vision(group="tp", pooling=3), "vision pooling 3 was asked for, and a step has 4 micro-batches a rank"),
        (
            PlanOptions(
                pp=2,
                tp=2,
                num_microbatches=4,
                schedule="1F1B",
                zero_stage=1,
                risk=0.05,
                vision=VisionChoice(group="tp", pooling=2),
            ),
            "vision pooling 2 was asked for on a pipeline of 2 stages where the plan does not price it",
        ),
        (
            PlanOptions(pp=1, tp=2, num_microbatches=4, schedule="GPipe", vision=VisionChoice(group="tp", pooling=2)),
            "on GPipe, which holds all micro-batches, where the plan does not price it: leave it out",
        ),
        (
            PlanOptions(
                pp=8, num_microbatches=8, schedule="1F1B", zero_stage=1, risk=0.05, vision=VisionChoice(group="tp")
            ),
            "the plan has tp 1, a group of one that shares with no other rank: leave it out",
        ),
    ],
)
def test_groups_and_pools_that_a_plan_does_not_have_are_refused(options, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        make_plan(QWEN, image_samples(120), CLUSTER, options)


def test_without_images_there_is_nothing_to_share():
    text = table_of([np.array([], np.int64)] * 40, np.random.default_rng(0))
    with pytest.raises(PlanError, match="the data holds no image to share: leave it out"):
        make_plan(QWEN, text, CLUSTER, with_vision(group="tp"))


def test_whole_towers_that_do_not_fit_are_refused_with_the_group():
    options = PlanOptions(
        pp=1,
        tp=8,
        num_microbatches=2,
        vision=VisionChoice(group="tp"),
        memory_bytes=68 * 2**30,
        schedule="1F1B",
        zero_stage=1,
        risk=0.05,
    )
    with pytest.raises(PartitionError, match="over tp 8: "):
        make_plan(TILES, tile_samples(100), parse_cluster("8xA100-80GB"), options)


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
    assert any("slots a step, and the plan dp 2 x 8 micro-batches" in problem for problem in check_plan(tmp_path))


def test_pools_of_tiles_are_refused_over_ranks_that_hold_the_same():
    options = with_vision(group="tp", pooling=2)
    with pytest.raises(PlanError, match="InternVL-Chat-V1-5 cuts images into tiles: leave it out"):
        make_plan(TILES, tile_samples(), CLUSTER, dataclasses.replace(options, tp=8))
    wide = dataclasses.replace(with_vision(group="tp"), tp=8, max_patches=9225, max_tokens=4352, zero_stage=3)
    chosen = make_plan(TILES, tile_samples(), parse_cluster("16xH200"), wide)
    assert chosen.plan.decisions.vision_data_parallel.pooling == 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("group: tp", "group: ep", r"decisions\.vision_data_parallel\.group: 'ep' is none of tp, dp"),
        ("reduction: mean", "reduction: sum", r"decisions\.vision_data_parallel\.reduction: 'sum' is none of mean"),
        ("rule: balanced", "rule: best", r"decisions\.vision_data_parallel\.rule: 'best' is none of"),
        ("pooling: 1", "pooling: 0", r"decisions\.vision_data_parallel\.pooling is 0, and a plan has 1 or more"),
        ("degree: 4", "degree: 0", r"decisions\.vision_data_parallel\.degree is 0, and a plan has 1 or more"),
        ("degree: 4, ", "", r"decisions\.vision_data_parallel\.degree: missing"),
    ],
)
def test_unknown_words_of_the_decision_are_refused_when_read(before, after, message):
    text = GOLDEN.read_text(encoding="utf-8")
    with pytest.raises(PlanError, match=message):
        plan_from_yaml(text.replace(before, after))
