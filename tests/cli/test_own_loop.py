"""A plan that `trimtab train` runs: what the planner decides for it, what it refuses, and where its records are."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refusals import refused as refuses
from trimtab.demo import SPECIAL_TOKENS, write_model
from trimtab.errors import PlanError, SampleError
from trimtab.partition.schedules import splits_backward
from trimtab.plan.file.records import find_data_files
from trimtab.plan.file.yaml import load_plan

Run = Any
CLUSTER = ("--cluster", "4xA100-80GB", "--for", "trimtab", "--global-batch", "16")


@pytest.fixture(scope="module")
def model(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("own") / "model", drawn)


@pytest.fixture
def plan(run: Run, drawn: Path, model: Path, tmp_path: Path) -> Path:
    """Made from saved sizes; the tokenizer is the model folder's."""
    data, sizes = Path(shutil.copy(drawn / "data.jsonl", tmp_path)), tmp_path / "sizes.npz"
    assert run("size", data, "--model", model, "--media-root", drawn, "--out", sizes).code == 0
    made = run("plan", model, sizes, *CLUSTER, "--out", tmp_path / "plan")
    assert made.code == 0, made.err
    return tmp_path / "plan"


def test_only_what_the_loop_runs_is_decided(run: Run, plan: Path) -> None:
    made = load_plan(plan)
    assert (made.decisions.parallel.tp, made.inputs.training.zero_stage) == (1, 0)
    assert run("check", plan, "--for", "trimtab").code == 0


@pytest.mark.parametrize(
    ("words", "group"),
    [(("--for", "trimtab"), "replica"), (("--for", "trimtab", "--set", "towers=one-grid"), None), ((), None)],
)
def test_a_tower_on_each_device_of_a_replica_is_taken_by_itself(run: Run, tmp_path: Path, words, group) -> None:
    """It gains some per cent on these lengths; a plan without --for shares images only when asked."""
    random, lengths = np.random.default_rng(0), tmp_path / "lengths.jsonl"
    images = [random.integers(200, 2000, (n, 2)).tolist() for n in random.choice([0, 1, 1, 2, 4], 2000)]
    tokens = 20 + random.lognormal(6, 0.8, len(images)).astype(int)
    rows = [{"num_tokens": int(n), "image_wh": sides} for n, sides in zip(tokens, images, strict=True)]
    lengths.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("plan", "Qwen3-VL-8B", lengths, "--cluster", "32xH100-80GB", "--out", tmp_path / "plan", *words)
    assert run(*command).code == 0
    vision = load_plan(tmp_path / "plan").decisions.vision_data_parallel
    assert (None if vision is None else vision.group) == group


def test_a_plan_for_the_loop_is_one_that_it_runs(run: Run, tmp_path: Path) -> None:
    """The best here is ZBVZeroBubble, whose backward runs in two parts: no part of a layer recomputes."""
    lengths = tmp_path / "lengths.jsonl"
    rows = [{"num_tokens": 300 + 7 * i % 900, "image_wh": [[800, 600]] * (i % 4)} for i in range(1500)]
    lengths.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("plan", "Qwen2.5-VL-7B", lengths, "--cluster", "32xH100-80GB", "--out", tmp_path / "plan")
    for words in (("--for", "trimtab"), ("--for", "trimtab", "--set", "towers=one-grid"), ("--set", "schedule=ZBH1")):
        assert run(*command, *words).code == 0
        decisions = load_plan(tmp_path / "plan").decisions
        if splits_backward(decisions.schedule.name):
            assert {x.granularity for x in decisions.recompute} <= {"full"}


def test_planning_for_the_loop_imports_neither_torch_nor_the_runtime(drawn: Path, model: Path, tmp_path: Path) -> None:
    """What a plan needs to know of our own runtime is data on a lower floor."""
    command = [sys.executable, "-X", "importtime", "-m", "trimtab", "plan", str(model), str(drawn / "data.jsonl")]
    made = subprocess.run([*command, *CLUSTER, "--out", str(tmp_path)], capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in made.stderr.splitlines() if line.startswith("import time:")}
    assert "trimtab.plan.layout" in imported
    assert not {x for x in imported if x.split(".")[0] == "torch" or x.startswith("trimtab.runtime")}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--tp", "2"), ["--for trimtab", "tp 1", "2"]),
        (("--zero-stage", "3"), ["--for trimtab", "zero_stage 0", "3"]),
        (("--set", "schedule=ZBH1"), ["--for trimtab", "1F1B or GPipe", "ZBH1"]),
        (("--pp", "4", "--set", "num_microbatches=2", "--set", "schedule=1F1B"), ["1F1B", "4 stages", "2"]),
    ],
)
def test_what_the_loop_cannot_run_is_refused_before_a_plan_is_written(run, drawn, model, tmp_path, words, names):
    cluster = CLUSTER[:4] if "num_microbatches=2" in words else CLUSTER
    refused = run("plan", model, drawn / "data.jsonl", *cluster, *words, "--out", tmp_path / "plan")
    assert refused.code == 2
    assert all(name in refused.err for name in names)
    assert len(refused.err.strip().splitlines()) == 1
    assert not (tmp_path / "plan").exists()


def test_models_and_data_that_the_loop_cannot_read_are_refused(run: Run, drawn: Path, tmp_path: Path) -> None:
    for model, message in (("InternVL-Chat-V1-5", "samples of internvl_chat"), ("Qwen2.5-VL-7B", "--tokenizer")):
        refused = run("plan", model, drawn / "data.jsonl", *CLUSTER, "--out", tmp_path / "plan")
        assert refused.code == 2
        assert message in refused.err


def test_a_plan_of_saved_sizes_leads_to_the_files_that_were_sized(plan: Path) -> None:
    made, file = load_plan(plan), plan.parent / "data.jsonl"
    assert [found.file for found in find_data_files(made, plan)] == [file]
    moved = file.rename(plan.parent / "moved.jsonl")
    with refuses(SampleError, "data.jsonl", "--data"):
        find_data_files(made, plan)
    assert [found.file for found in find_data_files(made, plan, [moved])] == [moved]
    with refuses(PlanError, "2", "1", "--data"):
        find_data_files(made, plan, [moved, moved])
    with refuses(SampleError, "sizes.npz"):
        find_data_files(made, plan, [plan.parent / "sizes.npz"])
    moved.write_bytes(moved.read_bytes().replace(b"chart", b"chirt"))
    with refuses(PlanError, "moved.jsonl", "data.jsonl"):
        find_data_files(made, plan, [moved])


def test_the_demos_model_knows_the_demos_tokens(drawn: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tokens = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}
    assert {name: SPECIAL_TOKENS[config[f"{name}_token_id"]] for name in tokens} == tokens
    assert SPECIAL_TOKENS[config["eos_token_id"]] == "<|im_end|>"
    vocabulary = json.loads((drawn / "tokenizer.json").read_text())["model"]["vocab"]
    assert max(vocabulary.values()) < config["text_config"]["vocab_size"]
