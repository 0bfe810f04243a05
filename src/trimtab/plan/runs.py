"""What a training run writes down next to its plan, one JSON object a line: the run, then each step."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.costs.devices import find_device
from trimtab.costs.measured.fitted import Calibration, LoggedRun, fit_runs, read_runs
from trimtab.costs.profile import profile_model
from trimtab.errors import PlanError, TrimtabError
from trimtab.files import blake2b
from trimtab.partition.simulate import StageTimes, simulate
from trimtab.plan.plan import Plan
from trimtab.specs import DeviceSpec, FloatArray, ModelSpec, ParallelDims
from trimtab.typed_json import parse_json, read_typed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The run as it was started; a resumed run adds another."""

    plan: str  # digest of its decisions
    device: str  # as torch names it
    planned_device: str
    dp: int
    pp: int
    schedule: str
    num_microbatches: int
    dtype: str
    attention: str
    optimizer: str
    planned_step_s: float  # mean over the steps of the plan's own epoch
    planned_memory_bytes: tuple[int, ...]  # of each pipeline device, at the limits, without the reserve
    versions: str
    vision_dp: str = "off"  # "dispatch": data-parallel ranks share images; "replica": the ranks of each pipeline do


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step."""

    step: int  # from 1
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float | None  # before clipping; null where nothing is clipped
    num_tokens: int  # LLM tokens of the step, all ranks
    step_s: float  # wall time of the slowest rank, data loading included
    data_s: float  # of it waiting for samples, slowest rank
    peak_memory_bytes: tuple[int, ...]  # of each pipeline device so far, the largest over its data-parallel ranks
    num_fillers: int = 0  # samples that could not be read, of all data-parallel ranks
    # ViT patches in the packs of each rank that shares images: of dp, or of the first pipeline; () where none does
    patches_held: tuple[int, ...] = ()
    patches_encoded: tuple[int, ...] = ()  # of them, those that it encoded, with others' images

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """A run from its first step to its last; a step that was run twice counts as it was run last."""

    header: RunHeader  # of the process that ran the latest step
    steps: tuple[StepRecord, ...]
    starts: tuple[int, ...]  # steps that a process began with: they pay for warming up
    others: tuple[int, ...] = ()  # steps of processes that ran otherwise than `header` says: comparable with nothing

    @property
    def own(self) -> tuple[StepRecord, ...]:
        """The steps that ran as `header` says: one or more."""
        others = frozenset(self.others)
        return tuple(record for record in self.steps if record.step not in others)

    @property
    def warm(self) -> tuple[StepRecord, ...]:
        """Return `own` but those that pay for warming up; all of them, where there are no others."""
        starts = frozenset(self.starts)
        return tuple(record for record in self.own if record.step not in starts) or self.own

    def median_step_s(self) -> float:
        return float(np.median([record.step_s for record in self.warm]))

    @property
    def comparable(self) -> bool:
        """Return whether the run was on the device that the plan's times are for."""
        return _same_device(self.header.device, self.header.planned_device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeComparison:
    """The warm steps' times against the plan's mean step."""

    planned_s: float
    ratio: float  # median of measured / planned
    band: float  # relative half-width that the plan claims
    share_inside: float  # of the steps


def compare_times(log: RunLog, *, band: float) -> TimeComparison:
    """Compare measured steps with the mean step that the plan expects."""
    planned_s = log.header.planned_step_s
    ratios = np.array([record.step_s for record in log.warm]) / planned_s
    return TimeComparison(
        planned_s=planned_s,
        ratio=float(np.median(ratios)),
        band=band,
        share_inside=float(np.mean(np.abs(ratios - 1.0) <= band)),
    )


def digest_of(plan: Plan) -> str:
    """Tells the decisions of plans apart."""
    return blake2b(repr(plan.decisions).encode())


def line_of(record: RunHeader | StepRecord) -> str:
    kind = "run" if isinstance(record, RunHeader) else "step"
    return json.dumps({"kind": kind, **asdict(record)}) + "\n"


def read_run_log(path: Path) -> RunLog:
    """Raises `PlanError` for a file that is none. Lines cut by a kill are left out, wherever a resumed run went on."""
    header: RunHeader | None = None
    steps: dict[int, StepRecord] = {}
    ran_as: dict[int, RunHeader] = {}
    starts: set[int] = set()
    fresh = True  # no step since the last header
    latest: RunHeader | None = None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the run log {path}: {error}; name the log that `trimtab train` wrote") from None
    for number, line in enumerate(lines, 1):
        try:
            found = parse_json(line.encode(), with_nan=True)
        except ValueError as error:
            if header is not None and isinstance(error, json.JSONDecodeError):
                continue
            raise PlanError(f"line {number} of {path} is no JSON ({error}): name a log of `trimtab train`") from None
        try:
            if found["kind"] == "run":
                header, fresh = _record(RunHeader, found), True
                continue
            record = _record(StepRecord, found)
            if header is None:
                raise ValueError("no run is named before it")
            if len(record.peak_memory_bytes) != len(header.planned_memory_bytes):
                raise ValueError(f"peak_memory_bytes are of {len(record.peak_memory_bytes)} devices")
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"line {number} of {path} is no record ({error}): name a log of `trimtab train`") from None
        steps[record.step], ran_as[record.step], latest = record, header, header
        (starts.add if fresh else starts.discard)(record.step)
        fresh = False
    if latest is None:
        raise PlanError(f"the run log {path} holds no step: name the log of a run that finished one")
    # steps after the checkpoint that a run was resumed from are run again, with the same losses
    alike = replace(latest, versions="")
    return RunLog(
        header=latest,
        steps=tuple(steps[step] for step in sorted(steps)),
        starts=tuple(sorted(starts)),
        others=tuple(step for step in sorted(steps) if replace(ran_as[step], versions="") != alike),
    )


