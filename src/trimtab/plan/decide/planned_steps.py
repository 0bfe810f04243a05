"""What a plan expects of the very packs that a run puts into one step, on any number of data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimtab.partition.simulate import StageTimes
from trimtab.partition.stages import SplitProblem
from trimtab.plan.decide.times import steps_of, times_of
from trimtab.plan.file.reload import reload_plan
from trimtab.specs import IntArray, ModelSpec, Stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedSteps:
    """Seconds of every pack on every stage of a plan, ready to be put together into steps."""

    times: StageTimes  # (num_stages, num_packs)
    stages: tuple[Stage, ...]
    problem: SplitProblem  # at the plan's own dp, whose gradient exchange counts

    def step_s(self, packs: IntArray) -> float:
        """Simulated seconds of a step of `packs` (dp, num_microbatches), -1 for an empty slot."""
        return float(steps_of(self.times, np.asarray(packs, np.int64)[None], self.stages, self.problem)[0])


def planned_steps(path: Path, *, model: ModelSpec | None = None) -> PlannedSteps:
    """Of the plan at `path`; `model` stands in for its own config where that has moved. Raises as `reload_plan`."""
    found = reload_plan(path, model=model)
    case = found.case
    times = times_of(case.work, found.stages, case.setting.profile, case.cluster)
    return PlannedSteps(times=times, stages=found.stages, problem=case.problem)
