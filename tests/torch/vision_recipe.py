"""The published recipe's calls on gloo ranks: functions that spawned processes call. Needs torch."""

import types
from typing import Any

import torch
import torch.distributed as dist
from rounding import assert_close
from torch import Tensor
from vision_runs import make_case

from trimtab.runtime.vision import recipe
from trimtab.runtime.vision.apply import vision_dp


def run_helpers(rank: int, _folder: str) -> None:
    """The helpers in the recipe's order, by hand: assign, take, encode, gather."""
    num_ranks = dist.get_world_size()
    grid = torch.tensor([[1, 4, 4], [1, 8, 8], [2, 4, 4], [1, 2, 2]])
    torch.manual_seed(2)
    pixels, weight = torch.randn(116, 6).double(), torch.randn(6, 3).double().requires_grad_()
    counts = recipe.get_image_patch_counts(grid)
    assert counts == [16, 64, 32, 4]
    assert recipe.get_image_embedding_counts(grid, 2) == [4, 16, 8, 1]
    assigned, loads = recipe.assign_images_to_dp_ranks(counts, num_ranks)
    assert (assigned, loads) == ([[0], [1], [2, 3]], [16, 64, 36])
    local, local_grid, own = recipe.prepare_local_vision_inputs(pixels, grid, assigned, rank)
    assert own == assigned[rank]
    assert recipe.get_image_patch_counts(local_grid) == [counts[i] for i in own]
    gathered = recipe.gather_vision_embeddings(local @ weight, dist.group.WORLD, loads)
    assert_close(gathered, pixels @ weight, dtype=torch.float64)
    gathered.square().sum().backward()  # the whole loss on every rank: its parts add up to num_ranks times the gradient
    expected = torch.autograd.grad((pixels @ weight).square().sum(), weight)[0]
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    assert_close(weight.grad / num_ranks, expected, dtype=torch.float64)  # averaged, as the recipe's scale assumes


def run_like_veomni(rank: int, _folder: str) -> None:
    """VeOmni's `get_image_features`: rows of all images in one tensor, and lengths made for the whole batch."""
    case = make_case("qwen2_5_vl", "one image" if rank else "images")
    inner = case.model.model

    def encode(self: Any, pixel_values: Tensor, image_grid_thw: Tensor, vit_metadata: Any = None, **_: Any) -> Any:
        found = self.visual(pixel_values, grid_thw=image_grid_thw)
        assert vit_metadata is None or len(vit_metadata["cu_seqlens"]) == len(image_grid_thw) + 1
        return found

    inner.get_image_features = types.MethodType(encode, inner)
    given = {"pixel_values": case.inputs["pixel_values"], "image_grid_thw": case.inputs["image_grid_thw"]}
    made = {"cu_seqlens": torch.arange(len(given["image_grid_thw"]) + 1)}
    expected = inner.get_image_features(**given, vit_metadata=made).pooler_output
    with vision_dp(case.model, exchange="dispatch", timeout_s=60):
        found = inner.get_image_features(**given, vit_metadata=made).pooler_output
    assert_close(found, expected, "features")
