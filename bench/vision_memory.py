"""What the vision tower keeps for its backward on the worst rank of a group, over what one process keeps.

Qwen2.5-VL and Qwen3-VL towers at their published widths, 2 layers, 12 images, float32 on the CPU; bytes by saved-tensor
hooks, every storage once, parameters left out. Each rank's share is encoded in this one process.
Run: python bench/vision_memory.py   (a minute on one core)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import share_images
from trimtab.runtime.vision.inputs import tower_flops

WIDTHS = {
    "qwen2_5_vl": {"depth": 2, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 512},
    "qwen3_vl": {"depth": 2, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 512},
}
TOWERS = {"qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel, "qwen3_vl": Qwen3VLVisionModel}
GRIDS = [(12, 16), (4, 4), (8, 6), (16, 10), (6, 6), (4, 8), (10, 10), (14, 14), (4, 4), (8, 12), (6, 10), (12, 8)]


def make_tower(family: str) -> nn.Module:
    vision = {**WIDTHS[family], "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0]}
    vision = {k: v for k, v in vision.items() if hasattr(AutoConfig.for_model(family).vision_config, k)}
    return TOWERS[family](type(AutoConfig.for_model(family).vision_config)(**vision)).train()


def kept_bytes(tower: nn.Module, grids: list[tuple[int, int]]) -> int:
    """Unique storages that the forward of these images leaves for the backward."""
    own = {p.untyped_storage().data_ptr() for p in tower.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    patch = tower.config.patch_size
    table = torch.tensor([(1, h, w) for h, w in grids])
    pixels = torch.randn(int(table.prod(1).sum()), 3 * 2 * patch**2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = tower(pixels, grid_thw=table)
    assert output.pooler_output is not None  # alive: storages are not used twice
    return sum(kept.values())


def main() -> None:
    patches = np.array([h * w for h, w in GRIDS])
    for family in WIDTHS:
        tower = make_tower(family)
        alone = kept_bytes(tower, GRIDS)
        print(f"\n{family}: {alone / patches.sum() / 1024:.0f} KiB a patch kept by one process, {len(GRIDS)} images")
        print(f"{'ranks':>6s}{'shared by':>12s}{'worst kept':>12s}{'patches':>9s}{'limit':>8s}")
        for ranks in (2, 4, 8):
            for name, cost in (("time", tower_flops(tower.config)), ("memory", LinearCost(patches=1.0))):
                shares = share_images(cost.of(patches), ranks)
                groups = [shares.atoms_of(rank) for rank in range(ranks)]
                worst = max(kept_bytes(tower, [GRIDS[i] for i in atoms]) for atoms in groups if len(atoms))
                most = max(patches[atoms].sum() for atoms in groups) / patches.sum()
                limit = 1.05 / ranks * max(1.0, ranks * patches.max() / patches.sum())
                print(f"{ranks:6d}{name:>12s}{worst / alone:12.4f}{most:9.4f}{limit:8.4f}")


if __name__ == "__main__":
    main()
