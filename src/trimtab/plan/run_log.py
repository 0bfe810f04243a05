"""What a training run writes down beside its plan, one JSON object a line: the run, then each step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import PlanError
from trimtab.files import blake2b
from trimtab.plan.plan import Plan
from trimtab.specs import FloatArray


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
    planned_s: float | None  # simulated for these very packs; null where the plan's model or device is not at hand
    peak_memory_bytes: tuple[int, ...]  # of each pipeline device so far, the largest over its data-parallel ranks

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """A run from its first step to its last; a step that was run twice counts as it was run last."""

    header: RunHeader
    steps: tuple[StepRecord, ...]
    starts: tuple[int, ...]  # steps that a process began with: they pay for warming up

    @property
    def warm(self) -> tuple[StepRecord, ...]:
        """All steps but those that pay for warming up; all, where there are no others."""
        return tuple(record for record in self.steps if record.step not in self.starts) or self.steps

    def median_step_s(self) -> float:
        return float(np.median([record.step_s for record in self.warm]))

    @property
    def comparable(self) -> bool:
        """Whether the run was on the device that the plan's times are for."""
        return _letters(self.header.planned_device) in _letters(self.header.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeComparison:
    """Measured against planned step times of the warm steps that have both."""

    num_steps: int
    measured_s: float  # median
    planned_s: float  # median
    ratio: float  # median of measured / planned, step by step
    band: float  # relative half-width that the plan claims
    share_inside: float  # of the steps
    planned_range: float  # of the planned times' middle 80 %, over their median
    rank_correlation: float | None  # Spearman's, of planned and measured; None: fewer than 3 steps, or all alike


def compare_times(log: RunLog, *, band: float) -> TimeComparison | None:
    """None where no step was simulated."""
    pairs = [(record.planned_s, record.step_s) for record in log.warm if record.planned_s is not None]
    if not pairs:
        return None
    planned, measured = np.array(pairs, np.float64).T
    planned = np.maximum(planned, 1e-30)
    ratios = measured / planned
    return TimeComparison(
        num_steps=len(pairs),
        measured_s=float(np.median(measured)),
        planned_s=float(np.median(planned)),
        ratio=float(np.median(ratios)),
        band=band,
        share_inside=float(np.mean(np.abs(ratios - 1.0) <= band)),
        planned_range=float(np.ptp(np.quantile(planned, (0.1, 0.9))) / np.median(planned)),
        rank_correlation=_rank_correlation(planned, measured),
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
    starts: set[int] = set()
    fresh = True  # no step since the last header
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the run log {path}: {error}; name the log that `trimtab train` wrote") from None
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except ValueError:
            if header is not None:
                continue
            raise PlanError(
                f"line {number} of the run log {path} is no JSON: name the log that `trimtab train` wrote"
            ) from None
        try:
            if found["kind"] == "run":
                header, fresh = _record(RunHeader, found), True
                continue
            record = _record(StepRecord, found)
        except (KeyError, TypeError) as error:
            raise PlanError(
                f"line {number} of the run log {path} is no record ({error}): name the log that `trimtab train` wrote"
            ) from None
        steps[record.step] = record
        (starts.add if fresh else starts.discard)(record.step)
        fresh = False
    if header is None or not steps:
        raise PlanError(f"the run log {path} holds no step: name the log of a run that finished one")
    # steps behind the checkpoint that a run was resumed from are run again, with the same losses
    return RunLog(header=header, steps=tuple(steps[step] for step in sorted(steps)), starts=tuple(sorted(starts)))


def read_run_of(plan: Plan, path: Path) -> RunLog:
    """`read_run_log`, for a run of this plan; `PlanError` for one of another."""
    log = read_run_log(path)
    if log.header.plan != digest_of(plan):
        raise PlanError(
            f"the run in {path} trained by other decisions than this plan's: name the log of its own run, or the plan "
            "that was run"
        )
    return log


def _record(kind: type[Any], found: dict[str, Any]) -> Any:
    values = {field.name: found[field.name] for field in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _rank_correlation(a: FloatArray, b: FloatArray) -> float | None:
    """Spearman's rho; equal values share the mean of their ranks."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: FloatArray) -> FloatArray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: FloatArray = (ends - (counts - 1) / 2.0)[inverse]
    return ranks


def _letters(name: str) -> str:
    """NVIDIA A100-SXM4-80GB and A100-80GB: the model's own name."""
    words = name.upper().replace("-", " ").replace("_", " ").split()
    return next((word for word in words if any(c.isdigit() for c in word) and not word.endswith("GB")), name.upper())
