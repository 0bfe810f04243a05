"""Which images ranks share in one call, and what each of them encodes then: all calls of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.balance.image_pools import share_pools
from trimtab.balance.images import TowerCost, tower_bytes, tower_seconds
from trimtab.plan.case import Case
from trimtab.plan.decide.image_sizes import ImageSizes
from trimtab.plan.plan import VisionDecision
from trimtab.specs import FloatArray, IntArray, Packing, Profile

_POOLS_AT_ONCE = 8192  # of which atoms are laid out together


def pool_packs(table: IntArray, decision: VisionDecision) -> IntArray:
    """(calls, packs): the packs whose images are shared in one call, -1 for an empty slot; calls step by step."""
    num_steps, dp, num_microbatches = table.shape
    k = decision.pooling
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
        seconds = cost.of(*part.atoms.T)
        weight = objective_cost(profile, decision).of(*part.atoms.T)
        parts.append(share_pools(weight, seconds, part.atoms, part.offsets, decision.degree, rule=decision.rule))
    return Shares(
        seconds=np.concatenate([part.load for part in parts]),
        slowest=np.concatenate([part.slowest for part in parts]),
        largest=np.concatenate([part.largest for part in parts]),
    )


def objective_cost(profile: Profile, decision: VisionDecision) -> TowerCost:
    return tower_seconds(profile) if decision.objective == "time" else tower_bytes(profile)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Atoms:
    atoms: FloatArray  # (n, 3) image terms
    offsets: IntArray  # (calls + 1,)
    slot: IntArray  # (n,) slot of the call that the atom's pack is in


def lay_out(pools: IntArray, packing: Packing, sizes: ImageSizes) -> _Atoms:
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
