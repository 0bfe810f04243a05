"""Splits as launchers make them, to stand beside ours: equal block counts, and one switch of recompute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from trimtab.errors import PartitionError
from trimtab.options import RecomputedTier
from trimtab.specs import Profile, Stage, recomputing, stages_between


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
    keeps the whole vision tower on stage 0 and counts only the language model's blocks, as Megatron-style launchers
    do. A forbidden cut gives way to the nearest allowed one.
    """
    blocks = [
        i
        for i, layer in enumerate(profile.layers)
        if layer.kind == "block" and (vision == "spread" or layer.tower == "language")
    ]
    if not 1 <= num_stages <= len(blocks):
        raise PartitionError(
            f"cannot divide {len(blocks)} blocks evenly among {num_stages} stages: choose between 1 and {len(blocks)} "
            "stages"
        )
    each, left = divmod(len(blocks), num_stages)
    starts = [i * each + min(i, left) for i in range(1, num_stages)]
    return stages_between(_allowed([blocks[k] for k in starts], len(profile.layers), forbidden_cuts))


def full_recompute(profile: Profile, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with full recompute of every layer that can."""
    able: dict[int, RecomputedTier] = {i: "full" for i, layer in enumerate(profile.layers) if layer.tier("full")}
    return tuple(recomputing(stage, able) for stage in stages)


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
