"""What a simulated step looks like: start and end of every block on every device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.specs import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Start and end of every block of one pipeline step.

    Use it to draw a step, or to sum idle time; `simulate` returns one and has an example.

    Blocks are rows of four equally long columns; `kind` is 0 forward, 1 backward, 2 weight gradients where a schedule
    runs them apart from the backward. Seconds from the step's start.
    """

    stage: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    start_s: FloatArray
    end_s: FloatArray
    num_devices: int
    makespan_s: float
    stage_devices: tuple[int, ...] | None = None  # device of every stage; None: stage s on s mod num_devices

    def device_of(self, stage: int) -> int:
        """Stages go round the devices unless `stage_devices` says otherwise, as V-shaped schedules do."""
        return stage % self.num_devices if self.stage_devices is None else self.stage_devices[stage]

    @property
    def device(self) -> IntArray:
        """Device of every block."""
        num_stages = int(self.stage.max(initial=-1)) + 1
        return np.array([self.device_of(stage) for stage in range(num_stages)], np.int64)[self.stage]

    def busy_s(self) -> FloatArray:
        """Seconds each device computes."""
        busy: FloatArray = np.bincount(self.device, self.end_s - self.start_s, self.num_devices).astype(np.float64)
        return busy

    @property
    def bubble_ratio(self) -> float:
        """Idle share of the devices: 1 - busy / (devices x makespan)."""
        available_s = self.num_devices * self.makespan_s
        return float(1.0 - self.busy_s().sum() / available_s) if available_s > 0 else 0.0
