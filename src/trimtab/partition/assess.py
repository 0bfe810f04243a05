"""The split problem; what given stages cost and hold in it; and peaks over a run's real micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import numpy as np

from trimtab.costs.profile import chosen_tiers, mean_seconds, stage_seconds
from trimtab.errors import PartitionError
from trimtab.options import RecomputeMode, ScheduleName
from trimtab.partition.schedules import (
    BlockOrder,
    block_order,
    check_schedule,
    devices_of_stages,
    peak_in_flight,
    peak_saved_bytes,
    splits_backward,
)
from trimtab.specs import FloatArray, Profile, Stage
from trimtab.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Peak bytes of one device, in parts that add up."""

    state_bytes: float  # parameters, gradients, optimizer state
    saved_bytes: float  # activations of all micro-batches in flight at the worst moment
    transient_bytes: float  # the most one layer's backward needs: its workspace, and what it computes again
    overhead_bytes: float  # expected on top of those counted: context, allocator, communication buffers

    @property
    def total_bytes(self) -> float:
        return self.counted_bytes + self.overhead_bytes

    @property
    def counted_bytes(self) -> float:
        return self.state_bytes + self.saved_bytes + self.transient_bytes

    def with_share(self, share: float) -> DeviceMemory:
        """Return it with so much of the counted bytes expected on top of them."""
        return replace(self, overhead_bytes=self.overhead_bytes + share * self.counted_bytes)


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
    def peak_bytes(self) -> float:
        """Return the peak of the fullest device."""
        return max(device.total_bytes for device in self.memory)

    @property
    def imbalance(self) -> float:
        """Return slowest stage / mean stage - 1."""
        total = sum(self.forward_s) + sum(self.backward_s)
        return self.bottleneck_s * len(self.stages) / total - 1.0 if total > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitProblem:
    """What `split_stages` is asked; checks itself. `work_*` are (len(WORK_TERMS),) vectors.

    Use it as the one argument of `split_stages`, which has an example.
    """

    profile: Profile
    num_stages: int  # devices of the pipeline
    work_mean: FloatArray  # of a micro-batch: prices time
    work_max: FloatArray  # of the largest micro-batch, term by term: prices memory
    num_microbatches: int
    memory_bytes: float = math.inf  # of one device
    forbidden_cuts: frozenset[int] = frozenset()
    schedule: ScheduleName = "1F1B"
    num_chunks: int = 1  # virtual stages of a device
    recompute: RecomputeMode = "auto"
    overhead_bytes: float = 0.0  # of each device, whatever it holds
    overhead_share: float = 0.0  # of the bytes that it holds
    lockstep: bool = False  # ranks gather every layer together (ZeRO-3): a micro-batch waits for the slowest rank

    def __post_init__(self) -> None:
        L, P, V = len(self.profile.layers), self.num_stages, self.num_chunks
        if self.recompute not in get_args(RecomputeMode):
            raise PartitionError(f"recompute={self.recompute!r} is unknown: choose auto, none or full")
        if not 1 <= P * V <= L:
            what = f"{P} stages" if V == 1 else f"{P} stages of {V} chunks each"
            raise PartitionError(f"cannot cut {L} layers into {what}: choose between 1 and {L} in all")
        check_schedule(self.schedule, num_devices=P, num_chunks=V, num_microbatches=self.num_microbatches)
        if not 0 <= self.overhead_bytes < self.memory_bytes:
            raise PartitionError(f"{format_bytes(self.overhead_bytes)} overhead leave nothing of the memory: give less")
        runs = L - len([c for c in self.forbidden_cuts if 0 < c < L])
        if runs < P * V:
            raise PartitionError(f"cannot cut {L} layers into {P * V} stages: forbidden cuts allow at most {runs}")

    @property
    def room_bytes(self) -> float:
        """Return what a device may hold, overhead aside; less by what rounding may add."""
        room = (self.memory_bytes - self.overhead_bytes) / (1.0 + self.overhead_share)
        return room * (1.0 - 1e-12) if self.overhead_share else room

    @property
    def order(self) -> BlockOrder:
        """Return what each device runs."""
        return block_order(
            self.schedule,
            num_devices=self.num_stages,
            num_chunks=self.num_chunks,
            num_microbatches=self.num_microbatches,
        )

    def assess(self, stages: Sequence[Stage]) -> SplitResult:
        """Return given stages, recompute included, as a `SplitResult`; decides nothing and checks no cap.

        Device memory = sum state + peak over time of sum (alive micro-batches x saved bytes of the layers' tiers and
        what its first layer enters with) + largest transient, bytes at `work_max`, + overhead. A layer's transient is
        the workspace of its backward (`transient_bytes`) and, where it recomputes, what it then holds more than its
        tier saves: layers are computed again one at a time. Not counted there: a row of its input where its norm keeps
        another copy (RMSNorm in separate operations). Where weight gradients run apart, a micro-batch whose backward
        has begun holds everything until they are done, recomputed or not (see `peak_saved_bytes`), so that nothing
        computed again comes on top.
        """
        profile, schedule = self.profile, self.schedule
        mean, most = np.asarray(self.work_mean, np.float64), np.asarray(self.work_max, np.float64)
        S, P = len(stages), len(stages) // self.num_chunks
        shape = {"num_devices": P, "num_chunks": self.num_chunks, "num_microbatches": self.num_microbatches}
        devices = devices_of_stages(schedule, num_devices=P, num_chunks=self.num_chunks)

        # 1. Seconds of every stage at the mean micro-batch.
        forward, backward = mean_seconds(profile, mean)
        found = [stage_seconds(profile, stage, mean[None]) for stage in stages]
        stage_forward, stage_backward, extra = (
            np.array([float(getattr(x, name)[0]) for x in found]) for name in ("forward", "backward", "again")
        )
        unsplittable = np.add.reduceat(
            forward + backward, [c for c in range(len(forward)) if c not in self.forbidden_cuts]
        )

        # 2. Bytes of every stage at the largest one, and of every device at its worst moment.
        once = splits_backward(schedule)  # then nothing computed again comes on top
        saved, whole, transient = (x[:, 0] for x in stages_bytes(profile, stages, most[None], once=once))
        peaks = peak_saved_bytes(saved, schedule, **shape, pending_bytes=whole)
        state = state_bytes(profile, stages)
        return SplitResult(
            stages=tuple(stages),
            forward_s=tuple(stage_forward.tolist()),
            backward_s=tuple(stage_backward.tolist()),
            recompute_s=tuple(extra.tolist()),
            in_flight=tuple(peak_in_flight(schedule, **shape).tolist()),
            memory=tuple(
                DeviceMemory(
                    state_bytes=float(state[devices == d].sum()),
                    saved_bytes=float(peaks[d]),
                    transient_bytes=float(transient[devices == d].max()),
                    overhead_bytes=float(self.overhead_bytes),
                ).with_share(self.overhead_share)
                for d in range(P)
            ),
            devices=tuple(devices.tolist()),
            bottleneck_s=float((stage_forward + stage_backward).max()),
            lower_bound_s=float(max((forward + backward).sum() / S, unsplittable.max())),
            exact=False,
        )


