"""A tiny model, a planned data set and runs of `train` over gloo ranks, for the loop's tests. Needs torch."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from plan_runs import spawn
from test_conversations import write_data, write_model

import trimtab
from trimtab.models.describe import describe
from trimtab.plan.file import load_plan, plan_to_yaml
from trimtab.plan.modules import fold_modules
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.plan.plan import DataFile, StageDecision
from trimtab.runtime.train import TrainSettings, train
from trimtab.samples.tokens import MARKUPS

NUM_SAMPLES = 24


def write_run(folder: Path, family: str) -> None:
    """model/ and data/, and plan/: dp 2 x pp 2 with 2 micro-batches, cut inside the text model."""
    write_model(folder / "model", family)
    data = write_data(folder / "data", num=NUM_SAMPLES)
    spec = describe(folder / "model")
    sized = trimtab.size_samples(
        data,
        image_rule=spec.image_rule,
        image_markup=MARKUPS[family],
        tokenizer=folder / "model",
    )
    limits = {"max_patches": int(sized.table.num_patches.max()), "max_tokens": int(sized.table.num_tokens.max())}
    options = PlanOptions(dp=2, pp=2, tp=1, num_microbatches=2, dtype="fp32", attention="sdpa", **limits)
    origin = PlanOrigin(data_files=(DataFile(path=str(data), num_bytes=data.stat().st_size, blake2b=""),))
    details = trimtab.make_plan(spec, sized.table, trimtab.parse_cluster("4xA100-80GB"), options, origin=origin)
    trimtab.write_plan(details, folder / "plan")


def write_variant(folder: Path, name: str, *, num_stages: int, **schedule: Any) -> Path:
    """The same packs with the model cut into equally many layers a stage."""
    source = folder / "plan"
    plan = load_plan(source)
    layers = [layer.name for layer in describe(folder / "model").layers]
    cuts = [round(len(layers) * i / num_stages) for i in range(num_stages + 1)]
    stages = tuple(StageDecision(stage=i, modules=fold_modules(layers[a:b])) for i, (a, b) in enumerate(pairwise(cuts)))
    decisions = replace(
        plan.decisions,
        stages=stages,
        recompute=(),
        schedule=replace(plan.decisions.schedule, **schedule),
    )
    target = folder / name
    target.mkdir()
    for file in source.iterdir():
        if file.name != "plan.yaml":
            (target / file.name).write_bytes(file.read_bytes())
    (target / "plan.yaml").write_text(plan_to_yaml(replace(plan, decisions=decisions)))
    return target


def settings_of(folder: Path, plan: Path, out: str, **more: Any) -> TrainSettings:
    given = {"random_weights": True, "dtype": "float32", "device": "cpu", "learning_rate": 1e-3, "steps": 4, **more}
    return TrainSettings(plan=plan, model=folder / "model", out=folder / out, **given)


def run_on_ranks(folder: Path, runs: list[TrainSettings], num_ranks: int) -> None:
    """One after the other, in the same processes."""
    spawn(_train, folder, runs, num_ranks=num_ranks)


def losses_of(settings: TrainSettings) -> list[float]:
    """By step, as the run's log has them."""
    lines = [json.loads(line) for line in (settings.out / "run.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def _train(rank: int, folder: Path, runs: list[TrainSettings]) -> None:
    for settings in runs:
        train(settings)
