"""Which grid a tower has: the decoder's, shared among ranks of it, every device of a replica, or devices of its own.

The choice is the shortest simulated epoch over the whole data set. A tower on the whole replica frees the pipeline of
it, so that other degrees may be best: they are searched again for a model of the decoder alone.

Left open, a form has to gain 2 % over the best single grid, whose cuts may lie inside the tower. Bounds come first: a
form at a setting is simulated only where an even share of the images, waiting for nothing, would gain that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from trimtab.errors import PartitionError, PlanError, join_problems
from trimtab.options import VisionGroup
from trimtab.plan.decide.case import Case, MemoryBudget, Setting
from trimtab.plan.decide.groups import (
    decision_problems,
    exchange_of,
    group_degree,
    groups_of,
    reduction_of,
)
from trimtab.plan.decide.members import least_step_s
from trimtab.plan.decide.search import choose_setting
from trimtab.plan.decide.setting import Priced, profile_setting
from trimtab.plan.decide.sharing import share_vision
from trimtab.plan.decide.stages import SplitChoice, choose_split, epoch_s
from trimtab.plan.decide.work import MICROBATCHES, PATCHES, Phases, pad_documents
from trimtab.plan.options import PlanOptions, VisionChoice
from trimtab.plan.plan import ScheduleDecision, VisionDecision
from trimtab.specs import ClusterSpec, FloatArray, LayerCost, ModelSpec, ParallelDims, SampleTable
from trimtab.units import format_bytes

_GOOD_ENOUGH = 1.005  # of the shortest epoch: then the smaller pool
MUST_GAIN = 1.02
"""Asked of every form over the best single grid: ranks that share wait for each other at every call, which no simulated
step does, and a plan that shares is one that fewer can run."""
_SEARCH_GAINS = 1.05  # what the search on sampled steps may gain over the exact split
_MAX_POOLED = 8  # where the pool is left open: what larger ones gain is little, what they hold is not


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSplit:
    """A case whose images are shared or not, and its split."""

    case: Case
    found: SplitChoice
    epoch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionChosen:
    """What was chosen, and what else was tried."""

    best: SharedSplit
    tried: tuple[SharedSplit, ...]  # the one without sharing first
    ruled_out: tuple[str, ...] = ()  # why others were not tried, or do not fit
    least: tuple[str, float] | None = None  # of the forms whose bound gains too little: the least one, its epoch
    elsewhere: tuple[SharedSplit, ...] = ()  # at other settings than the best single grid's


def choose_vision(
    case: Case, found: SplitChoice, *, replica: bool = True, one_grid_s: float = math.inf
) -> VisionChosen:
    """Return `case` with its images shared as `case.options.vision` asks; `found` is its split without that.

    Where the group is left open, sharing must shorten the epoch by 2 %: of this case, and of the best single grid so
    far, which takes `one_grid_s`. Of pools of 1, 2, ... 8 micro-batches that divide a step, the smallest within 0.5 %
    of the shortest epoch; recompute is decided again for each, so that a pool whose activations cost more recompute
    than it saves is not taken. Raises `PlanError` where the plan has no such group, `PartitionError` where nothing
    fits. `replica`: whether a tower on the whole replica can run.
    """
    # the single grid, which every form must beat
    plain = SharedSplit(case=case, found=found, epoch_s=epoch_s(case, found.split.stages))
    choice = case.options.vision
    if choice.group == "one-grid":
        return VisionChosen(best=plain, tried=(plain,))
    is_open = choice.group in ("auto", "shared")
    # 1. every group that is possible; where it is left open, those that may gain enough
    groups = groups_of(choice.group)
    if not replica:
        if choice.group == "replica":
            raise PlanError(
                "vision data parallel over a replica is no setting of this framework: give --for trimtab, leave --for "
                "out, or choose tp, cp, tp_cp or dp"
            )
        groups = tuple(group for group in groups if group != "replica")
    if is_open:  # plans with a degree of 1 are the rule: only tp and dp say why they were not tried
        groups = tuple(x for x in groups if x in ("tp", "dp") or group_degree(x, case.setting.dims) > 1)
    problem = _lacking(case)
    if problem is not None and not is_open:
        raise PlanError(problem)
    tried, misfits, ruled_out = [plain], list[str](), [] if problem is None else [problem]
    limit_s = min(plain.epoch_s, one_grid_s) / MUST_GAIN if is_open else math.inf
    least: tuple[str, float] | None = None
    whole = whole_tower(case.model, case.cluster, case.options) if is_open and problem is None else np.zeros(0)
    for group in groups if problem is None else ():
        decisions, problems = _decisions(case, group)
        if problems and not decisions:
            if not is_open:
                raise PlanError(join_problems(problems))
            ruled_out += problems
            continue
        if is_open:
            bound_s = least_epoch_s(case.setting, case.options, group, work_of(case), whole)
            if bound_s > limit_s:
                own = f"over {group} {group_degree(group, case.setting.dims)}", bound_s
                least = min(least or own, own, key=lambda x: x[1])
                continue
        # 2. each way, with stages and recompute of its own; searched is only the best of those left open
        for decision in decisions:
            shared = share_vision(case, decision)
            try:
                split = choose_split(shared, search=not is_open)
                _refuse_moment(shared, split)
            except PartitionError as error:
                misfits.append(f"{label_of(shared)}: {error}")
                ruled_out.append(f"{label_of(shared)} does not fit the memory, or leaves too few cuts")
                continue
            tried.append(SharedSplit(case=shared, found=split, epoch_s=epoch_s(shared, split.split.stages)))
    # what was asked for and cannot be is refused; of what was open the best stands
    if not is_open and len(tried) == 1:
        raise PartitionError(join_problems(misfits))
    tried, best = _take(tried, limit_s, is_open=is_open)
    return VisionChosen(best=best, tried=tuple(tried), ruled_out=tuple(ruled_out), least=least)


def _take(tried: list[SharedSplit], limit_s: float, *, is_open: bool) -> tuple[list[SharedSplit], SharedSplit]:
    """The shortest epoch, or the single grid, `tried`'s first, where no form takes less than `limit_s`.

    Of forms left open the best is searched, if it may gain enough by what the search gained on the single grid.
    """
    # the shortest, or a smaller pool that is nearly as short: it holds less
    plain, *forms = tried
    shortest = min((x.epoch_s for x in forms), default=math.inf)
    best = next((x for x in forms if x.epoch_s <= _GOOD_ENOUGH * shortest), plain)
    if not is_open or best is plain:
        return tried, best
    search = plain.found.search
    gains = _SEARCH_GAINS if search is None else _GOOD_ENOUGH * search.start_makespan_s / search.makespan_s
    if best.epoch_s <= limit_s * gains:
        split = choose_split(best.case)
        searched = replace(best, found=split, epoch_s=epoch_s(best.case, split.split.stages))
        tried, best = [searched if x is best else x for x in tried], searched
    return tried, best if best.epoch_s <= limit_s else plain


def least_epoch_s(
    setting: Setting, options: PlanOptions, group: VisionGroup | None, work: RankWork, whole: FloatArray, own: int = 0
) -> float:
    """Return seconds that no epoch of this setting takes less, its images shared over `group`; None: one grid.

    `whole`: of an undivided tower, as `whole_tower` gives it; `own`: devices of the tower's own, which are no faster
    than their share of all images, nor is the pipeline without it.

    Costs are linear in the work, so with equal packs and even shares that wait for nothing no step is longer. A call's
    constant is counted once for the largest pool.
    """
    profile, dims, M = setting.profile, setting.dims, setting.num_microbatches
    # the mean pack, and the share of a rank in the images of one call
    pack = work.of_epoch / (work.num_steps * M)
    pack[MICROBATCHES] = 1.0
    share = pack / (1 if group in (None, "dp") else group_degree(group, dims))
    pooled = 1 if group is None or dims.pp > 1 else min(M, _MAX_POOLED)
    share[MICROBATCHES] = 1.0 / (M if group == "replica" else pooled)
    # what runs in the pipeline, and what before and after it
    divided = pass_terms([x for x in profile.layers if x.tower != "language"])
    language_s = float(pack @ pass_terms([x for x in profile.layers if x.tower == "language"]))
    tower_s = float(share @ (divided if group in (None, "dp", "cp") else whole))
    inside_s = language_s if group in ("replica", "own") else language_s + tower_s
    step_s = least_step_s(inside_s, M, dims.pp, options) + (M * tower_s if group == "replica" else 0.0)
    update_s = sum(layer.step_s for layer in profile.layers if layer.tower == "language") / dims.pp
    epoch_s = work.num_steps * (step_s + update_s)
    if group == "own":
        images = np.where(np.arange(len(whole)) == MICROBATCHES, 0.0, work.of_epoch)
        return max(epoch_s, float(images @ whole) * dims.dp / own)
    return epoch_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankWork:
    """What a mean data-parallel rank computes of an epoch, images not shared."""

    of_epoch: FloatArray  # (len(WORK_TERMS),)
    num_steps: float


def work_of(case: Case) -> RankWork:
    steps, dp, _ = case.schedule.table.shape
    packs = case.schedule.table
    return RankWork(of_epoch=case.work[packs[packs >= 0]].sum(axis=0) / dp, num_steps=float(steps))


def rank_work(model: ModelSpec, samples: SampleTable, priced: Priced) -> RankWork:
    """Return the same before its packs are made; `samples` is the epoch's table."""
    dims = priced.setting.dims
    work = pad_documents(samples, dims).work(token_window=model.token_window).sum(axis=0)
    return RankWork(of_epoch=work / dims.dp, num_steps=len(samples) / priced.samples_per_step)


