"""Blocks of a stage and what recomputes of them."""

from __future__ import annotations

from export_cases import by_counts, first_block, make_model

from trimtab.adapters.blocks import (
    blocks_of,
    count_by_tier,
    has_other_kinds,
    lost_tiers,
    recomputed_blocks,
    recomputing,
)
from trimtab.specs import RecomputeChoice

MODEL = make_model(num_vision=4, num_language=6)
BLOCK = first_block(MODEL)
CHOSEN = {
    0: [RecomputeChoice(tier="full", layers=(0, 1)), RecomputeChoice(tier="attention", layers=(BLOCK, 2))],
    1: [RecomputeChoice(tier="selective", layers=(BLOCK + 3,))],
}


def test_blocks_are_those_of_one_tower_with_their_tiers():
    first, second = by_counts(MODEL, 2, 4, recompute=CHOSEN)
    assert blocks_of(MODEL, first, "vision") == (1, 2, 3, 4)
    assert blocks_of(MODEL, first) == (BLOCK, BLOCK + 1)
    assert recomputed_blocks(MODEL, first, "vision") == {1: "full", 2: "attention"}  # not the patch embedding, layer 0
    assert recomputed_blocks(MODEL, second) == {BLOCK + 3: "selective"}


def test_recomputing_replaces_what_the_stage_recomputed():
    first, _ = by_counts(MODEL, 2, 4, recompute=CHOSEN)
    assert recomputing(first, (3, 1)).recompute == (RecomputeChoice(tier="full", layers=(1, 3)),)
    assert recomputing(first, ()).recompute == ()


def test_other_kinds_are_those_that_no_taken_layer_stands_in_for():
    vision, language = blocks_of(MODEL, by_counts(MODEL, 6)[0], "vision"), blocks_of(MODEL, by_counts(MODEL, 6)[0])
    assert not has_other_kinds(MODEL, vision[2:], vision[:2])
    assert has_other_kinds(MODEL, vision[1:], vision[:2])  # more of them
    assert has_other_kinds(MODEL, language[:1], vision)


def test_every_tier_that_becomes_full_is_a_sentence():
    counts = count_by_tier(by_counts(MODEL, 2, 4, recompute=CHOSEN))
    assert counts == {"full": 2, "attention": 2, "selective": 1}
    assert lost_tiers(counts, "layers", "it runs all again") == [
        "2 layers are planned with attention recompute (each keeps the result of attention alone), and it runs all "
        "again, which holds less and takes longer",
        "1 layers are planned with selective recompute (each keeps the results of matrix products and attention), and "
        "it runs all again, which holds less and takes longer",
    ]
