"""Shared images under DeepSpeed ZeRO-3 on gloo ranks; needs deepspeed built without its kernels."""

import importlib

import torch
import torch.distributed as dist
from vision_runs import make_case, shard

from trimtab.runtime.vision.apply import vision_dp

LEARNING_RATE = 0.5


def run_zero3(rank: int, _folder: str) -> None:
    """One step of SGD moves parameters as one process's gradient does; with an empty rank, and with images on all."""
    import deepspeed

    # by its full name: deepspeed.comm.torch as an attribute is torch itself
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # an all-reduce by shared memory, which it would compile here
    num_ranks = dist.get_world_size()
    for family in ("qwen2_5_vl", "qwen3_vl"):
        for batch in ("one image", "images and clip"):
            case = make_case(family, batch)
            case.loss(case.forward()).backward()
            expected = case.gradients()
            before = {name: p.detach().clone() for name, p in case.model.named_parameters()}
            settings = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,  # by default it scales gradients to a norm of 1
            }
            optimizer = torch.optim.SGD(case.model.parameters(), lr=LEARNING_RATE)
            engine, *_ = deepspeed.initialize(model=case.model, optimizer=optimizer, config=settings)
            mine = shard(rank, num_ranks, case.num_tokens)
            with vision_dp(case.model, timeout_s=120):
                engine.backward(num_ranks * case.loss(case.forward(engine), mine))
                engine.step()
            difference = whole = 0.0
            for name, p in case.model.named_parameters():
                with deepspeed.zero.GatheredParameters([p]):
                    if name in expected:
                        moved = (before[name] - p.detach()) / LEARNING_RATE
                        difference += float((moved - expected[name]).double().square().sum())
                        whole += float(expected[name].double().square().sum())
            assert (difference / whole) ** 0.5 <= 1e-4, (family, batch, (difference / whole) ** 0.5)
            engine.destroy()
