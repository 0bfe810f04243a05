"""Functions run on gloo ranks, for all tests of several processes. Needs torch."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

IMPORTED_ONCE = [
    "trimtab.runtime.training.loop",
    "trimtab.runtime.vision",
    "transformers.models.auto.modeling_auto",
    "pytest",
]


def on_ranks(function: Callable[..., None], *arguments: Any, num_ranks: int = 2) -> None:
    """Run `function(rank, *arguments)` on gloo ranks of one thread each; a rank that dies ends the others.

    They are forked from a server that has imported Transformers once: on its own each pays 5 s of CPU for that.
    """
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            run_rank,
            args=(num_ranks, f"{folder}/store", dict(os.environ), function, arguments),
            nprocs=num_ranks,
            start_method="forkserver",
        )


def run_rank(
    rank: int,
    num_ranks: int,
    store: str,
    environment: dict[str, str],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)  # the server's is that of its start
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def fail(_: object) -> None:
    """For launchers that run a function by its name."""
    raise ValueError("no such thing")
