"""Tests of runtime/vision/recipe.py: the published calls on two and three ranks, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import vision_recipe
from gloo_ranks import on_ranks

from trimtab.errors import TrimtabError
from trimtab.runtime.vision import recipe


def test_patched_classes_share_images_and_are_whole_again(tmp_path: Path) -> None:
    on_ranks(vision_recipe.run_patched, tmp_path, num_ranks=2)


def test_the_helpers_by_hand_give_the_features_and_the_averaged_gradient(tmp_path: Path) -> None:
    on_ranks(vision_recipe.run_helpers, tmp_path, num_ranks=3)


def test_assignment_is_the_best_of_all_runs() -> None:
    assert recipe.assign_images_to_dp_ranks([9, 1, 1, 1, 9], 2) == ([[0, 1, 2], [3, 4]], [11, 10])
    assert recipe.assign_images_to_dp_ranks([50, 1], 3)[1].count(0) == 1
    assert recipe.assign_images_to_dp_ranks([], 2) == ([[], []], [0, 0])


def test_a_rank_without_images_takes_empty_tensors() -> None:
    pixels, grid = torch.ones(4, 6), torch.tensor([[1, 2, 2]])
    local, local_grid, own = recipe.prepare_local_vision_inputs(pixels, grid, [[0], []], 1)
    assert (local.shape, local_grid.shape, own) == ((0, 6), (0, 3), [])
    with pytest.raises(TrimtabError, match="grid_thw counts 4 patches and pixel_values has 3 rows"):
        recipe.prepare_local_vision_inputs(pixels[:3], grid, [[0]], 0)


def test_a_tower_without_a_group_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tower(torch.nn.Module):
        def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
            return pixels

    monkeypatch.setitem(__import__("sys").modules, "verl", None)
    monkeypatch.setitem(__import__("sys").modules, "verl.utils.ulysses", None)
    recipe.apply_vision_dp_patch(classes=[Tower])
    try:
        with pytest.raises(TrimtabError, match=r"no group was given to share images over, and verl, .* not installed"):
            Tower()(torch.ones(1), torch.ones(1))
    finally:
        recipe.unapply_vision_dp_patch()
    assert Tower()(torch.ones(1), torch.ones(1)).item() == 1.0
