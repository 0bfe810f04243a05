"""Advice: what makes a plan fit where nothing does, what would tip a tie, and what grids of the tower would change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.balance.images import tower_seconds
from trimtab.errors import PartitionError, PlanError
from trimtab.lora import Lora
from trimtab.partition.schedules import microbatch_unit
from trimtab.partition.stages import split_stages
from trimtab.plan.decide.apart import bubble_bounds_s
from trimtab.plan.decide.case import MemoryBudget
from trimtab.plan.decide.groups import over_tp
from trimtab.plan.decide.members import Member, list_members
from trimtab.plan.decide.search import choose_setting, price_member, tried_case
from trimtab.plan.decide.setting import CHOICE_ERROR, ChosenSetting, Priced, parallel_dims
from trimtab.plan.decide.sharing import undivided_tower
from trimtab.plan.decide.towers import (
    MUST_GAIN,
    SharedSplit,
    VisionChosen,
    label_of,
    least_epoch_s,
    pass_terms,
    work_of,
)
from trimtab.plan.decide.work import IMAGE_TERMS, Lanes, select_rows
from trimtab.plan.options import PlanOptions
from trimtab.plan.plan import FormEstimate, TipEstimate
from trimtab.specs import ClusterSpec, ModelSpec, SampleTable
from trimtab.units import GIB, format_bytes, format_degrees, format_number, format_seconds, round_digits

_MOST_SAMPLES = 512  # of the data that changes are tried on; the largest are among them
_MOST_TIED = 3
_MOST_MEMBERS = 24  # settings of a change that are tried, those of the smallest packs and most divided first


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a plan that does not fit."""

    said: str  # as it is written on the command line
    options: PlanOptions
    cluster: ClusterSpec
    samples: SampleTable


def explain_misfit(
    model: ModelSpec, samples: SampleTable, cluster: ClusterSpec, options: PlanOptions, budget: MemoryBudget
) -> str:
    """The nearest setting, and each single change that makes something fit, the cheapest first; all were tried."""
    samples = _largest_part(samples)
    # the bytes of every setting, were there room: none where something else than memory rules them out
    nearest = _nearest(_members(model, samples, cluster, options, replace(budget, fill_bytes=2.0**62)), model, cluster)
    if nearest is None:
        return ""
    member, needed = nearest
    said = (
        f"The nearest is {format_degrees(member.profile.dims)}, ZeRO-{member.options.sharding}: with full recompute "
        f"its fullest device needs {format_bytes(needed)}, of {format_bytes(budget.fill_bytes)} that may be filled. "
    )
    fitting = [x.said for x in possible_changes(samples, cluster, options) if _fits(x, model, budget)]
    if fitting:
        return f"{said}Each of these makes a plan fit, the cheapest first: {'; '.join(fitting)}."
    return f"{said}No single change that was tried makes a plan fit: take several, or a smaller model."


