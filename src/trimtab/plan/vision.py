"""A case whose ranks share the images of a micro-batch: other vision layers, and the slowest share as the work.

Every cost is linear in the work terms, so the time of the slowest rank's share is that of a micro-batch that holds just
this share: split, simulation and memory go on as ever. Each share follows from the plan's own packs, all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.balance.image_pools import share_pools
from trimtab.balance.images import TowerCost, keep_at_home, share_images, tower_bytes, tower_seconds
from trimtab.costs.settings import ITEM_BYTES, Efficiency
from trimtab.plan.case import Case, SharedVision, VisionLoads
from trimtab.plan.image_sizes import ImageSizes, image_sizes
from trimtab.plan.plan import VisionDataParallel
from trimtab.plan.setting import profile_setting
from trimtab.plan.work import MICROBATCHES, PATCHES, PATCHES_WINDOWED, limit_work
from trimtab.specs import FloatArray, IntArray, LayerCost, LayerSpec, ModelSpec, Packing, Profile, Stage

_IMAGE_TERMS = slice(PATCHES, PATCHES_WINDOWED + 1)
_GRADIENT_BYTES = 4  # as `profile_model` keeps gradients
_PIXEL_BYTES = 4  # processors give fp32
_POOLS_AT_ONCE = 8192  # of which atoms are laid out together
_DEALT_POOLS = 256  # spread over the data set, to see how much of a dispatch stays where it is


def share_vision(case: Case, decision: VisionDataParallel) -> Case:
    """`case` with images shared as decided; `decision` must be free of `decision_problems`.

    Priced: the slowest share of every call, and what a call costs whatever is in it, which pooling saves; the whole
    tower on every rank of tp, and the sum of its gradients over them; the exchange, which overlaps nothing; the
    features each rank holds. Not priced: the few integers that ranks exchange before each call.
    """
    plain = case.without_vision()
    profile = _whole_towers(plain) if decision.group == "tp" else plain.setting.profile
    profile = _once_a_pool(profile, decision.pooling)
    sizes = image_sizes(plain.samples, plain.model)
    pools = _pool_packs(plain.schedule.table, decision)
    found = _share_pools(plain, profile, decision, sizes, pools)

    work = plain.work.copy()
    work[:, _IMAGE_TERMS] = 0.0
    in_slot = pools >= 0
    by_rank = in_slot.reshape(len(pools), -1, decision.pooling).sum(axis=2)  # each of a dispatch has slots of its own
    calls = np.repeat(np.maximum(by_rank, 1), decision.pooling, axis=1)
    work[pools[in_slot], _IMAGE_TERMS] = (found.slowest[:, None, :] / calls[:, :, None])[in_slot]

    most = limit_work(plain.work, plain.setting.max_patches, plain.setting.max_tokens)[_IMAGE_TERMS]
    packed = plain.work[:, _IMAGE_TERMS].max(axis=0)
    margin = np.divide(most, packed, out=np.ones(3), where=packed > 0)  # of the limits over the largest pack
    exchange = _price_exchange(plain, decision, sizes, pools, margin=float(margin[0]))
    setting = replace(plain.setting, profile=_with_exchange(profile, plain, decision, exchange))
    return replace(
        plain,
        work=work,
        setting=setting,
        vision=SharedVision(
            decision=decision,
            work=plain.work,
            profile=plain.setting.profile,
            largest=found.largest.max(axis=0) * np.maximum(margin, 1.0),
            loads=_summarise(plain, profile, decision, found, exchange, sizes),
        ),
    )


# -- who encodes what -----------------------------------------------------------------------------------------------


def _pool_packs(table: IntArray, decision: VisionDataParallel) -> IntArray:
    """(calls, packs): the packs whose images are shared in one call, -1 for an empty slot; calls step by step."""
    num_steps, dp, num_microbatches = table.shape
    k = decision.pooling
    by_call = table.reshape(num_steps, dp, num_microbatches // k, k)
    if decision.group == "dp":
        return by_call.transpose(0, 2, 1, 3).reshape(-1, dp * k)
    return by_call.reshape(-1, k)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shares:
    seconds: FloatArray  # (calls, N)
    slowest: FloatArray  # (calls, 3) image terms of the slowest share
    largest: FloatArray  # (calls, 3) term by term the most of any share


def _share_pools(
    case: Case, profile: Profile, decision: VisionDataParallel, sizes: ImageSizes, pools: IntArray
) -> _Shares:
    cost, parts = tower_seconds(profile), []
    for first in range(0, len(pools), _POOLS_AT_ONCE):
        part = _lay_out(pools[first : first + _POOLS_AT_ONCE], case.packing, sizes)
        seconds = cost.of(*part.atoms.T)
        weight = _objective_cost(profile, decision).of(*part.atoms.T)
        parts.append(share_pools(weight, seconds, part.atoms, part.offsets, decision.degree, rule=decision.rule))
    return _Shares(
        seconds=np.concatenate([part.load for part in parts]),
        slowest=np.concatenate([part.slowest for part in parts]),
        largest=np.concatenate([part.largest for part in parts]),
    )


def _objective_cost(profile: Profile, decision: VisionDataParallel) -> TowerCost:
    return tower_seconds(profile) if decision.objective == "time" else tower_bytes(profile)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Atoms:
    atoms: FloatArray  # (n, 3) image terms
    offsets: IntArray  # (calls + 1,)
    slot: IntArray  # (n,) slot of the call that the atom's pack is in


def _lay_out(pools: IntArray, packing: Packing, sizes: ImageSizes) -> _Atoms:
    """The atoms of these calls, call after call."""
    call, slot = np.nonzero(pools >= 0)
    packs = pools[call, slot]
    held = np.diff(packing.offsets)[packs]  # samples
    starts = np.cumsum(held) - held
    places = np.arange(int(held.sum())) - np.repeat(starts - packing.offsets[packs], held)
    rows = packing.indices[places]
    count = sizes.count[rows]
    per_call = np.bincount(np.repeat(call, held), count, minlength=len(pools)).astype(np.int64)
    return _Atoms(
        atoms=sizes.atoms_of(rows),
        offsets=np.concatenate([[0], np.cumsum(per_call)]),
        slot=np.repeat(np.repeat(slot, held), count),
    )


# -- the tower of a rank --------------------------------------------------------------------------------------------


def _whole_towers(case: Case) -> Profile:
    """The profile with every rank of tp holding the whole tower; its gradients are summed over them once a step."""
    setting, tp = case.setting, case.setting.dims.tp
    alone = profile_setting(case.model, case.cluster, case.options, replace(setting.dims, tp=1))
    link = case.cluster.device.link_bytes_per_s * Efficiency().link
    reduce_s = 2.0 * (tp - 1) / tp * _GRADIENT_BYTES / link  # ring
    layers = tuple(
        ours if ours.tower == "language" else replace(whole, step_s=whole.step_s + _trained(case, whole) * reduce_s)
        for ours, whole in zip(setting.profile.layers, alone.layers, strict=True)
    )
    return replace(setting.profile, layers=layers)


def _once_a_pool(profile: Profile, pooling: int) -> Profile:
    """What a call of the tower costs whatever is in it, divided among the micro-batches that share the call."""

    def pooled(terms: tuple[float, ...]) -> tuple[float, ...]:
        return _plus(terms, terms[MICROBATCHES] / pooling - terms[MICROBATCHES]) if terms else ()

    layers = tuple(
        layer
        if layer.tower == "language"
        else replace(
            layer,
            forward_s=pooled(layer.forward_s),
            backward_s=pooled(layer.backward_s),
            weight_s=pooled(layer.weight_s),
            tiers=tuple(replace(tier, extra_backward_s=pooled(tier.extra_backward_s)) for tier in layer.tiers),
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def _trained(case: Case, layer: LayerCost) -> float:
    return 0.0 if layer.tower in case.options.frozen_towers else layer.num_params


# -- the exchange ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """Of one rank, over the whole data set."""

    forward_bytes: float
    backward_bytes: float
    forward_s: float
    backward_s: float
    num_calls: int
    rows_sent: float  # bytes of features that the next stage gets
    largest_rows: float  # bytes of features held in the largest call


def _price_exchange(
    case: Case, decision: VisionDataParallel, sizes: ImageSizes, pools: IntArray, *, margin: float
) -> _Exchange:
    """Bytes that a rank receives and their seconds over one link; each call takes two latencies.

    gather: (N - 1) / N of the rows of all images, and as much of their gradients. routed: 1 / N of that. dispatch: the
    pixels of images that come from other ranks, their rows back, and the gradients of these.
    """
    N, num_ranks = decision.degree, 1 if decision.group == "dp" else case.setting.dims.dp
    patches = np.where(pools >= 0, case.work[np.maximum(pools, 0), PATCHES], 0.0)
    row = feature_values(case.model) * ITEM_BYTES[case.options.dtype]
    num_calls = len(pools) // num_ranks
    whole = float(patches.sum()) * row / num_ranks  # features of all images that a group shares
    most = float(patches.sum(axis=1).max(initial=0.0)) * row * margin
    pixels = 0.0
    if decision.exchange == "dispatch":
        moved = _moved_share(case, decision, sizes, pools)
        received, most = whole / N * moved, float(patches.max(initial=0.0)) * row * margin * decision.pooling
        pixels = float(patches.sum()) / N * moved * _pixel_values(case.model) * _PIXEL_BYTES
        sent = whole / N
    else:
        received, sent = whole * (N - 1) / N, whole
        if decision.exchange == "routed":
            received, most = received / N, most / N
    trained = any(_trained(case, layer) for layer in case.setting.profile.layers if layer.tower != "language")
    cluster = case.cluster
    link = cluster.device.link_bytes_per_s if decision.group == "tp" else cluster.slowest_link_bytes_per_s
    per_byte = 1.0 / (link * Efficiency().link)
    forward, backward = received + pixels, received if trained else 0.0
    return _Exchange(
        forward_bytes=forward,
        backward_bytes=backward,
        forward_s=forward * per_byte + 2 * num_calls * cluster.latency_s,
        backward_s=backward * per_byte + 2 * num_calls * cluster.latency_s * trained,
        num_calls=num_calls,
        rows_sent=sent,
        largest_rows=most,
    )


def feature_values(model: ModelSpec) -> float:
    """Values of image features that leave the tower for each patch, DeepStack's among them."""
    return sum(layer.rows_out_per_input * layer.output_size for layer in _last_projectors(model))


