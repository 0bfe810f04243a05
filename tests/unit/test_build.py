"""plan/build.py: the whole flow without files, torch or a data set."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from plan_cases import read_back, tile_samples, write_checked

from refusals import refused
from trimtab import PlanDetails, PlanOptions, check_plan, describe, make_plan, parse_cluster, write_plan
from trimtab.errors import PackingError, PlanError
from trimtab.plan.file.reload import load_details
from trimtab.plan.file.yaml import plan_to_yaml

MODEL = describe("InternVL-Chat-V1-5")
CLUSTER = parse_cluster("32xA100-80GB")
OPTIONS = PlanOptions(pp=4, tp=2, num_microbatches=8)


@pytest.fixture(scope="module")
def made() -> PlanDetails:
    return make_plan(MODEL, tile_samples(), CLUSTER, OPTIONS)


def test_the_same_inputs_give_the_same_bytes(made: PlanDetails) -> None:
    again = make_plan(MODEL, tile_samples(), CLUSTER, OPTIONS)
    assert plan_to_yaml(again.plan) == plan_to_yaml(made.plan)
    other = make_plan(MODEL, tile_samples(), CLUSTER, dataclasses.replace(OPTIONS, seed=1))
    assert plan_to_yaml(other.plan) != plan_to_yaml(made.plan)


def test_what_is_left_open_is_chosen_so_that_it_fits(tmp_path: Path) -> None:
    made = make_plan(MODEL, tile_samples(), CLUSTER, PlanOptions(host="none"))  # another one has no moved baseline
    parallel = made.plan.decisions.parallel
    assert parallel.dp * parallel.pp * parallel.tp == 32
    assert made.variants[-1].fits
    settings = made.plan.estimates.settings
    assert [getattr(settings[0], axis) for axis in ("dp", "pp", "tp")] == [parallel.dp, parallel.pp, parallel.tp]
    assert settings[0].zero_stage == made.plan.inputs.training.zero_stage
    # the baseline is the fastest that fits on any of them
    first, moved = made.plan.estimates.compared[:2]
    assert moved.name == "the plan's degrees", "the case is to have a faster baseline on other degrees"
    assert first.epoch_s < moved.epoch_s
    assert first.fits
    elsewhere = next(x for x in settings if x.label in first.packs)
    same = {x: getattr(elsewhere, x) for x in ("dp", "pp", "tp", "zero_stage", "schedule", "num_chunks")}
    there = PlanOptions(host="none", **same)
    alone = make_plan(MODEL, tile_samples(), CLUSTER, there).plan.estimates.compared[0]
    assert first.samples_per_s == pytest.approx(
        alone.samples_per_s, rel=0.25
    )  # packs, so batch sizes, are others there
    write_plan(made, tmp_path)
    assert load_details(tmp_path).plan == made.plan
    assert [x.epoch_s for x in load_details(tmp_path).variants] == [x.epoch_s for x in made.variants]


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        dataclasses.replace(OPTIONS, oversize="alone", max_patches=9225, max_tokens=1500),
        PlanOptions(pp=4, tp=2, schedule="GPipe", num_microbatches=4, zero_stage=0, optimizer="sgd"),
        PlanOptions(pp=4, tp=2, schedule="Interleaved1F1B", num_chunks=2, num_microbatches=8),
        PlanOptions(pp=4, tp=2, num_microbatches=8, method="isf", order="sorted"),
        PlanOptions(pp=4, tp=2, num_microbatches=8, recompute="full"),
        PlanOptions(pp=4, tp=2, global_batch=128),
        PlanOptions(pp=1, tp=8, zero_stage=3),
        PlanOptions(pp=4, tp=2, num_microbatches=8, frozen_towers=("vision",), fused_kernels=True),
    ],
    ids=lambda o: f"{o.schedule}-{o.method}-{o.recompute}-zero{o.zero_stage}-{o.frozen_towers}",
)
def test_other_choices_give_plans_that_check_and_simulate_alike(options: PlanOptions, tmp_path: Path) -> None:
    cluster = dataclasses.replace(CLUSTER, node_link_bytes_per_s=5e9, latency_s=1e-4)
    model = dataclasses.replace(MODEL, forbidden_cuts=MODEL.forbidden_cuts | frozenset(range(1, 20)))
    made = make_plan(model, tile_samples(300), cluster, options)
    read_back(made, tmp_path)


def test_oversize_samples_are_an_error_alone_or_skipped(tmp_path: Path) -> None:
    limits = PlanOptions(pp=4, tp=2, num_microbatches=4, max_patches=9 * 1025, max_tokens=1500)
    samples = tile_samples(300)
    num_large = int((samples.num_tokens > 1500).sum())
    assert num_large > 0
    with refused(PackingError):
        make_plan(MODEL, samples, CLUSTER, limits)
    alone = make_plan(MODEL, samples, CLUSTER, dataclasses.replace(limits, oversize="alone"))
    assert len(alone.packing.indices) == 300
    write_checked(alone, tmp_path / "alone")
    skipped = make_plan(MODEL, samples, CLUSTER, dataclasses.replace(limits, oversize="skip"))
    assert skipped.plan.decisions.packing.num_oversize == num_large
    write_checked(skipped, tmp_path / "skipped")


def test_fewer_samples_than_ranks_still_make_a_plan(tmp_path: Path) -> None:
    made = make_plan(MODEL, tile_samples(3), CLUSTER, OPTIONS)
    assert sorted(made.packing.indices.tolist()) == [0, 1, 2]
    write_checked(made, tmp_path)


def test_a_model_without_a_file_is_checked_with_the_model_in_hand(tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, origin=None)
    write_plan(make_plan(model, tile_samples(100), CLUSTER, OPTIONS), tmp_path)
    assert "pass it as model=" in check_plan(tmp_path)[0]
    assert check_plan(tmp_path, model=model) == []
    assert "other layers" in check_plan(tmp_path, model=describe("InternVL-Chat-V1-5", max_tiles=3))[0]


def test_frozen_towers_exchange_no_gradients_and_recompute_nothing() -> None:
    towers = ("vision", "language")
    frozen = make_plan(MODEL, tile_samples(200), CLUSTER, dataclasses.replace(OPTIONS, frozen_towers=towers))
    step_s = [layer.step_s for layer in frozen.profile.layers]
    trained = [layer.tower == "projector" for layer in frozen.profile.layers]
    assert [seconds > 0 for seconds in step_s] == trained
    modules = [m for entry in frozen.plan.decisions.recompute for m in entry.modules]
    assert not [m for m in modules if m.startswith("vision_model")]


def test_open_limits_hold_most_samples_where_the_rest_may_be_skipped() -> None:
    samples = tile_samples(300)
    tokens = samples.num_tokens.copy()
    tokens[7] = 400_000
    samples = dataclasses.replace(samples, num_tokens=tokens)
    made = make_plan(MODEL, samples, CLUSTER, dataclasses.replace(OPTIONS, oversize="skip"))
    assert made.plan.decisions.packing.max_tokens < 100_000
    assert made.packing.oversize.tolist() == [7]


@pytest.mark.parametrize("max_patches", [None, 9225])
def test_text_alone_makes_a_plan(max_patches: int | None) -> None:
    zeros = np.zeros(100, np.int64)
    text = dataclasses.replace(
        tile_samples(100), num_images=zeros, num_patches=zeros, patches_sq=zeros, patches_windowed=zeros
    )
    made = make_plan(MODEL, text, CLUSTER, dataclasses.replace(OPTIONS, max_patches=max_patches))
    assert made.variants[-1].fits
    assert made.packing.sums(text.num_tokens).max() <= made.plan.decisions.packing.max_tokens


@pytest.mark.parametrize("num_samples", [230, 280])
def test_gpipe_fits_with_the_micro_batches_it_was_priced_with(num_samples: int, tmp_path: Path) -> None:
    options = PlanOptions(pp=8, tp=2, schedule="GPipe", memory_bytes=50 * 2**30)
    write_checked(make_plan(MODEL, tile_samples(num_samples), CLUSTER, options), tmp_path)


def test_figures_of_a_device_are_its_own_or_the_published_ones(tmp_path: Path) -> None:
    slow = dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, peak_flops=1e14))
    for cluster in (slow, CLUSTER):
        made = make_plan(MODEL, tile_samples(100), cluster, OPTIONS)
        write_checked(made, tmp_path)
    text = (tmp_path / "plan.yaml").read_text()
    now = made.plan.inputs.cluster.device_blake2b
    (tmp_path / "plan.yaml").write_text(text.replace(now, "0" * len(now)))  # as if the table had changed since
    assert "has other figures" in check_plan(tmp_path)[0]


def test_no_variant_beats_the_plan() -> None:
    for options in (PlanOptions(pp=8, tp=4), PlanOptions(pp=16, tp=1, global_batch=64), PlanOptions(pp=2, tp=8)):
        made = make_plan(MODEL, tile_samples(400), CLUSTER, options)
        epochs = [v.epoch_s for v in made.variants if v.fits]
        assert epochs[-1] <= min(epochs) * (1 + 1e-12)


@pytest.mark.parametrize(("what", "missing"), [("model", "config"), ("preprocessor", "preprocessor")])
def test_a_file_of_the_plan_that_is_not_here_is_said_to_come_from_the_plan(made, tmp_path, what, missing):
    given = dataclasses.replace(made.plan.inputs.model, **{missing: "somewhere/model"})
    inputs = dataclasses.replace(made.plan.inputs, model=given)
    write_plan(dataclasses.replace(made, plan=dataclasses.replace(made.plan, inputs=inputs)), tmp_path)
    with refused(PlanError, "somewhere/model", what):
        load_details(tmp_path)
