"""Plans as xtuner's recompute ratios: the ratio that floors to the planned number, and what numbers cannot say."""

from __future__ import annotations

import pytest
from export_cases import by_counts, cut, first_block, make_model
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.adapters.xtuner_fsdp import XtunerExport, ratio_for, xtuner_export, xtuner_ladder
from trimtab.errors import UnsupportedPlanError
from trimtab.specs import ModelSpec, ParallelDims, RecomputeChoice, Stage

MODEL = make_model(family="qwen3_vl")
BLOCK = first_block(MODEL)
VISION = MODEL.indices("vision", "block")


def export(model: ModelSpec, stages: tuple[Stage, ...], **options) -> XtunerExport:
    return xtuner_export(model=model, stages=stages, **({"dims": ParallelDims(dp=2)} | options))


def recomputed_by(num_layers: int, ratio: float) -> list[int]:
    """Layers that xtuner v1 wraps: `num_recompute_layers = int(num_hidden_layers * recompute_ratio)`, then
    `layer_idx < num_recompute_layers` (dense.py and modeling_vision.py)."""
    return [layer for layer in range(num_layers) if layer < int(num_layers * ratio)]


def recomputed_by_experts(num_layers: int, ratio: float) -> list[int]:
    """The same with experts: `_should_recompute` of moe.py leaves the last layer out."""
    return [layer for layer in recomputed_by(num_layers, ratio) if layer != num_layers - 1]


def test_every_number_of_every_depth_has_its_ratio():
    for total in range(1, 201):
        for number in range(total + 1):
            ratio = ratio_for(number, total)
            assert len(recomputed_by(total, ratio)) == number
            assert 0.0 <= ratio <= 1.0
            assert len(repr(ratio)) <= 5, "three decimals are enough for 200 layers"


@given(st.integers(1, 10**6), st.data())
@settings(max_examples=200, deadline=None)
def test_the_ratio_is_exact_at_any_depth(total, data):
    number = data.draw(st.integers(0, total))
    assert int(total * ratio_for(number, total)) == number


def test_the_naive_ratio_would_lose_a_layer():
    lost = [(n, total) for total in range(1, 129) for n in range(total) if int(total * (n / total)) != n]
    assert lost, "n / total does not floor to n everywhere"
    assert all(int(total * ratio_for(n, total)) == n for n, total in lost)


def test_both_towers_have_their_ratio():
    chosen = RecomputeChoice(tier="full", layers=(*VISION[:2], *range(BLOCK, BLOCK + 5)))
    found = export(MODEL, by_counts(MODEL, 12, recompute={0: [chosen]}), zero_stage=3)
    assert dict(found.fields) == {"recompute_ratio": 0.42, "vision_recompute_ratio": 0.5, "reshard_after_forward": True}
    assert found.runs[0].recompute == (chosen,)
    assert found.warnings == ()
    made: dict[str, object] = {}
    names = {"FSDPConfig": lambda **fields: made.update(fields)}
    exec(found.python().replace("from xtuner.v1.config import FSDPConfig", ""), names)
    assert made == dict(found.fields)
    assert "recompute_ratio=0.42,  # the first 5 of 12 blocks" in found.python()
    nothing = export(MODEL, by_counts(MODEL, 12))
    assert dict(nothing.fields)["recompute_ratio"] == 0.0, "xtuner's own default recomputes everything"


def test_which_blocks_cannot_be_said():
    last = RecomputeChoice(tier="full", layers=(BLOCK + 11,))
    assert export(MODEL, by_counts(MODEL, 12, recompute={0: [last]})).runs[0].recompute[0].layers == (BLOCK,)
    mixed = make_model(family="qwen3_vl", kinds=True)
    last = RecomputeChoice(tier="full", layers=(first_block(mixed) + 11,))
    found = export(mixed, by_counts(mixed, 12, recompute={0: [last]}))
    assert any("the planned language blocks are of other kinds than the first 1" in w for w in found.warnings)


def test_tiers_and_layers_beside_blocks_are_warned_of():
    chosen = [
        RecomputeChoice(tier="attention", layers=(BLOCK,)),
        RecomputeChoice(tier="selective", layers=(VISION[0],)),
        RecomputeChoice(tier="full", layers=(len(MODEL.layers) - 1,)),
    ]
    found = export(MODEL, by_counts(MODEL, 12, recompute={0: chosen}))
    assert any("1 language blocks are planned with attention recompute" in w for w in found.warnings)
    assert any("1 vision blocks are planned with selective recompute" in w for w in found.warnings)
    assert any("recompute of lm_head is planned, and xtuner's ratios count blocks alone" in w for w in found.warnings)
    assert any("ZeRO stage 1 was planned, and xtuner shards parameters" in w for w in found.warnings)


def test_with_experts_the_last_block_keeps_its_activations():
    model = make_model(family="qwen3_vl_moe", experts=8)
    blocks = tuple(model.indices("language", "block"))
    found = export(model, by_counts(model, 12, recompute={0: [RecomputeChoice(tier="full", layers=blocks)]}))
    ratio = dict(found.fields)["recompute_ratio"]
    assert recomputed_by_experts(12, ratio) == list(range(11))
    assert found.runs[0].recompute[0].layers == blocks[:11]
    assert any("recompute of all 12 language blocks is planned, and xtuner keeps the last" in w for w in found.warnings)
    assert max(way[0].num_recomputed() for ladder in xtuner_ladder(model, by_counts(model, 12)) for way in ladder) == 15


def test_every_way_is_exported_as_it_is():
    ladders = xtuner_ladder(MODEL, by_counts(MODEL, 12))
    assert len(ladders) == 5
    for ladder in ladders:
        assert [way[0].num_recomputed() for way in ladder] == list(
            range(ladder[0][0].num_recomputed(), ladder[0][0].num_recomputed() + 13)
        )
        for way in ladder:
            assert export(MODEL, way).runs == way
    assert xtuner_ladder(MODEL, by_counts(MODEL, 6, 6)) == []


def test_other_families_and_degrees_are_refused_at_once():
    other = make_model(family="gemma3")
    with pytest.raises(UnsupportedPlanError) as caught:
        export(other, cut(other, BLOCK), dims=ParallelDims(pp=2, tp=4, cp=2))
    assert str(caught.value).splitlines() == [
        "tiny is of the family gemma3, and xtuner v1 has of ours internvl, internvl_chat, qwen3_vl, qwen3_vl_moe: "
        "export to huggingface instead",
        "pp 2 was planned, and xtuner v1 trains by FSDP with whole layers on every rank: plan with pp 1",
        "tp 4 was planned, and xtuner v1 trains by FSDP with whole layers on every rank: plan with tp 1",
        "cp 2 was planned, and xtuner v1 trains by FSDP with whole layers on every rank: plan with cp 1",
    ]
