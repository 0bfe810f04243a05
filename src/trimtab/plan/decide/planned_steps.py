"""What a plan expects of the very packs that a run puts into one step, on any number of data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimtab.options import ScheduleName
from trimtab.partition.simulate import StageTimes, simulate_steps
from trimtab.plan.decide.times import rank_step_s, times_of
from trimtab.plan.file.reload import reload_plan
from trimtab.specs import IntArray, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedSteps:
    """Seconds of every pack on every stage of a plan, ready to be put together into steps."""

    times: StageTimes  # (num_stages, num_packs)
    schedule: ScheduleName
    num_devices: int
    rank_step_s: float  # gradient exchange and optimizer, at the plan's own dp

    def step_s(self, packs: IntArray) -> float:
        """Simulated seconds of a step of `packs` (dp, num_microbatches), -1 for an empty slot."""
        steps = simulate_steps(
            self.times,
            np.asarray(packs, np.int64)[None],
            schedule=self.schedule,
            num_devices=self.num_devices,
            all_reduce_s=self.rank_step_s,
        )
        return float(steps[0])


def planned_steps(path: Path, *, model: ModelSpec | None = None) -> PlannedSteps:
    """Of the plan at `path`; `model` stands in for its own config where that has moved. Raises as `reload_plan`."""
    found = reload_plan(path, model=model)
    case = found.case
    return PlannedSteps(
        times=times_of(case.work, found.stages, case.setting.profile, case.cluster),
        schedule=case.problem.schedule,
        num_devices=case.problem.num_stages,
        rank_step_s=rank_step_s(case.problem, found.stages),
    )
