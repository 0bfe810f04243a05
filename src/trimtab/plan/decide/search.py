"""Which settings fit, and which is taken: degrees of parallelism, ZeRO stage, schedule and micro-batches.

Each member of the space (module `members`) is priced alike: packs of some steps of the epoch, the exact split with
recompute under the memory cap, then the simulated steps. Branch and bound: members are priced in the order of their
bounds, until the next is above all that is of interest. A member of a series (other packs, all else alike) recomputes
what smaller packs of it do. Recompute aside, it is taken to be above its bound by nearly as much as the least of those
that were priced, for uneven stages hit all: heuristic, and the tests compare with the whole space.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trimtab.costs.profile import with_tiers
from trimtab.errors import PartitionError
from trimtab.partition.stages import split_stages
from trimtab.plan.decide.case import Case, MemoryBudget, Setting, make_case
from trimtab.plan.decide.members import Member, Refusal, list_members
from trimtab.plan.decide.setting import EQUAL, ChosenSetting, Priced, parallel_dims
from trimtab.plan.decide.work import steps_of
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec, LayerSpec, ModelSpec, ParallelDims, SampleTable
from trimtab.units import format_degrees

_SAME_SERIES, _SAME_DEGREES = 0.97, 0.9  # of what others of a series, or of its degrees, are above their bounds

Tiers = Callable[[LayerSpec], Collection[str]]


def choose_setting(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    *,
    tiers: Tiers | None = None,
    progress: Callable[[int, int], None] | None = None,
    below_s: float | None = None,
    least_pp: int = 1,
    without: Collection[ParallelDims] = (),
) -> ChosenSetting:
    """The settings that fit, and which is taken.

    `below_s`: only the fastest, if it may take fewer seconds a sample, of `least_pp` stages or more, and none of the
    degrees in `without`.

    `tiers`: the recompute that the framework has of a layer, so that packs are no larger than it can hold. Raises
    `PlanError` when the degrees do not divide the devices, and `PartitionError` when nothing fits, with its reason.
    """
    longest, crowded, refusals = int(samples.num_tokens.max()), False, list[Refusal]()
    if options.schedule == "auto":  # whose chunks are those of an interleaved schedule
        divided = replace(options, num_chunks=1)
    else:
        divided = options
    dims = list(parallel_dims(model, cluster, divided, longest=longest))
    if below_s is not None:
        dims, crowded = [x for x in dims if x.pp >= least_pp and x not in without], True
    while True:
        # 1. the members of the space, with their bounds
        members, impossible = list_members(model, samples, cluster, options, budget, dims)
        # 2. their prices, the least bound first
        priced, misfits = price_members(
            members, model, cluster, budget, tiers=tiers, progress=progress, below_s=below_s
        )
        refusals += impossible + misfits
        if priced or crowded or options.cp is not None:
            break
        # 3. packs that do not fit one device may fit several
        crowded = True
        dims = list(parallel_dims(model, cluster, divided, longest=longest, crowded=True))
    if not priced:
        raise _refused(refusals)
    fitting = {found.setting.dims for found in priced}
    fastest = dict[object, Priced]()  # of each series
    for found in priced:
        fastest.setdefault((found.setting.dims, found.options.sharding, found.options.schedule), found)
    return ChosenSetting(
        considered=tuple(fastest.values()),
        num_misfits=len({refusal.dims for refusal in refusals} - fitting),
        prefer=options.prefer,
    )


def _refused(refusals: Sequence[Refusal]) -> PartitionError:
    """Return why nothing fits: the reason of the division that divides the model most."""
    if not refusals:
        return PartitionError("no setting may be as fast as was asked for: ask for less")
    last = max(refusals, key=lambda x: x.dims.pp * x.dims.tp * x.dims.cp)
    reason = PartitionError(f"{format_degrees(last.dims)}: {last.error}")
    number = len({refusal.dims for refusal in refusals})
    if number == 1:
        return reason
    return PartitionError(f"none of {number} divisions of the devices fits; the one that divides most:\n{reason}")


# -- prices -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Known:
    """What the prices so far say of members that have none yet."""

    best_s: float = math.inf  # seconds a sample
    above: dict[object, float] = field(default_factory=dict)  # by series and degrees: least price over its bound
    recomputed: dict[object, list[tuple[float, float]]] = field(default_factory=dict)  # samples a pack, share

    def add(self, member: Member, priced: Priced) -> None:
        """Learn from one price."""
        seconds, degrees, schedule = 1 / priced.samples_per_s, member.series[:2], member.options.schedule
        self.best_s = min(self.best_s, seconds)
        # 1. how far it is above its bound, recompute aside
        bound_s = member.bound_s(again=priced.recompute_share)
        for key in (member.series, degrees) if schedule != "ZBVZeroBubble" else ():
            self.above[key] = min(self.above.get(key, math.inf), seconds / bound_s)
        # 2. what packs of this size recompute
        for key in (member.series, degrees) if schedule == "1F1B" else (member.series,):
            self.recomputed.setdefault(key, []).append((member.offer.samples_per_pack, priced.recompute_share))

    def expected_s(self, member: Member, slowest_over_mean: float = 1.0) -> float:
        """Return the member's bound, raised by what others show.

        What smaller packs of its series recompute, it recomputes as well; so it does what 1F1B recomputes, for no
        schedule holds less. It is also nearly as far above its bound as others of its series, or degrees.
        """
        degrees, size = member.series[:2], member.offer.samples_per_pack
        known = (*self.recomputed.get(member.series, ()), *self.recomputed.get(degrees, ()))
        again = max((share for own, share in known if own <= size), default=0.0)
        bound_s = member.bound_s(slowest_over_mean=slowest_over_mean, again=again)
        if member.options.schedule == "ZBVZeroBubble":  # its devices hold alike: what others exceed says nothing of it
            return bound_s
        ratios = (_SAME_SERIES * self.above.get(member.series, 0.0), _SAME_DEGREES * self.above.get(degrees, 0.0))
        return bound_s * max(1.0, *ratios)


def price_members(
    members: Sequence[Member],
    model: ModelSpec,
    cluster: ClusterSpec,
    budget: MemoryBudget,
    *,
    tiers: Tiers | None = None,
    progress: Callable[[int, int], None] | None = None,
    prune: bool = True,
    below_s: float | None = None,
) -> tuple[list[Priced], list[Refusal]]:
    """Price the members that may be taken: those that fit, the fastest first, and reasons of others.

    Priced are all that may be within 1 % of the fastest, and one of each kind; with `below_s`, seconds a sample, only
    the former, and none that takes more.
    """
    found, refusals = dict[int, Priced | None](), list[Refusal]()
    known, listed, plain_fits = _Known(), set[object](), dict[object, float]()

    def price(number: int) -> bool:
        """Return whether the member fits; its price is kept."""
        if number not in found:
            member = members[number]
            try:
                found[number] = one = price_member(member, model, cluster, budget, tiers)
                known.add(member, one)
            except PartitionError as error:
                found[number] = None
                refusals.append(Refusal(dims=member.profile.dims, error=error))
        return found[number] is not None

    series = _by_series(members)
    for number in _in_order(members, series):
        member, own = members[number], series[members[number].series]
        if prune:
            # 1. packs that are larger than others that did not fit; 1F1B holds least
            if number not in own or member.offer.samples_per_pack > plain_fits.get(member.series[:2], math.inf):
                continue
            # 2. too slow, and not the first of its kind; more is known once its packs are made
            limit_s = known.best_s * (1 + EQUAL) if member.kind in listed or below_s is not None else math.inf
            limit_s = min(limit_s, math.inf if below_s is None else below_s)
            if known.expected_s(member) > limit_s:
                continue
            if known.expected_s(member, member.packs.slowest_over_mean) > limit_s:
                continue
        if progress is not None:
            progress(len(found), len(members))
        if price(number):
            listed.add(member.kind)
        elif prune:  # the largest packs of the series that fit, by bisection
            del own[: bisect_left(own, True, lo=own.index(number) + 1, key=price)]
            if member.options.schedule == "1F1B" and own:
                plain_fits[member.series[:2]] = members[own[0]].offer.samples_per_pack
    priced = [x for x in found.values() if x is not None]
    priced.sort(key=lambda x: -x.samples_per_s)  # stable: of equals the one of the lower bound
    return priced, refusals


def _by_series(members: Sequence[Member]) -> dict[object, list[int]]:
    """Return the numbers of each series, the largest packs first."""
    series = dict[object, list[int]]()
    for number in sorted(range(len(members)), key=lambda i: -members[i].offer.samples_per_pack):
        series.setdefault(members[number].series, []).append(number)
    return series


def _in_order(members: Sequence[Member], series: Mapping[object, Sequence[int]]) -> list[int]:
    """Return the order in which members are priced.

    Plain schedules come first, by their bounds: they say how far members of the same degrees are above theirs. Then
    the others, of each series the smallest packs first, which say what larger ones recompute at least.
    """
    bounds_s = [member.bound_s() for member in members]
    # a series is tried whole, where its least bound stands
    least_s = {name: min(bounds_s[i] for i in own) for name, own in series.items()}

    def place(i: int) -> tuple[float, ...]:
        if members[i].options.schedule == "1F1B":
            return 0, bounds_s[i]
        return 1, least_s[members[i].series], members[i].offer.samples_per_pack

    return sorted(range(len(members)), key=place)


def price_member(
    member: Member, model: ModelSpec, cluster: ClusterSpec, budget: MemoryBudget, tiers: Tiers | None
) -> Priced:
    """The exact split of the member's packs, simulated; `PartitionError` where they do not fit."""
    case = tried_case(member, model, cluster, budget)
    own = with_tiers(member.profile, model, tiers)
    problem = case.problem if own is member.profile else replace(case.problem, profile=own)
    split = split_stages(problem)
    # what it recomputes, which larger packs of its series do at least, and its steps
    again_s, all_s = sum(split.recompute_s), sum(split.forward_s) + sum(split.backward_s)
    step_s = float(steps_of(case.work, case.schedule.table, split.stages, problem, cluster).mean())
    return Priced(
        setting=case.setting,
        options=member.options,
        step_s=step_s,
        samples_per_s=member.packs.samples_per_step / step_s,
        peak_bytes=split.peak_bytes,
        recompute_share=again_s / (all_s - again_s),
    )


def tried_case(member: Member, model: ModelSpec, cluster: ClusterSpec, budget: MemoryBudget) -> Case:
    """The member as a case of the tried steps alone; memory as in the whole epoch."""
    packs = member.packs
    return make_case(
        model,
        packs.samples,
        cluster,
        member.options,
        budget,
        Setting(
            dims=member.profile.dims,
            max_patches=packs.limits[0],
            max_tokens=packs.limits[1],
            num_microbatches=packs.num_microbatches,
            profile=member.profile,
        ),
        packs.packed,
        samples_work=packs.samples_work,
        extremes=packs.extremes,
    )
