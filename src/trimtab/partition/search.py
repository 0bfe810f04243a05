"""Splits of least simulated makespan: local search around the split of least slowest stage.

Minimising the slowest stage is not minimising the step when micro-batches are few: a stage behind others waits for them
before its first forward and after its last backward, so late stages should be smaller than early ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.errors import PartitionError
from trimtab.partition.assess import SplitProblem, SplitResult
from trimtab.partition.layer_table import layer_table, pipeline_of
from trimtab.partition.simulate import block_costs, makespans, stage_times, waves_of
from trimtab.partition.stages import chunk_room, split_stages, stage_of
from trimtab.specs import NUM_WORK_TERMS, FloatArray, Stage

# -- makespans of cuts, each stage with its least recompute; what was priced is remembered ----------------------------


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
            raise PartitionError(f"work must have shape (steps, {expected[0]}, {expected[1]}), not {work.shape}")
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
        # what was priced before
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


# -- the search -------------------------------------------------------------------------------------------------------


MAX_SIMULATED = 4000  # candidates
_STEPS = (-1, 1, -2, 2, -3, 3)
"""Runs of layers by which a cut moves; pairs of cuts, each by its own."""
_EQUAL = 1 - 1e-12  # makespans nearer than this are rounding apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A split worth trying on the devices."""

    split: SplitResult
    makespan_s: float  # mean over the sampled steps, without optimizer and all-reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best splits found, no two with the same cuts, the best first."""

    candidates: tuple[Candidate, ...]
    start_makespan_s: float  # of the split with the least bottleneck, where the search began
    num_simulated: int  # candidate splits

    @property
    def split(self) -> SplitResult:
        return self.candidates[0].split

    @property
    def makespan_s(self) -> float:
        return self.candidates[0].makespan_s


def search_makespan(evaluator: Evaluator, *, keep: int = 1, max_simulated: int = MAX_SIMULATED) -> SearchResult:
    """The `keep` splits of least mean simulated makespan that were found; the first never worse than the exact split.

    Descent from the split of least bottleneck: a round tries every move of one kind and takes each that is better at
    once: one cut moved by up to three runs of layers, then neighbouring cuts moved together, then any two cuts. Each
    stage's recompute is solved again exactly under the cap (least time at `problem.work_mean`). Heuristic, no bound;
    deterministic; stops after `max_simulated` candidates.
    """
    problem = evaluator.problem
    start = split_stages(problem)
    own, start_makespan = evaluator.cuts_of(start.stages), evaluator.makespan_of(start.stages)
    # down from the exact split; of all that was simulated the best are kept
    _descend(evaluator, own, max_simulated=max_simulated)
    found = dict(evaluator.seen)
    keeps_start = start_makespan * _EQUAL <= found[own]  # chunks may share their device's room otherwise
    if keeps_start:
        found[own] = start_makespan * _EQUAL  # of equals the start is the first
    fitting = sorted((seconds, cuts) for cuts, seconds in found.items() if seconds < float("inf"))
    candidates = tuple(
        Candidate(split=start, makespan_s=start_makespan)
        if keeps_start and cuts == own
        else Candidate(split=replace(problem.assess(evaluator.stages(cuts)), exact=False), makespan_s=seconds)
        for seconds, cuts in fitting[:keep]
    )
    return SearchResult(candidates=candidates, start_makespan_s=start_makespan, num_simulated=len(evaluator.seen))


def _descend(evaluator: Evaluator, cuts: tuple[int, ...], *, max_simulated: int) -> None:
    """Takes every move that is better, through ever wider neighbourhoods; `evaluator.seen` holds what was simulated."""
    best = evaluator.makespan(cuts)
    neighbourhoods = (_single_moves, _joint_moves, _pair_moves)
    kind = 0
    while kind < len(neighbourhoods):
        is_better = False
        for move in neighbourhoods[kind](len(cuts) - 2):
            if len(evaluator.seen) >= max_simulated:
                return
            moved = tuple(a + step for a, step in zip(cuts, (0, *move, 0), strict=True))
            if any(a >= b for a, b in itertools.pairwise(moved)):
                continue
            makespan = evaluator.makespan(moved)
            if makespan < best * _EQUAL:
                best, cuts, is_better = makespan, moved, True
        # wider moves cost more to try: back to single cuts after each success
        kind = 0 if is_better else kind + 1


def _single_moves(num_cuts: int) -> Iterator[tuple[int, ...]]:
    for i in range(num_cuts):
        for step in _STEPS:
            yield (0,) * i + (step,) + (0,) * (num_cuts - i - 1)


def _joint_moves(num_cuts: int) -> Iterator[tuple[int, ...]]:
    """Runs of two or more neighbouring cuts by the same step."""
    for i, j in itertools.combinations(range(num_cuts + 1), 2):
        if j - i > 1:
            for step in _STEPS:
                yield (0,) * i + (step,) * (j - i) + (0,) * (num_cuts - j)


def _pair_moves(num_cuts: int) -> Iterator[tuple[int, ...]]:
    for i, j in itertools.combinations(range(num_cuts), 2):
        for first, second in itertools.product(_STEPS, repeat=2):
            yield (0,) * i + (first,) + (0,) * (j - i - 1) + (second,) + (0,) * (num_cuts - j - 1)
