"""The candidate splits of a plan, run for a few steps each on this machine: the fastest one is kept."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trimtab.errors import PlanError
from trimtab.files import write_atomically
from trimtab.models.asking.inputs import quietly
from trimtab.options import ReadingOptions
from trimtab.plan.decide.assemble import describe_decisions
from trimtab.plan.decide.expressible import replan
from trimtab.plan.decide.stages import Candidate, candidate_splits
from trimtab.plan.file.details import PlanDetails
from trimtab.plan.file.reload import ReloadedPlan, reload_plan
from trimtab.plan.file.yaml import plan_to_yaml
from trimtab.plan.measured.run_log import StepRecord
from trimtab.plan.plan import Plan
from trimtab.runtime.layout import read_layout
from trimtab.runtime.training.loop import train
from trimtab.runtime.training.settings import TrainSettings
from trimtab.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RefineSettings:
    """How candidates are run."""

    model: Path  # as for `train`; where it holds no weights they are drawn
    num_candidates: int
    num_steps: int = 5  # timed ones, of each candidate; one more warms it up
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    device: Literal["cpu", "cuda"] | None = None  # None: cuda where there is one


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
    """Run the best splits of the plan in `folder` through torch's launcher on this machine, over the same packs.

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
            "correct that, or plan without --set refine"
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
        try:
            records = _launch(_training(plan, trial, settings), _num_processes(plan))
        except ChildFailedError as error:
            reason = _reason(error.get_first_failure()[1].message)
            return Trial(candidate=candidate, median_step_s=None, problem=reason, peak_memory_bytes=None)
    return Trial(
        candidate=candidate,
        median_step_s=statistics.median(record.step_s - record.data_s for record in records[1:]),
        problem=None,
        peak_memory_bytes=max(max(record.peak_memory_bytes) for record in records),
    )


def _plan_of(found: ReloadedPlan, candidate: Candidate) -> Plan:
    packing = found.plan.decisions.packing
    files = {"offsets.npy": packing.offsets, "indices.npy": packing.indices, "schedule.npy": packing.schedule}
    return replace(found.plan, decisions=describe_decisions(found.case, candidate.stages, files=files))


def _training(plan: Plan, folder: Path, settings: RefineSettings) -> TrainSettings:
    return TrainSettings(
        plan=folder,
        model=settings.model,
        out=folder / "run",
        steps=settings.num_steps + 1,
        save=False,
        dtype="float32" if plan.inputs.training.dtype == "fp32" else "bfloat16",
        reading=settings.reading,
        device=settings.device,
        random_weights=not any(settings.model.glob("*.safetensors")),
    )


def _launch(settings: TrainSettings, num_processes: int) -> list[StepRecord]:
    """`train` as torchrun runs it, in processes that end with this one and print into files beside the run."""
    settings.out.mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(settings.out), redirects=Std.ALL),
    )
    with _signals_as_before(), quietly():
        records: list[StepRecord] = elastic_launch(config, _train)(settings)[0]
    return records


@contextmanager
def _signals_as_before() -> Iterator[None]:
    """torch's launcher ends its processes where this one is told to end, and leaves its handlers behind."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _reason(told: str | Mapping[str, str]) -> str:
    """The last exception of a process, or the signal that ended it."""
    return (told if isinstance(told, str) else told["message"]).splitlines()[0][:300]


def _train(settings: TrainSettings) -> list[StepRecord]:
    """In a process of its own."""
    torch.set_num_threads(1)  # as torchrun has it: processes that share cores would be timed waiting for each other
    return train(settings)


# -- checks ---------------------------------------------------------------------------------------------------------


def _num_processes(plan: Plan) -> int:
    return plan.decisions.parallel.dp * plan.decisions.parallel.pp


def _check(plan: Plan, settings: RefineSettings) -> None:
    read_layout(plan)  # refuses what the runtime cannot run
    if not settings.model.is_dir():
        raise PlanError(
            f"splits of the model {settings.model} were to be run, which is no folder: name the one that holds its "
            "config.json, preprocessor and tokenizer (--set model_dir)"
        )
    on_gpus = settings.device != "cpu" and torch.cuda.is_available()
    # processes that share a core would be timed waiting for each other
    number = torch.cuda.device_count() if on_gpus else os.cpu_count() or 1
    if _num_processes(plan) > number:
        parallel = plan.decisions.parallel
        raise PlanError(
            f"splits were to be timed on dp {parallel.dp} x pp {parallel.pp} = {_num_processes(plan)} devices, and "
            f"this machine has {number} {'GPUs' if on_gpus else 'CPU cores'}: plan with fewer, or without --set refine"
        )
