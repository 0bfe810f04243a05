"""Units of a model and the orders in which they may be cut."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from placement_cases import small_model

from trimtab.models.describe import describe
from trimtab.models.description import shipped_models
from trimtab.models.families import family_of
from trimtab.models.images.rules import UnsettledRule
from trimtab.placement.bytes import arrangements, modules_of, parts_of
from trimtab.placement.place import choices_of, least_sum, smallest_fullest
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


# -- cuts over unlike devices equal brute force ------------------------------------------------------------------------


def draw(seed: int) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Shares [class, start, stop], the class of every device, and free costs of the same shape."""
    rng = np.random.default_rng(seed)
    num_units, num_devices = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    num_classes = int(rng.integers(1, num_devices + 1))
    classes = [*range(num_classes), *rng.integers(0, num_classes, num_devices - num_classes).tolist()]
    capacities = rng.integers(5, 40, num_classes)
    added, peak = rng.integers(0, 12, num_units), rng.integers(0, 9, num_units)
    fixed = int(rng.integers(0, 4))
    total = np.zeros((num_units + 1, num_units + 1))
    for s, e in itertools.combinations(range(num_units + 1), 2):
        total[s, e] = added[s:e].sum() + peak[s:e].max() + fixed
    shares = total[None] / capacities[:, None, None]
    return shares, classes, rng.random(shares.shape)


def all_maps(num_units: int, num_devices: int):
    """Every way to cut the units into runs that are not empty, each run on a device of its own."""
    for num_runs in range(1, min(num_units, num_devices) + 1):
        for cuts in itertools.combinations(range(1, num_units), num_runs - 1):
            ends = (0, *cuts, num_units)
            for devices in itertools.permutations(range(num_devices), num_runs):
                yield list(zip(ends[:-1], ends[1:], devices, strict=True))


@pytest.mark.parametrize("block", range(10))
def test_both_solvers_match_brute_force_on_a_thousand_instances(block):
    for seed in range(100 * block, 100 * (block + 1)):
        shares, classes, cost = draw(seed)
        num_units, num_devices = shares.shape[1] - 1, len(classes)
        maps = list(all_maps(num_units, num_devices))
        fullest = [max(shares[classes[d], s, e] for s, e, d in runs) for runs in maps]
        sums = [sum(cost[classes[d], s, e] for s, e, d in runs) for runs in maps]
        choices = choices_of(classes)
        assert smallest_fullest(shares, choices) == min(fullest), seed
        positive = np.where(np.triu(np.ones(cost.shape[1:], bool), 1), cost, np.inf)
        total, runs = least_sum(positive, choices)
        assert total == pytest.approx(min(sums), abs=1e-12), seed
        assert sum(cost[classes[r.device], r.start, r.stop] for r in runs) == pytest.approx(total)
        assert [r.start for r in runs] == [0, *[r.stop for r in runs[:-1]]]
        assert runs[-1].stop == num_units
        assert len({r.device for r in runs}) == len(runs)


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_that_nothing_beats_is_handed_back(seed):
    shares, classes, _ = draw(seed)
    choices = choices_of(classes)
    best = smallest_fullest(shares, choices)
    assert smallest_fullest(shares, choices, below=best) == best
    assert smallest_fullest(shares, choices, below=best / 2) == best / 2


def test_the_number_of_devices_can_be_asked_for():
    shares, classes, cost = draw(3)
    num_units = shares.shape[1] - 1
    positive = np.where(np.triu(np.ones(cost.shape[1:], bool), 1), cost, np.inf)
    for num in range(1, min(num_units, len(classes)) + 1):
        assert len(least_sum(positive, choices_of(classes), num_devices=num)[1]) == num


def test_more_than_twelve_unlike_devices_keep_their_order():
    classes = list(range(14))
    choices = choices_of(classes)
    rng = np.random.default_rng(0)
    before = np.concatenate([[0], np.cumsum(rng.integers(1, 9, 40))]).astype(float)
    capacities = rng.integers(10, 40, 14)
    shares = np.maximum(before[None, :] - before[:, None], 0)[None] / capacities[:, None, None]
    bound = smallest_fullest(shares, choices)
    cost = np.where((shares > 0) & (shares <= bound), shares**2, np.inf)
    _, runs = least_sum(cost, choices)
    devices = [r.device for r in runs]
    assert devices == sorted(devices)
    assert max(shares[classes[r.device], r.start, r.stop] for r in runs) == bound


def test_nothing_fits_gives_no_runs():
    total, runs = least_sum(np.full((1, 4, 4), np.inf), choices_of([0, 0]))
    assert total == np.inf
    assert runs == ()
