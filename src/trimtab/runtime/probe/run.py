"""OmniBal's memory steps on the device itself (arXiv 2407.20761); read `probe`.

The paper: recompute everything and see what is left; switch some layers off and see what they take; set as many as fit.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from trimtab.errors import PartitionError, PlanError
from trimtab.options import RecomputedTier, Tower
from trimtab.partition.published import full_recompute
from trimtab.partition.schedules import splits_backward
from trimtab.partition.stages import recompute_stages
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.probed import (
    ABOUT_BYTES,
    DeviceProbe,
    KeptProbe,
    ProbedProfile,
    add_transient,
    freed_bytes,
    probed_profile,
    with_budget,
    with_profile,
)
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.file.reload import ReloadedPlan, reload_plan, replan
from trimtab.runtime.probe.trial import CURES, Bench, ProbeRun, frozen_heap, open_bench
from trimtab.runtime.ranks import process_group
from trimtab.runtime.training.settings import ProbeSettings
from trimtab.specs import Profile, RecomputeChoice, Stage
from trimtab.units import format_bytes

# OmniBal's first three memory steps: what full recompute leaves, and what one layer of each kind keeps more.


FULL = "everything recomputed"


def measure_full(bench: Bench) -> tuple[DeviceProbe, ...]:
    """Measure with everything recomputed what is left or missing."""
    stages = full_recompute(bench.case.setting.profile, bench.stages)
    found = list[DeviceProbe]()
    for pack in bench.batches:
        found += bench.run(FULL, stages, pack)
    fullest = max(found, key=lambda x: x.peak_bytes)
    missing = fullest.peak_bytes - bench.limit_bytes
    if missing > 0 and not splits_backward(bench.case.problem.schedule):  # there none may need less than full
        raise PlanError(
            f"with all recomputed device {fullest.device} needs {format_bytes(fullest.peak_bytes)}, {missing} bytes "
            f"more than {_budget_words(bench.case)}: {CURES}"
        )
    return tuple(found)


def measure_kinds(bench: Bench, full: Sequence[DeviceProbe]) -> Iterator[KeptProbe]:
    """Yield one run for each of a device's kinds of layers and each tier, on all devices at once: one layer keeps more.

    What is kept then differs from full recompute by micro-batches in flight x what the layer keeps more: exact. A
    device whose memory would not last, by the formulas, or whose pack asks nothing of the layer tells nothing.
    """
    profile = bench.case.setting.profile
    layout = bench.pipeline.layout
    before = {(x.device, x.pack): x for x in full}
    of_device = [_kinds_of(bench, layout.stages_of(device)) for device in range(layout.num_devices)]
    tiers = ("none", "selective") if bench.case.problem.recompute == "auto" else ("none",)
    for number in range(max(map(len, of_device))):
        for tier in tiers:
            for pack in bench.batches:
                layers = {
                    device: kinds[number]
                    for device, kinds in enumerate(of_device)
                    if number < len(kinds) and _can_keep(bench.case, before[device, pack], kinds[number], tier)
                }
                if not layers:
                    continue
                stages = tuple(
                    _move(stage, i, tier) if (i := layers.get(layout.device_of(stage.index))) is not None else stage
                    for stage in full_recompute(profile, bench.stages)
                )
                readings = bench.run(f"one layer of a kind on {tier}", stages, pack, whole=False)
                for device, i in layers.items():
                    reference, reading = before[device, pack], readings[device]
                    place = next(k for k, s in enumerate(layout.stages_of(device)) if _lies_in(bench.stages[s], i))
                    more, held = reading.kept_bytes - reference.kept_bytes, reference.in_flight[place]
                    if held > 0 and more > 0:
                        yield KeptProbe(layer=i, tier=tier, pack=pack, num_bytes=more / held)


def _can_keep(case: Case, full: DeviceProbe, layer: int, tier: str) -> bool:
    """Return whether the layer has the tier and its device's memory lasts by the formulas: else the probe ends."""
    cost = case.setting.profile.layers[layer]
    if cost.tier(tier) is None:
        return False
    more = max(full.in_flight) * freed_bytes(cost, tier, case.held_work[full.pack])
    return full.peak_bytes + more <= case.budget.total_bytes


