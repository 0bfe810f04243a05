"""A tower outside of the pipeline: on every device of a replica, or on devices of its own.

On a replica a step is an encode phase, in which its tp x pp x cp devices each encode their share of all images; the
pipeline, which holds no tower; and an encode-backward phase. Every device holds the whole tower, whose optimizer state
is sharded over all devices as the ZeRO stage says; the first stage holds the features of the whole step.

On E devices of its own the tower is one more stage in front of the pipelines. Where E is a multiple of dp, E / dp
devices share the images of each micro-batch of a rank; where it is a divisor, one device encodes for dp / E ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.costs.formula.settings import ITEM_BYTES, Efficiency
from trimtab.partition.simulate import Timeline, simulate_steps
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.exchange import (
    Exchange,
    ImageSizes,
    Shares,
    feature_values,
    num_trained,
    plus_constant,
    share_calls,
)
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.decide.work import IMAGE_TERMS, MICROBATCHES, PATCHES, Apart, Lanes, Phases, rank_step_s, times_of
from trimtab.plan.plan import VisionDecision
from trimtab.specs import (
    NUM_WORK_TERMS,
    FloatArray,
    LayerCost,
    ParallelDims,
    Profile,
    RecomputeChoice,
    RecomputeTier,
    Stage,
    recomputing,
    tiers_of,
)

_NOTHING = (0.0,) * NUM_WORK_TERMS


def tower_alone(case: Case, num_devices: int) -> Profile:
    """The profile of devices that each hold the whole tower, its state sharded over all of them."""
    return profile_setting(case.model, case.cluster, case.options, ParallelDims(dp=num_devices))


def without_tower(profile: Profile, *, step_bytes: float = 0.0, pack_bytes: float = 0.0) -> Profile:
    """The profile of a pipeline without tower and projector.

    Its first stage holds `step_bytes` of features all the time, `pack_bytes` of each micro-batch in flight.
    """
    layers = [layer if layer.tower == "language" else _emptied(layer) for layer in profile.layers]
    last = max(i for i, layer in enumerate(layers) if layer.tower != "language")
    held = plus_constant(_NOTHING, pack_bytes)
    layers[last] = replace(
        layers[last],
        state_bytes=step_bytes,
        tiers=(replace(layers[last].tiers[0], saved_bytes=held),),
        transient_bytes=held,  # gradients of one micro-batch
    )
    return replace(profile, layers=tuple(layers))


def _emptied(layer: LayerCost) -> LayerCost:
    return replace(
        layer,
        forward_s=_NOTHING,
        backward_s=_NOTHING,
        weight_s=_NOTHING if layer.weight_s else (),
        output_bytes=_NOTHING,
        state_bytes=0.0,
        num_params=0.0,
        tiers=(RecomputeTier(name="none", extra_backward_s=_NOTHING, saved_bytes=_NOTHING),),
        transient_bytes=_NOTHING,
        other_transient_bytes=(),
        entry_bytes=(),
        step_s=0.0,
        host_forward_s=0.0,
        host_backward_s=0.0,
    )


def encode_phases(case: Case, alone: Profile, decision: VisionDecision, found: Shares, exchange: Exchange) -> Phases:
    """Return the seconds of both phases of every step and replica, and what each device holds for them.

    The slowest share decides; a call costs its constant once, for the images of a step are one call. The tower's
    gradients and update come once a step on every device.
    """
    tower = _Tower.of(alone, decision)
    shape = case.schedule.table.shape[:2]
    forward, backward = tower.passes(found.slowest)
    most = _largest_call(found)
    return Phases(
        seconds=(forward + backward).reshape(shape) + (exchange.forward_s + exchange.backward_s) / shape[0],
        forward_s=forward.reshape(shape) + exchange.forward_s / shape[0],
        update_s=tower.update_s,
        state_bytes=tower.state_bytes,
        saved_bytes=tower.saved(most),
        moment_bytes=tower.moment(most),
    )


def between_phases(pipeline: Timeline, phases: Apart | None, step: int, rank: int) -> Timeline:
    """The pipeline's blocks; with phases, a forward block of every device before them and a backward block after."""
    if not isinstance(phases, Phases):
        return pipeline
    forward_s, both_s = float(phases.forward_s[step, rank]), float(phases.seconds[step, rank])
    num, end_s = pipeline.num_devices, pipeline.makespan_s + both_s
    first = [next(s for s in range(num) if pipeline.device_of(s) == device) for device in range(num)]
    number = int(pipeline.microbatch.max(initial=-1)) + 1
    starts = np.repeat([0.0, forward_s + pipeline.makespan_s], num)
    return replace(
        pipeline,
        stage=np.concatenate([pipeline.stage, first, first]).astype(np.int32),
        microbatch=np.concatenate([pipeline.microbatch, np.full(2 * num, number)]).astype(np.int32),
        kind=np.concatenate([pipeline.kind, np.repeat([0, 1], num)]).astype(np.int8),
        start_s=np.concatenate([pipeline.start_s + forward_s, starts]),
        end_s=np.concatenate([pipeline.end_s + forward_s, np.repeat([forward_s, end_s], num)]),
        makespan_s=end_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tower:
    """Layers of tower and projector, and the recompute that was decided for all of them."""

    layers: tuple[LayerCost, ...]
    tiers: tuple[RecomputeTier, ...]

    @staticmethod
    def of(alone: Profile, decision: VisionDecision) -> _Tower:
        layers = tuple(layer for layer in alone.layers if layer.tower != "language")
        return _Tower(layers=layers, tiers=tuple(x.tiers[-1 if decision.recompute else 0] for x in layers))

    @property
    def recompute(self) -> tuple[RecomputeChoice, ...]:
        """Return which of the layers, the model's first ones, run again."""
        again = tuple(i for i, tier in enumerate(self.tiers) if tier.name != "none")
        return (RecomputeChoice(tier="full", layers=again),) if again else ()

    @property
    def update_s(self) -> float:
        return sum(layer.step_s for layer in self.layers)

    @property
    def state_bytes(self) -> float:
        return sum(layer.state_bytes for layer in self.layers)

    def passes(self, slowest: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return (calls,) seconds of forward and backward; recompute runs the forward again before the backward."""
        work = np.zeros((len(slowest), NUM_WORK_TERMS))
        work[:, IMAGE_TERMS], work[:, MICROBATCHES] = slowest, 1.0
        backward = _sum([x.backward_s for x in self.layers]) + _sum([x.extra_backward_s for x in self.tiers])
        host_forward = sum(layer.host_forward_s for layer in self.layers)
        again = host_forward if any(any(x.extra_backward_s) for x in self.tiers) else 0.0
        host_backward = sum(layer.host_backward_s for layer in self.layers) + again
        # a call without an image takes nothing; else no less than its host
        called = slowest.any(axis=1).astype(np.float64)
        forward = np.maximum(work @ _sum([x.forward_s for x in self.layers]), host_forward)
        return called * forward, called * np.maximum(work @ backward, host_backward)

    def saved(self, work: FloatArray) -> float:
        """Return the bytes that a call keeps for its backward."""
        return sum(max(0.0, float(work @ np.array(tier.saved_bytes))) for tier in self.tiers)

    def moment(self, work: FloatArray) -> float:
        """Count bytes on top of them while it computes: of one layer, with its own activations if recomputed."""
        moment = max(float(work @ np.array(layer.transient_bytes)) for layer in self.layers)
        if any(any(x.extra_backward_s) for x in self.tiers):
            moment += max(float(work @ np.array(layer.tiers[0].saved_bytes)) for layer in self.layers)
        return max(0.0, moment)


def _largest_call(found: Shares) -> FloatArray:
    most = np.zeros(NUM_WORK_TERMS)
    most[IMAGE_TERMS], most[MICROBATCHES] = found.largest.max(axis=0), 1.0
    return most


# -- devices of its own ---------------------------------------------------------------------------------------------


def own_calls(case: Case, alone: Profile, decision: VisionDecision, sizes: ImageSizes) -> tuple[Shares, int]:
    """The shares of every call, and how many lanes there are; calls by step, lane and micro-batch."""
    steps, dp, M = case.schedule.table.shape
    lanes = min(dp, decision.degree)
    # packs of one micro-batch of all ranks of a lane; devices of a lane share them
    pools = case.schedule.table.reshape(steps, lanes, dp // lanes, M).transpose(0, 1, 3, 2).reshape(-1, dp // lanes)
    return share_calls(case, alone, replace(decision, degree=decision.degree // lanes), sizes, pools), lanes


def own_lanes(case: Case, alone: Profile, decision: VisionDecision, found: Shares, lanes: int) -> Lanes:
    """Return the seconds of every call of the tower, of its features on their way, and what an encoder device holds.

    A lane sends the features of a micro-batch over one link, and the first rank of a first stage passes them on to
    those of tp and cp.
    """
    tower = _Tower.of(alone, decision)
    table, dims, cluster = case.schedule.table, case.setting.dims, case.cluster
    steps, dp, M = table.shape
    shape = (steps, lanes, M)
    # seconds of the slowest device of a lane
    forward, backward = tower.passes(found.slowest)
    # features of all ranks of a lane
    patches = np.where(table >= 0, case.work[np.maximum(table, 0), PATCHES], 0.0)
    rows = patches.reshape(steps, lanes, dp // lanes, M).sum(axis=2) * feature_values(case.model)
    per_byte = ITEM_BYTES[case.options.dtype] / Efficiency().link
    seconds = rows * per_byte / cluster.slowest_link_bytes_per_s
    if dims.tp * dims.cp > 1:
        seconds += rows * per_byte / cluster.device.link_bytes_per_s
    seconds = np.where(rows > 0, seconds + cluster.latency_s, 0.0)
    # a pipeline of pp + 1 stages has as many micro-batches in flight on the first
    most = _largest_call(found)
    return Lanes(
        forward_s=forward.reshape(shape),
        backward_s=backward.reshape(shape) * is_trained(case),
        send_s=seconds,
        return_s=seconds * is_trained(case),
        update_s=tower.update_s,
        num_devices=decision.degree,
        state_bytes=tower.state_bytes,
        saved_bytes=tower.saved(most) * min(M, dims.pp + 1),
        transient_bytes=tower.moment(most),
        recompute=tower.recompute,
    )


def is_trained(case: Case) -> bool:
    """Return whether tower or projector gets gradients."""
    return any(num_trained(case, layer) for layer in case.setting.profile.layers if layer.tower != "language")


# -- in the bubbles of the pipeline, of which only a bound is known ----------------------------------------------------


def bubble_bounds_s(case: Case, stages: Sequence[Stage]) -> tuple[float, float]:
    """Bound the seconds of an epoch whose images are encoded while the pipeline waits, on all devices of a replica.

    No step is shorter than all work shared evenly, nor than the pipeline without a tower between images of the first
    micro-batch and the backward of those of the last. Second: where packs of text alone run first and last in steps
    that have two. No runner encodes so.
    """
    # 1. the pipelines without their tower, rank by rank
    plain = case.without_vision()
    bare = without_tower(plain.setting.profile)
    work, table, dims = plain.work.copy(), plain.schedule.table, plain.setting.dims
    work[:, IMAGE_TERMS] = 0.0
    kept = range(min(plain.model.indices("language")), len(bare.layers))
    own = [recomputing(x, {i: tier for i, tier in tiers_of(x).items() if i in kept}) for x in stages]
    times = times_of(work, own, bare, plain.cluster)
    schedule, M = plain.problem.schedule, table.shape[2]
    alone_s = simulate_steps(times, table.reshape(-1, 1, M), schedule=schedule, num_devices=dims.pp)
    # 2. the tower's seconds of each pack, on all devices of a replica; an empty slot takes none
    tower = [x for x in tower_alone(plain, plain.cluster.num_devices).layers if x.tower != "language"]
    images, num_devices = plain.work[:, IMAGE_TERMS], dims.pp * dims.tp * dims.cp

    def of_slots(pack_s: FloatArray) -> FloatArray:
        return np.where(table >= 0, pack_s[np.maximum(table, 0)], 0.0)

    forward, backward = (
        of_slots(images @ _sum([getattr(x, name)[IMAGE_TERMS] for x in tower]) / num_devices)
        for name in ("forward_s", "backward_s")
    )
    decoder = of_slots((times.forward_s + times.backward_s).sum(axis=0) / dims.pp)
    # 3. what devices compute, and what nothing hides
    busy_s = (decoder + forward + backward).sum(axis=2)
    exposed_s = forward[:, :, 0] + backward[:, :, -1]
    two_of_text = ((forward == 0) & (table >= 0)).sum(axis=2) >= 2
    update_s = len(table) * rank_step_s(plain.problem, stages)
    as_it_is, ordered = (
        float(np.maximum(busy_s, alone_s.reshape(busy_s.shape) + hidden_by_none).max(axis=1).sum()) + update_s
        for hidden_by_none in (exposed_s, np.where(two_of_text, 0.0, exposed_s))
    )
    return as_it_is, ordered


def features_held(case: Case, exchange: Exchange) -> float:
    """Return the bytes of a step's features on the first stage, and of their gradients where a tower is trained."""
    return exchange.largest_rows * (2.0 if is_trained(case) else 1.0)


def _sum(terms: list[tuple[float, ...]]) -> FloatArray:
    return np.asarray(np.sum(np.array(terms), axis=0), np.float64)
