"""What a training run writes down beside its plan, one JSON object a line: the run, then each step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The run as it was started; a resumed run adds another."""

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
    planned_memory_bytes: tuple[int, ...]  # of each pipeline device, at the limits
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
    peak_memory_bytes: tuple[int, ...]  # of each pipeline device, the largest over its data-parallel ranks

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """A run from its first step to its last; a step that was run twice counts as it was run last."""

    header: RunHeader
    steps: tuple[StepRecord, ...]

    def median_step_s(self) -> float:
        """Of all steps but the first, which pays for warming up."""
        times = [record.step_s for record in self.steps[1:] or self.steps]
        return float(np.median(times))

    @property
    def comparable(self) -> bool:
        """Whether the run was on the device that the plan's times are for."""
        return _letters(self.header.planned_device) in _letters(self.header.device)


def line_of(record: RunHeader | StepRecord) -> str:
    kind = "run" if isinstance(record, RunHeader) else "step"
    return json.dumps({"kind": kind, **asdict(record)}) + "\n"


def read_run_log(path: Path) -> RunLog:
    """Raises `PlanError` for a file that is none. A last line cut by a kill is left out."""
    header: RunHeader | None = None
    steps: dict[int, StepRecord] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the run log {path}: {error}; name the log that `trimtab train` wrote") from None
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            found = json.loads(line)
            if found["kind"] == "run":
                header = _record(RunHeader, found)
            else:
                record = _record(StepRecord, found)
                steps[record.step] = record
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"line {number} of the run log {path} is no record ({error}): name the log that `trimtab train` wrote"
            ) from None
    if header is None or not steps:
        raise PlanError(f"the run log {path} holds no step: name the log of a run that finished one")
    return RunLog(header=header, steps=tuple(steps[step] for step in sorted(steps)))


def _record(kind: type[Any], found: dict[str, Any]) -> Any:
    values = {field.name: found[field.name] for field in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _letters(name: str) -> str:
    """NVIDIA A100-SXM4-80GB and A100-80GB: the model's own name."""
    words = name.upper().replace("-", " ").replace("_", " ").split()
    return next((word for word in words if any(c.isdigit() for c in word) and not word.endswith("GB")), name.upper())
