"""Sizes of single images, from a sample table that may know no more than sums over the images of a sample.

A tower that cuts images into tiles of one size encodes tiles apart: they are the atoms, and their number is known.
Elsewhere an image is one atom of p patches. `trimtab size` records them; a table without them holds n, Σ p and Σ p².
One image, two images, and images of one size follow from these exactly. Others are spread like a log-normal
distribution of such sums: near where sizes vary smoothly, too uneven where a sample holds a few sizes many times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import keep_at_home, share_images, share_pools, tower_bytes, tower_seconds
from trimtab.costs.formula.adapters import adapt_layer
from trimtab.costs.formula.settings import ITEM_BYTES, Efficiency
from trimtab.errors import TrimtabError
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.work import MICROBATCHES, PATCHES, one_tile
from trimtab.plan.plan import VisionDecision
from trimtab.specs import FloatArray, IntArray, LayerCost, ModelSpec, Packing, Profile, SampleTable

_EQUAL = 1e-9  # relative: sums of integers below this are those of equal images
_GOLDEN = (5**0.5 - 1) / 2
_WHOLE_IMAGES = ("llava_anyres",)  # rules whose tiles of one image are encoded together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageSizes:
    """Atoms of every sample, by the numbers that describe them."""

    count: IntArray  # (num_samples,) atoms
    patches: FloatArray  # (num_samples,) of all of them
    patches_sq: FloatArray  # (num_samples,)
    patches_windowed: FloatArray  # (num_samples,)
    known: npt.NDArray[np.bool_]  # (num_samples,) whether these are the true sizes
    each: FloatArray  # (all atoms,) patches of each, in any unit, sample after sample

    def atoms_of(self, rows: IntArray) -> FloatArray:
        """Return (n, 3): patches, patches_sq and patches_windowed of the atoms of samples `rows`, in their order."""
        # every atom's place among all that the table holds
        count = self.count[rows]
        owner = np.repeat(np.arange(len(rows)), count)
        place = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
        # its share of the sample's sums, so that these stay exact where single sizes are a guess
        share = self.each[(np.cumsum(self.count) - self.count)[rows][owner] + place]
        share /= np.bincount(owner, share, len(rows))[owner]
        squares = share * share
        squares /= np.bincount(owner, squares, len(rows))[owner]
        sums = (self.patches, self.patches_sq, self.patches_windowed)
        return np.stack(
            [part * of[rows][owner] for part, of in zip((share, squares, share), sums, strict=True)], axis=1
        )


def image_sizes(samples: SampleTable, model: ModelSpec) -> ImageSizes:
    """The atoms of every sample of a table in patches."""
    p, squares = samples.num_patches.astype(np.float64), samples.patches_sq.astype(np.float64)
    # tiles are atoms; else the images as they were sized; else what sums of rows and of their squares allow
    tile = tile_rows(model)
    if tile is not None:
        count = np.maximum(np.rint(p / tile).astype(np.int64), p > 0)
        known, each = count * tile == p, np.ones(int(count.sum()))
    elif samples.image_patches is not None:
        count, known = np.where(p > 0, samples.num_images, 0), np.ones(len(p), np.bool_)
        each = samples.image_patches[np.repeat(p > 0, samples.num_images)].astype(np.float64)
    else:
        count = np.where(p > 0, np.maximum(samples.num_images, 1), 0)
        known, each = _from_sums(count, np.divide(count * squares, p * p, out=np.ones(len(p)), where=p > 0))
    return ImageSizes(
        count=count,
        patches=p,
        patches_sq=squares,
        patches_windowed=samples.patches_windowed.astype(np.float64),
        known=known | (count == 0),
        each=each,
    )


def _from_sums(count: IntArray, ratio: FloatArray) -> tuple[npt.NDArray[np.bool_], FloatArray]:
    """Return whether sizes are known, and every atom, in some unit; `ratio` is n Σp² / (Σp)², 1 of equal images.

    Two images are 1 ± d with d² = ratio - 1. The i-th of n others is exp(s z): s² = ln ratio, as of a log-normal
    distribution, z the logistic quantile of (i + 1/2) / n at variance 1, large and small ones mixed.
    """
    # one image, two, or equal ones follow exactly from n, Σp and Σp²
    known = (count <= 1) | (np.abs(ratio - 1) <= _EQUAL) | ((count == 2) & (ratio >= 1))
    ratio = np.maximum(ratio, 1.0)
    owner = np.repeat(np.arange(len(count)), count)
    n, i = count[owner], np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    # the golden ratio mixes large and small ones: a pack's first images are no rule for its last
    i = i[np.lexsort((i * _GOLDEN % 1.0, owner))]
    z = np.log((i + 0.5) / (n - i - 0.5)) * (3**0.5 / np.pi)
    pair = 1 + (2 * i - 1) * np.sqrt(np.minimum(ratio - 1, 1.0))[owner]
    return known, np.where(n == 2, pair, np.exp(np.sqrt(np.log(ratio))[owner] * z))


def tile_rows(model: ModelSpec) -> int | None:
    """Return the rows of one tile, where the tower encodes tiles of one size apart."""
    if model.image_rule.name in _WHOLE_IMAGES:
        return None
    try:
        return one_tile(model).patches
    except TrimtabError:
        return None


# Which images ranks share in one call, what each encodes, and what bringing the features together takes.


_POOLS_AT_ONCE = 8192  # of which atoms are laid out together
_PIXEL_BYTES = 4  # processors give fp32
_DEALT_POOLS = 256  # spread over the data set, to see how much of a dispatch stays where it is


def pool_packs(table: IntArray, decision: VisionDecision) -> IntArray:
    """List (calls, packs) the packs whose images are shared in one call, -1 for an empty slot; calls step by step."""
    num_steps, dp, num_microbatches = table.shape
    k = decision.pooling
    # ranks of dp share across packs of one micro-batch; those of tp and cp hold the same pack
    by_call = table.reshape(num_steps, dp, num_microbatches // k, k)
    if decision.group == "dp":
        return by_call.transpose(0, 2, 1, 3).reshape(-1, dp * k)
    return by_call.reshape(-1, k)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    seconds: FloatArray  # (calls, N)
    slowest: FloatArray  # (calls, 3) image terms of the slowest share
    largest: FloatArray  # (calls, 3) term by term the most of any share


def share_calls(case: Case, profile: Profile, decision: VisionDecision, sizes: ImageSizes, pools: IntArray) -> Shares:
    cost, parts = tower_seconds(profile), []
    for first in range(0, len(pools), _POOLS_AT_ONCE):
        part = lay_out(pools[first : first + _POOLS_AT_ONCE], case.packing, sizes)
        seconds = cost.of_images(part.atoms)
        weight = objective_cost(profile, decision).of_images(part.atoms)
        parts.append(share_pools(weight, seconds, part.atoms, part.offsets, decision.degree, rule=decision.rule))
    return Shares(
        seconds=np.concatenate([part.load for part in parts]),
        slowest=np.concatenate([part.slowest for part in parts]),
        largest=np.concatenate([part.largest for part in parts]),
    )


def objective_cost(profile: Profile, decision: VisionDecision) -> LinearCost:
    return tower_seconds(profile) if decision.objective == "time" else tower_bytes(profile)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Atoms:
    atoms: FloatArray  # (n, 3) image terms
    offsets: IntArray  # (calls + 1,)
    slot: IntArray  # (n,) slot of the call that the atom's pack is in


def lay_out(pools: IntArray, packing: Packing, sizes: ImageSizes) -> _Atoms:
    """The atoms of these calls, call after call."""
    # samples of every pack of a call, then the atoms of every sample
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


# -- exchange -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Of one rank, over the whole data set."""

    received_bytes: float  # forward and backward
    forward_s: float
    backward_s: float
    rows_sent: float  # bytes of features that the next stage gets
    largest_rows: float  # bytes of features held in the largest call


