"""`plan --refine`: candidate splits run on this machine, the fastest kept; needs torch, starts torchrun."""

# ruff: noqa: E402 - what may be absent is asked for first, so that the file is skipped with a reason

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

from train_runs import write_run  # isort: skip
from report_fixtures import make_header, make_step

from trimtab.errors import PlanError, UnsupportedPlanError
from trimtab.plan.build import write_plan
from trimtab.plan.decide.candidates import candidate_splits
from trimtab.plan.file.reload import load_details, reload_plan
from trimtab.plan.file.yaml import load_plan, plan_to_yaml
from trimtab.plan.measured.run_log import line_of
from trimtab.runtime.training.refine import RefineSettings, _run, refine

pytestmark = pytest.mark.torch


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

    def command(_plan, trial, _settings):
        takes = next(seconds)
        if takes is None:
            return [sys.executable, "-c", "import sys; sys.exit('trimtab: out of memory')"]
        (trial / "run").mkdir()
        (trial / "run" / "run.jsonl").write_text(
            "".join(map(line_of, (make_header(), make_step(1, 9.0), make_step(2, takes + 1, data_s=1.0))))
        )
        return [sys.executable, "-c", ""]

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("trimtab.runtime.training.refine._command", command)
    found = refine(folder / "plan", settings_of(folder, num_candidates=3))
    assert [trial.median_step_s for trial in found.trials] == [pytest.approx(0.2), None, pytest.approx(0.1)]
    assert [trial.problem for trial in found.trials] == [None, "out of memory", None]
    assert found.details.variants[-1].stages == found.trials[2].candidate.stages
    (sentence,) = [x for x in found.details.plan.assumptions if x.startswith("Splits were run")]
    assert re.search(r"took 200 ms .* did not run .* took 100 ms \(simulated [^)]*, kept\)", sentence)


def test_no_split_that_runs_is_an_error(folder, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    words = [sys.executable, "-c", "raise ValueError('no such thing')"]
    monkeypatch.setattr("trimtab.runtime.training.refine._command", lambda *_: words)
    with pytest.raises(PlanError, match=r"2 splits were to be timed, and none of them ran \(ValueError: no such"):
        refine(folder / "plan", settings_of(folder))


_PARENT = """
import signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
def end(*_):
    worker.terminate()
    worker.wait()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
print(worker.pid, file=open(sys.argv[1] + ".new", "w"), flush=True)
import os
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""  # a launcher as torchrun is one: its worker has a session of its own, and it ends it when it is told to end


def worker_of(path):
    while not path.exists():
        time.sleep(0.02)
    return int(path.read_text())


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_over_its_time_is_stopped_with_its_workers(tmp_path):
    pid = tmp_path / "pid"
    assert _run([sys.executable, "-c", _PARENT, str(pid)], 5.0) == "it had not ended after 5.00 s"
    assert not is_alive(worker_of(pid))


def test_an_interrupt_stops_the_run_and_its_workers(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    communicate = subprocess.Popen.communicate

    def interrupted(process, *words, timeout=None, **more):
        if timeout == 99.0:
            worker_of(pid)
            raise KeyboardInterrupt
        return communicate(process, *words, timeout=timeout, **more)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run([sys.executable, "-c", _PARENT, str(pid)], 99.0)
    assert not is_alive(worker_of(pid))


def test_sigterm_stops_the_run_and_its_workers(tmp_path):
    pid, before = tmp_path / "pid", signal.getsignal(signal.SIGTERM)

    def terminate():
        worker_of(pid)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=terminate)
    sender.start()
    with pytest.raises(SystemExit, match="143"):
        _run([sys.executable, "-c", _PARENT, str(pid)], 99.0)
    sender.join()
    assert not is_alive(worker_of(pid))
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_will_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("trimtab.runtime.training.refine._GRACE_S", 0.2)
    pid = tmp_path / "pid"
    stubborn = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    stubborn += "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    assert _run([sys.executable, "-c", stubborn, str(pid)], 3.0) == "it had not ended after 3.00 s"
    assert not is_alive(int(pid.read_text()))


def test_too_few_devices_are_refused(folder, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with pytest.raises(PlanError, match=r"dp 1 x pp 2 = 2 devices, and this machine has 1 CPU cores: plan with fewer"):
        refine(folder / "plan", settings_of(folder))


def test_a_model_that_is_no_folder_is_refused(folder):
    with pytest.raises(PlanError, match=r"splits of the model InternVL were to be run, which is no folder"):
        refine(folder / "plan", settings_of(folder, model=Path("InternVL")))


def test_a_plan_that_the_runtime_cannot_run_is_refused(folder):
    plan = load_plan(folder / "plan")
    parallel = replace(plan.decisions.parallel, tp=2)
    (folder / "plan" / "plan.yaml").write_text(
        plan_to_yaml(replace(plan, decisions=replace(plan.decisions, parallel=parallel)))
    )
    with pytest.raises(UnsupportedPlanError, match="a plan with tp 2 was given"):
        refine(folder / "plan", settings_of(folder))


def test_candidates_hold_the_plans_own_split_and_no_cuts_twice(folder):
    found = reload_plan(folder / "plan")
    for k in (1, 2, 5):
        candidates = candidate_splits(found.case, found.stages, k)
        assert len(candidates) == k
        assert found.stages in [candidate.stages for candidate in candidates]
        assert len({tuple(s.start for s in candidate.stages) for candidate in candidates}) == k
        times = [candidate.step_s for candidate in candidates]
        assert times == sorted(times)