def _last_projectors(model: ModelSpec) -> Iterator[LayerSpec]:
    """Projector layers whose rows go to the language model: not on to another layer of the projector."""
    for layer, following in zip(model.layers, (*model.layers[1:], None), strict=True):
        if layer.tower != "projector":
            continue
        if following is None or following.tower != "projector" or following.hidden_size != layer.output_size:
            yield layer


def _pixel_values(model: ModelSpec) -> float:
    """Input values of one patch: rows of the patch embedding's weight."""
    first = next(x for x in model.layers if x.tower == "vision" and x.kind == "embed" and x.num_matmul_params)
    return first.num_matmul_params / first.output_size


def _moved_share(case: Case, decision: VisionDataParallel, sizes: ImageSizes, pools: IntArray) -> float:
    """Part of the patches that other ranks encode, in up to 256 calls spread over the data set."""
    chosen = np.unique(np.linspace(0, len(pools) - 1, num=min(_DEALT_POOLS, len(pools))).astype(np.int64))
    part = _lay_out(pools[chosen], case.packing, sizes)
    cost = _objective_cost(case.setting.profile, decision)
    home = part.slot // decision.pooling
    moved = total = 0.0
    for first, last in zip(part.offsets[:-1].tolist(), part.offsets[1:].tolist(), strict=True):
        atoms = part.atoms[first:last]
        shares = keep_at_home(
            share_images(cost.of(*atoms.T), decision.degree, rule=decision.rule), home[first:last], atoms[:, 0]
        )
        rank = np.repeat(np.arange(decision.degree), np.diff(shares.offsets))
        moved += float(atoms[shares.order[rank != home[first:last][shares.order]], 0].sum())
        total += float(atoms[:, 0].sum())
    return moved / total if total > 0 else 0.0


