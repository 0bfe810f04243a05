"""Which blocks a stage holds and recomputes: what frameworks that count layers make of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trimtab.options import RecomputedTier, Tower
from trimtab.specs import AttentionSpec, ModelSpec, Stage, recomputing, tiers_of

TIERS: tuple[RecomputedTier, ...] = ("full", "selective")
"""From what holds least to what holds most."""

MEANINGS: Mapping[RecomputedTier, str] = {
    "full": "only its input",
    "selective": "the results of matrix products and attention",
}
"""What a layer holds by each tier, in words."""


def attentions(model: ModelSpec, tower: Tower = "language") -> list[AttentionSpec]:
    return [x.attention for x in model.layers if x.tower == tower and x.attention is not None]


def head_problems(model: ModelSpec, tp: int) -> list[str]:
    """What keeps the heads of the language model from being spread over tp ranks."""
    problems = []
    for heads, groups in sorted({(x.num_heads, x.num_kv_heads) for x in attentions(model)}):
        if heads % tp:
            problems.append(
                f"tp {tp} does not divide the language model's {heads} attention heads: choose a tp that does"
            )
        elif groups % tp and tp % groups:
            problems.append(
                f"tp {tp} neither divides the language model's {groups} key-value heads nor is a multiple of them: "
                "choose a tp that does"
            )
    return problems


def padded_heads(model: ModelSpec, tp: int) -> list[tuple[int, int]]:
    """Head counts of the vision tower that tp does not divide, each with the next one that it does."""
    counts = sorted({x.num_heads for x in attentions(model, "vision")})
    return [(count, -(-count // tp) * tp) for count in counts if count % tp]


def is_block(model: ModelSpec, index: int, tower: Tower = "language") -> bool:
    return model.layers[index].tower == tower and model.layers[index].kind == "block"


def blocks_of(model: ModelSpec, stage: Stage, tower: Tower = "language") -> tuple[int, ...]:
    """Blocks of the tower on the stage, in forward order."""
    return tuple(i for i in range(stage.start, stage.stop) if is_block(model, i, tower))


def recomputed_blocks(model: ModelSpec, stage: Stage, tower: Tower = "language") -> dict[int, RecomputedTier]:
    """Those that the stage recomputes, each with its tier."""
    return {i: tier for i, tier in tiers_of(stage).items() if is_block(model, i, tower)}


def recompute_first(
    model: ModelSpec, stages: Sequence[Stage], counts: Mapping[Tower, int | None], tier: RecomputedTier = "full"
) -> tuple[Stage, ...]:
    """The stages with recompute of the first blocks of each tower on every one of them: so many, or None for all."""
    return tuple(
        recomputing(
            stage, {i: tier for tower, number in counts.items() for i in blocks_of(model, stage, tower)[:number]}
        )
        for stage in stages
    )


def count_by_tier(stages: Sequence[Stage]) -> Counter[RecomputedTier]:
    """Recomputed layers of each tier."""
    return Counter(tier for stage in stages for tier in tiers_of(stage).values())


def lost_tiers(counts: Mapping[RecomputedTier, int], layers: str, instead: str) -> list[str]:
    """A sentence for each tier beside full that a framework turns into full."""
    return [
        f"{counts[tier]} {layers} are planned with {tier} recompute (each keeps {MEANINGS[tier]}), and {instead}, "
        "which holds less and takes longer"
        for tier in TIERS[1:]
        if counts.get(tier)
    ]
