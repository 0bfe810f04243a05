"""`trimtab train`: the same losses on any number of ranks and stages, and after a resume; needs torch."""

# ruff: noqa: E402 - what may be absent is asked for first, so that the file is skipped with a reason

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

import transformers
from train_runs import losses_of, run_on_ranks, settings_of, write_run, write_variant

from trimtab.errors import PlanError, TrimtabError
from trimtab.plan.file import load_plan
from trimtab.plan.run_log import read_run_log
from trimtab.runtime.checkpoint import list_checkpoints, read_progress
from trimtab.runtime.train import TrainSettings, fit_layout, rate_factor, train

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small InternVL and its plan for dp 2 x pp 2; losses of one process over four steps."""
    path = tmp_path_factory.mktemp("internvl")
    write_run(path, "internvl")
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """Losses of four steps by one process without stages, with checkpoints behind steps 2 and 4."""
    plan = write_variant(folder, "alone", num_stages=1)
    settings = settings_of(folder, plan, "run-alone", save_every=2, export=folder / "exported")
    train(settings)
    return losses_of(settings)


def test_twenty_steps_lose_as_one_process_does(tmp_path):
    """InternVL and Qwen2.5-VL, in three stages and in 2 x 2; in few processes, for each takes seconds to start."""
    ones, threes, squares = [], [], []
    for family in ("internvl", "qwen2_5_vl"):
        folder = tmp_path / family
        write_run(folder, family)
        ones.append(settings_of(folder, write_variant(folder, "one", num_stages=1), "run-1", steps=20))
        threes.append(settings_of(folder, write_variant(folder, "three", num_stages=3), "run-3", steps=20))
        squares.append(settings_of(folder, folder / "plan", "run-22", steps=20))
        train(ones[-1])
    run_on_ranks(tmp_path, threes, 3)
    run_on_ranks(tmp_path, squares, 4)
    for one, three, square in zip(ones, threes, squares, strict=True):
        expected = losses_of(one)
        assert len(expected) == 20
        assert expected[-1] < 0.9 * expected[0]
        assert losses_of(three) == pytest.approx(expected, rel=5e-6)
        assert losses_of(square) == pytest.approx(expected, rel=5e-6)


def test_resuming_gives_the_same_losses(folder, alone):
    shorter = settings_of(folder, folder / "alone", "run-resumed", steps=2)
    train(shorter)
    assert losses_of(shorter) == alone[:2]
    longer = replace(shorter, steps=4, resume=True)
    records = train(longer)
    assert [record.step for record in records] == [3, 4]
    assert losses_of(longer) == alone


def test_a_run_resumes_on_other_ranks_and_stages(folder, alone):
    settings = settings_of(folder, folder / "alone", "run-moved", steps=2)
    train(settings)
    moved = replace(settings, plan=folder / "plan", steps=4, resume=True)
    run_on_ranks(folder, [moved], 4)
    assert losses_of(moved) == pytest.approx(alone, rel=5e-6)
    assert read_progress(list_checkpoints(moved.out)[-1]).world_size == 4


def test_the_exported_model_is_the_trained_one(folder, alone):
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "exported")
    assert not [name for name, p in model.named_parameters() if p.is_meta]
    trained = folder / "model-trained"
    shutil.copytree(folder / "model", trained)
    for file in (folder / "exported").glob("*.safetensors*"):
        shutil.copy(file, trained)
    again = settings_of(folder, folder / "alone", "run-exported", steps=1, random_weights=False, learning_rate=1e-12)
    assert train(replace(again, model=trained))[0].loss < alone[0]


def test_a_half_written_checkpoint_is_not_resumed(folder, alone):
    out = folder / "run-alone"
    whole = list_checkpoints(out)
    assert [path.name for path in whole] == ["step-00000002", "step-00000004"]
    (out / ".step-00000009.writing").mkdir()
    (out / "step-00000008").mkdir()  # no progress.json: not ours
    assert list_checkpoints(out) == whole


def test_the_log_can_be_read_while_it_is_written(folder, alone):
    path = folder / "run-alone" / "run.jsonl"
    cut = folder / "cut.jsonl"
    cut.write_bytes(path.read_bytes()[:-20])
    log = read_run_log(cut)
    assert [record.step for record in log.steps] == [1, 2, 3]
    assert log.header.pp == 1
    assert not log.comparable
    assert all(record.num_tokens > 0 and record.step_s > 0 for record in log.steps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "Adamm"}, "optimizer 'Adamm' is no class of torch.optim"),
        ({"steps": 0, "keep": 0}, r"steps 0 was asked for(.|\n)*keep 0 was asked for"),
        ({"learning_rate": float("nan")}, "learning_rate nan was asked for: give a number above 0"),
        ({"optimizer": "LBFGS"}, "needs closures"),
        ({"max_grad_norm": -1.0, "warmup_steps": -1}, r"warmup_steps -1(.|\n)*max_grad_norm -1.0"),
    ],
)
def test_bad_settings_are_named_together(folder, change, message):
    with pytest.raises(TrimtabError, match=message):
        TrainSettings(plan=folder / "plan", model=folder / "model", out=folder / "no", **change)
    assert not (folder / "no").exists()


def test_the_number_of_processes_must_fit_the_plan(folder):
    with pytest.raises(PlanError, match=r"stages for 2 devices, and 1 processes were started: start 2, or a multiple"):
        train(settings_of(folder, folder / "plan", "no"))


def test_packs_that_ranks_cannot_share_are_refused(folder, alone):
    plan = load_plan(folder / "alone")
    with pytest.raises(PlanError, match="holds 4 packs, which 3 data-parallel ranks cannot share evenly"):
        fit_layout(plan, dp=3)


def test_a_folder_without_weights_is_refused(folder, alone):
    with pytest.raises(PlanError, match=r"holds no weights \(\*.safetensors\).*--random-weights"):
        train(settings_of(folder, folder / "alone", "no", random_weights=False))


def test_options_an_optimizer_refuses_are_named(folder, alone):
    with pytest.raises(TrimtabError, match=r"optimizer SGD was asked for with beta=2, which it refuses"):
        train(settings_of(folder, folder / "alone", "no", optimizer="SGD", optimizer_options={"beta": 2}))


def test_resuming_with_another_optimizer_is_refused(folder, alone):
    settings = settings_of(folder, folder / "alone", "run-alone", optimizer="SGD", resume=True, steps=6)
    with pytest.raises(PlanError, match="was written with optimizer AdamW, this run has SGD"):
        train(settings)


def test_a_broken_checkpoint_is_refused(folder, alone):
    broken = folder / "run-broken" / "step-00000001"
    broken.mkdir(parents=True)
    (broken / "progress.json").write_text('{"step": 1}')
    with pytest.raises(PlanError, match=r"is no checkpoint of `trimtab train`"):
        train(settings_of(folder, folder / "alone", "run-broken", resume=True))


def test_momentum_and_other_numbers_survive_a_resume(folder, alone):
    options = {"optimizer": "SGD", "optimizer_options": {"momentum": 0.9, "nesterov": True}}
    whole = settings_of(folder, folder / "alone", "run-sgd", **options)
    train(whole)
    half = settings_of(folder, folder / "alone", "run-sgd-half", **{**options, "steps": 2})
    train(half)
    train(replace(half, steps=4, resume=True))
    assert losses_of(half) == losses_of(whole)


def test_the_learning_rate_rises_and_decays():
    factors = [rate_factor(step, 10, 2, "cosine") for step in range(1, 11)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert all(a >= b for a, b in pairwise(factors[1:]))
    assert factors[-1] > 0
    assert [rate_factor(step, 6, 2, "linear") for step in (3, 4, 5, 6)] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rate_factor(1, 6, 0, "constant") == 1.0


def test_no_half_written_log_is_taken_for_one(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"kind": "step", "step": 1}) + "\n")
    with pytest.raises(PlanError, match=r"line 1 of the run log .* is no record"):
        read_run_log(path)
    with pytest.raises(PlanError, match="cannot read the run log"):
        read_run_log(tmp_path / "none")
    path.write_text("")
    with pytest.raises(PlanError, match="holds no step"):
        read_run_log(path)
    assert os.listdir(tmp_path) == ["run.jsonl"]
