"""What given stages cost and hold: seconds per micro-batch, bytes per device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.errors import PartitionError
from trimtab.options import ScheduleName
from trimtab.partition.schedules import (
    check_schedule,
    devices_of_stages,
    peak_in_flight,
    peak_saved_bytes,
    splits_backward,
)
from trimtab.specs import FloatArray, LayerCost, Profile, RecomputeTier, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Peak bytes of one device, in parts that add up."""

    state_bytes: float  # parameters, gradients, optimizer state
    saved_bytes: float  # activations of all micro-batches in flight at the worst moment
    transient_bytes: float  # the most one layer's backward needs: its workspace, and what it computes again
    overhead_bytes: float  # what the caller set aside: context, allocator, communication buffers
    host_bytes: float = 0.0  # of offloaded layers, in host memory: no part of the device's total

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + self.saved_bytes + self.transient_bytes + self.overhead_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """Stages, what they cost at the mean micro-batch and hold at the largest; tuples run over (virtual) stages."""

    stages: tuple[Stage, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]  # with recompute
    recompute_s: tuple[float, ...]  # the part of backward_s that recompute adds
    in_flight: tuple[int, ...]  # most micro-batches whose activations the stage holds at once
    memory: tuple[DeviceMemory, ...]  # of each device
    devices: tuple[int, ...]  # the device of every stage
    bottleneck_s: float  # the slowest stage's forward + backward
    lower_bound_s: float  # of any split's bottleneck: the mean without recompute, or a run that no cut may divide
    exact: bool  # bottleneck_s is the minimum over all splits and recompute choices under the cap

    @property
    def imbalance(self) -> float:
        """Slowest stage / mean stage - 1."""
        total = sum(self.forward_s) + sum(self.backward_s)
        return self.bottleneck_s * len(self.stages) / total - 1.0 if total > 0 else 0.0


OFFLOAD_BUFFERS = 2.0  # while an offloaded layer's backward runs: its own bytes, and as many for the layer before it


def assess_stages(
    profile: Profile,
    stages: Sequence[Stage],
    *,
    work_mean: FloatArray,
    work_max: FloatArray,
    num_microbatches: int,
    schedule: ScheduleName = "1F1B",
    num_chunks: int = 1,
    overhead_bytes: float = 0.0,
    forbidden_cuts: frozenset[int] = frozenset(),
) -> SplitResult:
    """Given stages, recompute included, as a `SplitResult`; decides nothing and checks no cap.

    Device memory = sum state + peak over time of sum (alive micro-batches x saved bytes of the layers' tiers and what
    its first layer enters with) + largest transient + overhead, bytes at `work_max`. A layer's transient is the
    workspace of its backward (`transient_bytes`) and, where it recomputes, what it then holds more than its tier saves:
    layers are computed again one at a time. An offloaded layer holds that twice, its own and what comes back for the
    layer before it meanwhile; until its backward ends it takes as much of host memory, for each micro-batch.
    Not counted there: a row of its input where its norm keeps another copy (RMSNorm in separate operations).
    Where weight gradients run apart, a micro-batch whose backward has begun holds everything until they are done,
    recomputed or not (see `peak_saved_bytes`), so that nothing computed again comes on top.
    """
    mean, most = np.asarray(work_mean, np.float64), np.asarray(work_max, np.float64)
    S, P = len(stages), len(stages) // num_chunks
    check_schedule(schedule, num_devices=P, num_chunks=num_chunks, num_microbatches=num_microbatches)
    shape = {"num_devices": P, "num_chunks": num_chunks, "num_microbatches": num_microbatches}
    devices = devices_of_stages(schedule, num_devices=P, num_chunks=num_chunks)

    # 1. Seconds of every stage at the mean micro-batch.
    forward, backward = profile.matrix("forward_s") @ mean, profile.matrix("backward_s") @ mean
    own = [slice(stage.start, stage.stop) for stage in stages]
    chosen = [chosen_tiers(profile, stage) for stage in stages]
    extra = np.array([sum(float(np.dot(tier.extra_backward_s, mean)) for tier in tiers) for tiers in chosen])
    stage_forward = np.array([forward[x].sum() for x in own])
    stage_backward = np.array([backward[x].sum() for x in own]) + extra
    unsplittable = np.add.reduceat(forward + backward, [c for c in range(len(forward)) if c not in forbidden_cuts])

    # 2. Bytes of every stage at the largest one, and of every device at its worst moment.
    workspace, entry = profile.transients(most), entry_bytes(profile, most)
    once = splits_backward(schedule)  # then nothing computed again comes on top
    held = [
        _stage_bytes(profile.layers[x], tiers, most, workspace[x], float(entry[x.start]), once=once)
        for x, tiers in zip(own, chosen, strict=True)
    ]
    saved = np.array([x.saved for x in held])
    away = np.array([x.host for x in held])
    peaks = peak_saved_bytes(saved, schedule, **shape, pending_bytes=np.maximum(saved, [x.whole for x in held]))
    host_peaks = peak_saved_bytes(away, schedule, **shape, pending_bytes=away)
    on = [[x for x, device in zip(held, devices, strict=True) if device == d] for d in range(P)]
    return SplitResult(
        stages=tuple(stages),
        forward_s=tuple(stage_forward.tolist()),
        backward_s=tuple(stage_backward.tolist()),
        recompute_s=tuple(extra.tolist()),
        in_flight=tuple(peak_in_flight(schedule, **shape).tolist()),
        memory=tuple(
            DeviceMemory(
                state_bytes=float(np.array([x.state for x in own_stages]).sum()),
                saved_bytes=float(peaks[d]),
                transient_bytes=float(max(x.transient for x in own_stages)),
                overhead_bytes=float(overhead_bytes),
                host_bytes=float(host_peaks[d]),
            )
            for d, own_stages in enumerate(on)
        ),
        devices=tuple(devices.tolist()),
        bottleneck_s=float((stage_forward + stage_backward).max()),
        lower_bound_s=float(max((forward + backward).sum() / S, unsplittable.max())),
        exact=False,
    )


