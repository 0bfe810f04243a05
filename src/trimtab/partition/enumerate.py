"""Every split into at most four stages that a safe bound leaves open, simulated: the best ones, without exception."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.compiled import compiled
from trimtab.partition.bound import BoundTerms
from trimtab.partition.cuts import Pipeline, stage_extra
from trimtab.partition.evaluate import Evaluator
from trimtab.partition.tiers import IMPOSSIBLE, TierTable
from trimtab.specs import FloatArray, IntArray

MAX_STAGES = 4
MAX_CUTS = 2_000_000  # that the bound may leave open
MAX_BLOCKS = 80_000_000  # simulated at most: a few seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumerated:
    """What was done so that `Evaluator.seen` holds the best cuts of all that fit."""

    num_simulated: int
    complete: bool  # no cuts beside these are better


def enumerate_cuts(evaluator: Evaluator, terms: BoundTerms, *, keep: int = 1) -> Enumerated | None:
    """The `keep` best of all cuts, given that `evaluator` has priced some; None where there are too many.

    Exact. A stage's term of `makespan_bound` depends on its own two ends alone, so cuts whose largest term is not below
    the `keep`-th best makespan known are left out; the others are simulated in the order of their bounds, until
    the next bound exceeds it. With several chunks a device and a cap that binds
    their room is fixed beforehand, and the result is not `complete`.
    """
    problem = evaluator.problem
    S = problem.num_stages * problem.num_chunks
    known = sorted(evaluator.seen.values())
    if S == 1 or S > MAX_STAGES or len(known) < keep or not np.isfinite(known[keep - 1]):
        return None
    limit = known[keep - 1]
    forms = terms.pipeline._replace(rooms=evaluator.pipeline.rooms)
    composite = stage_terms(forms, terms.table.tiers)
    # chunks share their device's room: what they may hold is settled only where none of them needs to save any
    settled = problem.num_chunks == 1 or bool((composite == stage_terms(terms.pipeline, terms.table.tiers)).all())
    term_s = np.where(composite == IMPOSSIBLE, np.inf, terms.seconds(composite))
    cuts = open_cuts(term_s, limit)
    if cuts is None:
        return None
    bounds = np.max([term_s[i, cuts[:, i], cuts[:, i + 1]] for i in range(S)], axis=0)
    ranked = np.argsort(bounds, kind="stable")
    cuts, bounds = cuts[ranked], bounds[ranked]

    # In the order of their bounds, until the next one cannot be among the best.
    order = evaluator.order
    max_simulated = MAX_BLOCKS // (order.stage.size * len(evaluator.slots)) + 1
    best = [limit * (1 + 1e-12)] * keep
    done = 0
    for cut, bound in zip(cuts.tolist(), bounds.tolist(), strict=True):
        if bound >= best[-1] or done >= max_simulated:
            break
        done += 1
        best = sorted([*best, evaluator.makespan(tuple(cut))])[:keep]
    return Enumerated(num_simulated=done, complete=done < max_simulated and settled)


@compiled
def stage_terms(pipeline: Pipeline, tiers: TierTable) -> IntArray:
    """(S, K + 1, K + 1) composite time of segments a <= k < b as stage i; `IMPOSSIBLE` beyond the cap, or a >= b."""
    J, S, K = pipeline.head.shape[0], pipeline.head.shape[1], pipeline.sums.shape[0] - 1
    counts = np.empty((tiers.upgrades.shape[0], tiers.upgrades.shape[1]), np.int64)
    result = np.full((S, K + 1, K + 1), IMPOSSIBLE, np.int64)
    for i in range(S):
        for a in range(i, K):
            for b in range(a + 1, K - (S - 1 - i) + 1):
                extra = stage_extra(
                    pipeline, tiers, np.int64(i), np.int64(a), np.int64(b), np.int64(IMPOSSIBLE // 2), counts
                )
                if extra == IMPOSSIBLE:
                    break  # what is longer holds more
                longest = np.int64(0)
                for j in range(J):
                    term = pipeline.tail[j, i, b] - pipeline.head[j, i, a] + pipeline.weight[j, i] * extra
                    longest = max(longest, term)
                result[i, a, b] = longest
    return result


def open_cuts(term_s: FloatArray, limit: float) -> IntArray | None:
    """(n, S + 1) cuts none of whose stages' terms reaches `limit`, in lexical order; None if more than `MAX_CUTS`."""
    S, K = term_s.shape[0], term_s.shape[1] - 1
    is_open = term_s < limit
    is_open[S - 2] &= is_open[S - 1, :, K]  # the last cut but one also begins the last stage
    cuts = np.zeros((1, 1), np.int64)
    for i in range(S - 1):
        follows = is_open[i, cuts[:, -1]]
        if follows.sum() > MAX_CUTS:
            return None
        which, ends = np.nonzero(follows)
        cuts = np.column_stack([cuts[which], ends])
    return np.column_stack([cuts, np.full(len(cuts), K)])
