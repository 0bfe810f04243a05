"""The best plan that a framework can run: the same packs, split again under what the framework cannot express."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trimtab.costs.profile import with_tiers
from trimtab.errors import PartitionError, PlanError, join_problems
from trimtab.partition.assess import SplitResult
from trimtab.partition.stages import SplitProblem, split_stages
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.stages import cuts_of, epoch_s, split_case, uniform_splits
from trimtab.plan.options import PlanOptions
from trimtab.specs import LayerSpec, Profile, Stage, recomputing, stages_between, tiers_of

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
    """Recompute settings in which it can run these stages, as stages: rungs recompute more and more, and hold less."""
    choices: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Fields of `PlanOptions` and the values that it can run: the first stands where the user left the field open."""
    tp_degrees: Callable[[int], bool] | None = None  # whether it runs this tensor-parallel degree; None: any
    degrees: tuple[Literal["cp", "ep", "etp"], ...] = ()  # that it has beside dp, pp and tp


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
    settled |= {axis: 1 for axis in ("cp", "ep") if axis not in can.degrees}
    for axis in {"cp", "ep", "etp"}.difference(can.degrees):
        if getattr(options, axis) not in (None, 1):
            problems.append(
                f"{axis} {getattr(options, axis)} was asked for with --for {target}, which has no such degree: leave "
                f"{axis} out"
            )
    for name, values in choices.items():
        given = getattr(options, name)
        if given in values:
            continue
        if given != getattr(left_open, name):
            problems.append(
                f"{name} {given} was asked for with --for {target}, which runs {name} "
                f"{' or '.join(map(str, values))}: give that, or leave {name} out"
            )
        elif name in _SEARCHED:  # the search takes the best of them
            settled |= {name: given, _SEARCHED[name]: values}
        else:
            settled[name] = values[0]
    if problems:
        raise PlanError(join_problems(problems))
    return replace(options, **settled)  # type: ignore[arg-type]  # fields by name


def best_split(case: Case, can: Expressible) -> SplitResult | None:
    """`best_expressible`, with what it costs; the case's model forbids the cuts that cannot be made."""
    stages = best_expressible(case, can)
    return None if stages is None else case.problem.assess(stages)


def best_expressible(case: Case, can: Expressible) -> Stages | None:
    """The fastest stages found that `can` be run and fit the memory, recompute as the framework would do it.

    Candidates are the exact split, the refined one and those with recompute nowhere and everywhere, or all of
    `can.splits`; on each ladder the lowest rung that fits. Unless the splits are given, the best is improved by moving
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
        fitting = [way for ladder in can.ladders(stages) if (way := _lowest_rung(problem, ladder)) is not None]
        best = min(fitting, key=lambda way: way.bottleneck_s, default=None)
        if best is not None and (cuts not in found or best.bottleneck_s < found[cuts].bottleneck_s):
            found[cuts] = best

    for stages in _candidates(case, can):
        price(cuts_of(stages), stages)
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
    ranked = sorted(found.values(), key=lambda way: way.bottleneck_s)[:_SIMULATED]
    return min((way.stages for way in ranked), key=lambda stages: epoch_s(case, stages), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    stages: Stages
    bottleneck_s: float


def _lowest_rung(problem: SplitProblem, ladder: Sequence[Stages]) -> _Priced | None:
    """The first that fits, by bisection: a rung holds no more than the one below it."""
    priced = [_as_priced(problem.profile, way) for way in ladder]
    ladder = [way for way in priced if _is_offered(problem.profile, way)]
    if problem.recompute == "none":
        ladder = [way for way in ladder if not any(stage.recompute for stage in way)]
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
    solvers: list[Callable[[], Iterable[SplitResult]]] = [
        lambda: [split_case(case)],
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
    """Whether every tier has a price: unfused attention has none of its own."""
    return all(profile.layers[i].tier(tier) is not None for stage in stages for i, tier in tiers_of(stage).items())


def relative_time(case: Case, stages: Sequence[Stage], other: Sequence[Stage]) -> float:
    """Predicted time of `stages` for the whole data set, over that of `other`."""
    return mean_step_s(case, stages) / mean_step_s(case, other)


def mean_step_s(case: Case, stages: Sequence[Stage]) -> float:
    """Predicted seconds of a step on these stages, the mean over the data set."""
    return epoch_s(case, _as_priced(case.setting.profile, stages)) / case.schedule.num_steps


def rank_bytes(case: Case, stages: Sequence[Stage]) -> tuple[float, ...]:
    """Expected peak of every pipeline rank."""
    memory = case.problem.assess(_as_priced(case.setting.profile, stages)).memory
    return tuple(device.total_bytes for device in memory)


def overfull_ranks(case: Case, stages: Sequence[Stage]) -> tuple[int, ...]:
    """Pipeline ranks that would hold more than the plan's memory."""
    most = case.problem.memory_bytes
    return tuple(rank for rank, held in enumerate(rank_bytes(case, stages)) if held > most)
