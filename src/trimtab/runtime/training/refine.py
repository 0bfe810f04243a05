"""The candidate splits of a plan, run for a few steps each on this machine: the fastest one is kept."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from trimtab.errors import PlanError
from trimtab.files import write_atomically
from trimtab.options import ReadingOptions
from trimtab.plan.decide.assemble import describe_decisions
from trimtab.plan.decide.candidates import Candidate, candidate_splits
from trimtab.plan.decide.expressible import replan
from trimtab.plan.file.details import PlanDetails
from trimtab.plan.file.reload import ReloadedPlan, reload_plan
from trimtab.plan.file.yaml import plan_to_yaml
from trimtab.plan.measured.run_log import read_run_log
from trimtab.plan.plan import Plan
from trimtab.runtime.pipeline.layout import read_layout
from trimtab.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RefineSettings:
    """How candidates are run."""

    model: Path  # as for `train`; where it holds no weights they are drawn
    num_candidates: int
    num_steps: int = 5  # timed ones, of each candidate; one more warms it up
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    device: Literal["cpu", "cuda"] | None = None  # None: cuda where there is one
    max_trial_s: float = 3600.0  # of one candidate, its start and the model's loading included; then it is stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate and what its run measured."""

    candidate: Candidate
    median_step_s: float | None  # without waiting for samples; None: it did not run
    problem: str | None  # why
    peak_memory_bytes: int | None

    @property
    def layers(self) -> str:
        """Of each stage, as in 14 + 15."""
        return " + ".join(str(stage.stop - stage.start) for stage in self.candidate.stages)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Refinement:
    """What was tried, and the plan with the fastest of it."""

    details: PlanDetails
    trials: tuple[Trial, ...]  # the least simulated step first
    wall_s: float


def refine(folder: Path, settings: RefineSettings, *, progress: Callable[[int, int], None] | None = None) -> Refinement:
    """Run the best splits of the plan in `folder` through torchrun on this machine, over the same packs.

    Every candidate trains for `num_steps` + 1 steps in processes of its own, so that one which exceeds the memory
    leaves the others alone. The one with the least median step, waiting for samples left out, is the plan's from now
    on. Timings differ from run to run, so the result may as well. Raises `PlanError` where this machine has too few
    devices, or where none ran.
    """
    started = time.perf_counter()
    found = reload_plan(folder)
    _check(found.plan, settings)
    candidates = candidate_splits(found.case, found.stages, settings.num_candidates)
    trials = []
    for number, candidate in enumerate(candidates):
        trials.append(_try(found, folder, candidate, settings))
        if progress is not None:
            progress(number + 1, len(candidates))
    ran = [trial for trial in trials if trial.median_step_s is not None]
    if not ran:
        raise PlanError(
            f"{len(trials)} splits were to be timed, and none of them ran ({trials[0].problem}): "
            "mend that, or plan without --refine"
        )
    best = min(ran, key=lambda trial: trial.median_step_s or 0.0)
    details = replan(
        found, best.candidate.stages, forbidden_cuts=frozenset(), note=_sentence(trials, best, settings.num_steps)
    )
    return Refinement(details=details, trials=tuple(trials), wall_s=time.perf_counter() - started)


def _sentence(trials: list[Trial], best: Trial, num_steps: int) -> str:
    """For the plan's reader: every candidate with what was simulated and what was measured."""

    def tell(trial: Trial) -> str:
        simulated = f"simulated {format_seconds(trial.candidate.step_s)}"
        if trial.median_step_s is None:
            return f"{trial.layers} layers did not run ({simulated})"
        kept = ", kept" if trial is best else ""
        return f"{trial.layers} layers took {format_seconds(trial.median_step_s)} ({simulated}{kept})"

    return (
        f"Splits were run on the machine that planned, timed steps each: {num_steps}, median: "
        f"{'; '.join(map(tell, trials))}."
    )


# -- one run --------------------------------------------------------------------------------------------------------


def _try(found: ReloadedPlan, folder: Path, candidate: Candidate, settings: RefineSettings) -> Trial:
    plan = _plan_of(found, candidate)
    with tempfile.TemporaryDirectory(prefix="trimtab-refine-") as name:
        trial = Path(name)
        for file in folder.iterdir():
            if file.suffix in (".npy", ".npz", ".json"):
                (trial / file.name).symlink_to(file.resolve())
        write_atomically(trial / "plan.yaml", plan_to_yaml(plan))
        reason = _run(_command(plan, trial, settings), settings.max_trial_s)
        if reason is not None:
            return Trial(candidate=candidate, median_step_s=None, problem=reason, peak_memory_bytes=None)
        log = read_run_log(trial / "run" / "run.jsonl")
    return Trial(
        candidate=candidate,
        median_step_s=statistics.median(record.step_s - record.data_s for record in log.warm),
        problem=None,
        peak_memory_bytes=max(max(record.peak_memory_bytes) for record in log.steps),
    )


