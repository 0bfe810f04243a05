"""A case whose ranks share the images of a micro-batch: other vision layers, and the slowest share as the work.

Every cost is linear in the work terms, so the time of the slowest rank's share is that of a micro-batch that holds just
this share: split, simulation and memory go on as ever. Each share follows from the plan's own packs, all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trimtab.balance.images import tower_seconds
from trimtab.costs.formula.settings import ITEM_BYTES, Efficiency
from trimtab.plan.decide.apart import (
    encode_phases,
    features_held,
    own_calls,
    own_lanes,
    tower_alone,
    without_tower,
)
from trimtab.plan.decide.case import Case, SharedVision
from trimtab.plan.decide.exchange import (
    Exchange,
    ImageSizes,
    Shares,
    feature_values,
    image_sizes,
    num_trained,
    plus_constant,
    pool_packs,
    price_exchange,
    share_calls,
    with_exchange,
)
from trimtab.plan.decide.groups import over_tp
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.decide.work import IMAGE_TERMS, MICROBATCHES, PATCHES, Apart, limit_work
from trimtab.plan.plan import VisionDecision, VisionEstimate, VisionRankEstimate
from trimtab.specs import FloatArray, Profile, Stage
from trimtab.units import MIB, round_digits, round_gib

_GRADIENT_BYTES = 4  # as `profile_model` keeps gradients


def share_vision(case: Case, decision: VisionDecision) -> Case:
    """Return `case` with images shared as decided; `decision` must be free of `decision_problems`.

    Priced: the slowest share of every call, and what a call costs whatever is in it, which pooling saves; over tp the
    whole tower on every rank, and the sum of its gradients over them; the exchange, which overlaps nothing; the
    features each rank holds. Ranks of cp hold the tower whole, and add its gradients up with those of dp, shared or
    not. Not priced: the few integers that ranks exchange before each call.
    """
    if decision.group in ("replica", "own"):
        return (_share_replica if decision.group == "replica" else _share_own)(case, decision)
    # 1. the tower of a rank, and which packs one call of it encodes
    plain = case.without_vision()
    profile = _whole_towers(plain) if over_tp(decision.group) else plain.setting.profile
    profile = _once_a_pool(profile, decision.pooling)
    sizes = image_sizes(plain.samples, plain.model)
    pools = pool_packs(plain.schedule.table, decision)
    found = share_calls(plain, profile, decision, sizes, pools)

    # 2. seconds: of each call the slowest share, divided among the micro-batches that share it
    work = plain.work.copy()
    work[:, IMAGE_TERMS] = 0.0
    in_slot = pools >= 0
    by_rank = in_slot.reshape(len(pools), -1, decision.pooling).sum(axis=2)  # each of a dispatch has slots of its own
    calls = np.repeat(np.maximum(by_rank, 1), decision.pooling, axis=1)
    work[pools[in_slot], IMAGE_TERMS] = (found.slowest[:, None, :] / calls[:, :, None])[in_slot]

    # 3. bytes: the largest share, held whole by each of them
    held = plain.work.copy()
    held[:, IMAGE_TERMS] = 0.0
    held[pools[in_slot], IMAGE_TERMS] = np.broadcast_to(found.largest[:, None, :], (*pools.shape, 3))[in_slot]

    # 4. the exchange, and the limits' room over the largest pack that there is
    margin = _margin(plain)
    exchange = price_exchange(plain, decision, sizes, pools, margin=float(margin[0]))
    setting = replace(plain.setting, profile=with_exchange(profile, plain, decision, exchange))
    return replace(
        plain,
        work=work,
        setting=setting,
        vision=SharedVision(
            decision=decision,
            work=plain.work,
            held=held,
            profile=plain.setting.profile,
            largest=found.largest.max(axis=0) * margin,
            estimate=_summarise(plain, profile, decision, found, exchange, sizes),
        ),
    )


def _share_replica(case: Case, decision: VisionDecision) -> Case:
    """Share as `share_vision` does, with the tower on every device of a replica: see `apart`."""
    plain = case.without_vision()
    # the tower outside of the pipeline, on every device; the pipeline without it
    alone = tower_alone(plain, case.cluster.num_devices)
    sizes, pools = image_sizes(plain.samples, plain.model), pool_packs(plain.schedule.table, decision)
    found = share_calls(plain, alone, decision, sizes, pools)
    margin = _margin(plain)
    exchange = price_exchange(plain, decision, sizes, pools, margin=float(margin[0]))
    phases = encode_phases(plain, alone, decision, replace(found, largest=found.largest * margin), exchange)
    profile = without_tower(plain.setting.profile, step_bytes=features_held(plain, exchange))
    pooled = _once_a_pool(alone, decision.pooling)
    return _apart(plain, profile, decision, phases, _summarise(plain, pooled, decision, found, exchange, sizes))


def _share_own(case: Case, decision: VisionDecision) -> Case:
    """Share as `share_vision` does, with the tower on devices of its own: see `apart`."""
    plain = case.without_vision()
    alone, sizes = tower_alone(plain, decision.degree), image_sizes(plain.samples, plain.model)
    found, num_lanes = own_calls(plain, alone, decision, sizes)
    margin = _margin(plain)
    lanes = own_lanes(plain, alone, decision, replace(found, largest=found.largest * margin), num_lanes)
    # what crosses from the tower to the pipelines and back
    row = feature_values(plain.model) * ITEM_BYTES[plain.options.dtype]
    features, dp = plain.work[:, PATCHES] * row, plain.setting.dims.dp
    most = float(features.max()) * float(margin[0])
    exchange = Exchange(
        received_bytes=float(features.sum()) / dp * (2 if lanes.return_s.any() else 1),
        forward_s=float(lanes.send_s.sum()) / num_lanes,
        backward_s=float(lanes.return_s.sum()) / num_lanes,
        rows_sent=float(features.sum()) / dp,
        largest_rows=most,
    )
    profile = without_tower(plain.setting.profile, pack_bytes=most)
    shared = replace(decision, degree=decision.degree // num_lanes)
    estimate = _summarise(plain, alone, shared, found, exchange, sizes, groups=num_lanes)
    return _apart(plain, profile, decision, lanes, estimate)


def _apart(plain: Case, profile: Profile, decision: VisionDecision, apart: Apart, estimate: VisionEstimate) -> Case:
    """The case with a pipeline of this profile, which holds no tower."""
    work = plain.work.copy()
    work[:, IMAGE_TERMS] = 0.0
    return replace(
        plain,
        work=work,
        setting=replace(plain.setting, profile=profile),
        vision=SharedVision(
            decision=decision,
            work=plain.work,
            held=work,
            profile=plain.setting.profile,
            largest=np.zeros(3),
            apart=apart,
            estimate=estimate,
        ),
    )


def _margin(case: Case) -> FloatArray:
    """Return (3,) ratios of the limits over the largest pack that there is, by image terms; 1 or more."""
    most = limit_work(case.work, case.setting.max_patches, case.setting.max_tokens)[IMAGE_TERMS]
    packed = case.work[:, IMAGE_TERMS].max(axis=0)
    ratio: FloatArray = np.divide(most, packed, out=np.ones(3), where=packed > 0)
    return np.maximum(ratio, 1.0)


# -- the tower of a rank --------------------------------------------------------------------------------------------


def undivided_tower(case: Case) -> Profile:
    """The profile of devices that each hold the whole tower, with the pipeline, cp and dp of the case."""
    # as many dp and cp ranks: state and exchange stay those of the case
    dims = replace(case.setting.dims, tp=1, ep=1, etp=None)  # a tower has no experts to divide
    return profile_setting(case.model, case.cluster, case.options, dims)


def _whole_towers(case: Case) -> Profile:
    """The profile with every rank of tp holding the whole tower; its gradients are summed over them once a step."""
    setting, tp = case.setting, case.setting.dims.tp
    link = case.cluster.device.link_bytes_per_s * Efficiency().link
    reduce_s = 2.0 * (tp - 1) / tp * _GRADIENT_BYTES / link  # ring
    layers = tuple(
        ours if ours.tower == "language" else replace(whole, step_s=whole.step_s + num_trained(case, whole) * reduce_s)
        for ours, whole in zip(setting.profile.layers, undivided_tower(case).layers, strict=True)
    )
    return replace(setting.profile, layers=layers)


def _once_a_pool(profile: Profile, pooling: int) -> Profile:
    """Return what a call of the tower costs whatever is in it, divided among the micro-batches that share the call."""

    def pooled(terms: tuple[float, ...]) -> tuple[float, ...]:
        return plus_constant(terms, terms[MICROBATCHES] / pooling - terms[MICROBATCHES]) if terms else ()

    # seconds of the device, of its host, and of recompute
    layers = tuple(
        layer
        if layer.tower == "language"
        else replace(
            layer,
            forward_s=pooled(layer.forward_s),
            backward_s=pooled(layer.backward_s),
            weight_s=pooled(layer.weight_s),
            host_forward_s=layer.host_forward_s / pooling,
            host_backward_s=layer.host_backward_s / pooling,
            tiers=tuple(replace(tier, extra_backward_s=pooled(tier.extra_backward_s)) for tier in layer.tiers),
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


# -- figures --------------------------------------------------------------------------------------------------------


def _summarise(
    case: Case,
    profile: Profile,
    decision: VisionDecision,
    found: Shares,
    exchange: Exchange,
    sizes: ImageSizes,
    *,
    groups: int | None = None,
) -> VisionEstimate:
    """Sum up a mean step: forward and backward of vision tower and projector, without recompute; bytes of one rank.

    `groups`: of devices that share; None: as many as the ranks make.
    """
    table = case.schedule.table
    num_steps, dp, _ = table.shape
    groups = groups or (1 if decision.group == "dp" else dp)
    # 1. seconds of each rank's part of each call
    constant = _constant_s(profile) * decision.pooling
    called = found.seconds.any(axis=1, keepdims=True)
    host_s = _host_s(profile) * decision.pooling
    seconds = (called * np.maximum(found.seconds + constant, host_s)).reshape(
        num_steps, groups, -1, decision.degree
    )  # (steps, groups, calls, N)
    # 2. the same where every rank encodes what it holds
    without = tower_seconds(case.setting.profile).of_images(case.work[:, IMAGE_TERMS])
    plain = case.setting.profile
    without = np.where(without > 0, np.maximum(without + _constant_s(plain), _host_s(plain)), 0.0)
    per_step = np.where(table >= 0, without[np.maximum(table, 0)], 0.0).sum(axis=2)  # (steps, dp)
    own = per_step.mean(axis=0)
    packed = np.bincount(case.packing.indices, minlength=len(case.samples)) * case.samples.num_patches
    rank_s = seconds.sum(axis=2).mean(axis=(0, 1))
    rank_without_s = own if decision.group == "dp" else np.full(decision.degree, own.mean())
    exchange_s = (exchange.forward_s + exchange.backward_s) / num_steps
    return VisionEstimate(
        tower_ms=_ms(float(seconds.max(axis=3).sum(axis=2).max(axis=1).mean()) + exchange_s),
        tower_without_ms=_ms(float(per_step.max(axis=1).mean())),
        ideal_ms=_ms(float(seconds.mean(axis=3).sum(axis=2).max(axis=1).mean())),
        exchange_ms=_ms(exchange_s),
        update_ms=_ms(_update_s(profile)),
        update_without_ms=_ms(_update_s(case.setting.profile)),
        exchange_mib=round_digits(exchange.received_bytes / num_steps / MIB),
        features_mib=round_digits(exchange.largest_rows / MIB),
        state_gib=0.0,
        state_without_gib=0.0,
        activations_gib=0.0,
        activations_without_gib=0.0,
        sizes_known=round(float(packed[sizes.known].sum() / max(1, packed.sum())), 4),
        ranks=tuple(
            VisionRankEstimate(rank=rank, tower_ms=_ms(shared), tower_without_ms=_ms(before))
            for rank, (shared, before) in enumerate(zip(rank_s.tolist(), rank_without_s.tolist(), strict=True))
        ),
    )


def with_memory(case: Case, stages: Sequence[Stage], without: Sequence[Stage]) -> VisionEstimate | None:
    """The figures of a case whose images are shared, run on `stages`; it would run on `without` if they were not."""
    if case.vision is None:
        return None
    (state, saved), (state_without, saved_without) = (
        _tower_bytes(case, stages),
        _tower_bytes(case.without_vision(), without),
    )
    return replace(
        case.vision.estimate,
        state_gib=round_gib(state),
        state_without_gib=round_gib(state_without),
        activations_gib=round_gib(saved),
        activations_without_gib=round_gib(saved_without),
    )


def _ms(seconds: float) -> float:
    return round_digits(seconds * 1e3)


def _constant_s(profile: Profile) -> float:
    """Time vision tower and projector on a micro-batch of no size, both ways: kernels, weights read once."""
    layers = (layer for layer in profile.layers if layer.tower != "language")
    return sum(layer.forward_s[MICROBATCHES] + layer.backward_s[MICROBATCHES] for layer in layers)


def _host_s(profile: Profile) -> float:
    """Return the seconds of the host for forward and backward of vision tower and projector: no call takes less."""
    return sum(layer.host_forward_s + layer.host_backward_s for layer in profile.layers if layer.tower != "language")


def _update_s(profile: Profile) -> float:
    return sum(layer.step_s for layer in profile.layers if layer.tower != "language")


def _tower_bytes(case: Case, stages: Sequence[Stage]) -> tuple[float, float]:
    """Return the state of vision tower and projector, and what all micro-batches in flight keep if no layer recomputes.

    On the device of `stages` that holds most of them, at the largest micro-batch; workspace is not counted.
    """
    if case.apart is not None:
        return case.apart.state_bytes, case.apart.saved_bytes
    # what all micro-batches in flight keep adds up on a device, whatever its stages are
    problem, profile = case.problem, case.setting.profile
    split, work = problem.assess(stages), problem.work_max
    state, saved = np.zeros(problem.num_stages), np.zeros(problem.num_stages)
    for stage, device, in_flight in zip(stages, split.devices, split.in_flight, strict=True):
        layers = profile.layers[stage.start : stage.stop]
        for layer in layers:
            if layer.tower != "language":
                state[device] += layer.state_bytes
                saved[device] += in_flight * max(0.0, float(np.dot(layer.tiers[0].saved_bytes, work)))
    worst = int(np.argmax(state + saved))
    return float(state[worst]), float(saved[worst])
