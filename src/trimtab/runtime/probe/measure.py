"""OmniBal's first three memory steps: what full recompute leaves, and what one layer of each kind keeps more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import get_args

from trimtab.errors import PlanError
from trimtab.options import RecomputedTier
from trimtab.partition.published import full_recompute
from trimtab.partition.schedules import splits_backward
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.probed import DeviceProbe, KeptProbe, freed_bytes
from trimtab.runtime.probe.bench import Bench
from trimtab.runtime.probe.trial import CURES
from trimtab.specs import RecomputeChoice, Stage
from trimtab.units import format_bytes

FULL = "everything recomputed"


def measure_full(bench: Bench) -> tuple[DeviceProbe, ...]:
    """Everything recomputed, and what is left or missing."""
    stages = full_recompute(bench.case.setting.profile, bench.stages)
    found = []
    for pack in bench.batches:
        readings = bench.run(FULL, stages, pack)
        found += [DeviceProbe(device=device, pack=pack, **asdict(x)) for device, x in enumerate(readings)]
    fullest = max(found, key=lambda x: x.peak_bytes)
    missing = fullest.peak_bytes - bench.limit_bytes
    if missing > 0 and not splits_backward(bench.case.problem.schedule):  # there none may need less than full
        raise PlanError(
            f"{_budget_words(bench.case)} was to hold the plan's heaviest packs, and with everything recomputed "
            f"device {fullest.device} needs {format_bytes(fullest.peak_bytes)}, {format_bytes(missing)} "
            f"({missing} bytes) more: {CURES}"
        )
    return tuple(found)


def measure_kinds(bench: Bench, full: Sequence[DeviceProbe]) -> Iterator[KeptProbe]:
    """One run for each of a device's kinds of layers and each tier, on all devices at once: one layer keeps more.

    What is kept then differs from full recompute by micro-batches in flight x what the layer keeps more: exact. A
    device whose memory would not last, by the formulas, or whose pack asks nothing of the layer tells nothing.
    """
    profile = bench.case.setting.profile
    layout = bench.rank.pipeline.layout
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
    """Whether the layer has the tier and, by the formulas, its device's memory lasts: else the probe would end."""
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
    return f"memory of {format_bytes(budget.total_bytes)}, of which {format_bytes(budget.fill_bytes)} may be filled,"
