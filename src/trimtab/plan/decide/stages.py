"""The split of a case: the exact one, refined on the simulated step, and never slower than what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.errors import PartitionError, PlanError
from trimtab.options import RecomputeMode
from trimtab.partition.assess import SplitResult
from trimtab.partition.bmp import BmpResult, bmp_split, rank_cuts
from trimtab.partition.evaluate import Evaluator
from trimtab.partition.search import SearchResult, search_makespan
from trimtab.partition.stages import SplitProblem, split_stages
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.work import stage_link, steps_of, times_of
from trimtab.plan.plan import SearchedSplit
from trimtab.specs import IntArray, Stage
from trimtab.units import format_seconds, round_digits

ABOUT_SPLIT = ("Splits were ", "Split again, ")
"""How sentences begin that say where a plan's split comes from: they go when it gets another one."""

_SAMPLED_STEPS = 32  # of one rank each: with 8, half of what the search gains is lost on other steps
_MAX_SIMULATED = 1500  # candidate splits: about 2 s at 16 stages x 64 micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedSplit:
    """A split and the seconds of the whole data set on it."""

    split: SplitResult
    epoch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitChoice:
    """The chosen split, and what it was chosen among."""

    split: SplitResult
    one_switch: tuple[PricedSplit, ...]  # the exact splits while recompute is one switch for all layers
    search: SearchResult | None  # None: there was nothing to search
    searched: tuple[SearchedSplit, ...] = ()  # by OmniBal's search
    note: str = ""  # how that went

    def sentences(self) -> tuple[str, ...]:
        """What the search says of its result, for the plan's reader."""
        if self.note:
            return (self.note,)
        if self.search is None:
            return ()
        return (
            f"Splits were simulated on sampled steps ({self.search.num_simulated} of them): the best runs its "
            f"micro-batches in {format_seconds(self.search.makespan_s)}, the exact split of least slowest stage in "
            f"{format_seconds(self.search.start_makespan_s)}.",
        )


def split_case(case: Case) -> SplitResult:
    """The split that `choose_split` chooses."""
    return choose_split(case).split


def choose_split(case: Case) -> SplitChoice:
    """Of these splits the one with the least simulated epoch: the exact one with recompute chosen per layer; that one
    refined by a search on sampled steps; and the exact ones with recompute nowhere and everywhere.

    The exact split minimises the slowest stage at the mean pack; with few or very different micro-batches another one
    may end earlier. Raises `PartitionError` if nothing fits.
    """
    problem = case.problem
    if case.options.search == "omnibal":
        return _omnibal_split(case)
    splits = [split_stages(problem)]
    found: SearchResult | None = None
    evaluator = _evaluator(case)
    if evaluator is not None:
        found = search_makespan(evaluator, max_simulated=_MAX_SIMULATED)
        splits.append(found.split)
    one_switch = price_splits(case, uniform_splits(problem))
    best = min([*price_splits(case, splits), *one_switch], key=lambda x: x.epoch_s)
    return SplitChoice(split=best.split, one_switch=one_switch, search=found)


def timed_near_anchor(case: Case, num_timed: int) -> tuple[BmpResult, Evaluator]:
    """OmniBal's search on this case; and its clock, the simulated step on sampled rows of packs."""
    clock = _evaluator(case)
    if clock is None:
        raise PlanError(
            f"OmniBal's search moves cuts between stages, and there are {case.problem.num_stages} stages and "
            f"{len(_full_rows(case.schedule.table))} full rows of packs: plan with pp 2 or more and enough samples, or "
            "with --set search=exact"
        )
    radius = case.options.radius
    return bmp_split(case.problem, clock.makespan_of, radius=radius, num_timed=num_timed), clock


def _omnibal_split(case: Case) -> SplitChoice:
    """The fastest of OmniBal's candidates; beside them, for the reader, what the exact search finds."""
    problem, options = case.problem, case.options
    found, clock = timed_near_anchor(case, options.top)
    exact = choose_split(replace(case, options=replace(options, search="exact")))
    exact_s = clock.makespan_of(exact.split.stages)
    num_layers = len(problem.profile.layers)
    rows = tuple(
        SearchedSplit(
            stages=tuple(np.diff([0, *candidate.cuts, num_layers]).tolist()),
            spread_ms=round_digits(candidate.spread_ms),
            sent_mib=round_digits(candidate.sent_mib),
            step_ms=round_digits(seconds * 1e3) if np.isfinite(seconds) else None,
        )
        for candidate, seconds in (*found.timed, (rank_cuts(problem, cuts_of(exact.split.stages)), exact_s))
    )
    return SplitChoice(
        split=found.split,
        one_switch=exact.one_switch,
        search=None,
        searched=rows,
        note=(
            f"Splits were searched as OmniBal published it: {found.num_candidates} within {options.radius} layers of "
            f"the anchor {'/'.join(map(str, found.anchor))}, ranked by uneven forward time and bytes sent, and the "
            f"{len(found.timed)} best simulated. The fastest runs its micro-batches in "
            f"{format_seconds(found.seconds)}, the split of --set search=exact in {format_seconds(exact_s)}."
        ),
    )


def price_splits(case: Case, splits: Sequence[SplitResult]) -> tuple[PricedSplit, ...]:
    """Each split with its epoch."""
    return tuple(PricedSplit(split=split, epoch_s=epoch_s(case, split.stages)) for split in splits)


def uniform_splits(problem: SplitProblem) -> list[SplitResult]:
    """The exact splits while recompute is one switch for all layers, where they fit."""
    modes: tuple[RecomputeMode, ...] = ("none", "full") if problem.recompute == "auto" else (problem.recompute,)
    found = []
    for mode in modes:
        try:
            found.append(split_stages(replace(problem, recompute=mode)))
        except PartitionError:
            continue
    return found


def epoch_s(case: Case, stages: Sequence[Stage]) -> float:
    """Seconds of the whole data set on these stages."""
    times = times_of(case.work, stages, case.setting.profile, case.cluster)
    return float(steps_of(times, case.schedule.table, stages, case.problem).sum())


def cuts_of(stages: Sequence[Stage]) -> tuple[int, ...]:
    """First layers of all stages but the first."""
    return tuple(stage.start for stage in stages[1:])


def _full_rows(table: IntArray) -> IntArray:
    """(n, num_microbatches) packs of some (step, rank) pairs without an empty slot, spread over the data set."""
    rows = table.reshape(-1, table.shape[2])
    rows = rows[(rows >= 0).all(axis=1)]
    chosen = np.unique(np.linspace(0, len(rows) - 1, num=min(_SAMPLED_STEPS, len(rows))).astype(np.int64))
    return rows[chosen]


def _evaluator(case: Case) -> Evaluator | None:
    """Simulates splits on sampled rows of packs, sends included; None where there is nothing to compare."""
    packs = _full_rows(case.schedule.table)
    if case.problem.num_stages < 2 or not len(packs):
        return None
    return Evaluator(
        case.problem,
        case.work[packs],
        link_bytes_per_s=stage_link(case.cluster),
        latency_s=case.cluster.latency_s,
    )
