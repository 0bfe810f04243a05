"""What a pipeline was measured to hold, put into a plan's profile: bytes of layers, state, and what no formula prices.

A *probe* is one run of the plan's stages on one pack. Everything recomputes in full in it, or all but a few layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.costs.bands import measured_band
from trimtab.errors import PlanError
from trimtab.partition.published import full_recompute
from trimtab.partition.schedules import splits_backward
from trimtab.plan.decide.case import Case, MemoryBudget
from trimtab.plan.options import risk_problems
from trimtab.specs import FloatArray, LayerCost, Profile, Stage
from trimtab.units import format_bytes

ABOUT_BYTES = "Bytes were measured on "
"""How the sentence begins that says where a profile's bytes come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptProbe:
    """One layer taken off full recompute: what it then kept, measured."""

    layer: int  # number in the model
    tier: str  # where it went
    pack: int
    num_bytes: float  # beyond what it keeps on "full", for one micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProbe:
    """What one device of the pipeline held in one run of one pack."""

    device: int
    pack: int
    state_bytes: int  # parameters, buffers, gradients, optimizer state
    kept_bytes: int  # when its first backward began, state aside
    peak_bytes: int  # of all, over whole steps
    in_flight: tuple[int, ...]  # micro-batches that each of its stages held at that moment, first stage first


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedProfile:
    """A profile with measured bytes, and how far the old one was off."""

    profile: Profile
    correction_bytes: tuple[int, ...]  # of each device: what its peak was above all that is priced


def freed_bytes(layer: LayerCost, tier: str, work: FloatArray) -> float:
    """Return what the layer keeps on `tier` beyond "full", for a micro-batch of this work, as its profile has it."""
    kept, full = layer.tier(tier), layer.tier("full")
    assert kept is not None, "asked of tiers that the layer has"
    assert full is not None, "asked of layers that can recompute"
    return float(np.dot(np.subtract(kept.saved_bytes, full.saved_bytes), work))