def whole_tower(model: ModelSpec, cluster: ClusterSpec, options: PlanOptions) -> FloatArray:
    """Return (len(WORK_TERMS),) seconds of forward and backward of vision tower and projector on one device."""
    profile = profile_setting(model, cluster, options, ParallelDims(dp=cluster.num_devices))
    return pass_terms([x for x in profile.layers if x.tower != "language"])


def pass_terms(layers: Sequence[LayerCost]) -> FloatArray:
    return np.asarray(np.sum([[x.forward_s, x.backward_s] for x in layers], axis=(0, 1)), np.float64)


def _refuse_moment(case: Case, found: SplitChoice) -> None:
    """Raise `PartitionError` where the tower does not fit while it computes, with the state of the stages held.

    Or where it does not fit its own devices.
    """
    apart, problem = case.apart, case.problem
    if apart is None:
        return
    if isinstance(apart, Phases):
        held = max(x.state_bytes for x in found.split.memory) + problem.overhead_bytes + apart.moment_bytes
        what, cure = "a step's share of the images", "give fewer micro-batches a step"
    else:
        held = apart.memory(problem).total_bytes
        what, cure = "the tower on devices of its own", "give smaller packs"
    if held > problem.memory_bytes:
        raise PartitionError(
            f"{what} needs {format_bytes(held)} of a device that may fill {format_bytes(problem.memory_bytes)}: {cure}"
        )