def price_exchange(
    case: Case, decision: VisionDecision, sizes: ImageSizes, pools: IntArray, *, margin: float
) -> Exchange:
    """Return the bytes that a rank receives and their seconds over one link; each call takes two latencies.

    gather: (N - 1) / N of the rows of all images, and as much of their gradients. dispatch: the pixels of images that
    come from other ranks, their rows back, and the gradients of these.
    """
    dims = case.setting.dims
    N, num_ranks = decision.degree, 1 if decision.group == "dp" else dims.dp
    # features of all images that a group shares, and of its largest call
    patches = np.where(pools >= 0, case.work[np.maximum(pools, 0), PATCHES], 0.0)
    row = feature_values(case.model) * ITEM_BYTES[case.options.dtype]
    num_calls = len(pools) // num_ranks
    whole = float(patches.sum()) * row / num_ranks  # features of all images that a group shares
    most = float(patches.sum(axis=1).max(initial=0.0)) * row * margin
    # gather: all rows to all; dispatch: what moves, there and back
    received, sent, pixels = whole * (N - 1) / N, whole, 0.0
    if decision.exchange == "dispatch":
        moved = _moved_share(case, decision, sizes, pools)
        received, most = whole / N * moved, float(patches.max(initial=0.0)) * row * margin * decision.pooling
        pixels = float(patches.sum()) / N * moved * _pixel_values(case.model) * _PIXEL_BYTES
        sent = whole / N
    trained = any(num_trained(case, layer) for layer in case.setting.profile.layers if layer.tower != "language")
    # over the devices' link inside a node, else by each rank's own port
    cluster = case.cluster
    # neighbours are those of tp, then of cp, then of dp
    stride = {"tp": 1, "tp_cp": 1, "cp": dims.tp, "dp": dims.tp * dims.cp, "replica": 1}[decision.group]
    within = N * stride <= cluster.devices_per_node
    if decision.group == "replica":  # whose stages lie on different nodes, where there are several
        within = cluster.num_nodes == 1
    link = cluster.device.link_bytes_per_s if within else cluster.node_link_bytes_per_s  # else by each rank's own port
    per_byte = 1.0 / (link * Efficiency().link)
    forward, backward = received + pixels, received if trained else 0.0
    return Exchange(
        received_bytes=forward + backward,
        forward_s=forward * per_byte + 2 * num_calls * cluster.latency_s,
        backward_s=backward * per_byte + 2 * num_calls * cluster.latency_s * trained,
        rows_sent=sent,
        largest_rows=most,
    )


