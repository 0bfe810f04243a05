"""Simulated makespans of cuts, each stage with its least recompute; what was priced once is remembered."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.errors import PartitionError
from trimtab.partition.assess import SplitProblem
from trimtab.partition.schedules import block_order, devices_of_stages
from trimtab.partition.simulate import block_costs, stage_times
from trimtab.partition.stages import chunk_room, stage_of
from trimtab.specs import NUM_WORK_TERMS, FloatArray, Stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedStage:
    """One stage alone over all micro-batches of all steps."""

    stage: Stage
    seconds: FloatArray  # (3, rows) FORWARD, BACKWARD, WEIGHT
    send: FloatArray  # (rows,) to the next stage, and from it on the way back


class Evaluator:
    """Prices cuts; a cut is the number of a `LayerTable` position."""

    def __init__(
        self,
        problem: SplitProblem,
        work: FloatArray,
        *,
        link_bytes_per_s: float | Sequence[float] | None = None,
        latency_s: float = 0.0,
    ) -> None:
        """`work` (steps, num_microbatches, len(WORK_TERMS)): what each micro-batch of each step asks of the layers."""
        from trimtab.partition.layer_table import layer_table, pipeline_of
        from trimtab.partition.replay import replay_steps

        work = np.asarray(work, np.float64)
        expected = (problem.num_microbatches, NUM_WORK_TERMS)
        if work.ndim != 3 or work.shape[0] == 0 or work.shape[1:] != expected:
            raise PartitionError(
                f"work of shape {work.shape} cannot be simulated with {problem.num_microbatches} micro-batches a step: "
                f"give (steps, {expected[0]}, {expected[1]}), at least one step"
            )
        S = problem.num_stages * problem.num_chunks
        shape = {"num_devices": problem.num_stages, "num_chunks": problem.num_chunks}
        self.problem = problem
        self.rows = work.reshape(-1, NUM_WORK_TERMS)
        self.slots = np.arange(len(self.rows)).reshape(work.shape[0], 1, work.shape[1])
        self.rates = (
            None if link_bytes_per_s is None else np.broadcast_to(np.asarray(link_bytes_per_s, float), (S - 1,))
        )
        self.latency_s = latency_s
        self.table = layer_table(problem)
        self.pipeline = pipeline_of(problem, self.table, chunk_room(problem))
        self.order = block_order(problem.schedule, **shape, num_microbatches=problem.num_microbatches)
        self.device = devices_of_stages(problem.schedule, **shape)
        self.seen: dict[tuple[int, ...], float] = {}
        self._priced: dict[tuple[int, int, int], PricedStage | None] = {}
        self._seconds, self._sends = np.zeros((3, S, len(self.rows))), np.zeros((2, S, len(self.rows)))
        self._replay_steps = replay_steps

    def cuts_of(self, stages: Sequence[Stage]) -> tuple[int, ...]:
        return (*(int(np.searchsorted(self.table.positions, x.start)) for x in stages), self.table.num_segments)

    def makespan(self, cuts: tuple[int, ...]) -> float:
        """Mean makespan with the stages' least recompute; infinite where a stage does not fit."""
        if cuts not in self.seen:
            priced = [self.priced(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(cuts))]
            fitting = [entry for entry in priced if entry is not None]
            self.seen[cuts] = self._replay(fitting) if len(fitting) == len(priced) else np.inf
        return self.seen[cuts]

    def stages(self, cuts: tuple[int, ...]) -> tuple[Stage, ...]:
        """The stages of cuts that fit."""
        found = [self.priced(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(cuts))]
        assert all(entry is not None for entry in found), "a stage exceeds the cap"
        return tuple(entry.stage for entry in found if entry is not None)

    def makespan_of(self, stages: Sequence[Stage]) -> float:
        """Mean makespan of stages as they are, their own recompute included."""
        return self._replay([self._price(stage) for stage in stages])

    def priced(self, i: int, a: int, b: int) -> PricedStage | None:
        """Segments a <= k < b as stage i; None if they exceed the cap."""
        if (i, a, b) not in self._priced:
            stage = stage_of(self.table, self.pipeline, index=i, first=a, last=b)
            self._priced[i, a, b] = None if stage is None else self._price(stage)
        return self._priced[i, a, b]

    def _price(self, stage: Stage) -> PricedStage:
        profile = self.problem.profile
        costs = block_costs(stage_times(profile, (stage,), self.rows), self.problem.schedule)
        send = np.zeros(len(self.rows))
        if self.rates is not None and stage.index < len(self.rates):
            sent = self.rows @ np.array(profile.layers[stage.stop - 1].output_bytes)
            send = self.latency_s + sent / self.rates[stage.index]
        return PricedStage(stage=stage, seconds=costs.seconds[:, 0], send=send)

    def _replay(self, priced: Sequence[PricedStage]) -> float:
        for i, entry in enumerate(priced):
            self._seconds[:, i] = entry.seconds
            if i + 1 < len(priced):
                self._sends[0, i] = self._sends[1, i + 1] = entry.send
        order = self.order
        steps = self._replay_steps(
            order.stage, order.microbatch, order.kind, self.device, self._seconds, self._sends, self.slots
        )
        return float(steps.mean())
