"""Tests of runtime/vision/recipe.py: the published calls on two and three ranks, and what they refuse."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import vision_recipe
from gloo_ranks import on_ranks

from trimtab.errors import TrimtabError
from trimtab.runtime.vision import recipe


def test_the_helpers_by_hand_give_the_features_and_the_averaged_gradient(tmp_path: Path) -> None:
    on_ranks(vision_recipe.run_helpers, tmp_path, num_ranks=3)


def test_a_host_that_returns_rows_of_all_images_and_computes_lengths_beforehand(tmp_path: Path) -> None:
    on_ranks(vision_recipe.run_like_veomni, tmp_path, num_ranks=2)


def test_every_patched_tower_takes_other_keywords(tmp_path: Path) -> None:
    on_ranks(vision_recipe.run_with_other_keywords, tmp_path, num_ranks=2)


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

    for host in ("verl", "roll"):
        monkeypatch.setitem(sys.modules, host, None)
    recipe.apply_vision_dp_patch(classes=[Tower])
    try:
        with pytest.raises(TrimtabError, match="no group was given to share images over, and neither verl nor ROLL"):
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
def test_importing_a_hosts_plug_in_patches_the_towers_and_asks_the_hosts_group(
    host: str, hosts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = recipe._tower_classes()[0]
    plain = tower.forward  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, f"trimtab.runtime.vision.{host}", raising=False)
    try:
        plug = importlib.import_module(f"trimtab.runtime.vision.{host}")
        assert tower.forward is not plain  # type: ignore[attr-defined]
        if host == "roll":
            monkeypatch.setitem(sys.modules, "verl", None)
            assert plug.SFTWorker is plug.SFTWorker
            assert issubclass(plug.SFTWorker, sys.modules["roll.pipeline.sft.sft_worker"].SFTWorker)
            assert plug.SFTWorker.__module__ == plug.__name__
            with pytest.raises(AttributeError, match="has no CriticWorker: choose one of RLVRActorWorker"):
                plug.CriticWorker  # noqa: B018
        module = {"verl": "verl.utils.ulysses", "roll": "roll.utils.context_parallel.globals"}[host]
        assert recipe._ulysses_group() is None
        hosts[module] = "the group"
        assert recipe._ulysses_group() == "the group"
    finally:
        recipe.unapply_vision_dp_patch()
    assert tower.forward is plain  # type: ignore[attr-defined]