def possible_changes(samples: SampleTable, cluster: ClusterSpec, options: PlanOptions) -> Iterator[Change]:
    """Yield changes to try, those that cost least first; none that the target of the options does not have."""

    def change(said: str, **fields: object) -> Change:
        changed = replace(options, **fields)  # type: ignore[arg-type]  # fields by name
        return Change(said=said, options=changed, cluster=cluster, samples=samples)

    is_narrowed = bool(options.zero_stages or options.schedules or options.tp_degrees)  # by a framework
    # what was closed is opened: nothing of the run changes
    if options.zero_stage in (0, 1, 2) and not is_narrowed:
        yield change("--zero-stage 3", zero_stage=3)
    if options.recompute == "none":
        yield change("--recompute auto", recompute="auto")
    given = {name: getattr(options, name) for name in ("dp", "pp", "tp") if getattr(options, name) is not None}
    if given:
        yield change(f"leave {', '.join(f'--{name}' for name in given)} open", **dict.fromkeys(given))
    if options.max_tokens is not None or options.max_patches is not None or options.num_microbatches is not None:
        yield change(
            "leave the limits and the number of packs open",
            **dict.fromkeys(("max_patches", "max_tokens", "num_microbatches")),
        )
    # another optimizer, adapters, smaller images: the training changes
    if options.optimizer == "adamw" and options.lora is None and not is_narrowed:
        yield change("--set optimizer=adamw_8bit", optimizer="adamw_8bit")
    if not is_narrowed and "language" not in options.frozen_towers:
        if options.lora is None:
            yield change("--lora r=16", lora=Lora(r=16))
        if options.lora is None or options.lora.bits == 16:
            lora = replace(options.lora or Lora(r=16), bits=4)
            yield change(f"--lora r={lora.r},bits=4", lora=lora)
    if samples.num_patches.any():
        yield Change(said="images of half the size", options=options, cluster=cluster, samples=_smaller(samples))
    # more devices
    for times in (2, 4):
        nodes = replace(cluster, num_nodes=cluster.num_nodes * times)
        more = replace(options, dp=None if options.dp is None else options.dp * times)
        yield Change(said=f"{nodes.num_devices} devices", options=more, cluster=nodes, samples=samples)


def _members(
    model: ModelSpec, samples: SampleTable, cluster: ClusterSpec, options: PlanOptions, budget: MemoryBudget
) -> list[Member]:
    """Return the member of each series with the smallest packs; those that divide the model most come first."""
    if not options.fills_packs and options.global_batch is not None:
        options = replace(options, global_batch=min(options.global_batch, len(samples)))
    try:
        dims = list(parallel_dims(model, cluster, options, longest=int(samples.num_tokens.max())))
        members, _ = list_members(model, samples, cluster, options, budget, dims)
    except PlanError:
        return []
    # of each series the smallest packs: if they do not fit, none does
    smallest = {x.series: x for x in sorted(members, key=lambda x: -x.offer.samples_per_pack)}
    found = [x for x in smallest.values() if x.options.schedule in ("1F1B", options.schedule)]
    found.sort(key=lambda x: (-x.options.sharding, -x.profile.dims.pp * x.profile.dims.tp * x.profile.dims.cp))
    return found[:_MOST_MEMBERS]


def _nearest(members: Sequence[Member], model: ModelSpec, cluster: ClusterSpec) -> tuple[Member, float] | None:
    """The member that needs least on its fullest device when all recomputes, and how much."""
    found = list[tuple[Member, float]]()
    for member in members:
        case = tried_case(member, model, cluster, MemoryBudget.of(cluster, member.options))
        try:
            split = split_stages(replace(case.problem, memory_bytes=2.0**62, recompute="full"))
        except PartitionError:
            continue
        found.append((member, split.peak_bytes))
    return min(found, key=lambda x: x[1], default=None)


def _fits(change: Change, model: ModelSpec, budget: MemoryBudget) -> bool:
    for member in _members(model, change.samples, change.cluster, change.options, budget):
        try:
            price_member(member, model, change.cluster, budget, None)
        except PartitionError:
            continue
        return True
    return False


