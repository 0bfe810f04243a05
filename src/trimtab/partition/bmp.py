"""OmniBal's balanced model partitioning (BMP), as published: an anchor from profiled forwards, jitter, the best timed.

Source: Yao et al. 2025, "OmniBal", ICML (arXiv 2407.20761), section on balanced model partitioning. It stands beside
`search_makespan`, which needs no radius and no ranking by proxy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.costs.seconds import mean_seconds
from trimtab.errors import PartitionError
from trimtab.partition.assess import SplitProblem, SplitResult
from trimtab.partition.stages import recompute_stages
from trimtab.specs import FloatArray, IntArray, Stage, stages_between
from trimtab.units import MIB

MAX_CANDIDATES = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BmpCandidate:
    """Cuts near the anchor's, and what they are ranked by: squared deviations in ms^2 + `sent_mib`, smaller first."""

    cuts: tuple[int, ...]  # layers at which stages 1, 2, ... begin
    spread_ms: float  # standard deviation of the stages' forward times: what the paper's tables print as VAR(fwd_time)
    sent_mib: float  # activations that pass all boundaries, SUM(comm)

    @property
    def rank(self) -> float:
        """Sum over the stages of the squared deviation from their mean forward time, plus what is sent."""
        return (len(self.cuts) + 1) * self.spread_ms**2 + self.sent_mib


@dataclass(frozen=True, slots=True, kw_only=True)
class BmpResult:
    """The fastest of the candidates that were timed."""

    split: SplitResult
    seconds: float
    anchor: tuple[int, ...]
    timed: tuple[tuple[BmpCandidate, float], ...]  # in the order of their rank; infinite where it does not fit
    splits: tuple[SplitResult, ...]  # that were timed, in the order of their rank
    num_candidates: int


def bmp_split(
    problem: SplitProblem, time_stages: Callable[[Sequence[Stage]], float], *, radius: int = 3, num_timed: int = 10
) -> BmpResult:
    """The fastest by `time_stages` of the `num_timed` best-ranked candidates that fit the memory.

    `time_stages` gives seconds of a step: `Evaluator.makespan_of`, or a run on the devices. A candidate's recompute is
    ours (exact, stage by stage); the paper decides it afterwards by hand. Heuristic: the rank adds milliseconds to MiB.
    Raises `PartitionError` where no candidate fits.
    """
    anchor = bmp_anchor(problem)
    candidates = bmp_candidates(problem, anchor, radius=radius)
    splits: list[tuple[SplitResult, float]] = []
    timed: list[tuple[BmpCandidate, float]] = []
    for candidate in candidates:
        if len(splits) == num_timed:
            break
        try:
            split = recompute_stages(problem, stages_between((0, *candidate.cuts, len(problem.profile.layers))))
        except PartitionError:
            timed.append((candidate, float("inf")))
            continue
        splits.append((split, time_stages(split.stages)))
        timed.append((candidate, splits[-1][1]))
    if not splits:
        raise PartitionError(
            f"none of {len(candidates)} splits within {radius} layers of the anchor fits the memory: try a larger "
            "radius, or split_stages, which searches all of them"
        )
    best, seconds = min(splits, key=lambda x: x[1])
    return BmpResult(
        split=best,
        seconds=seconds,
        anchor=anchor,
        timed=tuple(timed),
        splits=tuple(split for split, _ in splits),
        num_candidates=len(candidates),
    )


def bmp_anchor(problem: SplitProblem) -> tuple[int, ...]:
    """Cuts nearest to where the forward's seconds, summed from the first layer, reach i / S of the whole; greedy."""
    S = problem.num_stages * problem.num_chunks
    before, positions = _forward_before(problem)
    cuts: list[int] = []
    low = 0
    for i in range(1, S):
        # an allowed cut after the last one, leaving one for each stage to come
        free = np.arange(low + 1, len(positions) - (S - i))
        low = int(free[np.abs(before[free] - before[-1] * i / S).argmin()])
        cuts.append(int(positions[low]))
    return tuple(cuts)


def bmp_candidates(problem: SplitProblem, anchor: Sequence[int], *, radius: int) -> list[BmpCandidate]:
    """All cuts within `radius` allowed cuts of the anchor's, best rank first; (2 radius + 1)^(S - 1) at most."""
    S = len(anchor) + 1
    count = (2 * radius + 1) ** len(anchor)
    if radius < 0 or count > MAX_CANDIDATES:
        raise PartitionError(
            f"radius {radius} around {len(anchor)} cuts makes {count} splits: choose a smaller radius, at least 0, or "
            "search_makespan, which does not list them"
        )
    _, positions = _forward_before(problem)
    at = np.searchsorted(positions, anchor)
    ranges = [range(max(1, a - radius), min(len(positions) - 1, a + radius + 1)) for a in at.tolist()]
    listed = list(itertools.product(*ranges))
    inner = np.array(listed, np.int64).reshape(len(listed), S - 1)
    cuts = positions[inner[(np.diff(inner, axis=1) > 0).all(axis=1)]]
    spread, sent = _spread_and_sent(problem, cuts)
    order = np.argsort(S * spread**2 + sent, kind="stable")
    return [
        BmpCandidate(cuts=tuple(cuts[n].tolist()), spread_ms=float(spread[n]), sent_mib=float(sent[n])) for n in order
    ]


def rank_cuts(problem: SplitProblem, cuts: Sequence[int]) -> BmpCandidate:
    """Any allowed cuts as a candidate."""
    spread, sent = _spread_and_sent(problem, np.array([cuts], np.int64).reshape(1, -1))
    return BmpCandidate(cuts=tuple(cuts), spread_ms=float(spread[0]), sent_mib=float(sent[0]))


def _spread_and_sent(problem: SplitProblem, cuts: IntArray) -> tuple[FloatArray, FloatArray]:
    """(n,) ms and MiB of n rows of cuts."""
    forward, _ = mean_seconds(problem.profile, problem.work_mean)
    before = np.concatenate([[0.0], np.cumsum(forward)])
    ends = np.full((len(cuts), 1), len(forward))
    spread = np.diff(before[np.hstack([np.zeros_like(ends), cuts, ends])], axis=1).std(axis=1) * 1e3
    sent = (problem.profile.matrix("output_bytes") @ problem.work_mean)[cuts - 1].sum(axis=1) / MIB
    return spread, sent


def _forward_before(problem: SplitProblem) -> tuple[FloatArray, IntArray]:
    """Seconds of the forward before each allowed cut, and the layers at which these lie."""
    L = len(problem.profile.layers)
    positions = np.array([c for c in range(L + 1) if c not in problem.forbidden_cuts], np.int64)
    forward, _ = mean_seconds(problem.profile, problem.work_mean)
    return np.concatenate([[0.0], np.cumsum(forward)])[positions], positions
