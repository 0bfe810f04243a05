"""Units of a model and the orders in which they may be cut."""

from dataclasses import replace

import pytest
from placement_cases import small_model

from trimtab.models.describe import describe
from trimtab.models.description import shipped_models
from trimtab.models.families import family_of
from trimtab.models.images.rules import UnsettledRule
from trimtab.placement.bytes import arrangements, modules_of, parts_of
from trimtab.specs import LayerSpec, ModelSpec


def published() -> list:
    return [model for model in map(describe, shipped_models()) if model.indices("vision")]


@pytest.mark.parametrize("tied", [False, True])
def test_every_arrangement_holds_every_layer_once(tied):
    model = small_model(tied=tied)
    found = arrangements(parts_of(model))
    assert [x.name for x in found if x.name == "forward"] == ([] if tied else ["forward"])
    for option in found:
        assert sorted(i for unit in option.units for i in unit.layers) == list(range(len(model.layers)))


def test_tied_weights_share_a_unit_in_every_arrangement():
    model = small_model(tied=True)
    owner, borrower = (next(i for i, x in enumerate(model.layers) if x.name == name) for name in model.tied[0])
    for option in arrangements(parts_of(model)):
        assert any({owner, borrower} <= set(unit.layers) for unit in option.units)


def test_a_tower_is_cut_between_blocks_never_inside_embeddings_or_projector():
    parts = parts_of(small_model(depth=3))
    names = [[small_model(depth=3).layers[i].name for i in unit.layers] for unit in parts.vision]
    assert names == [
        ["model.visual.patch_embed", "model.visual.blocks.0"],
        ["model.visual.blocks.1"],
        ["model.visual.blocks.2", "model.visual.merger"],
    ]


def test_a_model_that_nothing_has_run_cut_keeps_its_tower_whole():
    assert len(parts_of(describe("InternVL-Chat-V1-5")).vision) == 1
    assert len(parts_of(describe("Qwen2.5-VL-7B")).vision) == 32


def test_a_borrower_of_a_weight_lies_with_its_owner():
    """A decoder's own embedding behind an encoder, one weight with the shared one; the head reads it too."""

    def layer(name, kind):
        return LayerSpec(
            name=name, tower="language", kind=kind, hidden_size=8, output_size=8, num_params=64, num_matmul_params=64
        )

    names = ["shared", "encoder.0", "encoder.norm", "decoder.embed", "decoder.0", "head"]
    kinds = ["embed", "block", "norm", "embed", "block", "head"]
    model = ModelSpec(
        name="encoder and decoder",
        family="mine",
        layers=tuple(layer(*x) for x in zip(names, kinds, strict=True)),
        image_rule=UnsettledRule(reason=""),
        vocab_size=8,
        tied=(("shared", "decoder.embed"), ("shared", "head")),
    )
    parts = parts_of(model)
    assert parts.embed.layers == (0, 3)
    assert [x.layers for x in parts.blocks] == [(1, 2), (4,)]
    assert parts.tied
    alone = replace(model, tied=(("encoder.0", "decoder.0"),))
    assert [x.layers for x in parts_of(alone).blocks] == [(1, 2, 3, 4)]
    assert not parts_of(alone).tied


def test_published_models_have_units_that_cover_them():
    for model in published():
        for option in arrangements(parts_of(model)):
            covered = sorted(i for unit in option.units for i in unit.layers)
            assert covered == list(range(len(model.layers))), model.name
        vision = parts_of(model).vision
        assert (len(vision) > 1) != family_of(model.family).is_remote_code, model.name
        keys = [name for i in range(len(model.layers)) for name in modules_of(model, i)]
        assert len(set(keys)) == len(keys)


def test_hidden_states_that_are_joined_stay_on_one_device():
    model = small_model(depth=4)
    behind = next(i for i, x in enumerate(model.layers) if x.name.endswith("blocks.2")) + 1
    joined = replace(model, forbidden_cuts=frozenset(range(behind, model.indices("projector")[-1] + 1)))
    assert len(parts_of(model).vision) == 4
    assert (
        len(parts_of(joined).vision) == 2
    )  # states behind blocks 1 and 3 are read: what makes or reads both stays together
