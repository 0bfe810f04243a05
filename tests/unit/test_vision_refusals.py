"""What no plan can follow of shared images: options, decisions edited by hand, words of the plan file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from plan_cases import tile_samples
from vision_cases import CLUSTER, QWEN, TILES, image_samples, table_of, with_vision

from refusals import refused
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
        ({"group": "ep"}, ("--vision-dp", "ep")),
        (
            {"group": "tp", "rule": "random"},
            ("--set", "vision_rule", "random"),
        ),
        (
            {"group": "tp", "objective": "fun"},
            ("--set", "vision_objective", "fun"),
        ),
        ({"group": "tp", "pooling": 0}, ("--set", "vision_pooling", "0", "1")),
        ({"pooling": 2}, "--vision-dp"),
    ],
)
def test_choices_that_no_plan_can_follow_are_refused(choice, message):
    with refused(PlanError, message):
        PlanOptions(vision=VisionChoice(**choice))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (with_vision(group="tp", pooling=3), ("3", "4")),
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
            "2",
        ),
        (
            PlanOptions(pp=1, tp=2, num_microbatches=4, schedule="GPipe", vision=VisionChoice(group="tp", pooling=2)),
            "GPipe",
        ),
        (
            PlanOptions(
                pp=8, num_microbatches=8, schedule="1F1B", zero_stage=1, risk=0.05, vision=VisionChoice(group="tp")
            ),
            "1",
        ),
    ],
)
def test_groups_and_pools_that_a_plan_does_not_have_are_refused(options, message):
    with refused(PlanError, message):
        make_plan(QWEN, image_samples(120), CLUSTER, options)


def test_without_images_there_is_nothing_to_share():
    text = table_of([np.array([], np.int64)] * 40, np.random.default_rng(0))
    with refused(PlanError):
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
    with refused(PartitionError, "8"):
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
    with refused(PlanError, "InternVL-Chat-V1-5"):
        make_plan(TILES, tile_samples(), CLUSTER, dataclasses.replace(options, tp=8))
    wide = dataclasses.replace(with_vision(group="tp"), tp=8, max_patches=9225, max_tokens=4352, zero_stage=3)
    chosen = make_plan(TILES, tile_samples(), parse_cluster("16xH200"), wide)
    assert chosen.plan.decisions.vision_data_parallel.pooling == 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("group: tp", "group: ep", ("decisions.vision_data_parallel.group", "ep")),
        ("reduction: mean", "reduction: sum", ("decisions.vision_data_parallel.reduction", "sum")),
        ("rule: balanced", "rule: best", ("decisions.vision_data_parallel.rule", "best")),
        ("pooling: 1", "pooling: 0", ("decisions.vision_data_parallel.pooling", "0", "1")),
        ("degree: 4", "degree: 0", ("decisions.vision_data_parallel.degree", "0", "1")),
        ("degree: 4, ", "", "decisions.vision_data_parallel.degree"),
    ],
)
def test_unknown_words_of_the_decision_are_refused_when_read(before, after, message):
    text = GOLDEN.read_text(encoding="utf-8")
    with refused(PlanError, message):
        plan_from_yaml(text.replace(before, after))