def _kinds_of(bench: Bench, stages: Sequence[int]) -> list[int]:
    """The last layer of each group that can recompute."""
    layers = bench.case.setting.profile.layers
    held = [i for s in stages for i in range(bench.stages[s].start, bench.stages[s].stop)]
    return sorted({layers[i].group: i for i in held if layers[i].tier("full") is not None}.values())


def _lies_in(stage: Stage, layer: int) -> bool:
    return stage.start <= layer < stage.stop


def _move(stage: Stage, layer: int, tier: str) -> Stage:
    """The stage, all of which recomputes in full, with this layer on another tier, if it holds it."""
    if not _lies_in(stage, layer):
        return stage
    choices = [RecomputeChoice(tier=x.tier, layers=tuple(i for i in x.layers if i != layer)) for x in stage.recompute]
    moved = [RecomputeChoice(tier=how, layers=(layer,)) for how in get_args(RecomputedTier) if how == tier]
    return replace(stage, recompute=(*choices, *moved))


def _budget_words(case: Case) -> str:
    budget = case.budget
    return f"the {format_bytes(budget.fill_bytes)} to fill of {format_bytes(budget.total_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedKind:
    """What recompute of one layer frees, for one micro-batch of the heaviest pack."""

    tower: Tower
    layer: str  # one of its kind
    tier: str  # that it was measured on, against full recompute
    measured_bytes: float
    predicted_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStep:
    """One of the paper's four steps on one device: its peak before and after, and what that bought."""

    what: str
    before_bytes: int
    after_bytes: int
    bought: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedDevice:
    """One device of the pipeline, as it was measured."""

    device: int
    full_peak_bytes: int  # everything recomputed
    kinds: tuple[ProbedKind, ...]
    correction_bytes: int  # context, workspaces, rounding: what was there and is priced nowhere else
    recompute: Mapping[str, int]  # chosen layers of each tier
    peak_bytes: int  # with the choice
    predicted_bytes: int  # the same, by the probed profile on the same pack

    def steps(self, limit_bytes: int) -> tuple[MemoryStep, ...]:
        """Recompute everything; switch it off for one layer of each kind; for as many as fit; run that."""
        full, kept = self.full_peak_bytes, max((x.measured_bytes for x in self.kinds), default=0.0)
        per_kind = [f"{x.tower} {x.tier} {format_bytes(x.measured_bytes)}" for x in self.kinds]
        chosen = ", ".join(f"{tier} {count}" for tier, count in self.recompute.items()) or "no layer"
        left = limit_bytes - full
        kinds = "a layer's bytes: " + (", ".join(per_kind) or "no kind here recomputes")
        fits = format_bytes(limit_bytes - self.peak_bytes)
        off = self.predicted_bytes / self.peak_bytes - 1
        predicted, ran = self.predicted_bytes, self.peak_bytes
        said = (
            ("recompute every layer", limit_bytes, full, f"{format_bytes(left)} left to keep activations in"),
            ("one layer of each kind keeps more", full, full + int(kept), kinds),
            ("as many layers as fit keep more", full, predicted, f"recompute of {chosen}, by the bytes of step 2"),
            ("run with that choice", predicted, ran, f"it fits: {fits} left, prediction {off:+.1%}"),
        )
        return tuple(
            MemoryStep(what=f"{number}. {what}", before_bytes=before, after_bytes=after, bought=bought)
            for number, (what, before, after, bought) in enumerate(said, 1)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbeResult:
    """The plan with the recompute that ran, and what was seen on the way; the same on every rank."""

    details: PlanDetails
    limit_bytes: int  # of a measured peak: the memory less what stays free
    devices: tuple[ProbedDevice, ...]
    runs: tuple[ProbeRun, ...]
    wall_s: float

    @property
    def num_step_backs(self) -> int:
        return sum(run.what == CHOICE and bool(run.failed_devices) for run in self.runs)


CHOICE = "the choice"


def probe(settings: ProbeSettings, *, progress: Callable[[str], None] | None = None) -> ProbeResult:
    """Measure, choose, run: the plan's stages and packs with the recompute that fits this device.

    Alone or on torchrun's ranks, as `train` runs the plan; collective. Every run is of whole training steps, learning
    rate 0, on the heaviest packs. First everything recomputes, without a limit. Then, kind by kind and tier by tier,
    one layer a stage keeps more, which tells its bytes. The choice is the exact one at the plan's own limits with the
    probed profile, and has run within that part of the memory that may be filled; a choice whose peak is above it is
    stepped back from.
    Raises `PlanError` where not even full recompute fits, with the bytes that are missing (not under split backwards:
    there recompute may need more than none). Writes nothing.
    """
    started = time.perf_counter()
    found = reload_plan(settings.plan)
    if found.case.vision is not None:
        raise PlanError("a probe shares no images: plan with --set towers=one-grid")
    with process_group(settings.device, timeout_s=settings.timeout_s, again="start the probe again") as ranks:
        device = ranks.device
        ranks.arrive()
        case = with_budget(
            found.case, memory_bytes=settings.memory_bytes, risk=settings.risk, allocator=device.type == "cuda"
        )
        bench = open_bench(settings, found, case, ranks, progress or (lambda _: None))
        with frozen_heap():
            full = measure_full(bench)
            kept = tuple(measure_kinds(bench, full))
            where = _name_of(device)
            measured = probed_profile(bench.case, bench.stages, kept, full, where=where)
            settled = settle(bench, with_profile(bench.case, measured.profile))
        result = _result(bench, found, measured, settled, kept, full, where)
    return replace(result, wall_s=time.perf_counter() - started)


# -- step 4: choose and run -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settled:
    """A choice that has run."""

    case: Case  # with the profile that it is the best choice for
    stages: tuple[Stage, ...]
    readings: Mapping[int, tuple[DeviceProbe, ...]]  # of each pack, device by device


def settle(bench: Bench, case: Case) -> Settled:
    """The best recompute by the case's profile that runs within the limit; `PlanError` if none does.

    Where a device's peak is above the limit its layers' transients are raised, first by as much as changes its choice,
    then by half of the way to full recompute each time, and the exact choice is made again. What was raised stays in
    the profile: it was needed.
    """
    problem = case.problem
    P = problem.num_stages
    everything = full_recompute(case.setting.profile, bench.stages)
    raised, tries = [0.0] * P, [0] * P
    try:
        most = [problem.memory_bytes - held.total_bytes for held in problem.assess(everything).memory]
        while True:
            priced = _raise_transients(case, bench, raised)
            split = recompute_stages(priced.problem, bench.stages)
            readings = {pack: bench.run(CHOICE, split.stages, pack) for pack in bench.batches}
            failed = {device for found in readings.values() for device in bench.above_limit(found)}
            if not failed:
                return Settled(case=priced, stages=split.stages, readings=readings)
            for device in failed:
                left = problem.memory_bytes - split.memory[device].total_bytes
                step = left + 1 if tries[device] == 0 else max(left + 1, (most[device] - raised[device]) / 2)
                tries[device] += 1
                raised[device] = raised[device] + step
                if raised[device] > most[device]:
                    raise PlanError(f"device {device} lacks memory after {tries[device]} steps back: {CURES}")
    except PartitionError as error:
        raise PlanError(f"the stages run, but not at the plan's limits on packs: {error}") from error


def _raise_transients(case: Case, bench: Bench, raised: Sequence[float]) -> Case:
    layout, profile = bench.pipeline.layout, case.setting.profile
    for device, num_bytes in enumerate(raised):
        if num_bytes:
            profile = add_transient(profile, [bench.stages[s] for s in layout.stages_of(device)], num_bytes)
    return with_profile(case, profile)


def _result(
    bench: Bench,
    found: ReloadedPlan,
    measured: ProbedProfile,
    settled: Settled,
    kept: Sequence[KeptProbe],
    full: Sequence[DeviceProbe],
    where: str,
) -> ProbeResult:
    layout, problem = bench.pipeline.layout, settled.case.problem
    devices = []
    for device in range(layout.num_devices):
        stages = [settled.stages[s] for s in layout.stages_of(device)]
        peaks = {pack: readings[device].peak_bytes for pack, readings in settled.readings.items()}
        heaviest = max(peaks, key=lambda pack: peaks[pack])
        there = replace(
            problem, work_max=bench.case.held_work[heaviest], overhead_bytes=0.0, overhead_share=0.0
        ).assess(settled.stages)
        counts: Counter[str] = Counter(
            choice.tier for stage in stages for choice in stage.recompute for _ in choice.layers
        )
        devices.append(
            ProbedDevice(
                device=device,
                full_peak_bytes=max(x.peak_bytes for x in full if x.device == device),
                kinds=tuple(_compare(bench, stages, kept)),
                correction_bytes=measured.correction_bytes[device],
                recompute=dict(counts),
                peak_bytes=peaks[heaviest],
                predicted_bytes=int(there.memory[device].total_bytes),
            )
        )
    off = max(abs(x.predicted_bytes / x.peak_bytes - 1.0) for x in devices)
    profile = _with_all_tiers(settled.case.setting.profile, found.case.setting.profile)
    profile = replace(profile, memory_error=max(_LEAST_ERROR, off))
    plan = replace(
        found.plan,
        assumptions=(
            *(said for said in found.plan.assumptions if not said.startswith((_ABOUT, ABOUT_BYTES))),
            *(said for said in measured.profile.assumptions if said.startswith(ABOUT_BYTES)),
            *(_tell_steps(device, bench.limit_bytes) for device in devices),
        ),
    )
    backs = sum(run.what == CHOICE and bool(run.failed_devices) for run in bench.runs)
    note = (
        f"{_ABOUT}{where}, {len(bench.runs)} runs of the heaviest packs: the choice ran within "
        f"{format_bytes(bench.limit_bytes)} on every device, after {backs} that did not; predictions for it are within "
        f"{off:.1%} of its peaks."
    )
    details = replan(
        replace(found, plan=plan, case=with_profile(settled.case, profile)),
        settled.stages,
        forbidden_cuts=frozenset(),
        note=note,
    )
    return ProbeResult(
        details=details, limit_bytes=bench.limit_bytes, devices=tuple(devices), runs=tuple(bench.runs), wall_s=0.0
    )


def _tell_steps(device: ProbedDevice, limit_bytes: int) -> str:
    """Write the steps for the plan's reader."""
    said = (
        f"{x.what}: {format_bytes(x.before_bytes)} to {format_bytes(x.after_bytes)}, {x.bought}"
        for x in device.steps(limit_bytes)
    )
    return f"{_ABOUT}device {device.device} in four steps. {'; '.join(said)}."


_ABOUT = "Recompute was probed on "
_LEAST_ERROR = 0.01  # of a prediction; one that was exact once may not be so the next time


def _compare(bench: Bench, stages: Sequence[Stage], kept: Sequence[KeptProbe]) -> Iterator[ProbedKind]:
    """Yield each kind of the device's layers, and tier, at the pack where it frees most; measured on any device."""
    profile = bench.case.setting.profile
    groups = {profile.layers[i].group for stage in stages for i in range(stage.start, stage.stop)}
    most: dict[tuple[int, str], KeptProbe] = {}
    for probe in kept:
        key = (profile.layers[probe.layer].group, probe.tier)
        if key[0] in groups and (key not in most or probe.num_bytes > most[key].num_bytes):
            most[key] = probe
    for _, probe in sorted(most.items()):
        layer = profile.layers[probe.layer]
        yield ProbedKind(
            tower=layer.tower,
            layer=layer.name,
            tier=probe.tier,
            measured_bytes=probe.num_bytes,
            predicted_bytes=freed_bytes(layer, probe.tier, bench.case.held_work[probe.pack]),
        )


def _with_all_tiers(profile: Profile, offered: Profile) -> Profile:
    """The profile with the tiers that it lacks as `offered` has them: a saved profile is asked for each."""
    layers = tuple(
        replace(layer, tiers=tuple(layer.tier(tier.name) or tier for tier in other.tiers))
        for layer, other in zip(profile.layers, offered.layers, strict=True)
    )
    return replace(profile, layers=layers)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
