"""Two ranks hold the same three images; each encodes its share, and the gradients are those of one process.

Run: python examples/vision_data_parallel.py   (two processes on the CPU, a tiny untrained Qwen2.5-VL)
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from trimtab.testing import verify_vision_dp
from trimtab.vision import vision_dp

VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
IMAGE = 299


def run(rank: int, num_ranks: int, store: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        vision_config={**VISION, "fullatt_block_indexes": [1]}, text_config=TEXT, image_token_id=IMAGE
    )
    model = Qwen2_5_VLForConditionalGeneration(config)

    grids = torch.tensor([[1, 8, 8], [1, 4, 8], [1, 4, 4]])
    rows = (grids.prod(1) // 4).tolist()  # of image features: one for each block of 2 x 2 patches
    ids = torch.tensor([[token for num_rows in rows for token in (3, *[IMAGE] * num_rows, 4)]])
    batch = {
        "input_ids": ids,
        "pixel_values": torch.randn(int(grids.prod(1).sum()), 1176),
        "image_grid_thw": grids,
        "mm_token_type_ids": (ids == IMAGE).long(),
    }
    length = ids.shape[1]
    own = slice(length * rank // num_ranks, length * (rank + 1) // num_ranks)

    def loss() -> torch.Tensor:
        """Of this rank's tokens: the losses of all ranks add up to that of the batch."""
        return model(**batch).logits[:, own].square().sum() / length

    def sum_gradients() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)

    with vision_dp(model) as handle:
        check = verify_vision_dp(handle, loss, reduce_gradients=sum_gradients)
        shares = [None] * num_ranks
        dist.all_gather_object(shares, handle.load.share)
    if rank == 0:
        print("share of the patches each rank encoded:", ", ".join(f"{share:.0%}" for share in shares))
        print(f"vision gradients against one process: relative difference {check.gradient_error:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(2, str(Path(folder) / "store")), nprocs=2)
