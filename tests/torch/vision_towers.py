"""Towers whose own forward is replaced, Transformers 4.57 and 5: functions that spawned processes call. Needs torch."""

import functools
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from rounding import assert_close
from torch import Tensor, nn

from trimtab.runtime.vision import recipe

WIDTHS = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64}
GRIDS = [[[1, 4, 4]], [[1, 8, 8], [1, 4, 4], [3, 4, 8]]]


def make_towers() -> dict[str, nn.Module]:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen25
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
    from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
    from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen3_moe

    torch.manual_seed(0)
    deep = {**WIDTHS, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    towers = {
        "qwen2_vl": qwen2.Qwen2VisionTransformerPretrainedModel(
            qwen2.Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=64, num_heads=4)
        ),
        "qwen2_5_vl": qwen25.Qwen2_5_VisionTransformerPretrainedModel(
            qwen25.Qwen2_5_VLVisionConfig(**WIDTHS, fullatt_block_indexes=[1])
        ),
        "qwen3_vl": qwen3.Qwen3VLVisionModel(qwen3.Qwen3VLVisionConfig(**deep)),
        "qwen3_vl_moe": qwen3_moe.Qwen3VLMoeVisionModel(qwen3_moe.Qwen3VLMoeVisionConfig(**deep)),
    }
    return {name: tower.double() for name, tower in towers.items()}


def flatten(output: Any) -> Tensor:
    """Features and DeepStack features side by side, in either version's form."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return torch.cat([output[0], *output[1]], -1)
    return torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])], -1)


def run_patched(rank: int, _folder: str) -> None:
    """Every class that the recipe patches: features and gradients of one process, with the group from verl's module."""
    num_ranks = dist.get_world_size()
    ulysses = types.ModuleType("verl.utils.ulysses")
    ulysses.get_ulysses_sequence_parallel_group = lambda: dist.group.WORLD  # type: ignore[attr-defined]
    sys.modules.update({name: types.ModuleType(name) for name in ("verl", "verl.utils")})
    sys.modules["verl.utils.ulysses"] = ulysses
    for name, tower in make_towers().items():
        for table in GRIDS:
            grid = torch.tensor(table)
            torch.manual_seed(1)
            pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * tower.config.patch_size**2).double()
            run = functools.partial(tower, pixels, output_router_logits=True, grid_thw=grid)  # a host's own keyword
            own = run()
            whole = flatten(own)
            weights = torch.randn_like(whole)
            (whole * weights).sum().backward()
            expected = [p.grad.clone() for p in tower.parameters()]
            tower.zero_grad()
            recipe.apply_vision_dp_patch()
            recipe.apply_vision_dp_patch()  # once more changes nothing
            shared = run()
            assert type(shared) is type(own), name
            rows, held = flatten(shared), recipe.holder_of(tower)
            assert held is not None
            assert held.load.calls == 1
            assert held.load.patches < held.load.group_patches or len(grid) == 1
            first, last = (len(rows) * r // num_ranks for r in (rank, rank + 1))
            (rows * weights)[first:last].sum().backward()  # each rank's loss covers its part of the rows
            assert_close(rows, whole, name, dtype=torch.float64)
            for p, gradient in zip(tower.parameters(), expected, strict=True):
                dist.all_reduce(p.grad)
                assert float((p.grad - gradient).norm()) <= 1e-12 * max(1.0, float(gradient.norm())), name
            tower.zero_grad()
            held.remove()
            recipe.unapply_vision_dp_patch()
            assert "forward" not in tower.__dict__
            assert getattr(type(tower).forward, "__module__", None) != recipe.__name__
            assert_close(flatten(run()), whole, name, dtype=torch.float64)
