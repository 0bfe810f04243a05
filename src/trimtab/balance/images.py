"""Images to the ranks of a group, so that every rank's share of the vision tower costs the same.

An *atom* is what cannot be divided between ranks: an image, or one frame of a clip where attention stays inside frames.
Symbols: n atoms of cost w_i, N ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from trimtab.balance.cost import LinearCost
from trimtab.errors import PackingError
from trimtab.options import Rule
from trimtab.specs import WORK_TERMS, FloatArray, IntArray, Profile

RULES: tuple[Rule, ...] = get_args(Rule)

WHOLE = 2.0**50
"""Costs become integers that sum to about this: comparisons and sums are then exact, whatever the order."""


def tower_seconds(profile: Profile) -> LinearCost:
    """Forward and backward seconds of the vision tower and the projector, from a profile.

    Give it to `vision_dp` or `share_images` as the cost of an image; docs/vision-data-parallel.md says when.
    Not counted: what a call costs whatever is in it, which no assignment changes; recomputed forwards.
    """
    total = np.zeros(len(WORK_TERMS))
    for layer in profile.layers:
        if layer.tower != "language":
            total += np.add(layer.forward_s, layer.backward_s)
    return _as_cost(total)


def tower_bytes(profile: Profile) -> LinearCost:
    """Bytes the tower holds for its backward, nothing recomputed.

    Give it to `vision_dp` in place of `tower_seconds` to balance memory; docs/vision-data-parallel.md says when.
    """
    total = np.zeros(len(WORK_TERMS))
    for layer in profile.layers:
        if layer.tower != "language":
            total += layer.tiers[0].saved_bytes
    return _as_cost(total)


def _as_cost(total: FloatArray) -> LinearCost:
    of = dict(zip(WORK_TERMS, total.tolist(), strict=True))
    return LinearCost(**{name: of[name] for name in ("patches", "patches_sq", "patches_windowed")})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageShares:
    """Which rank encodes which atom: rank r encodes `order[offsets[r]:offsets[r + 1]]`, in their own order."""

    order: IntArray  # (n,) atoms, rank after rank
    offsets: IntArray  # (N + 1,)
    load: FloatArray  # (N,) in the unit of the costs
    lower_bound: float  # no assignment of these atoms has a smaller largest load
    rule: Rule

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def max_load(self) -> float:
        return float(self.load.max())

    @property
    def imbalance(self) -> float:
        """Slowest / mean - 1."""
        mean = float(self.load.mean())
        return self.max_load / mean - 1.0 if mean > 0 else 0.0

    def atoms_of(self, rank: int) -> IntArray:
        return self.order[self.offsets[rank] : self.offsets[rank + 1]]


def share_images(cost: npt.ArrayLike, num_ranks: int, *, rule: Rule = "balanced") -> ImageShares:
    """Atoms of cost w to `num_ranks` ranks, the largest load small; the same on every rank of equal input.

    Use it to divide images among ranks in code of your own; `vision_dp` calls it.

    `balanced`: longest first, then moves and swaps that lower the largest load.
    At most 4/3 - 1/(3N) times the optimum (longest-first's bound, Graham 1969); mostly within 1 % of `lower_bound`.
    `contiguous`: whole runs of atoms in order, cut where the largest load is least (exact): no row changes place.
    Time or memory is the caller's choice of cost: see `tower_seconds`, `tower_bytes`.

    >>> shares = share_images([8100, 1024, 1024, 4096, 576, 2304], 2)
    >>> [shares.atoms_of(rank).tolist() for rank in range(2)]
    [[0, 4], [1, 2, 3, 5]]
    """
    weights = np.ascontiguousarray(cost, dtype=np.float64)
    if problem := _find_problem(weights, num_ranks, rule):
        raise PackingError(problem)
    from trimtab.balance.image_search import balance, cut

    total = math.fsum(weights.tolist())  # exact, so the same on every kind of processor
    whole = np.rint(weights / (total or 1.0) * WHOLE).astype(np.int64)
    found = balance(whole, num_ranks) if rule == "balanced" else cut(whole, num_ranks)
    ranks = np.repeat(np.arange(num_ranks), np.diff(found.offsets))
    load: FloatArray = np.bincount(ranks, weights[found.order], num_ranks).astype(np.float64)
    bound = found.bound / WHOLE * total
    return ImageShares(order=found.order, offsets=found.offsets, load=load, lower_bound=bound, rule=rule)


def keep_at_home(shares: ImageShares, home: IntArray, size: npt.ArrayLike) -> ImageShares:
    """The same shares, dealt to the ranks so that much of `size` stays where it is: atom i lies on rank `home[i]`.

    Greedy, largest overlap first: at least half of the most that could stay. Loads change ranks, not their sizes.
    """
    N = shares.num_ranks
    share_of = np.repeat(np.arange(N), np.diff(shares.offsets))
    stays = np.zeros((N, N))
    np.add.at(stays, (share_of, home[shares.order]), np.asarray(size, np.float64)[shares.order])
    share_for = np.full(N, -1)
    taken = np.zeros(N, np.bool_)
    for flat in np.argsort(-stays, axis=None, kind="stable"):
        share, rank = divmod(int(flat), N)
        if share_for[rank] < 0 and not taken[share]:
            share_for[rank], taken[share] = share, True
    parts = [shares.atoms_of(share) for share in share_for]
    return ImageShares(
        order=np.concatenate(parts),
        offsets=np.concatenate([[0], np.cumsum([len(part) for part in parts])]),
        load=shares.load[share_for],
        lower_bound=shares.lower_bound,
        rule=shares.rule,
    )


def _find_problem(weights: FloatArray, num_ranks: int, rule: str) -> str | None:
    if rule not in RULES:
        return f"'{rule}' is not a rule to share images by: choose one of {', '.join(RULES)}"
    if num_ranks < 1:
        return f"images cannot be shared among {num_ranks} ranks: give a group of at least 1"
    if weights.ndim != 1:
        return f"costs of shape {weights.shape} are not one number for each image: give a flat list"
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        i = int(np.argmin(np.isfinite(weights) & (weights >= 0)))
        return f"the cost of image {i} is {weights[i]:g}: give finite numbers that are not negative"
    return None
