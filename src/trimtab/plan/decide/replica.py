"""A tower on every device of a replica: the images of a step are encoded before the pipeline, and go back after it.

A step is an encode phase, in which the tp x pp x cp devices of a replica each encode their share of all its images; the
pipeline, which holds no tower; and an encode-backward phase. Every device holds the whole tower, whose optimizer state
is sharded over all devices as the ZeRO stage says; the first stage holds the features of the whole step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.plan.decide.case import Case, Phases
from trimtab.plan.decide.exchange import Exchange, Shares, num_trained
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.decide.work import IMAGE_TERMS, MICROBATCHES
from trimtab.plan.plan import VisionDecision
from trimtab.specs import NUM_WORK_TERMS, FloatArray, LayerCost, ParallelDims, Profile, RecomputeTier

_NOTHING = (0.0,) * NUM_WORK_TERMS


def tower_alone(case: Case) -> Profile:
    """The profile of devices that each hold the whole tower, its state sharded over all devices of the cluster."""
    return profile_setting(case.model, case.cluster, case.options, ParallelDims(dp=case.cluster.num_devices))


def without_tower(profile: Profile, *, features_bytes: float) -> Profile:
    """The profile of a pipeline without tower and projector; its first stage holds the features of a step."""
    last = max(i for i, layer in enumerate(profile.layers) if layer.tower != "language")
    layers = tuple(
        layer if layer.tower == "language" else _emptied(layer, features_bytes if i == last else 0.0)
        for i, layer in enumerate(profile.layers)
    )
    return replace(profile, layers=layers)


def _emptied(layer: LayerCost, held: float) -> LayerCost:
    return replace(
        layer,
        forward_s=_NOTHING,
        backward_s=_NOTHING,
        weight_s=_NOTHING if layer.weight_s else (),
        output_bytes=_NOTHING,
        state_bytes=held,
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
    """Seconds of both phases of every step and replica, and what each device holds for them.

    The slowest share decides; a call costs its constant once, for the images of a step are one call. Recompute runs the
    forward again before the backward. The tower's gradients and update come once a step on every device.
    """
    # layers of the tower with the recompute that was decided for all of them
    towers = [layer for layer in alone.layers if layer.tower != "language"]
    again = [layer.tiers[-1] if decision.recompute else layer.tiers[0] for layer in towers]
    # 1. seconds of the slowest share of every step and replica
    shape = case.schedule.table.shape[:2]
    work = np.zeros((len(found.slowest), NUM_WORK_TERMS))
    work[:, IMAGE_TERMS] = found.slowest
    work[:, MICROBATCHES] = 1.0
    forward, backward = _sum([x.forward_s for x in towers]), _sum([x.backward_s for x in towers])
    extra = _sum([tier.extra_backward_s for tier in again])
    host_forward = sum(layer.host_forward_s for layer in towers)
    host_backward = sum(layer.host_backward_s for layer in towers) + host_forward * (decision.recompute is not None)
    seconds = np.maximum(work @ forward, host_forward) + np.maximum(work @ (backward + extra), host_backward)
    seconds = np.where(found.slowest.any(axis=1), seconds, 0.0).reshape(shape)
    exchange_s = (exchange.forward_s + exchange.backward_s) / shape[0]
    # 2. bytes: state, and the activations of the largest share, on every device
    most = np.zeros(NUM_WORK_TERMS)
    most[IMAGE_TERMS], most[MICROBATCHES] = found.largest.max(axis=0), 1.0
    saved = sum(max(0.0, float(most @ np.array(tier.saved_bytes))) for tier in again)
    moment = max(float(most @ np.array(layer.transient_bytes)) for layer in towers)
    if decision.recompute:
        moment += max(float(most @ np.array(layer.tiers[0].saved_bytes)) for layer in towers)
    return Phases(
        seconds=seconds + exchange_s,
        update_s=sum(layer.step_s for layer in towers),
        state_bytes=sum(layer.state_bytes for layer in towers),
        saved_bytes=saved,
        moment_bytes=max(0.0, moment),
    )


def features_held(case: Case, exchange: Exchange) -> float:
    """Bytes of a step's features on the first stage, and of their gradients where a tower is trained."""
    trained = any(num_trained(case, layer) for layer in case.setting.profile.layers if layer.tower != "language")
    return exchange.largest_rows * (2.0 if trained else 1.0)


def _sum(terms: list[tuple[float, ...]]) -> FloatArray:
    return np.asarray(np.sum(np.array(terms), axis=0), np.float64)
