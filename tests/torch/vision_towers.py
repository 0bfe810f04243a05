"""The tower itself as the seam, under Transformers 4.57 and 5: functions that spawned processes call. Needs torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from rounding import assert_close
from torch import Tensor, nn

from trimtab.runtime.vision import vision_dp

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


def run_towers(rank: int, _folder: str) -> None:
    num_ranks = dist.get_world_size()
    for name, tower in make_towers().items():
        for table in GRIDS:
            grid = torch.tensor(table)
            patch = tower.config.patch_size
            torch.manual_seed(1)
            pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * patch**2).double()
            run = functools.partial(tower, pixels, grid_thw=grid)
            whole = flatten(run())
            weights = torch.randn_like(whole)
            (whole * weights).sum().backward()
            expected = [p.grad.clone() for p in tower.parameters()]
            tower.zero_grad()
            with vision_dp(tower, at="tower", timeout_s=60) as handle:
                rows = flatten(run())
                assert type(run()) is type(_paused(handle, run)), name
                first, last = (len(rows) * r // num_ranks for r in (rank, rank + 1))
                (rows * weights)[first:last].sum().backward()
            assert "forward" not in tower.__dict__
            assert_close(rows, whole, name, dtype=torch.float64)
            for p, gradient in zip(tower.parameters(), expected, strict=True):
                dist.all_reduce(p.grad)
                assert float((p.grad - gradient).norm()) <= 1e-12 * max(1.0, float(gradient.norm())), name
            tower.zero_grad()


def _paused(handle: Any, run: Any) -> Any:
    with handle.paused():
        return run()