def _lacking(case: Case) -> str | None:
    if not case.model.indices("vision") or not case.model.indices("projector"):
        return f"{case.model.name} has no tower and projector to share images: leave vision data parallel out"
    if not case.work[:, PATCHES].any():
        return "vision data parallel was asked for, and the data holds no image to share: leave it out"
    return None


def _decisions(case: Case, group: VisionGroup) -> tuple[list[VisionDecision], list[str]]:
    """Return what to try over this group, and why the first that cannot be cannot."""
    choice, dims = case.options.vision, case.setting.dims
    assert case.options.schedule != "auto", "it was chosen before"
    schedule = ScheduleDecision(
        name=case.options.schedule,
        num_microbatches=case.setting.num_microbatches,
        num_chunks=case.options.num_chunks,
    )
    # ways of this group: pools of micro-batches, or recompute of a tower apart
    poolings = [choice.pooling] if choice.pooling is not None else list(range(1, _MAX_POOLED + 1))
    ways: list[tuple[int, Literal["full"] | None]] = [(pooling, None) for pooling in poolings]
    if group == "replica":  # one call a step; its activations are kept, or not
        kept = case.options.recompute
        ways = [(schedule.num_microbatches, way) for way in (None, "full") if kept in ("auto", way or "none")]
    # those that a plan can have; why the first cannot, where none can
    decisions, first_problems = list[VisionDecision](), list[str]()
    for pooling, recompute in ways:
        decision = _decision(case, group, group_degree(group, dims), pooling, recompute)
        problems = list(decision_problems(decision, dims, schedule, case.model))
        if problems:
            first_problems = first_problems or problems
        else:
            decisions.append(decision)
    return decisions, first_problems


def _decision(
    case: Case, group: VisionGroup, degree: int, pooling: int, recompute: Literal["full"] | None
) -> VisionDecision:
    return VisionDecision(
        group=group,
        degree=degree,
        exchange=exchange_of(group),
        pooling=pooling,
        rule=case.options.vision.rule,
        objective=case.options.vision.objective,
        reduction=reduction_of(group),
        recompute=recompute,
    )