def feature_values(model: ModelSpec) -> float:
    """Return the values of image features that leave the tower for each patch, DeepStack's among them.

    They are rows of the projector that go to the language model: not on to another layer of the projector.
    """
    values = 0.0
    for layer, following in zip(model.layers, (*model.layers[1:], None), strict=True):
        goes_on = following and following.tower == "projector" and following.hidden_size == layer.output_size
        if layer.tower == "projector" and not goes_on:
            values += layer.rows_out_per_input * layer.output_size
    return values


def _pixel_values(model: ModelSpec) -> float:
    """Return input values of one patch: rows of the patch embedding's weight."""
    first = next(x for x in model.layers if x.tower == "vision" and x.kind == "embed" and x.num_matmul_params)
    return first.num_matmul_params / first.output_size


def _moved_share(case: Case, decision: VisionDecision, sizes: ImageSizes, pools: IntArray) -> float:
    """Return the part of the patches that other ranks encode, in up to 256 calls spread over the data set."""
    chosen = np.unique(np.linspace(0, len(pools) - 1, num=min(_DEALT_POOLS, len(pools))).astype(np.int64))
    part = lay_out(pools[chosen], case.packing, sizes)
    cost = objective_cost(case.setting.profile, decision)
    # call by call: shares go to the ranks that hold most of them; what is left moves
    home = part.slot // decision.pooling
    moved = total = 0.0
    for first, last in zip(part.offsets[:-1].tolist(), part.offsets[1:].tolist(), strict=True):
        atoms = part.atoms[first:last]
        shares = keep_at_home(
            share_images(cost.of_images(atoms), decision.degree, rule=decision.rule), home[first:last], atoms[:, 0]
        )
        rank = np.repeat(np.arange(decision.degree), np.diff(shares.offsets))
        moved += float(atoms[shares.order[rank != home[first:last][shares.order]], 0].sum())
        total += float(atoms[:, 0].sum())
    return moved / total if total > 0 else 0.0


def with_exchange(profile: Profile, case: Case, decision: VisionDecision, exchange: Exchange) -> Profile:
    """The last layer of the projector also exchanges and holds the features: constants of each micro-batch."""
    # on the last layer of the projector, whose stage has the features first
    number = max(case.model.indices("vision") + case.model.indices("projector"))
    layer, num_packs = profile.layers[number], len(case.work) / case.setting.dims.dp  # of one rank
    held = exchange.largest_rows
    pooled = 2.0 * held if decision.pooling > 1 else 0.0  # features and their gradients until the last backward
    changed = replace(
        layer,
        forward_s=plus_constant(layer.forward_s, exchange.forward_s / num_packs),
        backward_s=plus_constant(layer.backward_s, exchange.backward_s / num_packs),
        output_bytes=plus_constant((0.0,) * len(layer.output_bytes), exchange.rows_sent / num_packs),
        tiers=tuple(replace(tier, saved_bytes=plus_constant(tier.saved_bytes, pooled)) for tier in layer.tiers),
        transient_bytes=plus_constant(layer.transient_bytes, held),
        other_transient_bytes=plus_constant(layer.other_transient_bytes, held) if layer.other_transient_bytes else (),
        group=1 + max(other.group for other in profile.layers),
    )
    return replace(profile, layers=(*profile.layers[:number], changed, *profile.layers[number + 1 :]))


def plus_constant(terms: tuple[float, ...], constant: float) -> tuple[float, ...]:
    return (*terms[:MICROBATCHES], terms[MICROBATCHES] + constant, *terms[MICROBATCHES + 1 :])


def num_trained(case: Case, layer: LayerCost) -> float:
    """Return the parameters of the layer that get a gradient: its own, or with LoRA those of its adapters."""
    # under LoRA adapters alone have gradients
    lora = case.options.lora
    if lora is not None:
        spec = next(x for x in case.model.layers if x.name == layer.name)
        return sum(x.num_params for x in adapt_layer(spec, lora, 1))
    return 0.0 if layer.tower in case.options.frozen_towers else layer.num_params
