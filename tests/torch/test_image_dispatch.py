"""Data-parallel ranks of a pipeline that share images, and `trimtab train` doing so. Needs torch and Transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import image_dispatch_runs
import pytest
from gloo_ranks import on_ranks
from pipeline_runs import dispatch_by, on_replica
from train_runs import run_on_ranks, settings_of, values_of, write_run, write_variant

from refusals import refused
from trimtab.errors import UnsupportedPlanError
from trimtab.models.describe import describe
from trimtab.plan.file.reload import load_details
from trimtab.plan.file.yaml import load_plan, plan_to_yaml
from trimtab.plan.layout import read_layout
from trimtab.plan.plan import StageDecision
from trimtab.plan.runs import read_run_of
from trimtab.report.run import run_sentences
from trimtab.runtime.training.loop import train
from trimtab.runtime.training.settings import TrainSettings
from trimtab.units import fold_modules


@pytest.mark.parametrize("families", ["qwen2_5_vl internvl", "llava qwen3_vl"])
def test_two_ranks_share_the_images_of_a_step(families: str) -> None:
    """Loss, gradients and each rank's load; ranks that disagree; a tower that is cut."""
    on_ranks(image_dispatch_runs.run_all, families)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainSettings]:
    """On two ranks with the whole model each: without sharing, every micro-batch apart, and two in a call."""
    here = tmp_path_factory.mktemp("runs")
    write_run(here, "qwen2_5_vl")
    plain = write_variant(here, "plain", num_stages=1)
    apart = write_variant(here, "apart", num_stages=1, images=dispatch_by(1))
    planned = write_variant(here, "planned", num_stages=1, images=dispatch_by(2))
    usual: dict[str, Any] = {"optimizer": "SGD", "learning_rate": 0.5, "steps": 4}
    found = {
        "off": settings_of(here, plain, "off", **usual),
        "apart": settings_of(here, apart, "apart-run", **usual),
        "plan": settings_of(here, planned, "planned", **usual),
    }
    run_on_ranks(list(found.values()), 2)
    return found


@pytest.mark.parametrize("how", ["apart", "plan"])
def test_training_loses_as_without_sharing(runs, how):
    without, shared = runs["off"], runs[how]
    assert values_of(shared) == pytest.approx(values_of(without), rel=1e-6)
    assert values_of(shared, "grad_norm") == pytest.approx(values_of(without, "grad_norm"), rel=1e-5)
    assert len(set(values_of(shared))) == 4


def test_the_log_and_the_report_say_what_each_rank_encoded(runs):
    shared = runs["plan"]
    held, encoded = values_of(shared, "patches_held"), values_of(shared, "patches_encoded")
    assert [sum(step) for step in held] == [sum(step) for step in encoded]
    assert sum(max(step) for step in encoded) < sum(max(step) for step in held)
    assert values_of(runs["off"], "patches_held") == [[]] * 4
    header = json.loads((shared.out / "run.jsonl").read_text().splitlines()[0])
    assert header["vision_dp"] == "dispatch"
    details = load_details(shared.plan)
    words = " ".join(run_sentences(details, read_run_of(details.plan, shared.out / "run.jsonl")))
    totals = ", ".join(f"{sum(step[rank] for step in encoded):,}" for rank in range(2))
    assert "Data-parallel ranks shared their images: the most loaded of a step encoded 1." in words
    assert f"alone; by rank {totals}." in words
    off = read_run_of(load_details(runs["off"].plan).plan, runs["off"].out / "run.jsonl")
    assert "shared their images" not in " ".join(run_sentences(details, off))