def _with_exchange(profile: Profile, case: Case, decision: VisionDataParallel, exchange: _Exchange) -> Profile:
    """The last layer of the projector also exchanges and holds the features: constants of each micro-batch."""
    number = max(case.model.indices("vision") + case.model.indices("projector"))
    layer, num_packs = profile.layers[number], len(case.work) / case.setting.dims.dp  # of one rank
    held = exchange.largest_rows
    pooled = 2.0 * held if decision.pooling > 1 else 0.0  # features and their gradients until the last backward
    changed = replace(
        layer,
        forward_s=_plus(layer.forward_s, exchange.forward_s / num_packs),
        backward_s=_plus(layer.backward_s, exchange.backward_s / num_packs),
        output_bytes=_plus((0.0,) * len(layer.output_bytes), exchange.rows_sent / num_packs),
        tiers=tuple(replace(tier, saved_bytes=_plus(tier.saved_bytes, pooled)) for tier in layer.tiers),
        transient_bytes=_plus(layer.transient_bytes, held),
        other_transient_bytes=_plus(layer.other_transient_bytes, held) if layer.other_transient_bytes else (),
        group=1 + max(other.group for other in profile.layers),
    )
    return replace(profile, layers=(*profile.layers[:number], changed, *profile.layers[number + 1 :]))