def heaviest_packs(case: Case, stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return the pack of which each device's layers keep most, nothing recomputed; each once, ascending.

    And the same among packs of several samples: they may need masks, which a lone sample does not.
    """
    layers = case.setting.profile.layers
    keeps = np.array([layer.tiers[0].saved_bytes for layer in layers])
    of_stage = case.held_work @ np.array([keeps[stage.start : stage.stop].sum(axis=0) for stage in stages]).T
    devices = case.problem.order.device
    # of all packs, and of those that may need masks
    several = np.flatnonzero(np.diff(case.packing.offsets) > 1)
    found = set()
    for device in range(case.setting.dims.pp):
        kept = of_stage[:, devices == device].sum(axis=1)
        found.add(int(kept.argmax()))
        if len(several):
            found.add(int(several[kept[several].argmax()]))
    return tuple(sorted(found))


def probed_profile(
    case: Case, stages: Sequence[Stage], kept: Sequence[KeptProbe], devices: Sequence[DeviceProbe], *, where: str
) -> ProbedProfile:
    """The case's profile with what was measured; `where` names the device in a sentence.

    Kept bytes: of each group of layers and each tier, full + (tier - full) x the largest measured over predicted ratio.
    State: one factor for all layers. What remains, at the pack of each device's highest peak, everything recomputed:
    where less was kept than predicted, the layers that cannot recompute are scaled down; where the peak is less, no
    layer's transient is larger than what was there (one chunk a device); where it is more, the difference (context,
    workspaces, rounding, buffers) is added to the transients of the device's layers, of which only the largest counts.
    So the prediction for full recompute is that peak, or more where kept bytes, gradients and transients peak at
    different moments.
    """
    profile = _with_kept(case, kept)
    # 1. state: one factor for all layers
    predicted_state = sum(layer.state_bytes for layer in profile.layers)
    by_device = {
        device: max(probe.state_bytes for probe in devices if probe.device == device)
        for device in range(case.setting.dims.pp)
    }
    factor = sum(by_device.values()) / predicted_state if predicted_state > 0 else 1.0
    layers = [replace(layer, state_bytes=layer.state_bytes * factor) for layer in profile.layers]
    # 2. what is left at each device's highest peak
    corrections = []
    for device in sorted(by_device):
        heaviest = max((probe for probe in devices if probe.device == device), key=lambda probe: probe.peak_bytes)
        corrections.append(_correct_device(layers, stages, heaviest, case))
    biggest = max(corrections)
    said = (
        f"{ABOUT_BYTES}{where}: those kept, layer kind by layer kind, state ({factor:.3g} x the formulas'), "
        f"and up to {format_bytes(biggest)} more than both and a layer's backward explain, which is counted on top.",
    )
    return ProbedProfile(
        profile=replace(
            profile,
            layers=_regroup(layers),
            method="probed",
            optimizer=case.options.optimizer,
            zero_stage=case.options.sharding,
            assumptions=(*_unsaid(profile.assumptions), *said),
        ),
        correction_bytes=tuple(int(x) for x in corrections),
    )


def add_transient(profile: Profile, stages: Sequence[Stage], num_bytes: float) -> Profile:
    """The profile with so many bytes more in the backward of each layer of these stages."""
    inside = {i for stage in stages for i in range(stage.start, stage.stop)}
    layers = [_more(layer, num_bytes) if i in inside else layer for i, layer in enumerate(profile.layers)]
    return replace(profile, layers=_regroup(layers))


def with_budget(case: Case, *, memory_bytes: int | None, risk: float | None, allocator: bool) -> Case:
    """The case with another memory of each device, or another risk; None: the plan's. What stays free is then fixed.

    `allocator`: the device's is torch's for CUDA, whose slack a measured peak does not hold; on a CPU there is none.
    """
    total = case.budget.total_bytes if memory_bytes is None else memory_bytes
    accepted = case.options.risk if risk is None else risk
    if problems := risk_problems(accepted):
        raise PlanError(problems[0])
    share = measured_band(allocator=allocator).largest_counted(accepted)
    options = replace(case.options, memory_bytes=total, reserve_bytes=max(0, int(total * (1.0 - share))))
    return replace(case, options=options, budget=MemoryBudget.of(case.cluster, options))


def with_profile(case: Case, profile: Profile) -> Case:
    """The case priced by this profile, which the plan then keeps."""
    options = replace(case.options, profile=profile)
    return replace(case, options=options, setting=replace(case.setting, profile=profile))


# -- parts ------------------------------------------------------------------------------------------------------------


def _with_kept(case: Case, kept: Sequence[KeptProbe]) -> Profile:
    profile = case.setting.profile
    # 1. measured over predicted, the most of each group of layers and tier
    ratios: dict[tuple[int, str], float] = {}
    for probe in kept:
        layer = profile.layers[probe.layer]
        predicted = freed_bytes(layer, probe.tier, case.held_work[probe.pack])
        if predicted > 0:
            key = (layer.group, probe.tier)
            ratios[key] = max(ratios.get(key, 0.0), probe.num_bytes / predicted)
    # 2. tiers by these ratios, each between full recompute and what it was
    layers = []
    for layer in profile.layers:
        full = layer.tier("full")
        tiers = []
        for tier in layer.tiers:
            ratio = ratios.get((layer.group, tier.name))
            if full is None or ratio is None:
                tiers.append(tier)
                continue
            terms = (f + ratio * (t - f) for t, f in zip(tier.saved_bytes, full.saved_bytes, strict=True))
            tiers.append(replace(tier, saved_bytes=tuple(max(0.0, float(x)) for x in terms)))
        layers.append(replace(layer, tiers=tuple(tiers)))
    return replace(profile, layers=tuple(layers))


def _correct_device(layers: list[LayerCost], stages: Sequence[Stage], probe: DeviceProbe, case: Case) -> float:
    """Changes those of `layers` that the device holds; the bytes that its peak is above what is priced."""
    problem = replace(case.problem, work_max=case.held_work[probe.pack], overhead_bytes=0.0, overhead_share=0.0)
    own = [s for s, device in zip(stages, problem.order.device, strict=True) if device == probe.device]
    held = np.array([i for stage in own for i in range(stage.start, stage.stop)])
    number = np.repeat(probe.in_flight, [stage.stop - stage.start for stage in own])

    def kept(name: str) -> FloatArray:
        """Return (layers,) bytes for one micro-batch."""
        tiers = [layers[i].tier(name) or layers[i].tiers[0] for i in held]
        return np.array([max(0.0, float(np.dot(tier.saved_bytes, problem.work_max))) for tier in tiers])

    # 1. layers that cannot recompute kept less than predicted: scaled down
    full = number * kept("full")
    fixed = np.array([layers[i].tier("full") is None for i in held])
    rest = float(full[fixed].sum())
    share = (rest + probe.kept_bytes - float(full.sum())) / rest if rest > 0 else 1.0
    for i in held[fixed]:
        none = layers[i].tiers[0]
        fewer = replace(none, saved_bytes=tuple(x * min(1.0, max(0.0, share)) for x in none.saved_bytes))
        layers[i] = replace(layers[i], tiers=(fewer, *layers[i].tiers[1:]))

    # 2. what the peak is above or below what is now priced goes to the layers' transients
    profile = replace(problem.profile, layers=tuple(layers))
    priced = replace(problem, profile=profile).assess(full_recompute(profile, stages)).memory[probe.device]
    left = probe.peak_bytes - priced.state_bytes - priced.saved_bytes
    need = profile.transients(problem.work_max)[held]
    if not splits_backward(problem.schedule):
        need = need + np.maximum(kept("none") - kept("full"), 0.0)
    correction = left - priced.transient_bytes
    if correction < 0 and problem.num_chunks > 1:  # chunks peak at moments of their own, another choice at others
        return 0.0
    for i, needed in zip(held, need.tolist(), strict=True):
        layers[i] = _more(layers[i], correction if correction > 0 else -max(0.0, needed - left))
    return max(0.0, correction)


def _more(layer: LayerCost, num_bytes: float) -> LayerCost:
    """The layer with so many bytes more in its backward, at either moment."""
    first, other = layer.transient_bytes, layer.other_transient_bytes
    return replace(
        layer,
        transient_bytes=(first[0] + num_bytes, *first[1:]),
        other_transient_bytes=(other[0] + num_bytes, *other[1:]) if other else (),
    )


def _regroup(layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Return new groups: layers of one kind may have been changed differently on different stages."""
    groups: dict[tuple[object, ...], int] = {}
    return tuple(
        replace(x, group=groups.setdefault((x.group, x.tiers, x.transient_bytes), len(groups))) for x in layers
    )


def _unsaid(assumptions: Sequence[str]) -> tuple[str, ...]:
    """Leave out what an earlier probe said."""
    return tuple(sentence for sentence in assumptions if not sentence.startswith(ABOUT_BYTES))