@pytest.mark.parametrize("again", [None, "full"])
def test_training_loses_the_same_with_the_tower_on_every_rank(again, tmp_path):
    """Two stages: weights that the first rank updated reach the copy, and a checkpoint resumes with them."""
    write_run(tmp_path, "qwen3_vl", dp=1)
    plain = write_variant(tmp_path, "plain", num_stages=2)
    plan = load_plan(plain)
    # the same layers in the tower, which lies whole on the first stage
    layers = [x.name for x in describe(tmp_path / "model").layers]
    text = next(i for i, name in enumerate(layers) if "language_model.layers.1" in name)
    stages = tuple(
        StageDecision(stage=i, modules=fold_modules(part)) for i, part in enumerate((layers[:text], layers[text:]))
    )
    images = on_replica(2, plan.decisions.schedule.num_microbatches, again)
    decisions = replace(plan.decisions, stages=stages, vision_data_parallel=images)
    everywhere = tmp_path / "everywhere"
    shutil.copytree(plain, everywhere)
    (everywhere / "plan.yaml").write_text(plan_to_yaml(replace(plan, decisions=decisions)))
    usual: dict[str, Any] = {"optimizer": "AdamW", "learning_rate": 0.01}
    one = settings_of(tmp_path, plain, "one", **usual)
    every = settings_of(tmp_path, everywhere, "every", save_every=2, **usual)
    run_on_ranks([one, replace(every, steps=2), replace(every, resume=True)], 2)
    assert values_of(every) == pytest.approx(values_of(one), rel=1e-6)
    assert values_of(every, "grad_norm") == pytest.approx(values_of(one, "grad_norm"), rel=1e-5)
    encoded = values_of(every, "patches_encoded")
    assert sum(max(step) for step in encoded) < sum(sum(step) for step in encoded)
    details = load_details(every.plan)
    words = " ".join(run_sentences(details, read_run_of(details.plan, every.out / "run.jsonl")))
    assert ", ".join(f"{sum(step[rank] for step in encoded):,}" for rank in range(2)) in words


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_training_loses_the_same_with_the_tower_on_devices_of_its_own(family, tmp_path):
    """Two ranks of the decoder, a device each for the tower: four processes, two stages."""
    write_run(tmp_path, family, dp=2)
    plain = write_variant(tmp_path, "plain", num_stages=1)
    plan = load_plan(plain)
    model = describe(tmp_path / "model")
    layers, text = [x.name for x in model.layers], min(model.indices("language"))
    stages = tuple(
        StageDecision(stage=i, modules=fold_modules(part)) for i, part in enumerate((layers[:text], layers[text:]))
    )
    images = replace(on_replica(2, 1), group="own", exchange="send")
    own = tmp_path / "own"
    shutil.copytree(plain, own)
    decisions = replace(plan.decisions, stages=stages, vision_data_parallel=images)
    (own / "plan.yaml").write_text(plan_to_yaml(replace(plan, decisions=decisions)))
    usual: dict[str, Any] = {"optimizer": "AdamW", "learning_rate": 0.01}
    one, apart = settings_of(tmp_path, plain, "one", **usual), settings_of(tmp_path, own, "apart", **usual)
    run_on_ranks([one], 2)
    run_on_ranks([apart], 4)
    assert values_of(apart) == pytest.approx(values_of(one), rel=1e-6)
    assert values_of(apart, "grad_norm") == pytest.approx(values_of(one, "grad_norm"), rel=1e-5)
    other = replace(plan.decisions, stages=stages, vision_data_parallel=replace(images, degree=1))
    with refused(UnsupportedPlanError):
        read_layout(replace(plan, decisions=other))


def test_one_rank_alone_shares_nothing(runs, capsys):
    settings = runs["apart"]
    alone = settings_of(settings.model.parent, settings.plan, "alone", steps=1)
    train(alone)
    assert values_of(alone, "patches_encoded") == [[]]
    assert "one data-parallel rank has no other to share images with: it encodes its own" in capsys.readouterr().err


def test_other_ways_of_sharing_are_refused(runs):
    plan = load_plan(runs["plan"].plan)
    images = plan.decisions.vision_data_parallel
    assert read_layout(plan).images == images
    other = replace(images, group="tp", exchange="gather", reduction="mean")
    with refused(UnsupportedPlanError):
        read_layout(replace(plan, decisions=replace(plan.decisions, vision_data_parallel=other)))
