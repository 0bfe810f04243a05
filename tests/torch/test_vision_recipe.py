"""Tests of runtime/vision/recipe.py: the published calls on two and three ranks, and what they refuse."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import vision_recipe
from gloo_ranks import on_ranks

from refusals import refused
from trimtab.errors import TrimtabError
from trimtab.runtime.vision import recipe


def test_the_helpers_by_hand_give_the_features_and_the_averaged_gradient(tmp_path: Path) -> None:
    on_ranks(vision_recipe.run_helpers, tmp_path, num_ranks=3)


def test_a_host_that_returns_rows_of_all_images_and_computes_lengths_beforehand(tmp_path: Path) -> None:
    on_ranks(vision_recipe.run_like_veomni, tmp_path, num_ranks=2)


GRIDS = torch.tensor([[1, 4, 4], [2, 4, 6], [1, 2, 2]])


@pytest.mark.parametrize(("grids", "merge", "counts"), [(GRIDS, 1, [16, 48, 4]), (GRIDS, 2, [4, 12, 1])])
def test_rows_of_an_image_are_its_patches_over_the_merged_block(grids, merge, counts) -> None:
    assert recipe.get_image_embedding_counts(grids, merge) == counts
    assert recipe.get_image_patch_counts(grids) == recipe.get_image_embedding_counts(grids)
    assert recipe.get_image_patch_counts(grids[:0]) == []


@pytest.mark.parametrize(
    ("counts", "ranks", "loads"),
    [
        ([9, 1, 1, 1, 9], 2, [10, 11]),
        ([100] * 50, 4, [1200, 1200, 1300, 1300]),  # as even as they can be, not 13, 13, 13, 11
        ([5] * 4, 4, [5] * 4),
        ([50, 1], 3, [0, 50, 1]),
        ([7], 4, [0, 0, 0, 7]),
        ([], 2, [0, 0]),
        # the checks of verl's and ROLL's test_vision_dp_on_cpu.py
        ([100] * 4, 2, [200, 200]),
        ([100, 200, 300], 1, [600]),
        ([100] * 6, 3, [200] * 3),
        ([100, 200], 4, [0, 0, 100, 200]),
        ([10, 20, 30, 40, 50], 2, [60, 90]),
        ([4096, 256, 256, 256], 2, [768, 4096]),
        ([64] * 50, 4, [768, 768, 832, 832]),
    ],
)
def test_assignment_is_of_whole_runs_and_as_even_as_can_be(counts, ranks, loads) -> None:
    assigned, found = recipe.assign_images_to_dp_ranks(counts, ranks)
    assert [i for images in assigned for i in images] == list(range(len(counts)))
    assert len(assigned) == ranks
    assert [sum(counts[i] for i in images) for images in assigned] == found
    assert sorted(found) == sorted(loads)


@pytest.mark.parametrize("given", [None, [16, 48, 4]])
def test_each_rank_takes_the_pixels_and_grids_of_its_own_images(given) -> None:
    pixels = torch.arange(68 * 3).reshape(68, 3)
    for rank, images in enumerate(assigned := [[0, 1], [], [2]]):
        local, grid, own = recipe.prepare_local_vision_inputs(pixels, GRIDS, assigned, rank, patch_counts=given)
        assert own == images
        assert torch.equal(grid, GRIDS[images])
        assert torch.equal(local, {0: pixels[:64], 1: pixels[:0], 2: pixels[64:]}[rank])


def test_all_four_towers_of_the_recipe_are_patched() -> None:
    kinds = {kind.__name__ for kind in recipe._tower_classes()}
    assert kinds == {name.partition(".")[2] for name in recipe.TOWERS}
    assert len(kinds) == 4


@pytest.mark.parametrize(("rank", "pixels"), [(-1, 4), (2, 4), (0, 3)])
def test_a_rank_or_pixels_that_do_not_fit_are_refused(rank, pixels) -> None:
    with pytest.raises(TrimtabError, match=str(rank if pixels == 4 else pixels)):
        recipe.prepare_local_vision_inputs(torch.ones(pixels, 6), torch.tensor([[1, 2, 2]]), [[0], []], rank)


def test_without_a_group_embeddings_come_back_as_they_are() -> None:
    rows = torch.ones(3, 2, requires_grad=True)
    assert recipe.gather_vision_embeddings(rows, None, [3]) is rows
    assert recipe.GatherVisionEmbeddings.apply(rows, None, [3]) is rows


def test_a_tower_without_a_group_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tower(torch.nn.Module):
        def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
            return pixels

    for host in ("verl", "roll"):
        monkeypatch.setitem(sys.modules, host, None)
    recipe.apply_vision_dp_patch(classes=[Tower])
    try:
        with refused(TrimtabError):
            Tower()(torch.ones(1), torch.ones(1))
    finally:
        recipe.unapply_vision_dp_patch()
    assert Tower()(torch.ones(1), torch.ones(1)).item() == 1.0


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """verl's and ROLL's functions and classes that the plug-ins ask for, by the names of their sources."""
    names = {
        "verl.utils.ulysses": "get_ulysses_sequence_parallel_group",
        "roll.utils.context_parallel.globals": "get_ulysses_group",
        "roll.pipeline.sft.sft_worker": "SFTWorker",
    }
    found: dict[str, Any] = {}
    for name, held in names.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            module.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(module, held, type(held, (), {}) if held == "SFTWorker" else lambda name=name: found.get(name))
    return found


@pytest.mark.parametrize("host", ["verl", "roll"])
def test_importing_a_hosts_plug_in_patches_the_towers_and_asks_the_hosts_group(host, hosts, monkeypatch):
    tower = recipe._tower_classes()[0]
    plain = tower.forward  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "trimtab.runtime.vision.patched", raising=False)
    try:
        plug = importlib.import_module("trimtab.runtime.vision.patched")
        assert tower.forward is not plain  # type: ignore[attr-defined]
        if host == "roll":
            monkeypatch.setitem(sys.modules, "verl", None)
            assert plug.SFTWorker is plug.SFTWorker
            assert issubclass(plug.SFTWorker, sys.modules["roll.pipeline.sft.sft_worker"].SFTWorker)
            assert plug.SFTWorker.__module__ == plug.__name__
            with refused(AttributeError, "CriticWorker", "RLVRActorWorker"):
                plug.CriticWorker  # noqa: B018
        module = {"verl": "verl.utils.ulysses", "roll": "roll.utils.context_parallel.globals"}[host]
        assert recipe._ulysses_group() is None
        hosts[module] = "the group"
        assert recipe._ulysses_group() == "the group"
    finally:
        recipe.unapply_vision_dp_patch()
    assert tower.forward is plain  # type: ignore[attr-defined]
