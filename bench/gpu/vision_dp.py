"""What vision data parallelism costs beside the encoding: two to four ranks that share one device.

Ranks of one device cannot speak NCCL, so tensors go over gloo, through host memory: the exchange is slower than between
GPUs, and what is measured is an upper bound. A tower of two layers encodes 64 and 1,000 images; each rank is timed with
its share alone, and then with the whole call (control, exchange, order of rows, and their backward). `synchronizations`
are the waits for the device that torch's own watch counts in one call, `copies` those between host and device, pinned
and pageable, in the device's trace of one.
"""

import json
import statistics
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench.gpu.copies import count_copies
from bench.gpu.setting import Case, Setting
from gloo_ranks import on_ranks
from torch import nn

from trimtab.balance.images import share_images
from trimtab.runtime.vision.apply import vision_dp
from trimtab.runtime.vision.inputs import tower_flops

PATCH_WIDTH = 3 * 2 * 14 * 14
ROUNDS = 5


def cases(setting: Setting) -> list[Case]:
    ranks, images = ((2,), (16,)) if setting.tiny else ((2, 4), (64, 1000))
    return [
        Case(name=f"{num_ranks} ranks, {num_images} images", run=partial(measure, setting, num_ranks, num_images))
        for num_ranks in ranks
        for num_images in images
    ]


def measure(setting: Setting, num_ranks: int, num_images: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rank0.json"
        on_ranks(_rank, str(setting.device), setting.tiny, num_images, str(target), num_ranks=num_ranks)
        found: dict[str, Any] = json.loads(target.read_text())
    return found


def _rank(rank: int, device_name: str, tiny: bool, num_images: int, target: str) -> None:
    device, num_ranks = torch.device(device_name), dist.get_world_size()
    model = _make_tower(tiny).to(device)
    grids = np.random.default_rng(0).integers(2, 4 if tiny else 12, size=(num_images, 2)) * 2
    inputs = _inputs(grids, device)
    shares = share_images(tower_flops(model.config.vision_config).of(grids.prod(axis=1)), num_ranks)
    own = _inputs(grids[shares.atoms_of(rank)], device)
    alone_s = _median_s(partial(_encode, model, own), device)
    with vision_dp(model, exchange="gather"):
        shared_s = _median_s(partial(_encode, model, inputs), device)
        waits = _synchronizations(partial(_encode, model, inputs), device)
        copies = count_copies(partial(_encode, model, inputs), device)
    if rank == 0:
        figures = {
            "own_share_s": alone_s,
            "shared_call_s": shared_s,
            "overhead_s": shared_s - alone_s,
            "synchronizations": waits,
            "copies": copies,
            "max_load_by_bound": shares.max_load / shares.lower_bound,
            "exchanged_bytes": int(grids.prod(axis=1).sum() // 4 * model.config.vision_config.out_hidden_size * 4),
        }
        Path(target).write_text(json.dumps(figures), encoding="utf-8")


def _make_tower(tiny: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForImageTextToText

    width, heads = (128, 4) if tiny else (1280, 16)
    vision = {
        "depth": 2,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": heads,
        "out_hidden_size": width,
        "fullatt_block_indexes": [1],
    }
    quarter = width // heads // 8
    text = {
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [quarter, quarter, width // heads // 2 - 2 * quarter],
        },
    }
    config = AutoConfig.for_model("qwen2_5_vl", vision_config=vision, text_config=text, image_token_id=9)
    torch.manual_seed(0)
    model: nn.Module = AutoModelForImageTextToText.from_config(config)
    return model


def _inputs(grids: np.ndarray, device: torch.device) -> dict[str, torch.Tensor]:
    table = torch.tensor([(1, int(h), int(w)) for h, w in grids])
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(int(table.prod(1).sum()), PATCH_WIDTH, generator=generator)
    return {"pixel_values": pixels.to(device), "image_grid_thw": table.to(device)}


def _encode(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Forward and backward of the tower on these images."""
    features = model.model.get_image_features(**inputs).pooler_output
    torch.cat(list(features)).sum().backward()
    model.zero_grad(set_to_none=True)


def _median_s(call: Any, device: torch.device) -> float:
    """Of `ROUNDS` calls that all ranks begin together, one for warming up aside."""
    seconds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _synchronizations(call: Any, device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)