@dataclass(frozen=True, slots=True)
class _StageBytes:
    """Of one stage and one micro-batch, its state aside."""

    state: float
    saved: float  # with what the stage's first layer enters with
    whole: float  # the same if nothing is recomputed
    transient: float
    host: float


def _stage_bytes(
    layers: Sequence[LayerCost],
    tiers: Sequence[RecomputeTier],
    most: FloatArray,
    workspace: FloatArray,
    entry: float,
    *,
    once: bool,
) -> _StageBytes:
    whole = [_saved(layer.tiers[0], most) for layer in layers]
    again = [0.0 if once else bytes_again(tier, own, most) for tier, own in zip(tiers, whole, strict=True)]
    return _StageBytes(
        state=float(np.array([layer.state_bytes for layer in layers]).sum()),
        saved=sum(_saved(tier, most) for tier in tiers) + entry,
        whole=sum(whole) + entry,
        transient=float((workspace + np.array(again)).max()),
        host=sum(host_bytes(tier, own, most) for tier, own in zip(tiers, whole, strict=True)),
    )


def entry_bytes(profile: Profile, work: FloatArray) -> FloatArray:
    """(num_layers,) bytes that a stage holds more when it begins with the layer, of one micro-batch."""
    return np.array([max(0.0, float(np.dot(x.entry_bytes, work))) if x.entry_bytes else 0.0 for x in profile.layers])


def chosen_tiers(profile: Profile, stage: Stage) -> list[RecomputeTier]:
    """The tier of each of the stage's layers, in order; layers that no choice names are on "none"."""
    tiers = {i: _tier(profile.layers[i], x.tier) for x in stage.recompute for i in x.layers}
    return [tiers.get(i) or _tier(profile.layers[i], "none") for i in range(stage.start, stage.stop)]


def bytes_again(tier: RecomputeTier, whole_bytes: float, work: FloatArray) -> float:
    """What the backward of a layer holds beside its workspace and what `tier` saves: computed again, or fetched.

    `whole_bytes` is what tier "none" saves.
    """
    again = max(0.0, whole_bytes - _saved(tier, work))
    return OFFLOAD_BUFFERS * again if tier.name == "offload" else again


def host_bytes(tier: RecomputeTier, whole_bytes: float, work: FloatArray) -> float:
    """What one micro-batch of the layer takes of host memory."""
    return max(0.0, whole_bytes - _saved(tier, work)) if tier.name == "offload" else 0.0


def _saved(tier: RecomputeTier, work: FloatArray) -> float:
    return max(0.0, float(np.dot(tier.saved_bytes, work)))


def _tier(layer: LayerCost, name: str) -> RecomputeTier:
    tier = layer.tier(name)
    if tier is None:
        raise PartitionError(
            f"layer {layer.name} is to take the tier {name!r}, which its profile does not offer: "
            f"choose one of {', '.join(tier.name for tier in layer.tiers)}"
        )
    return tier
