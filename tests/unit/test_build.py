"""plan/build.py: the whole flow without files, torch or a data set."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from plan_cases import tile_samples

from trimtab.costs.devices import parse_cluster
from trimtab.errors import PackingError, PartitionError, PlanError
from trimtab.models.describe import describe
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.check import check_plan
from trimtab.plan.details import PlanDetails
from trimtab.plan.file import plan_to_yaml
from trimtab.plan.options import PlanOptions
from trimtab.plan.reload import load_details

MODEL = describe("InternVL-Chat-V1-5")
CLUSTER = parse_cluster("32xA100-80GB")
OPTIONS = PlanOptions(pp=4, tp=2, num_microbatches=8)


@pytest.fixture(scope="module")
def made() -> PlanDetails:
    return make_plan(MODEL, tile_samples(), CLUSTER, OPTIONS)


def test_every_sample_is_planned_once_within_the_limits(made: PlanDetails) -> None:
    packing, decision = made.packing, made.plan.decisions.packing
    assert sorted(packing.indices.tolist()) == list(range(600))
    assert packing.sums(made.samples.num_patches).max() <= decision.max_patches
    assert packing.sums(made.samples.num_tokens).max() <= decision.max_tokens


def test_each_decision_of_the_plan_gains_and_the_plan_fits(made: PlanDetails) -> None:
    epochs = [variant.epoch_s for variant in made.variants]
    assert epochs[-1] < epochs[0]
    assert epochs[-1] == min(epochs)
    assert made.variants[-1].fits
    assert made.plan.summary.endswith(".")
    assert f"{epochs[0] / epochs[-1]:.2f}x" in made.plan.summary


def test_the_same_inputs_give_the_same_bytes(made: PlanDetails) -> None:
    again = make_plan(MODEL, tile_samples(), CLUSTER, OPTIONS)
    assert plan_to_yaml(again.plan) == plan_to_yaml(made.plan)
    other = make_plan(MODEL, tile_samples(), CLUSTER, dataclasses.replace(OPTIONS, seed=1))
    assert plan_to_yaml(other.plan) != plan_to_yaml(made.plan)


def test_a_written_plan_checks_and_simulates_to_the_same_figures(made: PlanDetails, tmp_path: Path) -> None:
    write_plan(made, tmp_path)
    assert check_plan(tmp_path) == []
    loaded = load_details(tmp_path)
    assert loaded.plan == made.plan
    for before, after in zip(made.variants, loaded.variants, strict=True):
        np.testing.assert_array_equal(before.step_s, after.step_s)


def test_what_is_left_open_is_chosen_so_that_it_fits() -> None:
    made = make_plan(MODEL, tile_samples(), CLUSTER)
    parallel = made.plan.decisions.parallel
    assert parallel.dp * parallel.pp * parallel.tp == 32
    assert made.variants[-1].fits


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(pp=4, tp=2, schedule="GPipe", num_microbatches=4),
        PlanOptions(pp=4, tp=2, schedule="Interleaved1F1B", num_chunks=2, num_microbatches=8),
        PlanOptions(pp=4, tp=2, num_microbatches=8, method="isf", order="sorted"),
        PlanOptions(pp=4, tp=2, num_microbatches=8, recompute="full"),
        PlanOptions(pp=4, tp=2, global_batch=128),
        PlanOptions(pp=1, tp=8, zero_stage=3),
        PlanOptions(pp=4, tp=2, num_microbatches=8, frozen_towers=("vision",), fused_kernels=True),
    ],
    ids=lambda o: f"{o.schedule}-{o.method}-{o.recompute}-zero{o.zero_stage}-{o.frozen_towers}",
)
def test_other_choices_give_plans_that_check(options: PlanOptions, tmp_path: Path) -> None:
    made = make_plan(MODEL, tile_samples(300), CLUSTER, options)
    write_plan(made, tmp_path)
    assert check_plan(tmp_path) == []


def test_a_frozen_tower_is_never_recomputed() -> None:
    options = PlanOptions(pp=4, tp=2, num_microbatches=8, frozen_towers=("vision", "projector"))
    made = make_plan(MODEL, tile_samples(300), CLUSTER, options)
    modules = [m for entry in made.plan.decisions.recompute for m in entry.modules]
    assert not [m for m in modules if m.startswith(("vision_model", "mlp1"))]


def test_a_global_batch_is_met_on_average() -> None:
    made = make_plan(MODEL, tile_samples(), CLUSTER, PlanOptions(pp=4, tp=2, global_batch=128))
    decision = made.plan.decisions
    per_step = 600 / made.packing.num_packs * decision.parallel.dp * decision.schedule.num_microbatches
    assert 90 < per_step < 180


def test_oversize_samples_are_an_error_alone_or_skipped(tmp_path: Path) -> None:
    limits = PlanOptions(pp=4, tp=2, num_microbatches=4, max_patches=9 * 1025, max_tokens=1500)
    samples = tile_samples(300)
    num_large = int((samples.num_tokens > 1500).sum())
    assert num_large > 0
    with pytest.raises(PackingError, match="do not fit a pack"):
        make_plan(MODEL, samples, CLUSTER, limits)
    alone = make_plan(MODEL, samples, CLUSTER, dataclasses.replace(limits, oversize="alone"))
    assert len(alone.packing.indices) == 300
    write_plan(alone, tmp_path / "alone")
    assert check_plan(tmp_path / "alone") == []
    skipped = make_plan(MODEL, samples, CLUSTER, dataclasses.replace(limits, oversize="skip"))
    assert skipped.plan.decisions.packing.num_oversize == num_large
    write_plan(skipped, tmp_path / "skipped")
    assert check_plan(tmp_path / "skipped") == []


def test_fewer_samples_than_ranks_still_make_a_plan(tmp_path: Path) -> None:
    made = make_plan(MODEL, tile_samples(3), CLUSTER, OPTIONS)
    assert sorted(made.packing.indices.tolist()) == [0, 1, 2]
    write_plan(made, tmp_path)
    assert check_plan(tmp_path) == []


def test_text_alone_makes_a_plan() -> None:
    samples = tile_samples(100)
    zeros = np.zeros(100, np.int64)
    text = dataclasses.replace(samples, num_images=zeros, num_patches=zeros, patches_sq=zeros, patches_windowed=zeros)
    made = make_plan(MODEL, text, CLUSTER, OPTIONS)
    assert made.variants[-1].fits


def test_too_little_memory_says_how_much_is_missing() -> None:
    with pytest.raises(PartitionError, match="too many"):
        make_plan(MODEL, tile_samples(100), CLUSTER, dataclasses.replace(OPTIONS, memory_bytes=4 * 2**30))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 3}, "multiple of 3"),
        ({"dp": 2, "pp": 2, "tp": 2}, "no whole number of replicas"),
        ({"memory_bytes": 2**40}, "of memory per device was asked for"),
    ],
)
def test_options_that_contradict_the_cluster_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(MODEL, tile_samples(20), CLUSTER, PlanOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp": 0}, "dp 0 was asked for"),
        ({"num_microbatches": 2, "global_batch": 4}, "give one of them"),
        ({"reserve": 1.0}, "it is a share"),
        ({"num_chunks": 2}, "has one stage per device"),
        ({"schedule": "Interleaved1F1B"}, "give --num-chunks 2 or more"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanOptions(**options)  # type: ignore[arg-type]


def test_a_model_without_a_file_is_checked_with_the_model_in_hand(tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, origin=None)
    write_plan(make_plan(model, tile_samples(100), CLUSTER, OPTIONS), tmp_path)
    assert "pass it as model=" in check_plan(tmp_path)[0]
    assert check_plan(tmp_path, model=model) == []
    assert "other layers" in check_plan(tmp_path, model=describe("InternVL-Chat-V1-5", max_tiles=3))[0]
