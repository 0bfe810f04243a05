"""Simulated makespans of cuts, each stage with its least recompute; what was priced once is remembered."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from trimtab.errors import PartitionError
from trimtab.partition.assess import SplitProblem
from trimtab.partition.layer_table import layer_table, pipeline_of
from trimtab.partition.replay import makespans, waves_of
from trimtab.partition.simulate import block_costs, stage_times
from trimtab.partition.stages import chunk_room, stage_of
from trimtab.specs import NUM_WORK_TERMS, FloatArray, Stage


class Evaluator:
    """Prices cuts; a cut is the number of a `LayerTable` position."""

    def __init__(
        self,
        problem: SplitProblem,
        work: FloatArray,
        *,
        link_bytes_per_s: float | None = None,
        latency_s: float = 0.0,
    ) -> None:
        """`work` (steps, num_microbatches, len(WORK_TERMS)): what each micro-batch of each step asks of the layers."""
        work = np.asarray(work, np.float64)
        expected = (problem.num_microbatches, NUM_WORK_TERMS)
        if work.ndim != 3 or work.shape[0] == 0 or work.shape[1:] != expected:
            raise PartitionError(
                f"work of shape {work.shape} cannot be simulated with {problem.num_microbatches} micro-batches a step: "
                f"give (steps, {expected[0]}, {expected[1]}), at least one step"
            )
        S = problem.num_stages * problem.num_chunks
        self.problem = problem
        self.rows = work.reshape(-1, NUM_WORK_TERMS)
        self.slots = np.arange(len(self.rows)).reshape(work.shape[:2])
        self.link_bytes_per_s, self.latency_s = link_bytes_per_s, latency_s
        self.table = layer_table(problem)
        self.pipeline = pipeline_of(problem, self.table, chunk_room(problem))
        self.waves = waves_of(
            problem.schedule,
            num_devices=problem.num_stages,
            num_chunks=problem.num_chunks,
            num_microbatches=problem.num_microbatches,
        )
        self.seen: dict[tuple[int, ...], float] = {}
        self._stages: dict[tuple[int, int, int], Stage | None] = {}
        self._priced: dict[Stage, tuple[FloatArray, FloatArray]] = {}
        self._seconds, self._sends = np.zeros((3, S, len(self.rows))), np.zeros((2, S, len(self.rows)))

    def cuts_of(self, stages: Sequence[Stage]) -> tuple[int, ...]:
        return (*(int(np.searchsorted(self.table.positions, x.start)) for x in stages), self.table.num_segments)

    def makespan(self, cuts: tuple[int, ...]) -> float:
        """Mean makespan with the stages' least recompute; infinite where a stage does not fit."""
        if cuts not in self.seen:
            stages = self.stages(cuts)
            self.seen[cuts] = self.makespan_of(stages) if len(stages) == len(cuts) - 1 else np.inf
        return self.seen[cuts]

    def stages(self, cuts: tuple[int, ...]) -> tuple[Stage, ...]:
        """The stages between the cuts, each with its least recompute; without those that exceed the cap."""
        found = []
        for i, (first, last) in enumerate(itertools.pairwise(cuts)):
            if (i, first, last) not in self._stages:
                stage = stage_of(self.table, self.pipeline, index=i, first=first, last=last)
                self._stages[i, first, last] = stage
            found.append(self._stages[i, first, last])
        return tuple(stage for stage in found if stage is not None)

    def makespan_of(self, stages: Sequence[Stage]) -> float:
        """Mean makespan of stages as they are, their own recompute included."""
        for i, stage in enumerate(stages):
            if stage not in self._priced:
                self._priced[stage] = self._price(stage)
            self._seconds[:, i], send = self._priced[stage]
            if i + 1 < len(stages):
                self._sends[0, i] = self._sends[1, i + 1] = send
        return float(makespans(self.waves, self._seconds, self._sends, self.slots).mean())

    def _price(self, stage: Stage) -> tuple[FloatArray, FloatArray]:
        """(3, rows) seconds FORWARD, BACKWARD, WEIGHT, and (rows,) to the next stage, as long on the way back."""
        profile = self.problem.profile
        costs = block_costs(stage_times(profile, (stage,), self.rows), self.problem.schedule)
        send = np.zeros(len(self.rows))
        if self.link_bytes_per_s is not None:
            sent = self.rows @ np.array(profile.layers[stage.stop - 1].output_bytes)
            send = self.latency_s + sent / self.link_bytes_per_s
        return costs.seconds[:, 0], send
