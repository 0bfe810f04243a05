"""A tiny model, a planned data set and runs of `train` over gloo ranks, for the loop's tests. Needs torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gloo_ranks import on_ranks
from model_folders import write_data, write_model, write_plan_of

from trimtab.models.describe import describe
from trimtab.options import Tower
from trimtab.plan.file.yaml import load_plan, plan_to_yaml
from trimtab.plan.plan import RecomputeDecision, StageDecision, VisionDecision
from trimtab.runtime.training.loop import train
from trimtab.runtime.training.settings import TrainSettings
from trimtab.units import fold_modules

NUM_SAMPLES = 24


def write_run(folder: Path, family: str, *, dp: int = 2, **text: Any) -> None:
    """model/ and data/, and plan/: dp x pp 2 with 2 micro-batches, cut inside the text model.

    `text`: fields of the text model's configuration; tie_word_embeddings stands in the outer one as well.
    """
    write_model(folder / "model", family)
    config = json.loads((folder / "model" / "config.json").read_text())
    config["text_config"] |= text
    config |= {key: value for key, value in text.items() if key == "tie_word_embeddings"}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    data = write_data(folder / "data", num=NUM_SAMPLES)
    options = {"dp": dp, "pp": 2, "tp": 1, "num_microbatches": 2, "dtype": "fp32", "attention": "sdpa"}
    write_plan_of(folder, data, options, f"{2 * dp}xA100-80GB")


def write_variant(
    folder: Path,
    variant: str,
    /,
    *,
    num_stages: int,
    recompute: bool = False,
    frozen: tuple[Tower, ...] = (),
    images: VisionDecision | None = None,
    **schedule: Any,
) -> Path:
    """The same packs with the model cut into equally many layers a stage; every layer recomputed, if any."""
    source = folder / "plan"
    plan = load_plan(source)
    layers = [layer.name for layer in describe(folder / "model").layers]
    cuts = [round(len(layers) * i / num_stages) for i in range(num_stages + 1)]
    stages = tuple(StageDecision(stage=i, modules=fold_modules(layers[a:b])) for i, (a, b) in enumerate(pairwise(cuts)))
    pipeline = replace(plan.decisions.schedule, **schedule)
    decisions = replace(
        plan.decisions,
        parallel=replace(plan.decisions.parallel, pp=num_stages // pipeline.num_chunks),
        stages=stages,
        recompute=tuple(RecomputeDecision(stage=s.stage, granularity="full", modules=s.modules) for s in stages)
        if recompute
        else (),
        schedule=pipeline,
        vision_data_parallel=images,
    )
    target = folder / variant
    target.mkdir()
    for file in source.iterdir():
        if file.name != "plan.yaml":
            (target / file.name).write_bytes(file.read_bytes())
    inputs = replace(plan.inputs, training=replace(plan.inputs.training, frozen_towers=frozen))
    (target / "plan.yaml").write_text(plan_to_yaml(replace(plan, inputs=inputs, decisions=decisions)))
    return target


def settings_of(folder: Path, plan: Path, out: str, **more: Any) -> TrainSettings:
    given = {"random_weights": True, "dtype": "float32", "device": "cpu", "learning_rate": 1e-3, "steps": 4, **more}
    return TrainSettings(plan=plan, model=folder / "model", out=folder / out, **given)


def run_on_ranks(runs: list[TrainSettings], num_ranks: int) -> None:
    """One after the other, in the same gloo processes."""
    on_ranks(_train, runs, num_ranks=num_ranks)


def values_of(settings: TrainSettings, name: str = "loss") -> list[float]:
    """By step, as the run's log has them."""
    lines = [json.loads(line) for line in (settings.out / "run.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if line["kind"] == "step"]


def load_tensors(checkpoint: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Of the model, by name."""
    from safetensors.torch import load_file

    found = {name: value for file in checkpoint.glob("*.safetensors") for name, value in load_file(file).items()}
    return {name: value for name, value in found.items() if name.startswith(f"model/{prefix}")}


def read_lines(settings: TrainSettings) -> list[str]:
    """Steps in the log of a run that may still be writing it."""
    log = settings.out / "run.jsonl"
    return [line for line in log.read_text().splitlines() if '"step"' in line] if log.exists() else []


class Torchrun:
    """`torchrun --no-python trimtab` with these words; killed when left, what it wrote in `errors`."""

    def __init__(self, words: list[str], out: Path, num_ranks: int) -> None:
        ranks = ["--standalone", f"--nproc-per-node={num_ranks}", "--no-python"]
        itself = str(Path(sys.executable).parent / "trimtab")
        out.mkdir(exist_ok=True)
        self._verb, self._written = words[0], out / "stderr.txt"
        with self._written.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *ranks, itself, *words],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )

    @property
    def errors(self) -> str:
        return self._written.read_text()

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the verb."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {int(each.environ()["RANK"]): each for each in found if self._verb in each.cmdline()}

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        """-9 to torchrun and to all its ranks, which are in sessions of their own."""
        if self.process.poll() is None:
            for each in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
                each.kill()
        self.process.wait()


def start_training(settings: TrainSettings, num_ranks: int, *more: str) -> Torchrun:
    given = [str(settings.plan), str(settings.model), "--out", str(settings.out), "--steps", str(settings.steps)]
    given += [
        *("--random-weights", "--set", f"dtype={settings.dtype}", "--device"),
        *("cpu", "--lr", str(settings.learning_rate)),
    ]
    given += ["--save-every", str(settings.save_every)]
    return Torchrun(["train", *given, *more], settings.out, num_ranks)


def wait_for(happened: Callable[[], object], run: Torchrun) -> None:
    """The bound only ends a test that hangs."""
    for _ in range(3000):
        if happened():
            return
        assert run.process.poll() is None, run.errors
        time.sleep(0.1)
    pytest.fail(run.errors)


def said(run: Torchrun) -> list[str]:
    """Sentences, of all ranks."""
    return [line.removeprefix("trimtab: ") for line in run.errors.splitlines() if line.startswith("trimtab: ")]


def assert_said_once(run: Torchrun, sentence: str) -> None:
    """One sentence ends the run, and no rank shows a traceback or gloo's own words (torchrun's own summary aside)."""
    assert run.process.wait(timeout=300) == 1, run.errors
    assert len([line for line in said(run) if re.fullmatch(sentence, line)]) == 1, run.errors
    assert "gloo" not in run.errors
    assert "trimtab/runtime" not in run.errors


def _train(_rank: int, runs: list[TrainSettings]) -> None:
    for settings in runs:
        train(settings)