class StageBytes(NamedTuple):
    """Bytes of one stage, its state aside, for each of n micro-batches."""

    saved: FloatArray  # (n,) held from forward to backward, with what the stage's first layer enters with
    whole: FloatArray  # (n,) the same if nothing is recomputed: held from a backward of the inputs to that of weights
    transient: FloatArray  # (n,) next to them while the stage computes


def stage_bytes(profile: Profile, stage: Stage, work: FloatArray, *, once: bool) -> StageBytes:
    """Return bytes of micro-batches `work` (n, len(WORK_TERMS)); `once`: recomputed values count in `whole` only."""
    saved, whole, transient = np.zeros((3, len(work)))
    # layers of one kind are priced once: a stage of 40 has three or four kinds
    alike = Counter(
        (tier.saved_bytes, layer.tiers[0].saved_bytes, layer.transient_bytes, layer.other_transient_bytes)
        for layer, tier in zip(profile.layers[stage.start : stage.stop], chosen_tiers(profile, stage), strict=True)
    )
    for (held, everything, *moments), number in alike.items():
        kept, full = (np.maximum(work @ np.array(terms), 0.0) for terms in (held, everything))
        # layers compute one after the other, so that the largest moment counts, not the sum
        workspace = np.max([work @ np.array(terms) for terms in moments if terms], axis=0)
        saved, whole = saved + number * kept, whole + number * full
        again = 0.0 if once else np.maximum(full - kept, 0.0)
        transient = np.maximum(transient, np.maximum(workspace, 0.0) + again)
    if entry := profile.layers[stage.start].entry_bytes:
        enters_with = np.maximum(work @ np.array(entry), 0.0)
        saved, whole = saved + enters_with, whole + enters_with
    return StageBytes(saved=saved, whole=np.maximum(saved, whole), transient=transient)


def stages_bytes(profile: Profile, stages: Sequence[Stage], work: FloatArray, *, once: bool) -> StageBytes:
    """Return `stage_bytes` of all stages, (S, n) each."""
    held = [stage_bytes(profile, stage, work, once=once) for stage in stages]
    return StageBytes(*map(np.array, zip(*held, strict=True)))


def state_bytes(profile: Profile, stages: Sequence[Stage]) -> FloatArray:
    """Return (S,) parameters, gradients, optimizer state."""
    return np.array([sum(layer.state_bytes for layer in profile.layers[x.start : x.stop]) for x in stages])


def entry_bytes(profile: Profile, work: FloatArray) -> FloatArray:
    """Return (num_layers,) bytes that a stage holds more when it begins with the layer, of one micro-batch."""
    return np.array([max(0.0, float(np.dot(x.entry_bytes, work))) if x.entry_bytes else 0.0 for x in profile.layers])