def _plan_of(found: ReloadedPlan, candidate: Candidate) -> Plan:
    packing = found.plan.decisions.packing
    files = {"offsets.npy": packing.offsets, "indices.npy": packing.indices, "schedule.npy": packing.schedule}
    return replace(found.plan, decisions=describe_decisions(found.case, candidate.stages, files=files))


def _command(plan: Plan, folder: Path, settings: RefineSettings) -> list[str]:
    """`torchrun` of as many processes as the plan has devices, and `trimtab train` in each."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_num_processes(plan)}"]
    words = [sys.executable, *launch, "-m", "trimtab", "train", str(folder), str(settings.model)]
    words += ["--out", str(folder / "run"), "--steps", str(settings.num_steps + 1), "--no-save"]
    words += ["--dtype", "float32" if plan.inputs.training.dtype == "fp32" else "bfloat16"]
    words += ["--special-tokens", settings.reading.special_tokens, "--exif", settings.reading.exif]
    paths = {
        "--tokenizer": settings.reading.tokenizer,
        "--chat-template": settings.reading.chat_template,
        "--media-root": settings.reading.media_root,
    }
    words += [word for name, path in paths.items() if path is not None for word in (name, str(path))]
    words += ["--allow-outside"] if settings.reading.allow_outside else []
    words += ["--device", settings.device] if settings.device is not None else []
    return words if any(settings.model.glob("*.safetensors")) else [*words, "--random-weights"]


_GRACE_S = 45.0  # torchrun gives its workers 30 s to end before it kills them


def _run(words: list[str], limit_s: float) -> str | None:
    """Why the command failed; None where it did not. It is stopped with its workers at the limit, or with us."""
    # a session of its own: Ctrl-C and SIGTERM come to us alone, and we end the launcher so that it can end its workers
    with (
        _leaving_on_sigterm(),
        subprocess.Popen(  # noqa: S603 (this interpreter, a list of words, no shell)
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process,
    ):
        try:
            _, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _stop(process)
            return f"it had not ended after {format_seconds(limit_s)}"
        except BaseException:
            _stop(process)
            raise
    return _reason(errors) if process.returncode else None


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM is an exception like Ctrl-C's; only the main thread is asked to handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _stop(process: subprocess.Popen[str]) -> None:
    """End the launcher as torchrun expects it, with time to end its workers; then whatever is left of its group."""
    process.terminate()
    try:
        process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(errors: str) -> str:
    """Our own sentence, or the last exception, out of what the processes wrote."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    ours = [line.removeprefix("trimtab: ") for line in lines if line.startswith("trimtab: ")]
    raised = [line for line in lines if "Error: " in line and "torch.distributed.elastic" not in line]
    return (ours or raised or lines or ["no reason was given"])[0][:300]


# -- checks ---------------------------------------------------------------------------------------------------------


def _num_processes(plan: Plan) -> int:
    return plan.decisions.parallel.dp * plan.decisions.parallel.pp


def _check(plan: Plan, settings: RefineSettings) -> None:
    read_layout(plan)  # refuses what the runtime cannot run
    if not settings.model.is_dir():
        raise PlanError(
            f"splits of the model {settings.model} were to be run, which is no folder: name the one that holds its "
            "config.json, preprocessor and tokenizer (--model-dir)"
        )
    devices = _num_devices(settings.device)
    if _num_processes(plan) > devices.number:
        parallel = plan.decisions.parallel
        raise PlanError(
            f"splits were to be timed on dp {parallel.dp} x pp {parallel.pp} = {_num_processes(plan)} devices, and "
            f"this machine has {devices.number} {devices.kind}: plan with fewer, or without --refine"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Devices:
    number: int
    kind: str


def _num_devices(device: Literal["cpu", "cuda"] | None) -> _Devices:
    """Accelerators, or cores where there are none: processes that share one would be timed waiting for each other."""
    if device != "cpu" and torch.cuda.is_available():
        return _Devices(number=torch.cuda.device_count(), kind="GPUs")
    return _Devices(number=os.cpu_count() or 1, kind="CPU cores")