def read_run_of(plan: Plan, path: Path) -> RunLog:
    """Read the log of a run of this plan; `PlanError` for one of another."""
    log = read_run_log(path)
    if log.header.plan != digest_of(plan):
        raise PlanError(f"the run in {path} has other decisions than this plan: name its own log")
    return log


_MEGATRON_STEP = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\):\s*([\d.]+)")
"""A line of Megatron-LM, Megatron-Bridge, Pai-Megatron-Patch and MindSpeed-MM."""


def read_log_of(plan: Plan, path: Path) -> RunLog:
    """Return a run of this plan: the log of `trimtab train`, or the lines that Megatron's trainers print.

    Those name no device, no memory and no plan: they are taken to be of this plan, on its devices.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PlanError(f"cannot read the log {path}: {error.strerror}; name the log of a run") from None
    if text.lstrip().startswith("{"):
        return read_run_of(plan, path)
    seconds = {int(step): float(ms) / 1e3 for step, ms in _MEGATRON_STEP.findall(text)}
    seconds = {step: own for step, own in seconds.items() if 0 < own < math.inf and step > 0}
    if not seconds:
        raise PlanError(
            f"{path} is no log of `trimtab train`, and no line reads 'iteration N/... elapsed time per iteration (ms): "
            "X', as of Megatron"
        )
    inputs, decisions = plan.inputs, plan.decisions
    header = RunHeader(
        plan=digest_of(plan),
        device=inputs.cluster.device,
        planned_device=inputs.cluster.device,
        dp=decisions.parallel.dp,
        pp=decisions.parallel.pp,
        schedule=decisions.schedule.name,
        num_microbatches=decisions.schedule.num_microbatches,
        dtype=inputs.training.dtype,
        attention=inputs.training.attention,
        optimizer=inputs.training.optimizer,
        planned_step_s=0.0,
        planned_memory_bytes=(),
        versions="",
    )
    steps = [
        StepRecord(
            step=step,
            epoch=(step - 1) // decisions.packing.num_steps,
            loss=0.0,
            learning_rate=0.0,
            grad_norm=None,
            num_tokens=0,
            step_s=own,
            data_s=0.0,
            peak_memory_bytes=(),
        )
        for step, own in sorted(seconds.items())
    ]
    return RunLog(header=header, steps=tuple(steps), starts=(steps[0].step,))


_NO_NUMBER = ("loss", "grad_norm")  # what a run that diverged may log as NaN or infinite
_AT_LEAST_ONE = ("step", "dp", "pp", "num_microbatches")


def _record(kind: type[Any], found: dict[str, Any]) -> Any:
    """Raises `ValueError` for a field that is missing, or has a value that no run logs."""
    problems: list[str] = []
    known = {field.name: found[field.name] for field in fields(kind) if field.name in found}
    record = read_typed(kind, known, "", problems, read_number=_read_number)
    if problems:
        raise ValueError("; ".join(problems))
    return record


def _read_number(place: str, kind: Any, value: float, problems: list[str]) -> float:
    name = place.partition(".")[0]
    sound = (1 if name in _AT_LEAST_ONE else 0) <= value < 2**63 and (name != "step_s" or value > 0)
    if not sound and not (name in _NO_NUMBER and isinstance(value, float)):
        problems.append(f"{place} is {json.dumps(value)[:40]}")
        return value
    return value if kind is int else float(value)


def _same_device(run: str, planned: str) -> bool:
    """Return whether torch's name of a device means the plan's: both name one published row, or they are one name."""
    run = "cpu" if run.lower().startswith("cpu,") else run  # its architecture stands after the comma
    if run.casefold() == planned.casefold():
        return True
    try:
        return find_device(run) == find_device(planned)
    except TrimtabError:
        return False


# A profile calibrated on the user's own runs: the fit of `costs.fit` through the pipeline simulator.


def profile_from_logs(
    path: Path | str, model: ModelSpec, device: DeviceSpec, *, dims: ParallelDims | None = None, **settings: Any
) -> Calibration:
    """Return `Calibration.profile`: `model` at `dims` on `device`, seconds fitted to the runs that `path` (JSON) lists.

    `settings` are the other keywords of `profile_model` (host, zero_stage, attention, ...), the same for the runs and
    for the profile. Fitted are factors of the host's seconds, the language model's and the tower's, as far as the runs
    hold them and are enough for them. `Calibration.warnings` are sentences to print: a factor that the runs do not
    settle, a run that stage times do not explain. `Calibration.runs` holds each run's logged and fitted seconds,
    `Calibration.terms` each factor with its band.
    Raises `TrimtabError` with every problem of the file at once. Format of the file: `costs.logs.read_runs`.
    """
    runs = read_runs(path, model, device, **settings)
    target = profile_model(model, device, dims=dims or ParallelDims(), **settings)
    return fit_runs(target, runs, simulate_logged)


def simulate_logged(run: LoggedRun, forward: FloatArray, backward: FloatArray) -> float:
    """Return the seconds of one step under the run's schedule; sends take no time."""
    send = dict.fromkeys(("send_forward_s", "send_backward_s"), np.zeros_like(forward))
    times = StageTimes(forward_s=forward, backward_s=backward, weight_s=backward / 2, **send)
    return simulate(times, schedule=run.schedule, num_devices=run.profile.dims.pp).makespan_s