def _plus(terms: tuple[float, ...], constant: float) -> tuple[float, ...]:
    return (*terms[:MICROBATCHES], terms[MICROBATCHES] + constant, *terms[MICROBATCHES + 1 :])


# -- figures --------------------------------------------------------------------------------------------------------


def _summarise(
    case: Case, profile: Profile, decision: VisionDataParallel, found: _Shares, exchange: _Exchange, sizes: ImageSizes
) -> VisionLoads:
    table = case.schedule.table
    num_steps, dp, _ = table.shape
    groups = 1 if decision.group == "dp" else dp
    constant = _constant_s(profile) * decision.pooling
    called = found.seconds.any(axis=1, keepdims=True) * constant
    seconds = (found.seconds + called).reshape(num_steps, groups, -1, decision.degree)  # (steps, groups, calls, N)
    without = tower_seconds(case.setting.profile).of(*case.work[:, _IMAGE_TERMS].T)
    without += (without > 0) * _constant_s(case.setting.profile)
    per_step = np.where(table >= 0, without[np.maximum(table, 0)], 0.0).sum(axis=2)  # (steps, dp)
    own = per_step.mean(axis=0)
    packed = np.bincount(case.packing.indices, minlength=len(case.samples)) * case.samples.num_patches
    return VisionLoads(
        rank_s=seconds.sum(axis=2).mean(axis=(0, 1)),
        rank_without_s=own if decision.group == "dp" else np.full(decision.degree, own.mean()),
        slowest_s=float(seconds.max(axis=3).sum(axis=2).max(axis=1).mean()),
        slowest_without_s=float(per_step.max(axis=1).mean()),
        ideal_s=float(seconds.mean(axis=3).sum(axis=2).max(axis=1).mean()),
        update_s=_update_s(profile),
        update_without_s=_update_s(case.setting.profile),
        exchange_s=(exchange.forward_s + exchange.backward_s) / num_steps,
        exchange_bytes=(exchange.forward_bytes + exchange.backward_bytes) / num_steps,
        feature_bytes=exchange.largest_rows,
        sizes_known=float(packed[sizes.known].sum() / max(1, packed.sum())),
    )


def _constant_s(profile: Profile) -> float:
    """Forward and backward of vision tower and projector on a micro-batch of no size: kernels, weights read once."""
    layers = (layer for layer in profile.layers if layer.tower != "language")
    return sum(layer.forward_s[MICROBATCHES] + layer.backward_s[MICROBATCHES] for layer in layers)


def _update_s(profile: Profile) -> float:
    return sum(layer.step_s for layer in profile.layers if layer.tower != "language")


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerMemory:
    """Bytes of vision tower and projector on one device."""

    state_bytes: float
    saved_bytes: float  # of all micro-batches in flight, if no layer recomputes


def tower_memory(case: Case, stages: Sequence[Stage]) -> TowerMemory:
    """On the device of `stages` that holds most of them, at the largest micro-batch; workspace is not counted."""
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
    return TowerMemory(state_bytes=float(state[worst]), saved_bytes=float(saved[worst]))
