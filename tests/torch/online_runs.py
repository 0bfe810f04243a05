"""Ranks that share the samples of every step, and one process with all of them: spawned processes call `run_online`.

Needs torch."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rounding import assert_close
from tiny_models import IMAGE_TOKEN, make_tiny_model
from torch import Tensor

from trimtab.runtime.training.shared import OnlineBalancer
from trimtab.torch import PackedCollator

STEPS = (  # samples that ranks hold: (text tokens, image rows of 8 patches, or none)
    [[(5, 2), (9, None)], [(40, 12), (31, None), (7, 3)]],
    [[(60, None)], [(3, None), (4, 1)]],  # one rank without an image before
)


def make_sample(text: int, side: int | None, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids, inputs = torch.randint(3, 180, (text,), generator=draw).tolist(), {}
    if side is not None:
        grid = torch.tensor([[1, 2 * side, 4]])
        inputs["pixel_values"] = torch.randn(int(grid.prod()), 3 * 2 * 14 * 14, generator=draw)
        inputs["image_grid_thw"] = grid
        ids = [*ids[:2], *[IMAGE_TOKEN] * (2 * side), *ids[2:]]
    labels = torch.tensor(ids)
    return {"input_ids": labels, "labels": torch.where(labels == IMAGE_TOKEN, -100, labels), **inputs}


def run_online(rank: int, family: str) -> None:
    torch.manual_seed(0)
    model: Any = make_tiny_model(family).model.float()
    collate = PackedCollator(model.config)
    balancer = OnlineBalancer(model, collate, timeout_s=60)
    for number, held in enumerate(STEPS):
        own = [
            [make_sample(*shape, seed=100 * number + 10 * r + i) for i, shape in enumerate(each)]
            for r, each in enumerate(held)
        ]
        # 1. one process with the samples of both ranks
        every = [sample for each in own for sample in each]
        whole = collate(every)
        count = sum(int((x["labels"][1:] != -100).sum()) for x in every)
        loss = model(**whole, num_items_in_batch=torch.tensor(float(count))).loss
        loss.backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        # 2. each rank its share; gradients are averaged, as DDP does
        batch = balancer(own[rank])
        ours = model(**batch).loss
        ours.backward()
        mean = ours.detach().clone()
        dist.all_reduce(mean)
        assert_close(mean / 2, loss.detach(), (family, number))
        found = {}
        for name, p in model.named_parameters():
            total = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(total)
            if name in expected or total.any():
                found[name] = total / 2
        assert_close(found, expected, (family, number))
        model.zero_grad(set_to_none=True)
        # 3. every sample ran once, and ranks are more even
        shares = balancer.last
        assert shares is not None
        assert sorted(np.concatenate(shares.members).tolist()) == list(range(len(every)))
        assert shares.load.max() <= shares.held.max()
