"""The split of a case: the exact one, refined on the simulated step, or the best that a framework can run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from trimtab.costs.profile import with_tiers
from trimtab.errors import PartitionError, PlanError, join_problems
from trimtab.options import RecomputeMode
from trimtab.partition.assess import SplitResult
from trimtab.partition.published import BmpResult, bmp_split, rank_cuts
from trimtab.partition.stages import Evaluator, SearchResult, SplitProblem, search_makespan, split_stages
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.work import stage_link, steps_of
from trimtab.plan.options import PlanOptions
from trimtab.plan.plan import SearchedSplit
from trimtab.specs import IntArray, LayerSpec, Profile, Stage, recomputing, stages_between, tiers_of
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
        """Return what the search says of its result, for the plan's reader."""
        if self.note:
            return (self.note,)
        if self.search is None:
            return ()
        return (
            f"Splits were simulated on sampled steps ({self.search.num_simulated} of them): the best runs its "
            f"micro-batches in {format_seconds(self.search.makespan_s)}, the exact split of least slowest stage in "
            f"{format_seconds(self.search.start_makespan_s)}.",
        )


def choose_split(case: Case, *, search: bool = True) -> SplitChoice:
    """Return the split of least simulated epoch, of these: the exact one with recompute chosen per layer; that one
    refined by a search on sampled steps; and the exact ones with recompute nowhere and everywhere.

    The exact split minimises the slowest stage at the mean pack; with few or very different micro-batches another one
    may end earlier. Raises `PartitionError` if nothing fits. `search` False takes the exact one: a
    price in a tenth of the time.
    """
    problem = case.problem
    if not search:
        return SplitChoice(split=split_stages(problem), one_switch=(), search=None)
    if case.options.search == "omnibal":
        return _omnibal_split(case)
    # exact at the mean pack, then moved on real packs, whose unevenness no mean shows
    splits = [split_stages(problem)]
    found: SearchResult | None = None
    evaluator = _evaluator(case)
    if evaluator is not None:
        found = search_makespan(evaluator, max_simulated=_MAX_SIMULATED)
        splits.append(found.split)
    # one switch for all layers is what most launchers have; it sometimes wins, and stands in the report
    one_switch = price_splits(case, uniform_splits(problem))
    best = min([*price_splits(case, splits), *one_switch], key=lambda x: x.epoch_s)
    return SplitChoice(split=best.split, one_switch=one_switch, search=found)


def timed_near_anchor(case: Case, num_timed: int) -> tuple[BmpResult, Evaluator]:
    """Run OmniBal's search on this case; return its clock too, the simulated step on sampled rows of packs."""
    clock = _evaluator(case)
    if clock is None:
        raise PlanError(
            f"OmniBal's search moves cuts between stages, not {case.problem.num_stages} with "
            f"{len(_full_rows(case.schedule.table))} full rows of packs: plan with pp 2 or more, or --set search=exact"
        )
    radius = case.options.radius
    return bmp_split(case.problem, clock.makespan_of, radius=radius, num_timed=num_timed), clock


def _omnibal_split(case: Case) -> SplitChoice:
    """The fastest of OmniBal's candidates; with what the exact search finds."""
    problem, options = case.problem, case.options
    # the published search, and ours next to it, on the same clock
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
    """Return each split with its epoch."""
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
    """Return the seconds of the whole data set on these stages."""
    return float(steps_of(case.work, case.schedule.table, stages, case.problem, case.cluster, apart=case.apart).sum())


