"""Splits of least simulated makespan: complete enumeration where that is cheap, else local search around the exact one.

Minimising the slowest stage is not minimising the step when micro-batches are few: a stage behind others waits for them
before its first forward and after its last backward, so late stages should be smaller than early ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trimtab.partition.assess import SplitProblem, SplitResult
from trimtab.partition.bound import bound_terms
from trimtab.partition.evaluate import Evaluator
from trimtab.partition.stages import split_stages
from trimtab.specs import FloatArray

MAX_SIMULATED = 4000  # candidates of a start
_STEPS = (-1, 1, -2, 2, -3, 3)
"""Runs of layers by which a cut moves; pairs of cuts, each by its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best split found; makespans are means over the sampled steps, without optimizer and all-reduce."""

    split: SplitResult
    makespan_s: float
    start_makespan_s: float  # of the split with the least bottleneck, where the search began
    lower_bound_s: float  # of every split's makespan under the same cap (see `makespan_bound`)
    num_simulated: int  # candidate splits
    complete: bool  # no other cuts, each stage with its least recompute, end earlier

    @property
    def gap(self) -> float:
        """makespan / lower bound - 1: how much is at most left to gain."""
        return self.makespan_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A split worth trying on the devices."""

    split: SplitResult
    makespan_s: float  # mean over the sampled steps


def search_makespan(
    problem: SplitProblem,
    work: FloatArray,
    *,
    link_bytes_per_s: float | Sequence[float] | None = None,
    latency_s: float = 0.0,
    max_simulated: int = MAX_SIMULATED,
) -> SearchResult:
    """The split of least mean simulated makespan that was found; never worse than the exact bottleneck split.

    `work` (steps, num_microbatches, len(WORK_TERMS)): sampled steps of real micro-batches, in the order they run.
    Descent from two starts: the split of least bottleneck, and the one that minimises the terms of `makespan_bound`.
    A round simulates every neighbour of one kind and takes the best: one cut moved by up to three runs of layers,
    then neighbouring cuts moved together, then any two cuts. Each stage's recompute is solved again exactly under
    the cap (least time at `problem.work_mean`). Up to 4 stages all cuts that the bound leaves open are then simulated
    (`enumerate_cuts`), and the result is the best of all, `complete`; else it is heuristic, and `SearchResult.gap`
    bounds what it missed. Deterministic; each start stops after `max_simulated` candidates.
    """
    evaluator = Evaluator(problem, work, link_bytes_per_s=link_bytes_per_s, latency_s=latency_s)
    start = split_stages(problem)
    start_makespan = evaluator.makespan_of(start.stages)
    ranked = _rank(evaluator, start, max_simulated=max_simulated, keep=1)
    best_cuts, makespan = next(iter(ranked.cuts.items()), (evaluator.cuts_of(start.stages), start_makespan))
    if makespan >= start_makespan * (1 - 1e-12):
        split, makespan = start, start_makespan
    else:
        split = replace(problem.assess(evaluator.stages(best_cuts)), exact=False)
    return SearchResult(
        split=split,
        makespan_s=makespan,
        start_makespan_s=start_makespan,
        lower_bound_s=min(makespan, ranked.lower_bound_s),
        num_simulated=ranked.num_simulated,
        complete=ranked.complete,
    )


def top_candidates(
    problem: SplitProblem,
    work: FloatArray,
    k: int,
    *,
    link_bytes_per_s: float | Sequence[float] | None = None,
    latency_s: float = 0.0,
) -> tuple[Candidate, ...]:
    """The `k` splits of least simulated makespan, best first, no two with the same cuts; fewer if no more fit.

    Of all cuts where `search_makespan` would enumerate them, else of those that the descent simulated.
    """
    assert k >= 1
    evaluator = Evaluator(problem, work, link_bytes_per_s=link_bytes_per_s, latency_s=latency_s)
    start = split_stages(problem)
    ranked = _rank(evaluator, start, max_simulated=MAX_SIMULATED, keep=k)
    found = {
        cuts: Candidate(split=problem.assess(evaluator.stages(cuts)), makespan_s=s) for cuts, s in ranked.cuts.items()
    }
    own = evaluator.cuts_of(start.stages)
    makespan = evaluator.makespan_of(start.stages)
    if own not in found or makespan < found[own].makespan_s:  # chunks may share their device's room otherwise
        found[own] = Candidate(split=start, makespan_s=makespan)
    return tuple(sorted(found.values(), key=lambda candidate: candidate.makespan_s)[:k])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranked:
    cuts: dict[tuple[int, ...], float]  # makespans of the best cuts, ascending
    lower_bound_s: float
    num_simulated: int
    complete: bool


def _rank(evaluator: Evaluator, start: SplitResult, *, max_simulated: int, keep: int) -> _Ranked:
    from trimtab.partition.enumerate import enumerate_cuts

    terms = bound_terms(evaluator.problem, evaluator.work)
    for first in (evaluator.cuts_of(start.stages), terms.cuts()):
        if first is not None:
            _descend(evaluator, first, max_simulated=max_simulated)
    num_simulated = len(evaluator.seen)
    every = enumerate_cuts(evaluator, terms, keep=keep)
    found = {cuts: seconds for cuts, seconds in evaluator.seen.items() if seconds < float("inf")}
    best = sorted(found.items(), key=lambda item: (item[1], item[0]))[:keep]
    return _Ranked(
        cuts=dict(best),
        lower_bound_s=terms.makespan_s,
        num_simulated=num_simulated + (0 if every is None else every.num_simulated),
        complete=every is not None and every.complete,
    )


def _descend(evaluator: Evaluator, cuts: tuple[int, ...], *, max_simulated: int) -> None:
    """Best-improvement descent through ever wider neighbourhoods."""
    best = evaluator.makespan(cuts)
    budget = len(evaluator.seen) + max_simulated
    neighbourhoods = (_single_moves, _joint_moves, _pair_moves)
    kind = 0
    while kind < len(neighbourhoods):
        better, better_cuts = best, cuts
        for move in neighbourhoods[kind](len(cuts) - 2):
            if len(evaluator.seen) >= budget:
                break
            moved = tuple(a + step for a, step in zip(cuts, (0, *move, 0), strict=True))
            if any(a >= b for a, b in itertools.pairwise(moved)):
                continue
            makespan = evaluator.makespan(moved)
            if makespan < better * (1 - 1e-12):
                better, better_cuts = makespan, moved
        kind = 0 if better < best else kind + 1
        best, cuts = better, better_cuts


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
