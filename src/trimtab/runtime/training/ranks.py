"""The processes of a run: torchrun's process group, and which rank holds which stages and which data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimtab.errors import PlanError, TrimtabError

Result = TypeVar("Result")


@contextmanager
def process_group(kind: Literal["cpu", "cuda"] | None) -> Iterator[torch.device]:
    """This rank's device; in torchrun's process group, in one already there, or in one of this process alone."""
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TrimtabError("device cuda was asked for, but torch sees none here: ask for cpu")
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if dist.is_initialized():
        yield device
        return
    backend = "nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield device
    finally:
        dist.destroy_process_group()


def device_mesh(num_devices: int, device: torch.device) -> DeviceMesh:
    """("pp", "dp") over all ranks, for a pipeline of `num_devices`: rank r is on pipeline device r div dp."""
    ranks = dist.get_world_size()
    if ranks % num_devices:
        raise PlanError(
            f"the plan cuts the model into stages for {num_devices} devices, and {ranks} processes were started: start "
            f"{num_devices}, or a multiple of it (torchrun --nproc-per-node {num_devices})"
        )
    return init_device_mesh(device.type, (num_devices, ranks // num_devices), mesh_dim_names=("pp", "dp"))


def on_first_rank(find: Callable[[], Result], device: torch.device) -> Result:
    """What `find` returns on rank 0, on every rank; what it raises of a user's input is raised on every rank.

    Collective: a problem that rank 0 alone sees would leave the others waiting for it.
    """
    found: list[tuple[Result | None, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            found = [(find(), None)]
        except (TrimtabError, OSError) as problem:
            found = [(None, problem)]
    dist.broadcast_object_list(found, src=0, device=device)
    result, raised = found[0]
    if raised is not None:
        raise raised
    return result  # type: ignore[return-value]  # None only where `find` returned it