def _largest_part(samples: SampleTable) -> SampleTable:
    """Return up to 512 samples, those of most patches and tokens among them."""
    # what decides memory, and a picture of the rest
    half = _MOST_SAMPLES // 4
    rows = np.unique(
        np.concatenate(
            [
                np.argsort(-samples.num_patches, kind="stable")[:half],
                np.argsort(-samples.num_tokens, kind="stable")[:half],
                np.linspace(0, len(samples) - 1, num=min(len(samples), _MOST_SAMPLES // 2)).astype(np.int64),
            ]
        )
    )
    return select_rows(samples, rows)


def _smaller(samples: SampleTable) -> SampleTable:
    """Put half as many patches in every image, and as many fewer tokens as they make."""
    half = samples.num_patches // 2
    return replace(
        samples,
        num_patches=half,
        patches_sq=samples.patches_sq // 4,
        patches_windowed=samples.patches_windowed // 2,
        image_patches=None if samples.image_patches is None else samples.image_patches // 2,
        num_tokens=np.maximum(1, samples.num_tokens - half // 4),
    )


# -- ties -------------------------------------------------------------------------------------------------------------


def tied_settings(chosen: ChosenSetting) -> tuple[Priced, ...]:
    """The setting that is taken, and up to two others that divide the devices otherwise and are as fast by 5 %."""
    best, found = chosen.best, [chosen.best]
    for other in chosen.considered:
        is_near = abs(other.samples_per_s / best.samples_per_s - 1) <= CHOICE_ERROR
        if is_near and all(other.setting.dims != x.setting.dims for x in found):
            found.append(other)
    return tuple(found[:_MOST_TIED])


def find_tips(
    model: ModelSpec, samples: SampleTable, cluster: ClusterSpec, options: PlanOptions, tied: Sequence[Priced]
) -> tuple[TipEstimate, ...]:
    """Return which of the tied settings is the fastest where something is not as it was taken to be."""
    # 1. what may be otherwise: kernels, network, batch
    kernels = "unfused kernels" if options.fused_kernels else "fused kernels"
    slower = replace(cluster, node_link_bytes_per_s=cluster.node_link_bytes_per_s / 2)
    others = []
    if options.profile is None:  # what was measured has the kernels that it has
        others.append((kernels, cluster, replace(options, fused_kernels=not options.fused_kernels)))
    if cluster.num_nodes > 1:
        others.append(("half the network", slower, options))
    if not options.fills_packs and options.global_batch is not None:
        for said, batch in (
            ("half the batch", options.global_batch // 2),
            ("twice the batch", 2 * options.global_batch),
        ):
            if 1 <= batch <= len(samples):
                others.append((said, cluster, replace(options, global_batch=batch)))
    # 2. the tied settings again under each, in packs of the same size: which is ahead, and by how much
    found = []
    for said, there, changed in others:
        speeds = dict[str, float]()
        for setting in tied:
            speed = _speed_elsewhere(model, samples, there, changed, setting)
            if speed is not None:
                speeds[setting.estimate.label] = speed
        if speeds:
            label, *rest = sorted(speeds, key=lambda x: -speeds[x])
            ahead = speeds[label] / speeds[rest[0]] - 1 if rest else 0.0
            found.append(TipEstimate(changed=said, fastest=label, ahead=round(ahead, 4)))
    return tuple(found)


def _speed_elsewhere(
    model: ModelSpec, samples: SampleTable, cluster: ClusterSpec, options: PlanOptions, priced: Priced
) -> float | None:
    """Return samples a second of the setting on that cluster, in packs as now or half as large; None: none fits."""
    dims, own = priced.setting.dims, priced.options
    fixed = {name: getattr(dims, name) for name in ("dp", "pp", "tp", "cp", "ep", "etp")}
    plain = {"zero_stage": own.zero_stage, "schedule": own.schedule, "num_chunks": own.num_chunks}
    larger = 1.0 if options.global_batch is None else options.global_batch / priced.samples_per_step
    count = priced.setting.num_microbatches * larger
    unit = microbatch_unit(own.schedule, dims.pp)
    for packs in (count, 2 * count):
        num_microbatches = max(1, round(packs / unit)) * unit
        asked = replace(options, num_microbatches=num_microbatches, **fixed, **plain)  # type: ignore[arg-type]
        try:
            return choose_setting(model, samples, cluster, asked, MemoryBudget.of(cluster, asked)).best.samples_per_s
        except (PartitionError, PlanError):
            continue
    return None


def describe_tie(tied: Sequence[Priced], tips: Sequence[TipEstimate]) -> tuple[str, ...]:
    """Return a sentence on what is undecided, and one on what would decide it; nothing where all is clear."""
    if len(tied) < 2:
        return ()
    taken, *others = (setting.estimate.label for setting in tied)
    said = [
        f"Tie: {taken} is taken; {' and '.join(others)} {'is' if len(others) == 1 else 'are'} within "
        f"{100 * CHOICE_ERROR:g} %, closer than predictions can tell."
    ]
    tipping = [f"{tip.changed} ({tip.fastest}, {100 * tip.ahead:.1f} % ahead)" for tip in tips if tip.fastest != taken]
    said.append(f"It would tip with {'; '.join(tipping)}." if tipping else "No change that was tried tips it.")
    return tuple(said)


# -- grids of the tower ----------------------------------------------------------------------------------------------


def vision_sentences(chosen: VisionChosen) -> tuple[str, ...]:
    """Say what was found of the tower's grids; nothing where nothing was asked for."""
    about = []
    if len(chosen.tried) > 1:
        said = [f"{label_of(x.case)} {format_seconds(x.epoch_s)}" for x in chosen.tried]
        about.append(f"Sharing the images was simulated over the whole data set: {', '.join(said)}.")
        about.append(describe_losses(chosen.tried[0]))
    elif chosen.least is not None:
        label, bound_s = chosen.least
        gain = chosen.tried[0].epoch_s / bound_s - 1
        about.append(
            f"No form of sharing the images was simulated: shared evenly {label}, the least bound, they would gain "
            f"{gain:.1%} of an epoch, and {MUST_GAIN - 1:.0%} is asked for. " + describe_losses(chosen.tried[0])
        )
    if chosen.ruled_out:
        about.append(f"Sharing the images was not possible everywhere: {'; '.join(chosen.ruled_out)}.")
    vision = chosen.best.case.vision
    if vision is not None and vision.estimate.sizes_known < 1:
        about.append(
            f"The sizes of single images are known for {vision.estimate.sizes_known:.1%} of the patches; in "
            "samples of three or more unlike images they are spread as log-normal sizes of such sums are: "
            "`trimtab size` records them."
        )
    if vision is not None and vision.decision.group == "replica":
        about.append(ABOUT_REPLICA)
    if vision is not None and vision.decision.group == "own":
        about.append(_about_own(chosen.best))
    if vision is not None and over_tp(vision.decision.group):
        tp = chosen.best.case.setting.dims.tp
        about.append(f"Each of {tp} tensor-parallel ranks holds vision tower and projector whole.")
    return tuple(about)


ABOUT_REPLICA = (
    "The tower is on every device of a replica and encodes before and after the pipeline. `trimtab train` runs it, at "
    "tp 1; LoongForge (--enable-full-hetero-dp) and MindSpeed-MM (--hetero-parallel) share whole micro-batches so, "
    "which is less even."
)


def _about_own(taken: SharedSplit) -> str:
    """Say which devices the tower has, and what each device of the run and of the cluster trains."""
    case = taken.case
    assert case.vision is not None
    dims, own, there = case.setting.dims, case.vision.decision.degree, case.cluster.num_devices
    decoder = dims.dp * dims.pp * dims.tp * dims.cp
    rate, used = len(case.packing.indices) / taken.epoch_s, decoder + own
    idle = f"; {there - used} are idle" if used < there else ""
    return (
        f"The tower is on {own} devices of its own, the decoder on {decoder} others{idle}: "
        f"{format_number(rate / used)} samples/s for each device in use, {format_number(rate / there)} for each of the "
        "cluster. Megatron-Bridge runs it (MegatronMIMO), and `trimtab train` with tp 1, where the tower has "
        f"{dims.dp} devices."
    )


def describe_losses(grid: SharedSplit) -> str:
    """Say what of the single grid's devices a grid of the tower's own could free, and what their bubbles could hold."""
    plain, dims = grid.case.without_vision(), grid.case.setting.dims
    images = plain.work[:, IMAGE_TERMS]
    cost = tower_seconds(plain.setting.profile)
    # device-seconds of an epoch: of the tower on all its devices, whole, and of everything
    tower = float(cost.of_images(images).sum()) * dims.tp * dims.cp
    once = float(tower_seconds(undivided_tower(plain)).of_images(images).sum())
    layers = plain.setting.profile.layers
    busy = (
        sum(float((plain.work @ (np.array(x.forward_s) + np.array(x.backward_s))).sum()) for x in layers)
        * dims.tp
        * dims.cp
    )
    devices_s = grid.epoch_s * dims.dp * dims.pp * dims.tp * dims.cp
    again, cut = tower * (1 - 1 / dims.cp), max(0.0, tower / dims.cp - once)
    return (
        f"Of the devices' time on one grid, {again / devices_s:.1%} encodes images again on other ranks of cp, "
        f"{cut / devices_s:.1%} is lost by cutting the tower over tp, and {max(0.0, 1 - busy / devices_s):.1%} is "
        f"waiting, recompute and updates.{_about_bubbles(grid)}"
    )


def _about_bubbles(grid: SharedSplit) -> str:
    """Say what encoding while the pipeline waits could reach; nothing where it never waits, or holds no tower."""
    if grid.case.setting.dims.pp == 1 or grid.case.vision is not None:
        return ""
    as_it_is, ordered = bubble_bounds_s(grid.case, grid.found.split.stages)
    text = f", {format_seconds(ordered)} with packs of text alone first and last" if ordered < 0.999 * as_it_is else ""
    return f" Encoded in its bubbles, which nothing does, an epoch would take {format_seconds(as_it_is)} or more{text}."


_HOSTS = {
    "one-grid": "all",
    "replica": "trimtab train",
    "own": "megatron-bridge, trimtab train",
    "cp": "megatron-bridge, trimtab.vision",
    "dp": "trimtab train, trimtab.vision",
}


def form_estimates(chosen: VisionChosen) -> tuple[FormEstimate, ...]:
    """Return the fastest that was found of each form, the single grid first; none where no other was simulated."""
    fastest = dict[str, SharedSplit]()
    for one in (*chosen.tried, *chosen.elsewhere):
        name = "one-grid" if one.case.vision is None else one.case.vision.decision.group
        if name not in fastest or one.epoch_s < fastest[name].epoch_s:
            fastest[name] = one
    return tuple(_form_estimate(name, one) for name, one in fastest.items()) if len(fastest) > 1 else ()


def _form_estimate(name: str, one: SharedSplit) -> FormEstimate:
    plain, dims = one.case.without_vision(), one.case.setting.dims
    whole = undivided_tower(plain)
    # device-seconds of each layer once, the tower as if one device held it whole: what no form can save
    language = [x for x in one.case.setting.profile.layers if x.tower == "language"]
    once_s = float(tower_seconds(whole).of_images(plain.work[:, IMAGE_TERMS]).sum())
    once_s += float((plain.work @ pass_terms(language)).sum()) * dims.tp * dims.cp
    lanes = one.case.apart if isinstance(one.case.apart, Lanes) else None
    own = 0 if lanes is None else lanes.num_devices
    devices = dims.dp * dims.pp * dims.tp * dims.cp + own
    group = None if one.case.vision is None else one.case.vision.decision.group
    terms = pass_terms([x for x in whole.layers if x.tower != "language"])
    bound_s = least_epoch_s(one.case.setting, one.case.options, group, work_of(plain), terms, own)
    tower = None if lanes is None else lanes.memory(one.case.problem).total_bytes
    return FormEstimate(
        form=name,
        setting=f"{format_degrees(dims)}, {label_of(one.case)}",
        devices=devices,
        epoch_s=round_digits(one.epoch_s),
        bound_s=round_digits(bound_s),
        busy_share=round(once_s / (devices * one.epoch_s), 4),
        peak_gib=round_digits(one.found.split.peak_bytes / GIB),
        tower_gib=None if tower is None else round_digits(tower / GIB),
        hosts=_HOSTS.get(name, "trimtab.vision"),
    )
