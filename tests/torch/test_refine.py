"""`plan --set refine`: candidate splits run on this machine, the fastest kept; needs torch, starts processes."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from gloo_ranks import fail

from train_runs import write_run  # isort: skip
from report_fixtures import make_step
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trimtab.errors import PlanError, UnsupportedPlanError
from trimtab.plan.build import write_plan
from trimtab.plan.file.reload import load_details
from trimtab.plan.file.yaml import load_plan, plan_to_yaml
from trimtab.runtime.training.refine import RefineSettings, refine


@pytest.fixture
def folder(tmp_path):
    """A small InternVL and its plan for a pipeline of two."""
    write_run(tmp_path, "internvl", dp=1)
    return tmp_path


def settings_of(folder, **more):
    return RefineSettings(**{"model": folder / "model", "num_candidates": 2, "num_steps": 1, "device": "cpu", **more})


@pytest.mark.integration
def test_the_fastest_of_two_splits_is_kept(folder, monkeypatch):
    """Through torchrun, on two gloo ranks."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    before = load_plan(folder / "plan")
    found = refine(folder / "plan", settings_of(folder))
    assert [trial.problem for trial in found.trials] == [None, None]
    assert found.trials[0].candidate.step_s <= found.trials[1].candidate.step_s
    assert len({trial.layers for trial in found.trials}) == 2
    best = min(found.trials, key=lambda trial: trial.median_step_s)
    plan = found.details.plan
    assert [len(x.modules) > 0 for x in plan.decisions.stages] == [True, True]
    assert found.details.variants[-1].stages == best.candidate.stages
    assert plan.inputs == before.inputs
    assert replace(plan.decisions, stages=(), recompute=()) == replace(before.decisions, stages=(), recompute=())
    (sentence,) = [x for x in plan.assumptions if x.startswith("Splits were run")]
    assert f"{best.layers} layers took" in sentence
    assert sentence.count("simulated") == 2
    assert sentence.count("kept") == 1
    write_plan(found.details, folder / "plan")
    assert load_details(folder / "plan").plan == plan


def test_a_split_that_does_not_run_is_told_and_the_fastest_other_kept(folder, monkeypatch):
    """The runs are made up here: what each candidate takes, by its number."""
    seconds = iter([0.2, None, 0.1])

    def launch(_settings, _num):
        takes = next(seconds)
        if takes is None:
            raise failed("PlanError: out of memory")
        return [make_step(1, 9.0), make_step(2, takes + 1, data_s=1.0)]

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("trimtab.runtime.training.refine._launch", launch)
    found = refine(folder / "plan", settings_of(folder, num_candidates=3))
    assert [trial.median_step_s for trial in found.trials] == [pytest.approx(0.2), None, pytest.approx(0.1)]
    assert [trial.problem for trial in found.trials] == [None, "PlanError: out of memory", None]
    assert found.details.variants[-1].stages == found.trials[2].candidate.stages
    (sentence,) = [x for x in found.details.plan.assumptions if x.startswith("Splits were run")]
    assert re.search(r"took 200 ms .* did not run .* took 100 ms \(simulated [^)]*, kept\)", sentence)


def failed(message):
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="")
    failure.message = {"message": message + "\nbehind it"}
    return ChildFailedError("train", {0: failure})


@pytest.mark.integration
def test_what_a_process_raised_is_told_where_no_split_runs(folder, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("trimtab.runtime.training.refine._train", fail)
    with pytest.raises(PlanError, match=r"2 splits were to be timed, and none of them ran \(ValueError: no such thing"):
        refine(folder / "plan", settings_of(folder))


def test_a_signal_ends_it_and_handlers_are_as_before(folder, monkeypatch):
    def launch(*_):
        signal.signal(signal.SIGTERM, lambda *_: None)
        raise SignalException("as torch's launcher has it", signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("trimtab.runtime.training.refine.elastic_launch", launch)
    with pytest.raises(SystemExit, match="143"):
        refine(folder / "plan", settings_of(folder))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"dp 1 x pp 2 = 2 devices, and this machine has 1 CPU cores: plan with fewer"),
        ({"model": Path("InternVL")}, r"splits of the model InternVL were to be run, which is no folder"),
    ],
)
def test_what_cannot_be_run_here_is_refused(folder, monkeypatch, change, message):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with pytest.raises(PlanError, match=message):
        refine(folder / "plan", settings_of(folder, **change))


def test_a_plan_that_the_runtime_cannot_run_is_refused(folder):
    plan = load_plan(folder / "plan")
    parallel = replace(plan.decisions.parallel, tp=2)
    (folder / "plan" / "plan.yaml").write_text(
        plan_to_yaml(replace(plan, decisions=replace(plan.decisions, parallel=parallel)))
    )
    with pytest.raises(UnsupportedPlanError, match="a plan with tp 2 was given"):
        refine(folder / "plan", settings_of(folder))
