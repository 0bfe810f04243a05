"""Splits of least simulated makespan: local search around the split of least slowest stage.

Minimising the slowest stage is not minimising the step when micro-batches are few: a stage behind others waits for them
before its first forward and after its last backward, so late stages should be smaller than early ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trimtab.partition.assess import SplitResult
from trimtab.partition.evaluate import Evaluator
from trimtab.partition.stages import split_stages

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
