"""InternVL's published rule, and other people's maps in our bytes."""

import pytest
from placement_cases import small_model

import trimtab
import trimtab.placement
from refusals import refused
from trimtab import describe, place
from trimtab.errors import PartitionError
from trimtab.placement.machine import Workload, machine_of
from trimtab.placement.placed import assess_map, split_model, split_model_map
from trimtab.units import GIB

WORK = Workload(seq_len=100, images=((448, 448),))


def blocks_per_gpu(num_layers: int, world_size: int, vit_alpha: float = 0.5, *, real: bool = True) -> list[int]:
    counts = [0] * world_size
    for key, gpu in split_model(num_layers, vit_alpha, world_size=world_size).items():
        if ".layers." in key and (not real or int(key.rsplit(".", 1)[1]) < num_layers):
            counts[gpu] += 1
    return counts


@pytest.mark.parametrize(
    ("num_layers", "world_size", "vit_alpha", "counts"),
    [  # by hand: ceil(L / (n - alpha)) each, 1 - alpha of it rounded up on GPU 0, the last block moved there
        (80, 2, 0.5, [28, 52]),
        (80, 4, 0.5, [13, 23, 23, 21]),
        (48, 4, 0.5, [8, 14, 14, 12]),
        (60, 4, 0.0, [16, 15, 15, 14]),
        (32, 8, 0.5, [4, 5, 5, 5, 5, 5, 3, 0]),
        (24, 1, 0.5, [24]),
    ],
)
def test_blocks_lie_where_the_rule_puts_them(num_layers, world_size, vit_alpha, counts):
    assert blocks_per_gpu(num_layers, world_size, vit_alpha) == counts


def test_everything_else_lies_on_the_first_gpu():
    placed = split_model(32, world_size=4)
    others = {key: gpu for key, gpu in placed.items() if ".layers." not in key}
    assert others == dict.fromkeys(
        [
            "vision_model",
            "mlp1",
            "language_model.model.tok_embeddings",
            "language_model.model.embed_tokens",
            "language_model.model.norm",
            "language_model.model.rotary_emb",
            "language_model.output",
            "language_model.lm_head",
        ],
        0,
    )
    assert placed["language_model.model.layers.31"] == 0


def test_rounding_up_twice_names_blocks_that_do_not_exist_and_empties_the_last_gpu():
    depths = (24, 28, 32, 36, 40, 48, 60, 64, 80)
    empty = [(n, L) for n in range(2, 9) for L in depths if blocks_per_gpu(L, n)[-1] == 0]
    assert empty == [(6, 24), (6, 28), (7, 28), (7, 40), (8, 24), (8, 32), (8, 40)]
    phantoms = {(n, L): sum(blocks_per_gpu(L, n, real=False)) - L for n in range(2, 9) for L in depths}
    assert max(phantoms.values()) == 6
    assert {case for case, count in phantoms.items() if count == 6} == {(7, 40), (8, 24), (8, 32)}


@pytest.mark.parametrize(
    ("vit_alpha", "counts"), [(1.0, [1, 16, 15]), (1.5, [1, 22, 9]), (2.0, [1, 31, 0]), (2.5, [1, 31, 0])]
)
def test_from_one_on_the_first_gpu_holds_no_block_but_the_last(vit_alpha, counts):
    assert blocks_per_gpu(32, 3, vit_alpha) == counts


def test_model_cards_leave_the_rotary_table_out():
    pytest.importorskip("accelerate", reason="the name stands with what loads a model")
    repository, card = (
        trimtab.placement.split_model(48, world_size=4, variant=x) for x in ("repository", "model card")
    )
    assert repository == {**card, "language_model.model.rotary_emb": 0}
    assert len(repository) == len(card) + 1


def test_the_visible_gpus_are_the_world(monkeypatch):
    cuda = pytest.importorskip("torch.cuda", reason="torch counts the GPUs")  # `torch` alone may be tests/torch
    monkeypatch.setattr(cuda, "device_count", lambda: 3)
    assert trimtab.placement.split_model(48) == split_model(48, world_size=3)
    monkeypatch.setattr(cuda, "device_count", lambda: 0)
    with refused(PartitionError, "0", "1", "GPU", "world_size"):
        trimtab.placement.split_model(48)


def test_other_families_get_the_rule_under_their_own_names():
    model = small_model(num_layers=8)
    placed = split_model_map(model, 3)
    assert placed["model.visual.merger"] == 0
    assert placed["model.language_model.layers.7"] == 0
    assert placed["model.language_model.layers.3"] == 1
    internvl = describe("InternVL-Chat-V1-5")
    assert split_model_map(internvl, 4) == split_model(48, world_size=4)


def test_phantom_blocks_and_empty_gpus_are_reported():
    small = small_model(num_layers=32)
    found = assess_map(small, machine_of([80 * GIB] * 8), WORK, split_model_map(small, 8), rule="split_model")
    text = " ".join(found.problems)
    assert "6 keys for decoder blocks that do not exist: model.language_model.layers.32" in text
    assert "1 GPU left without any layer: 7" in text


def test_a_map_by_whole_modules_is_understood():
    model, machine = small_model(num_layers=3), machine_of([GIB] * 2, cpu_bytes=GIB)
    found = assess_map(
        model, machine, WORK, {"model.visual": 0, "model.language_model": 1, "lm_head": "cpu"}, rule="theirs"
    ).placement
    assert found is not None
    assert found.device_map["model.visual.merger"] == 0
    assert found.device_map["model.language_model.layers.2"] == 1
    (head,) = found.spilled
    assert head.runs_on == 0  # copied to the map's first GPU
    assert head.moved_bytes == 256 * head.weight_bytes


def test_a_map_that_leaves_modules_out_or_parts_tied_ones_is_told():
    model, machine = small_model(tied=True), machine_of([GIB] * 2)
    found = assess_map(model, machine, WORK, {"model.language_model": 0, "lm_head": 1}, rule="theirs")
    text = " ".join(found.problems)
    assert "4 modules without a device" in text
    assert "share a weight but lie on 0 and 1" in text


def test_our_own_map_assessed_gives_our_own_bytes():
    model, machine = describe("Qwen2.5-VL-7B"), machine_of([24 * GIB, 16 * GIB, 10 * GIB])
    ours = place(model, machine, WORK)
    found = assess_map(model, machine, WORK, ours.device_map, rule="ours")
    assert found.placement is not None
    assert found.placement.uses == ours.uses
    assert not found.problems