def label_of(case: Case) -> str:
    if case.vision is None:
        return "not shared"
    decision = case.vision.decision
    pooled = f", {decision.pooling} micro-batches a call" if decision.pooling > 1 else ""
    if decision.group in ("replica", "own"):
        pooled = ", its forward again" if decision.recompute else ""
    if decision.group == "own":
        return f"on {decision.degree} devices of its own{pooled}"
    return f"over {decision.group} {decision.degree}{pooled}"


# The decoder's degrees, where it has no tower in its pipeline.


_MOST_APART = 4  # settings of the decoder alone that are simulated with the tower on their replicas


def decoder_only(model: ModelSpec) -> ModelSpec:
    """The model without its towers: what a pipeline runs whose features come from elsewhere."""
    kept = model.indices("language")
    place = {old: new for new, old in enumerate(kept)}
    cuts = frozenset(place[cut] for cut in model.forbidden_cuts if place.get(cut, 0) > 0)
    return replace(model, layers=tuple(model.layers[i] for i in kept), forbidden_cuts=cuts, joined_cuts=None)


def settings_apart(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    *,
    below_s: float,
    without: Collection[ParallelDims] = (),
) -> Iterator[tuple[float, Priced]]:
    """The fastest pipelines of the decoder alone, with the whole model's costs; none where its costs were measured.

    Each comes with the least seconds a sample that it may take with the tower's even share: fewer than `below_s`.
    Patches are limited to what any pack of the tokens' limit may hold, for they no longer fill a stage. Degrees in
    `without` are left out.
    """
    if options.profile is not None or options.pp == 1:
        return
    # the tower on all devices, whose seconds no pipeline without it has
    tower_s, all_s = _seconds_a_sample(model, samples, cluster, options)
    if all_s > below_s:  # no division of the decoder takes fewer device-seconds than none
        return
    alone = replace(options, max_patches=None)
    try:
        chosen = choose_setting(
            decoder_only(model),
            _without_images(samples),
            cluster,
            alone,
            budget,
            below_s=below_s - tower_s,
            least_pp=2,
            without=without,
        )
    except PartitionError:
        return
    pipelines = [x for x in chosen.considered if x.setting.dims.pp > 1]
    for priced in pipelines[:_MOST_APART]:
        seconds = 1 / priced.samples_per_s / _SEARCH_GAINS + tower_s
        if seconds > below_s:
            break
        yield seconds, _of_whole_model(priced, model, samples, cluster, options)


def _seconds_a_sample(
    model: ModelSpec, samples: SampleTable, cluster: ClusterSpec, options: PlanOptions
) -> tuple[float, float]:
    """Return the least seconds a sample of the tower, and of the model, undivided and on all devices."""
    whole = profile_setting(model, cluster, options, ParallelDims(dp=cluster.num_devices))
    work = samples.work(token_window=model.token_window).sum(axis=0) / len(samples)
    work[MICROBATCHES] = 0.0
    tower = pass_terms([x for x in whole.layers if x.tower != "language"])
    return float(work @ tower) / cluster.num_devices, float(work @ pass_terms(whole.layers)) / cluster.num_devices


def _without_images(samples: SampleTable) -> SampleTable:
    none = np.zeros_like(samples.num_patches)
    return replace(
        samples, num_images=none, num_patches=none, patches_sq=none, patches_windowed=none, image_patches=None
    )


def _of_whole_model(
    priced: Priced, model: ModelSpec, samples: SampleTable, cluster: ClusterSpec, options: PlanOptions
) -> Priced:
    """Return a setting of the decoder with the whole model's costs, and patches that its packs may hold."""
    per_token = float((samples.num_patches / np.maximum(samples.num_tokens, 1)).max())
    most = options.max_patches or max(int(samples.num_patches.max()), round(per_token * priced.setting.max_tokens))
    its = replace(priced.options, max_patches=options.max_patches, vision=options.vision)
    profile = profile_setting(model, cluster, its, priced.setting.dims)
    return replace(priced, options=its, setting=replace(priced.setting, max_patches=most, profile=profile))


# Devices of the tower's own.


_MOST_PARTS, _MOST_OWN = 4, 3  # divisions of the devices among tower and decoder; settings of the decoder on each


