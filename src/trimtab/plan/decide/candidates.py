"""Splits of a plan's case that are worth trying on the devices, the plan's own among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.partition.search import top_candidates
from trimtab.plan.case import Case
from trimtab.plan.decide.stages import epoch_s, full_rows
from trimtab.plan.decide.times import stage_link
from trimtab.specs import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Stages, and the mean simulated step of the whole data set on them."""

    stages: tuple[Stage, ...]
    step_s: float


def candidate_splits(case: Case, stages: Sequence[Stage], k: int) -> tuple[Candidate, ...]:
    """`stages` and the best other cuts, `k` in all or as many as there are; the least simulated epoch first."""
    found = [tuple(stages)]
    packs = full_rows(case.schedule.table)
    if k > 1 and case.problem.num_stages > 1 and len(packs):
        best = top_candidates(
            case.problem,
            case.work[packs],
            k,
            link_bytes_per_s=stage_link(case.cluster),
            latency_s=case.cluster.latency_s,
        )
        cuts = {_cuts(stages)}
        for candidate in best:
            if _cuts(candidate.split.stages) not in cuts:
                cuts.add(_cuts(candidate.split.stages))
                found.append(candidate.split.stages)
    num_steps = case.schedule.num_steps
    priced = [Candidate(stages=x, step_s=epoch_s(case, x) / num_steps) for x in found[:k]]
    return tuple(sorted(priced, key=lambda candidate: candidate.step_s))


def _cuts(stages: Sequence[Stage]) -> tuple[int, ...]:
    return tuple(stage.start for stage in stages)