def cuts_of(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return the first layers of all stages but the first."""
    return tuple(stage.start for stage in stages[1:])


def _full_rows(table: IntArray) -> IntArray:
    """Return (n, num_microbatches) packs of some (step, rank) pairs without an empty slot, spread over the data set."""
    # rows with an empty slot are shorter, and would favour deep pipelines
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


Stages = tuple[Stage, ...]
_SIMULATED = 8  # candidates whose epoch is simulated; the others are ranked by their slowest stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressible:
    """What a framework can run of a model at given degrees of parallelism."""

    forbidden_cuts: frozenset[int] = frozenset()
    splits: tuple[tuple[int, ...], ...] | None = None  # the cuts of every split it knows; None: any of the other cuts
    tiers: Callable[[LayerSpec], Collection[str]] | None = None
    """The recompute it has of a layer, as the plan means it; None: all that the plan has."""
    ladders: Callable[[Sequence[Stage]], Iterable[Sequence[Stages]]] = lambda stages: [[tuple(stages)]]
    """Recompute settings in which it can run these stages, as stages: each recomputes more, and hold less."""
    choices: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Fields of `PlanOptions` and the values that it can run: the first stands where the user left the field open."""
    tp_degrees: Callable[[int], bool] | None = None  # whether it runs this tensor-parallel degree; None: any
    degrees: tuple[Literal["cp", "ep", "etp"], ...] = ()  # that it has next to dp, pp and tp


_MOST_TP = 64
_SEARCHED = {"zero_stage": "zero_stages", "schedule": "schedules"}


def within_choices(options: PlanOptions, can: Expressible, target: str) -> PlanOptions:
    """The options with every field that was left open kept to what `can` be run; `PlanError` for one that cannot be.

    >>> can = Expressible(choices={"tp": (1,), "zero_stage": (0, 3)})
    >>> found = within_choices(PlanOptions(pp=4), can, "my-trainer")
    >>> found.tp, found.pp, found.zero_stages
    (1, 4, (0, 3))
    """
    left_open, problems = PlanOptions(), list[str]()
    # a framework that says nothing of ZeRO has a launcher that knows stage 1
    settled: dict[str, object] = {"zero_stage": options.sharding}
    choices = {**can.choices}
    if can.tp_degrees is not None:
        allowed = tuple(tp for tp in range(1, _MOST_TP + 1) if can.tp_degrees(tp))
        settled["tp_degrees"] = allowed
        if options.tp is not None:
            choices["tp"] = allowed
    # degrees that the target lacks stay 1
    settled |= {axis: 1 for axis in ("cp", "ep") if axis not in can.degrees}
    for axis in {"cp", "ep", "etp"}.difference(can.degrees):
        if getattr(options, axis) not in (None, 1):
            problems.append(f"--for {target} has no {axis}, and {getattr(options, axis)} was given: leave {axis} out")
    # every other field: what was given must be among what it runs, what is open becomes that
    for name, values in choices.items():
        given = getattr(options, name)
        if given in values:
            continue
        if given != getattr(left_open, name):
            problems.append(
                f"--for {target} runs {name} {' or '.join(map(str, values))}, not {given}: leave {name} out"
            )
        elif name in _SEARCHED:  # the search takes the best of them
            settled |= {name: given, _SEARCHED[name]: values}
        else:
            settled[name] = values[0]
    if problems:
        raise PlanError(join_problems(problems))
    return replace(options, **settled)  # type: ignore[arg-type]  # fields by name


def best_expressible(case: Case, can: Expressible) -> Stages | None:
    """The fastest stages found that `can` be run and fit the memory, recompute as the framework would do it.

    Candidates are the exact split, the refined one and those with recompute nowhere and everywhere, or all of
    `can.splits`; each with the least recompute that fits. Unless the splits are given, the best is improved by moving
    single cuts until none helps. Those with the least slowest stage are simulated over all packs. Heuristic where
    recompute is coarse: split and recompute are then not solved as one. None if nothing fits.
    """
    model = replace(case.model, forbidden_cuts=case.model.forbidden_cuts | can.forbidden_cuts)
    case = replace(case, model=model)
    own = with_tiers(case.setting.profile, case.model, can.tiers)
    case = replace(case, setting=replace(case.setting, profile=own))
    try:
        problem = case.problem
    except PartitionError:
        return None  # fewer pieces than stages
    found: dict[tuple[int, ...], _Priced] = {}

    def price(cuts: tuple[int, ...], stages: Sequence[Stage]) -> None:
        fitting = [way for ladder in can.ladders(stages) if (way := _least_recompute(problem, ladder)) is not None]
        best = min(fitting, key=lambda way: way.bottleneck_s, default=None)
        if best is not None and (cuts not in found or best.bottleneck_s < found[cuts].bottleneck_s):
            found[cuts] = best

    # 1. each candidate with the recompute that it needs
    for stages in _candidates(case, can):
        price(cuts_of(stages), stages)
    # 2. the best of them, a cut moved at a time
    if can.splits is None and found:
        at = min(found, key=lambda cuts: found[cuts].bottleneck_s)
        while True:
            for cuts in _neighbours(at, len(model.layers), problem.forbidden_cuts):
                if cuts not in found:
                    price(cuts, stages_between((0, *cuts, len(model.layers))))
            best = min(found, key=lambda cuts: found[cuts].bottleneck_s)
            if found[best].bottleneck_s >= found[at].bottleneck_s:
                break
            at = best
    # 3. those with the least slowest stage, over all packs
    ranked = sorted(found.values(), key=lambda way: way.bottleneck_s)[:_SIMULATED]
    return min((way.stages for way in ranked), key=lambda stages: epoch_s(case, stages), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    stages: Stages
    bottleneck_s: float


def _least_recompute(problem: SplitProblem, ladder: Sequence[Stages]) -> _Priced | None:
    """The first that fits, by bisection: each holds no more than the one before it."""
    priced = [_as_priced(problem.profile, way) for way in ladder]
    ladder = [way for way in priced if _is_offered(problem.profile, way)]
    if problem.recompute == "none":
        ladder = [way for way in ladder if not any(stage.recompute for stage in way)]
    # the fastest way stands first, the one that holds least last
    low, high, best = 0, len(ladder), None
    while low < high:
        middle = (low + high) // 2
        result = problem.assess(ladder[middle])
        if result.peak_bytes <= problem.memory_bytes:
            best, high = _Priced(stages=ladder[middle], bottleneck_s=result.bottleneck_s), middle
        else:
            low = middle + 1
    return best


def _neighbours(cuts: tuple[int, ...], num_layers: int, forbidden: frozenset[int]) -> Iterator[tuple[int, ...]]:
    """The splits with one cut moved to the next place before or after it that is allowed."""
    bounds = (0, *cuts, num_layers)
    for number in range(1, len(bounds) - 1):
        below = range(bounds[number] - 1, bounds[number - 1], -1)
        above = range(bounds[number] + 1, bounds[number + 1])
        for places in (below, above):
            place = next((c for c in places if c not in forbidden), None)
            if place is not None:
                yield (*cuts[: number - 1], place, *cuts[number:])


def _candidates(case: Case, can: Expressible) -> Iterator[Stages]:
    # without the cap where recompute is not per layer: ladders and the memory check decide together
    free = replace(case, budget=replace(case.budget, fill_bytes=2.0**62))
    if can.splits is not None:
        num_layers = len(case.model.layers)
        for cuts in can.splits:
            if case.problem.forbidden_cuts.isdisjoint(cuts):
                yield stages_between((0, *cuts, num_layers))
        return
    # with recompute per layer, or as one switch with and without the memory
    solvers: list[Callable[[], Iterable[SplitResult]]] = [
        lambda: [choose_split(case).split],
        lambda: [split_stages(case.problem)],
        lambda: uniform_splits(case.problem),
        lambda: uniform_splits(free.problem),
    ]
    for solver in solvers:
        try:
            found = list(solver())
        except PartitionError:
            continue
        yield from (split.stages for split in found)


def _as_priced(profile: Profile, stages: Sequence[Stage]) -> Stages:
    """The stages as the profile prices them: a layer without a backward (a frozen tower's) has nothing to run again."""
    idle = {i for i, cost in enumerate(profile.layers) if len(cost.tiers) == 1}
    chosen = [{i: tier for i, tier in tiers_of(stage).items() if i not in idle} for stage in stages]
    return tuple(recomputing(stage, tiers) for stage, tiers in zip(stages, chosen, strict=True))


def _is_offered(profile: Profile, stages: Sequence[Stage]) -> bool:
    """Return whether every tier has a price: unfused attention has none of its own."""
    return all(profile.layers[i].tier(tier) is not None for stage in stages for i, tier in tiers_of(stage).items())


def relative_time(case: Case, stages: Sequence[Stage], other: Sequence[Stage]) -> float:
    """Return the predicted time of `stages` for the whole data set, over that of `other`."""
    return mean_step_s(case, stages) / mean_step_s(case, other)


def mean_step_s(case: Case, stages: Sequence[Stage]) -> float:
    """Return the predicted seconds of a step on these stages, the mean over the data set."""
    return epoch_s(case, _as_priced(case.setting.profile, stages)) / case.schedule.num_steps


def rank_bytes(case: Case, stages: Sequence[Stage]) -> tuple[float, ...]:
    """Return the expected peak of every pipeline rank."""
    memory = case.problem.assess(_as_priced(case.setting.profile, stages)).memory
    return tuple(device.total_bytes for device in memory)


def overfull_ranks(case: Case, stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return the pipeline ranks that would hold more than the plan's memory."""
    most = case.problem.memory_bytes
    return tuple(rank for rank, held in enumerate(rank_bytes(case, stages)) if held > most)
