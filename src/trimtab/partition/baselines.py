"""Splits as launchers make them, to stand beside ours: equal block counts, and equal parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from trimtab.errors import PartitionError
from trimtab.specs import Profile, Stage


def even_stages(
    profile: Profile,
    num_stages: int,
    *,
    vision: Literal["spread", "first"] = "spread",
    forbidden_cuts: frozenset[int] = frozenset(),
) -> tuple[Stage, ...]:
    """Equal counts of transformer blocks, earlier stages taking what is left over; all else beside its block.

    Embeddings come first and the head last; a norm, projector or embedding between the towers stays with the blocks
    before it. "spread" counts the blocks of both towers alike, as uniform partitioning of a layer list does; "first"
    keeps the whole vision tower on stage 0 and counts the language model's blocks alone, as Megatron-style launchers
    do. A forbidden cut gives way to the nearest allowed one.
    """
    blocks = [
        i
        for i, layer in enumerate(profile.layers)
        if layer.kind == "block" and (vision == "spread" or layer.tower == "language")
    ]
    if not 1 <= num_stages <= len(blocks):
        raise PartitionError(
            f"cannot deal {len(blocks)} blocks evenly to {num_stages} stages: choose between 1 and {len(blocks)} stages"
        )
    each, left = divmod(len(blocks), num_stages)
    starts = [i * each + min(i, left) for i in range(1, num_stages)]
    return _stages(_allowed([blocks[k] for k in starts], len(profile.layers), forbidden_cuts))


def parameter_stages(
    profile: Profile, num_stages: int, *, forbidden_cuts: frozenset[int] = frozenset()
) -> tuple[Stage, ...]:
    """The contiguous split whose largest stage has fewest parameters (exact; earliest cuts on ties).

    What DeepSpeed's partition_method="parameters" asks for. Dynamic programme over cuts, O(P L^2).
    """
    L = len(profile.layers)
    cuts = np.array([c for c in range(L + 1) if c not in forbidden_cuts])
    if not 1 <= num_stages < len(cuts):
        raise PartitionError(
            f"cannot cut {L} layers with {len(forbidden_cuts)} forbidden cuts into {num_stages} stages: "
            f"choose between 1 and {len(cuts) - 1} stages"
        )
    before = np.concatenate([[0.0], np.cumsum([layer.num_params for layer in profile.layers])])[cuts]
    largest = np.full(len(cuts), np.inf)
    largest[0] = 0.0
    came_from = np.zeros((num_stages, len(cuts)), int)
    for stage in range(num_stages):
        reached = np.full(len(cuts), np.inf)
        for b in range(stage + 1, len(cuts)):
            candidates = np.maximum(largest[:b], before[b] - before[:b])
            came_from[stage, b] = int(np.argmin(candidates))
            reached[b] = candidates[came_from[stage, b]]
        largest = reached
    chosen = [len(cuts) - 1]
    for stage in range(num_stages - 1, -1, -1):
        chosen.append(int(came_from[stage, chosen[-1]]))
    return _stages([int(cuts[k]) for k in reversed(chosen)])


def _allowed(inner: Sequence[int], num_layers: int, forbidden_cuts: frozenset[int]) -> list[int]:
    """Cuts 0, ..., num_layers, each inner one at the nearest free allowed place (earlier on ties)."""
    free = [c for c in range(1, num_layers) if c not in forbidden_cuts]
    if len(free) < len(inner):
        raise PartitionError(
            f"cannot cut {num_layers} layers into {len(inner) + 1} stages: only {len(free)} cuts are allowed: "
            f"choose at most {len(free) + 1} stages"
        )
    cuts = [0]
    for k, wanted in enumerate(inner):
        # leave enough allowed cuts for those behind
        choices = [c for c in free[: len(free) - (len(inner) - k - 1)] if c > cuts[-1]]
        cuts.append(min(choices, key=lambda c: (abs(c - wanted), c)))
    return [*cuts, num_layers]


def _stages(cuts: Sequence[int]) -> tuple[Stage, ...]:
    return tuple(Stage(index=i, start=a, stop=b) for i, (a, b) in enumerate(itertools.pairwise(cuts)))