def settings_own(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    *,
    below_s: float | None = None,
) -> Iterator[tuple[float, Priced, int]]:
    """The fastest settings of the decoder alone on a part of the devices, and how many others the tower takes.

    Each comes with seconds a sample that it is expected to take at least; with `below_s` it is the fastest of the
    first part, if that may take fewer.

    Parts are whole nodes, or as many devices of every node: those nearest to the tower's share of all seconds. Degrees
    that were asked for are the decoder's. Raises `PlanError` for what no tower on devices of its own runs with.
    """
    if options.schedule not in ("auto", "1F1B") or options.zero_stage in (2, 3) or options.profile is not None:
        raise PlanError(
            "a tower on devices of its own runs 1F1B below ZeRO-2, priced by formula: give --schedule 1F1B and "
            "--zero-stage 1, and leave --profile out"
        )
    # 1. how many devices the tower is worth, and the decoder's own run
    tower_s, all_s = _seconds_a_sample(model, samples, cluster, options)
    if tower_s == 0.0 or (below_s is not None and all_s > below_s):
        return
    decoder, text, W = decoder_only(model), _without_images(samples), cluster.num_devices
    alone = replace(options, max_patches=None, schedule="1F1B", num_chunks=1, zero_stages=(1,), vision=VisionChoice())
    # 2. of each part the decoder's fastest; the tower takes as many of the rest as its lanes divide
    for part in _parts(cluster, options, own=W * tower_s / all_s)[: 1 if below_s else _MOST_PARTS]:
        own = W - part.num_devices
        least_s = max(tower_s / own, (all_s - tower_s) / part.num_devices) * W
        if below_s is not None and least_s > below_s:
            continue
        try:
            chosen = choose_setting(decoder, text, part, alone, budget, below_s=below_s)
        except (PartitionError, PlanError):  # nothing fits, or the degrees asked for do not divide these devices
            continue
        fitting = [x for x in chosen.considered if cluster.devices_per_node % x.setting.dims.tp == 0]
        for priced in fitting[: 1 if below_s else _MOST_OWN]:
            dp, most = priced.setting.dims.dp, min(own, options.vision.devices or own)
            num = next(x for x in range(most, 0, -1) if x % dp == 0 or dp % x == 0)
            if below_s is not None and options.tp == 1:  # one for each rank, which is all that `trimtab train` runs
                num = dp
            if num > most:
                continue
            seconds = max(1 / priced.samples_per_s / _SEARCH_GAINS, tower_s * W / num)
            yield seconds, _of_whole_model(priced, model, samples, cluster, options), num


def _parts(cluster: ClusterSpec, options: PlanOptions, *, own: float) -> list[ClusterSpec]:
    """Return parts of the devices for the decoder, those first that leave nearly `own` for the tower."""
    # every part of whole nodes, or alike on all nodes, that the degrees asked for fill
    nodes, per_node = range(1, cluster.num_nodes), range(1, cluster.devices_per_node)
    parts = [replace(cluster, num_nodes=x) for x in nodes] + [replace(cluster, devices_per_node=x) for x in per_node]
    degrees = (options.dp, options.pp, options.tp)
    asked = math.prod(x for x in (*degrees, options.cp) if x is not None)
    fitting = [x for x in parts if x.num_devices % asked == 0 and (None in degrees or x.num_devices == asked)]
    return sorted(fitting, key=lambda x: abs(math.log((cluster.num_devices - x.num_devices) / own)))


def split_own(case: Case, num_devices: int) -> tuple[SharedSplit, ...]:
    """The case with its tower on so many devices of its own, its activations kept or not.

    The splits are the exact ones, not searched. Raises `PartitionError` where nothing fits.
    """
    problem = _lacking(case)
    if problem is not None:
        raise PlanError(problem)
    # activations kept, or the forward again
    found, misfit = list[SharedSplit](), PartitionError("no recompute was asked for that a tower apart has")
    kept = case.options.recompute
    for recompute in cast(tuple[Literal["full"] | None, ...], (None, "full")):
        if kept not in ("auto", recompute or "none"):
            continue
        decision = _decision(case, "own", num_devices, 1, recompute)
        shared = share_vision(case, decision)
        try:
            split = choose_split(shared, search=False)
            _refuse_moment(shared, split)
        except PartitionError as error:
            misfit = error
            continue
        found.append(SharedSplit(case=shared, found=split, epoch_s=epoch_s(shared, split.split.stages)))
    if not found:
        raise misfit
    return tuple(found)
